"""How well a decoder predicts: perplexity of a text, window by window, and the tasks of lm-eval."""

from __future__ import annotations

import difflib
import io
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from rankwise.deploy.documents import SpecialTokens, TextEncoder, document_windows
from rankwise.deploy.inputs import is_decoder, model_class, positions_of, special_tokens
from rankwise.errors import (
    CheckpointError,
    DataError,
    InvalidValueError,
    MissingPackageError,
    RankwiseError,
    first_line,
    install_extra,
)
from rankwise.files import not_utf8
from rankwise.hf.loading import check_words, load_config, no_progress_bars
from rankwise.measure import evaluating

ROWS = 512
"""Tokens whose logits are turned into float32 at a time: a vocabulary is wide."""
SUGGESTED = 3
"""Names that a message about an unknown task offers."""


def check_predicts(name: str, *, text: bool) -> Any:
    """The configuration of a folder or name; refuse a model that predicts no text, before its weights are read.

    With `text` it must read one text and predict each next token of it; the tasks also take encoder-decoders.
    """
    config = load_config(name)
    kind = model_class(config)
    if kind is not None and not kind.can_generate():
        raise CheckpointError(
            f"MODEL must have a language-model head that predicts the next token, but {name!r} is a {kind.__name__}. "
            "Give a decoder, such as a ...ForCausalLM."
        )
    if text and not is_decoder(config):
        raise CheckpointError(
            f"`--text` needs a model that reads one text, but {name!r} is an encoder-decoder. Use --tasks."
        )
    return config


@dataclass(frozen=True, kw_only=True)
class TextQuality:
    """How well a model predicts a text, and by which convention."""

    file: str
    perplexity: float
    bits_per_byte: float | None
    """None where the tokenizer does not say which characters a token stands for, and of a JSONL file."""
    window: int
    windows: int
    tokens: int
    """Tokens that were predicted."""
    bytes: int | None
    """Bytes of the text, in UTF-8, that these tokens stand for."""
    begins_with: str | None
    """The token before every window, such as BOS; it counts as one of the window and is not predicted."""

    @property
    def convention(self) -> str:
        first = (
            "the first token of a window is not predicted"
            if self.begins_with is None
            else f"every window begins with {self.begins_with}, which is not predicted"
        )
        return (
            f"Per token of the model's own tokenizer; windows of {self.window} tokens that do not overlap; {first}; "
            "the rest of the text, which fills no window, is left out. Bits per byte compare models of different "
            "tokenizers."
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "convention": self.convention}


