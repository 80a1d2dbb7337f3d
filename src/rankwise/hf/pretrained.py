"""Saving a compact model as a folder that stock `from_pretrained` loads, with its tokenizer and a model card."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from rankwise.core.budget import SizeReport, count
from rankwise.deploy.save import whole_folder
from rankwise.errors import CheckpointError, InvalidTypeError, InvalidValueError, RankwiseError
from rankwise.hf.card import Pair, card
from rankwise.hf.layout import is_gated
from rankwise.hf.saving import CONFIG
from rankwise.hf.sentences import copy_files, module_folders

CARD = "README.md"


def save_pretrained(
    model: PreTrainedModel,
    folder: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    size: SizeReport | None = None,
    quality: Mapping[str, Pair] | None = None,
    speed: Mapping[str, Pair] | None = None,
    base_model: str | None = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    check_finite: bool = True,
    files_from: str | None = None,
) -> list[str]:
    """Write `model` into a new folder. After `import rankwise` any `from_pretrained` loads it.

    The folder appears only when it is complete. Returned are names of files that `files_from` has and that were not
    copied, because they may hold code.

    Args:
        model: what `pruner.compact()` or `rankwise.compress` returns.
        folder: where to; it must not exist, unless `overwrite` is set.
        tokenizer: saved beside the model (or a processor: anything with `save_pretrained`).
        size: `pruner.size()`, for the card: what was requested, and what the dense model had.
        quality: for the card, by name of the metric: the dense model's figure and this one's.
        speed: for the card, by what was timed and where: milliseconds of the dense model and of this one.
        base_model: for the card: the model's name before.
        max_shard_size: the largest file of weights.
        overwrite: replace a model that was saved under this name before.
        check_finite: refuse parameters that are NaN or infinite.
        files_from: a folder or name whose files for sentence-transformers are copied, if it has them.
    """
    _check(model, size)
    for word, figures in (("quality", quality), ("speed", speed)):
        _check_figures(word, figures)
    target = Path(folder).resolve()
    check_target(target, overwrite)
    with whole_folder(target) as unfinished:
        unchecked: dict[str, Any] = {} if check_finite else {"check_finite": False}
        model.save_pretrained(unfinished, max_shard_size=max_shard_size, **unchecked)
        if tokenizer is not None:
            tokenizer.save_pretrained(unfinished)
        text = card(model, target.name, size=size, quality=quality, speed=speed, base_model=base_model)
        (unfinished / CARD).write_text(text, encoding="utf-8")
        return [] if files_from is None else copy_files(files_from, unfinished)


def _check(model: PreTrainedModel, size: SizeReport | None) -> None:
    if not isinstance(model, PreTrainedModel):
        raise InvalidTypeError(
            f"`model` must be a model of transformers, but is a {type(model).__name__} instead. "
            "Use `rankwise.save` for others."
        )
    if is_gated(model):
        raise CheckpointError(
            "A saved model must be compact, but this one is gated. Save what `pruner.compact()` returns."
        )
    if size is not None and not size.nonzeros and size.exported != count(model):
        raise RankwiseError(
            f"`size` must be the report of this model of {count(model):,} parameters, but speaks of one of "
            f"{size.exported:,}. Pass `pruner.size()` of the pruner that made it, for its own budget."
        )


def _check_figures(word: str, figures: Mapping[str, Pair] | None) -> None:
    for name, pair in (figures or {}).items():
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(math.isfinite(number) for number in pair):
            raise InvalidValueError(
                f"`{word}` must give two numbers by name, dense and compact, but {name!r} has {pair!r} instead."
            )


def check_target(target: Path, overwrite: bool) -> None:
    """Refuse to write over anything that is not an earlier saved model."""
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError(f"`folder` must be a folder, but {target} is a file. Choose another name.")
    if not overwrite:
        raise CheckpointError(
            f"`folder` must be new, but {target} exists. Choose another name, or pass overwrite=True (--overwrite)."
        )
    known = module_folders(target)
    inside = sorted(entry.name for entry in target.iterdir() if entry.is_dir() and entry.name not in known)
    if inside or not (target / CONFIG).is_file() or "model_type" not in json.loads((target / CONFIG).read_text()):
        what = f"also holds the folder {inside[0]}" if inside else f"has no {CONFIG} of one"
        raise CheckpointError(
            f"`overwrite` must replace a saved model and nothing else, but {target} {what}. Choose another name."
        )
