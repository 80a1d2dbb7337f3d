"""One-shot compression of a pretrained model: load, calibrate on a text, shrink in place, save."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from rankwise.core.budget import Budget, SizeReport
from rankwise.core.memory import return_large_blocks, trim
from rankwise.deploy.compress import Calibration, plan_of, sampled_loss, text_windows
from rankwise.deploy.inputs import positions_of
from rankwise.errors import CheckpointError, DataError, RankwiseError
from rankwise.hf.names import source_of
from rankwise.hf.pretrained import check_target, save_pretrained
from rankwise.methods.svd import Svd
from rankwise.oneshot import compress
from rankwise.pruner import account_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model")


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
        windows = text_windows(numbering(load_tokenizer(model, needed=True)), calibration)
        trim()
    found = load_model(model)
    plan = plan_of(found, embeddings=embeddings, exclude=exclude)
    account = account_of(found, plan, Svd(layout=layout), trained=True)
    data: dict[str, Any] = {}
    if calibration is not None and windows is not None:
        _check_windows(found, windows)
        data["calibration"] = [{"input_ids": window.unsqueeze(0)} for window in windows]
        data["loss_batches"] = [{"input_ids": window[None, : calibration.loss_window]} for window in windows]
        data["loss"] = sampled_loss()
    with _without_cache(found):
        compress(found, budget, plan=plan, layout=layout, in_place=True, **data)
    size = SizeReport.of(found, account, budget)
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

    source: dict[str, Any] = source_of(name)
    try:
        config = transformers.AutoConfig.from_pretrained(name, **source)
        named = next((getattr(transformers, each, None) for each in config.architectures or []), None)
        model = (named or transformers.AutoModelForCausalLM).from_pretrained(name, dtype="auto", **source)
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

    source: dict[str, Any] = source_of(name)
    try:
        folder = Path(name)
        # where there is nothing, transformers may make up one without words
        if folder.is_dir() and not any(any(folder.glob(files)) for files in TOKENIZER_FILES):
            raise FileNotFoundError(f"no {' or '.join(TOKENIZER_FILES)} there.")
        return AutoTokenizer.from_pretrained(name, **source)
    # a missing one is told in many ways
    except Exception as error:
        if not needed:
            return None
        raise CheckpointError(
            f"A calibration text needs the model's tokenizer, but {name!r} has none that loads: {_line(error)} "
            "Save the tokenizer beside the model."
        ) from None


def numbering(tokenizer: Any) -> Callable[[str], list[int]]:
    """A tokenizer as what it does to a text, without marks of its own around it."""
    return lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _line(error: Exception) -> str:
    """The first line of what went wrong."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _check_windows(model: PreTrainedModel, windows: Sequence[Tensor]) -> None:
    """Refuse windows that the model cannot read."""
    length, places = len(windows[0]), positions_of(model)
    if places is not None and length > places:
        raise DataError(f"A window must be at most {places} tokens, which is all the model reads, but is {length}.")
    largest, words = max(int(window.max()) for window in windows), model.config.get_text_config().vocab_size
    if largest >= words:
        raise DataError(f"The tokenizer must be the model's own, of {words} words, but gives number {largest}.")
