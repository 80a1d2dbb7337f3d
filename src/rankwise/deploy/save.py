"""Saving a compact model: weights as safetensors, structure as JSON. Nothing in the folder can run code.

`rankwise.json` holds the format and its version, the layers (`rankwise.deploy.structure`), shape and dtype of every
tensor, which names are tied, dtypes of buffers that are not saved, and, for an architecture of ours, the shape of the
dense model. Each distinct tensor is stored once, under the first of its names. Since version 2 it also holds the
checksums of the other files and of itself (`rankwise.files`).
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from rankwise.core.budget import count
from rankwise.deploy.architectures import describe
from rankwise.deploy.quantize import check_unrounded
from rankwise.deploy.structure import VERSION, layers_of, refuse_gated, slots, ties_of, to_json, walk
from rankwise.errors import CheckpointError, InvalidTypeError, RankwiseError
from rankwise.files import exchange, is_abandoned, owning, reason, sealed, sync, write_json, write_tensors
from rankwise.version import VERSION as OWN_VERSION

FORMAT = "rankwise"
WEIGHTS = "model.safetensors"
STRUCTURE = "rankwise.json"
OF_RUN = ("experiment.json", "vocabulary.json")
"""What stands beside the model of a run."""
COMPRESSION = "compression.json"
"""What `rankwise compress` says of a model that it made: sizes, quality and speed, for reports."""
OLD = ".old"
"""The end of the name that an earlier model has while another takes its place, where that takes two steps."""


def save(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    check_finite: bool = True,
    beside: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Write a compact model into a new folder; `rankwise.load` reads it back.

    The folder appears only when it is complete. With `overwrite`, an earlier saved model of that name is replaced by
    the new one at the very end, in one step (on Windows and NFS in two), so that a reader finds the old or the new
    model at any moment; whatever goes wrong before leaves it as it was. Parameters that are NaN or infinite are refused
    unless `check_finite` is False; buffers, such as masks of -inf, may hold anything. `beside` are JSON files of a run
    that are written along with the model, by name.
    """
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(f"`model` must be a torch.nn.Module, but is a {type(model).__name__} instead.")
    check_unrounded(model)
    tied = ties_of(model)
    stored = {name: tensor for name, _, _, tensor in slots(model) if name not in tied}
    computed = slots(model, computed=True)
    _check(model, stored)
    if check_finite:
        refuse_nonfinite({name: tensor for name, tensor in stored.items() if isinstance(tensor, nn.Parameter)})
    structure = {
        "format": FORMAT,
        "version": VERSION,
        "rankwise": OWN_VERSION,
        "torch": str(torch.__version__),
        "model": type(model).__name__,
        "dense": describe(model),
        "parameters": count(model),
        "layers": {name: to_json(layer) for name, layer in layers_of(model).items()},
        "tensors": {name: {"dtype": dtype_name(t.dtype), "shape": list(t.shape)} for name, t in stored.items()},
        "tied": tied,
        "computed": {s.name: dtype_name(s.holds.dtype) for s in computed if s.holds.is_floating_point()},
    }
    target = Path(folder).resolve()
    check_target(target, overwrite)
    with whole_folder(target) as unfinished:
        for name, content in (beside or {}).items():
            write_json(unfinished / name, content)
        try:
            write_tensors(unfinished / WEIGHTS, stored)
        except KeyError as error:
            raise CheckpointError(
                f"A saved tensor must be of a type that safetensors has, but one is {error.args[0]} instead. "
                "Convert it first."
            ) from error
        # what was measured of a model is no part of it
        files = [file for file in sorted(unfinished.iterdir()) if file.name != COMPRESSION]
        write_json(unfinished / STRUCTURE, sealed(structure, files))
        sync(unfinished)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to fill, which gets the name `target`, or takes the place of the folder there, when it is complete.

    What killed processes left of earlier attempts is removed.
    """
    missing = [folder for folder in target.parents if not folder.exists()]
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        with ExitStack() as stack:
            try:
                _sweep(target)
                unfinished.mkdir(parents=True)
                stack.enter_context(owning(unfinished))
                # another process may have swept it away before it was owned
                unfinished.mkdir(exist_ok=True)
            except OSError as error:
                raise CheckpointError(
                    f"`folder` (--out) must be in a place that can be written, but is {target}: {reason(error)}. "
                    "Choose another place."
                ) from error
            yield unfinished
            _put(unfinished, target)
    except (OSError, SafetensorError) as error:
        # what else goes wrong is no matter of the place, and says for itself what it is
        if isinstance(error, RankwiseError):
            raise
        raise CheckpointError(
            f"The model must be written whole to {target}, but that failed: {reason(error)}. "
            "Nothing was changed; free some space or choose another place."
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        for folder in missing:
            # which fails where the model is now
            with suppress(OSError):
                folder.rmdir()


def _check(model: nn.Module, stored: Mapping[str, Tensor]) -> None:
    refuse_gated(model, "A saved model")
    for name, module in walk(model):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise CheckpointError(
                f"A saved model must be made of tensors, but {name or 'the model'} ({type(module).__name__}) has "
                "extra state. Keep it in a buffer."
            )
    for name, tensor in stored.items():
        if tensor.is_meta or tensor.layout is not torch.strided:
            what = "is on the meta device" if tensor.is_meta else f"is {tensor.layout}"
            raise CheckpointError(f"A saved tensor must hold plain data, but {name} {what}. Fill it first.")


def refuse_nonfinite(parameters: Mapping[str, Tensor]) -> None:
    """Refuse weights that would make every answer of the model NaN."""
    for name, tensor in parameters.items():
        if tensor.is_meta or not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        # torch does not compare numbers of 8 bits
        values = values.detach().float() if values.element_size() == 1 else values.detach()
        # NaN wins both; unlike `isfinite`, it needs no memory of the tensor's size
        low, high = torch.aminmax(values)
        if not (low.isfinite() and high.isfinite()):
            bad = values.numel() - int(values.isfinite().sum())
            raise CheckpointError(
                f"Saved weights must be finite, but {bad:,} of the {values.numel():,} numbers of {name} are NaN or "
                "infinite. Go back to a checkpoint before that, or pass check_finite=False to save them as they are."
            )


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without its package."""
    return str(dtype).removeprefix("torch.")


