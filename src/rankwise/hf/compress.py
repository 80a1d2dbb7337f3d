"""One-shot compression of a pretrained model: load, calibrate on a text, shrink in place, save."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from inspect import signature
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from rankwise.core.budget import Budget
from rankwise.core.host_memory import release_freed_memory, return_large_blocks
from rankwise.deploy.compress import Compressed, Data, Listener, Windows, place, sampled_loss, shrink, windows_of
from rankwise.deploy.inputs import positions_of
from rankwise.deploy.windows import Calibration, Marks
from rankwise.errors import CheckpointError, DataError, RankwiseError
from rankwise.hf.names import source_of
from rankwise.hf.pretrained import check_target, save_pretrained

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model")


def compress_pretrained(
    model: str,
    budget: Budget,
    out: str | os.PathLike[str],
    *,
    calibration: Calibration | None = None,
    layout: Literal["pair", "pivot"] | None = None,
    target: str | None = None,
    embeddings: bool = False,
    exclude: Sequence[str] = (),
    overwrite: bool = False,
    device: str = "auto",
    dtype: torch.dtype | None = None,
    listener: Listener | None = None,
) -> Compressed:
    """Compress the model of that folder or name into the folder `out`, which appears when it is complete.

    Args:
        model: a folder or a name that `from_pretrained` of transformers takes.
        budget: the size asked for.
        out: where to; any `from_pretrained` loads it after `import rankwise`.
        calibration: text on which outputs are measured; without it the error of the weights themselves is least.
        layout: how a matrix of low rank is stored: by default as a pair; "pivot" is smaller and slower.
        target: where the model will run, "cuda", "cpu" or "size"; by default the device that it is compressed on.
        embeddings: compress tables of words too, and the output layers that are tied to them.
        exclude: names of layers that stay as they are.
        overwrite: replace a model that was saved under this name before.
        device: where it is done, such as "cuda:0"; "auto": on a GPU if there is one on which the model fits.
        dtype: of the compressed model; by default that of the folder.
        listener: told how far it is, what is left out, and what other ranks would lose.
    """
    folder = Path(out).resolve()
    check_target(folder, overwrite)
    return_large_blocks()
    cached: bool | None = None

    def load() -> nn.Module:
        nonlocal cached
        found: nn.Module = load_model(model)
        cached = _cache(found, False)
        return found.to(device=place(device, found), dtype=dtype)

    def save(small: nn.Module, made: Compressed, replace: bool) -> None:
        _cache(small, cached)
        quality = made.quality
        figures = {quality.measure: (quality.dense, quality.small)} if quality and isfinite(quality.small) else None
        speed = {f"{tokens} token{'s'[: tokens - 1]} on {made.device}": pair for tokens, pair in made.speed.items()}
        left = save_pretrained(
            *(small, folder),  # type: ignore[arg-type]
            tokenizer=load_tokenizer(model, needed=False),
            size=made,
            quality=figures,
            speed=speed,
            base_model=model,
            overwrite=overwrite or replace,
            files_from=model,
        )
        if left and listener is not None:
            listener.say(f"Not copied, because only JSON, text and safetensors files are: {', '.join(left)}.")

    prepare = None
    if calibration is not None:
        # it is read again when all is done: meanwhile its memory may be needed
        tokenizer = load_tokenizer(model, needed=True)
        marks = marks_of(tokenizer, _config(model))
        windows = windows_of(numbering(tokenizer), calibration, marks=marks)
        del tokenizer
        release_freed_memory()
        prepare = _preparing(windows, marks, calibration)
    return shrink(
        *(load, budget, save),
        prepare=prepare,
        layout=layout,
        target=target,
        embeddings=embeddings,
        exclude=exclude,
        listener=listener,
    )


def _preparing(windows: Windows, marks: Marks, calibration: Calibration) -> Callable[[nn.Module], Data]:
    def prepare(model: Any) -> Data:
        _check_windows(model, [*windows.used, *windows.kept_back])

        # an encoder-decoder goes on with the text that it reads
        names = [name for name in ("input_ids", "decoder_input_ids") if name in signature(model.forward).parameters]

        def batches(of: Sequence[Tensor]) -> list[dict[str, Tensor]]:
            return [dict.fromkeys(names, window[None].to(model.device)) for window in of]

        return Data(
            batches=batches(windows.used),
            loss_batches=batches([marks.shortened(window, calibration.loss_window) for window in windows.used]),
            loss=sampled_loss,
            kept_back=batches(windows.kept_back),
            is_decoder=is_decoder(model.config),
            window=calibration.window,
            notes=windows.notes,
        )

    return prepare


def _config(name: str) -> Any:
    """The configuration of a model; None where there is none, as whoever loads the model will say."""
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError):
        return None


def is_decoder(config: Any) -> bool:
    """Whether the model of a configuration says what comes next in a text."""
    import transformers

    named = next((getattr(transformers, each, None) for each in config.architectures or []), None)
    kind = named or transformers.AutoModelForCausalLM
    return not config.is_encoder_decoder and bool(getattr(kind, "can_generate", lambda: True)())


def marks_of(tokenizer: Any, config: Any) -> Marks:
    """Special tokens in which a model expects a text: those of its tokenizer.

    A decoder gets BOS first, which not every tokenizer adds, and no mark behind a text that goes on.
    """
    plain, whole = (tokenizer("a", add_special_tokens=added, verbose=False)["input_ids"] for added in (False, True))
    places = [i for i in range(len(whole)) if whole[i : i + len(plain)] == plain] if plain else []
    before, after = (tuple(whole[: places[0]]), tuple(whole[places[0] + len(plain) :])) if places else ((), ())
    if config is not None and is_decoder(config):
        text = config.get_text_config()
        first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else getattr(text, "bos_token_id", None)
        known = isinstance(first, int) and 0 <= first < text.vocab_size
        return Marks(before or ((first,) if known else ()))
    if not before and not after and None not in (tokenizer.cls_token_id, tokenizer.sep_token_id):
        return Marks((tokenizer.cls_token_id,), (tokenizer.sep_token_id,))
    return Marks(before, after)


def _cache(model: Any, wanted: bool | None) -> bool | None:
    """Let a model keep what it needs to go on with a text, or not: it takes memory. What it did before."""
    config = model.config.get_text_config()
    before: bool | None = getattr(config, "use_cache", None)
    if before is not None and wanted is not None:
        config.use_cache = wanted
    return before


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