class TextWindows:
    """A text, or the documents of a JSONL file, in windows of tokens that do not overlap."""

    def __init__(self, file: Path, tokenizer: Any, config: Any, window: int, limit: int | None = None) -> None:
        self.file, self.window = file, window
        self.special: SpecialTokens = special_tokens(tokenizer, config)
        self.num_given = max(len(self.special.before), 1)
        """Tokens at the start of a window that are not predicted."""
        if window <= self.num_given:
            raise InvalidValueError(
                f"`window` must be at least {self.num_given + 1}, so that a token is predicted, but is {window}."
            )
        check_readable(window, getattr(config.get_text_config(), "max_position_embeddings", None))
        text, step = _read(file), window - len(self.special.before)
        is_jsonl = file.suffix.lower() == ".jsonl"
        can_place = not is_jsonl and bool(getattr(tokenizer, "is_fast", False))
        if is_jsonl:
            # windows that may take so many bytes are looked for in the whole file
            sizes = {"wanted": limit or sys.maxsize, "length": step, "span": sys.maxsize}
            tokens = list(chain(*document_windows(file, TextEncoder(tokenizer), self.special, **sizes)))
        else:
            found = tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=can_place)
            tokens = found["input_ids"]
        number = min(len(tokens) // step, limit or len(tokens))
        if number < 1:
            has = "none" if is_jsonl else len(tokens) + len(self.special.before)
            raise DataError(
                f"`text` must hold at least one window of {window} tokens, but {file} has {has}. Give a longer text, "
                "or a smaller --window."
            )
        check_words(max(tokens[: number * step]), config)
        self.tokens = [self.special.around(tokens[i * step : (i + 1) * step]) for i in range(number)]
        self.begins_with = tokenizer.decode(list(self.special.before)) if self.special.before else None
        self.num_bytes = None
        if can_place:
            starts = [start for start, _ in found["offset_mapping"]] + [len(text)]
            skipped = self.num_given - len(self.special.before)
            # up to the start of the next token: a space that no token has belongs to the one before it
            spans = [(starts[i * step + skipped], starts[(i + 1) * step]) for i in range(number)]
            self.num_bytes = sum(len(text[first:last].encode()) for first, last in spans)

    @torch.inference_mode()
    def measure(self, model: PreTrainedModel, batch_size: int = 1) -> TextQuality:
        """The quality of `model`, on the device where it is."""
        check_readable(self.window, positions_of(model))
        # what a model keeps to go on with a text takes memory
        more = {"use_cache": False} if "use_cache" in signature(model.forward).parameters else {}
        nats, number = 0.0, 0
        with evaluating(model):
            for first in range(0, len(self.tokens), batch_size):
                batch = torch.stack(self.tokens[first : first + batch_size]).to(model.device)
                logits: Tensor = model(input_ids=batch, **more).logits[:, self.num_given - 1 : -1]
                wanted = batch[:, self.num_given :].flatten()
                parts = zip(torch.split(logits.flatten(0, 1), ROWS), torch.split(wanted, ROWS), strict=True)
                nats += sum(F.cross_entropy(part.float(), want, reduction="sum").item() for part, want in parts)
                number += wanted.numel()
                if not math.isfinite(nats):
                    raise RankwiseError(
                        f"The model must give finite logits, but its loss is {nats} from window {first + 1} of "
                        f"{len(self.tokens)} on, in {model.dtype}. Try --dtype float32."
                    )
        return TextQuality(
            file=str(self.file),
            perplexity=_exp(nats / number),
            bits_per_byte=nats / math.log(2) / self.num_bytes if self.num_bytes else None,
            window=self.window,
            windows=len(self.tokens),
            tokens=number,
            bytes=self.num_bytes,
            begins_with=self.begins_with,
        )


def check_readable(window: int, most: object) -> None:
    """Refuse windows that are longer than what a model reads."""
    if isinstance(most, int) and 0 < most < window:
        raise DataError(f"`window` must be at most {most} tokens, which is all the model reads, but is {window}.")


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8(file, 0, error) from None
    except OSError as error:
        raise DataError(f"`text` must be a text, but {file} is not: {error.strerror}.") from None


def _exp(nats: float) -> float:
    try:
        return math.exp(nats)
    except OverflowError:
        raise RankwiseError(
            f"The perplexity must be a number, but the loss per token is {nats:.4g}, whose exponential is too large."
        ) from None


class Tasks:
    """Tasks of lm-eval, with their data read."""

    def __init__(self, names: Sequence[str], include: Path | None = None) -> None:
        if find_spec("lm_eval") is None:
            raise MissingPackageError(f"`--tasks` needs lm-eval, which is not installed. {install_extra('eval')}")
        if include is not None and not include.is_dir():
            raise DataError(f"`include` must be a folder of task files, but there is no folder {include}.")
        self.names = list(dict.fromkeys(names))
        with quiet():
            self.manager = self._manager(include)
            self.found = self._load()

    def _manager(self, include: Path | None) -> Any:
        """What knows these names: a folder by itself where it has all, else beside lm-eval's own tasks."""
        from lm_eval.tasks import TaskManager  # type: ignore[import-untyped]

        known: list[str] = []
        # reading the thousands of task files of lm-eval takes seconds
        for defaults in (False, True) if include else (True,):
            with _of_task("`include`"):
                manager = TaskManager(include_path=include and str(include), include_defaults=defaults)
            known = manager.all_tasks
            # a group may name tasks of lm-eval
            if set(self.names) <= set(known if defaults else manager.all_subtasks):
                return manager
        wrong = next(name for name in self.names if name not in known)
        close = difflib.get_close_matches(wrong, known, SUGGESTED)
        hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise DataError(
            f"`tasks` must be names that lm-eval knows, or of a folder given by --include, but there is no {wrong!r}."
            f"{hint}"
        )

    def _load(self) -> list[Any]:
        """The tasks and groups, which reads their data."""
        found: list[Any] = []
        for name in self.names:
            with _of_task(f"The task {name!r}"):
                loaded = self.manager.load([name])
                group = loaded["groups"].get(name)
                found += loaded["tasks"].values() if group is None else [group]
        with _of_task("The tasks"):
            # which refuses one that is in two groups
            self.manager.load(found)
        return found

    def measure(
        self, model: PreTrainedModel, tokenizer: Any, *, batch_size: int = 1, limit: int | None = None
    ) -> dict[str, Any]:
        """What lm-eval says of `model`: figures by task, and how they were made."""
        from lm_eval import simple_evaluate  # type: ignore[import-untyped]
        from lm_eval.models.huggingface import HFLM  # type: ignore[import-untyped]

        with quiet(), _of_task("The tasks"):
            with _without_advice():
                language_model = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
            settings = {"tasks": self.found, "limit": limit, "task_manager": self.manager, "log_samples": False}
            found = simple_evaluate(language_model, **settings)
        kept = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better")
        return {
            **{name: found[name] for name in kept if found.get(name)},
            "limit": limit,
            "lm_eval": version("lm_eval"),
        }


@contextmanager
def quiet() -> Iterator[None]:
    """Keep lm-eval and what it uses from drawing progress bars, unless on a terminal."""
    if sys.stderr.isatty():
        yield
        return
    with no_progress_bars(), redirect_stderr(_WithoutBars(sys.stderr)):
        yield


@contextmanager
def _without_advice() -> Iterator[None]:
    """Keep lm-eval from warning that it is given a model and not a name."""
    logger = logging.getLogger("lm_eval.models.huggingface")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class _WithoutBars(io.TextIOBase):
    """A stream that passes on lines, but no bars: these begin with a carriage return."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        if text.strip() and "\r" not in text:
            self.stream.write(text)
        return len(text)


@contextmanager
def _of_task(what: str) -> Iterator[None]:
    """Tell in one line what is wrong with a task: its files and data raise errors of many types."""
    try:
        yield
    except Exception as error:
        if isinstance(error, RankwiseError | torch.OutOfMemoryError):
            raise
        raise DataError(
            f"{what} must load and run in lm-eval, but {type(error).__name__}: {first_line(error)}"
        ) from error


def figures_of(found: Mapping[str, Any]) -> Iterator[tuple[str, str, float, float | None]]:
    """Task, metric, value and standard error, in the order of lm-eval."""
    for task, row in found["results"].items():
        for key, value in row.items():
            metric, _, kind = key.partition(",")
            if isinstance(value, int | float) and kind and not metric.endswith("_stderr"):
                error = row.get(f"{metric}_stderr,{kind}")
                shown = metric if kind == "none" else f"{metric} ({kind})"
                yield task, shown, float(value), error if isinstance(error, float) else None