def check_target(target: Path, overwrite: bool, not_ours: Callable[[Path], str | None] | None = None) -> None:
    """Refuse to write over anything but an earlier saved model.

    `not_ours` says what an existing folder holds that is no such model; by default one of `rankwise.save`.
    """
    _sweep(target)
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError(f"`folder` (--out) must be a folder, but {target} is a file. Choose another name.")
    if not overwrite:
        raise CheckpointError(
            f"`folder` (--out) must be new, but {target} exists. Choose another name, or pass overwrite=True "
            "(--overwrite)."
        )
    if what := (not_ours or _not_ours)(target):
        raise CheckpointError(
            f"`overwrite` must replace a saved model and nothing else, but {target} {what}. Choose another name."
        )


def _not_ours(folder: Path) -> str | None:
    own = (WEIGHTS, STRUCTURE, *((*OF_RUN, COMPRESSION) if (folder / STRUCTURE).is_file() else ()))
    others = sorted(entry.name for entry in folder.iterdir() if entry.name not in own)
    return f"also holds {others[0]}" if others else None


def _put(finished: Path, target: Path) -> None:
    """Give a finished folder its name; one that has it gets the name of the finished folder, and is removed by that.

    Where the two names cannot be exchanged in one step there is a moment without a model, between two renames. What a
    process that is killed in it leaves under the name of `OLD` gets its name back from the next save (`_sweep`).
    """
    if not target.exists():
        os.rename(finished, target)
    elif not exchange(finished, target):
        old = finished.with_name(finished.name + OLD)
        with owning(target):
            os.rename(target, old)
            try:
                os.rename(finished, target)
            except BaseException:
                os.rename(old, target)
                raise
            shutil.rmtree(old, ignore_errors=True)
    sync(target.parent)


def _sweep(target: Path) -> None:
    """Remove what killed processes left beside `target`; an earlier model that lost its name gets it back."""
    for entry in left_beside(target):
        if not is_abandoned(entry):
            continue
        if entry.name.endswith(OLD) and not target.exists():
            # where nothing can be written, that is said when something is
            with suppress(OSError):
                os.rename(entry, target)
        else:
            shutil.rmtree(entry, ignore_errors=True)


def left_beside(target: Path) -> list[Path]:
    """The folders that are, or were to be, saved as `target`: of processes at work, and of killed ones."""
    name = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}({re.escape(OLD)})?")
    if not target.parent.is_dir():
        return []
    return sorted(entry for entry in target.parent.iterdir() if name.fullmatch(entry.name))
