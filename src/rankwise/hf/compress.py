"""One-shot compression of a pretrained model: load, calibrate on a text, shrink in place, save."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from rankwise.adapters.generic import find_plan
from rankwise.core.budget import Budget, SizeReport, count
from rankwise.core.memory import return_large_blocks, trim
from rankwise.core.plan import LeftOut, Plan, check_not_empty
from rankwise.errors import CheckpointError, DataError, PlanError, RankwiseError
from rankwise.hf.pretrained import check_target, save_pretrained
from rankwise.methods.svd import Svd
from rankwise.oneshot import compress
from rankwise.pruner import account_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model")
BYTES_PER_TOKEN = 16
"""More than a token of text has, nearly always."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A text, and how much of it is read."""

    file: Path
    num_windows: int = 64
    """Windows, at equal distances in the text."""
    window: int = 256
    """Tokens of a window."""
    loss_window: int = 32
    """Tokens at the start of a window by which gradients are measured: they take far more memory."""

    def __post_init__(self) -> None:
        for name in ("num_windows", "window", "loss_window"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` must be a whole number of at least 1, but is {value!r} instead.")


def compress_pretrained(
    model: str,
    budget: Budget,
    out: str | os.PathLike[str],
    *,
    calibration: Calibration | None = None,
    layout: Literal["pair", "pivot"] = "pivot",
    embeddings: bool = False,
    exclude: Sequence[str] = (),
    overwrite: bool = False,
) -> SizeReport:
    """Compress the model of that folder or name into the folder `out`, which appears when it is complete.

    Args:
        model: a folder or a name that `from_pretrained` of transformers takes.
        budget: the size asked for.
        out: where to; any `from_pretrained` loads it after `import rankwise`.
        calibration: text on which outputs are measured; without it the error of the weights themselves is least.
        layout: how a matrix of low rank is stored.
        embeddings: compress tables of words too, and the output layers that are tied to them.
        exclude: names of layers that stay as they are.
        overwrite: replace a model that was saved under this name before.
    """
    target = Path(out).resolve()
    check_target(target, overwrite)
    return_large_blocks()
    windows = None
    if calibration is not None:
        # it is read again when all is done: meanwhile its memory may be needed
        windows = text_windows(load_tokenizer(model, needed=True), calibration)
        trim()
    found = load_model(model)
    plan = plan_of(found, embeddings=embeddings, exclude=exclude)
    account = account_of(found, plan, Svd(layout=layout), budget, trained=True)
    data: dict[str, Any] = {}
    if calibration is not None and windows is not None:
        _check_windows(found, windows)
        data["calibration"] = [{"input_ids": window.unsqueeze(0)} for window in windows]
        data["loss_batches"] = [{"input_ids": window[None, : calibration.loss_window]} for window in windows]
        data["loss"] = sampled_loss()
    with _without_cache(found):
        compress(found, budget, plan=plan, layout=layout, in_place=True, **data)
    size = SizeReport(account.dense, budget.resolve(account), count(found), count(found), account.prunable)
    tokenizer = load_tokenizer(model, needed=False)
    save_pretrained(found, target, tokenizer=tokenizer, size=size, base_model=model, overwrite=overwrite)
    return size


@contextmanager
def _without_cache(model: PreTrainedModel) -> Iterator[None]:
    """What a model remembers for generating text takes memory, and nobody asks for it here."""
    config = model.config.get_text_config()
    if not hasattr(config, "use_cache"):
        yield
        return
    asked, config.use_cache = config.use_cache, False
    try:
        yield
    finally:
        config.use_cache = asked


def load_model(name: str) -> PreTrainedModel:
    """The model of that folder or name, of the class that its configuration names."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(name)
        named = next((getattr(transformers, each, None) for each in config.architectures or []), None)
        model = (named or transformers.AutoModelForCausalLM).from_pretrained(name, dtype="auto")
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, RankwiseError):
            raise
        raise CheckpointError(
            f"MODEL must be a folder or name that transformers can load, but {name!r} is not: {_line(error)}"
        ) from None
    assert isinstance(model, transformers.PreTrainedModel)
    return model


def load_tokenizer(name: str, *, needed: bool) -> Any:
    """The tokenizer that comes with a model; None where it has none and none is needed."""
    from transformers import AutoTokenizer

    try:
        folder = Path(name)
        # where there is nothing, transformers may make up one without words
        if folder.is_dir() and not any(any(folder.glob(files)) for files in TOKENIZER_FILES):
            raise FileNotFoundError(f"no {' or '.join(TOKENIZER_FILES)} there.")
        return AutoTokenizer.from_pretrained(name)
    # a missing one is told in many ways
    except Exception as error:
        if not needed:
            return None
        raise CheckpointError(
            f"A calibration text needs the model's tokenizer, but {name!r} has none that loads: {_line(error)} "
            "Save the tokenizer beside the model."
        ) from None


def _line(error: Exception) -> str:
    """The first line of what went wrong."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def text_windows(tokenizer: Any, calibration: Calibration) -> list[Tensor]:
    """Windows of tokens at equal distances in a text; of a long one only those places are read."""
    length = calibration.window
    span = length * BYTES_PER_TOKEN
    try:
        size = calibration.file.stat().st_size
        with calibration.file.open("rb") as file:
            number = max(1, min(calibration.num_windows, size // span))
            windows = []
            for i in range(number):
                file.seek(i * size // number)
                text = file.read(span).decode("utf-8", errors="ignore")
                tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
                windows.append(torch.tensor(tokens[:length], dtype=torch.long))
    except OSError as error:
        raise DataError(f"`calibration` must be a text, but {calibration.file} is not: {error.strerror}.") from None
    whole = [window for window in windows if len(window) == length]
    if not whole:
        raise DataError(
            f"`calibration` must hold at least one window of {length} tokens, but {calibration.file} has "
            f"{max(len(window) for window in windows)}. Give a longer text, or shorter windows."
        )
    return whole


def _check_windows(model: PreTrainedModel, windows: Sequence[Tensor]) -> None:
    """Refuse windows that the model cannot read."""
    config = model.config.get_text_config()
    length, places = len(windows[0]), getattr(config, "max_position_embeddings", None)
    if places is not None and length > places:
        raise DataError(f"A window must be at most {places} tokens, which is all the model reads, but is {length}.")
    largest, words = max(int(window.max()) for window in windows), config.vocab_size
    if largest >= words:
        raise DataError(f"The tokenizer must be the model's own, of {words} words, but gives number {largest}.")


def plan_of(model: PreTrainedModel, *, embeddings: bool, exclude: Sequence[str]) -> Plan:
    """Every linear layer, and tables of words if they are wanted."""
    plan = find_plan(model, exclude=list(exclude))
    unknown = [name for name in exclude if find_plan(model, exclude=[name]).params == find_plan(model).params]
    if unknown:
        raise PlanError(f"`exclude` must name layers of the model, but {unknown[0]!r} matches none.")
    if not embeddings:
        words = [site for site in plan.sites if site.has_embedding]
        left_out = [LeftOut(site.name, site.params, "a table of words") for site in words]
        plan = Plan(tuple(site for site in plan.sites if site not in words), (*plan.left_out, *left_out))
    check_not_empty(plan)
    return plan


def sampled_loss(seed: int = 0) -> Callable[[Any], Tensor]:
    """The loss of answers that the model itself gives at random: its gradients tell what changes those answers.

    Their second moments are the Fisher information, with no need of right answers.
    """
    generator = torch.Generator().manual_seed(seed)

    def loss(output: Any) -> Tensor:
        logits = output.logits if hasattr(output, "logits") else output[0]
        logits = logits.reshape(-1, logits.shape[-1])
        if not hasattr(output, "logits") or logits.shape[1] == 1:
            # numbers, not choices: the squared error
            noise = torch.randn(logits.shape, generator=generator).to(logits)
            error: Tensor = (logits * noise).sum()
            return error
        with torch.no_grad():
            chances = logits.float().softmax(-1).cpu()
            answers = torch.multinomial(chances, 1, generator=generator).flatten().to(logits.device)
        return F.cross_entropy(logits, answers, reduction="sum")

    return loss
