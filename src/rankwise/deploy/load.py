"""Loading a compact model: a dense skeleton takes on the saved structure and the saved weights."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.adapters import families
from rankwise.core.layers import GatedLayer
from rankwise.deploy.architectures import build, from_description
from rankwise.deploy.format import Saved, check_files, check_masks, damaged, read_structure, read_tensors
from rankwise.deploy.save import STRUCTURE, dtype_name
from rankwise.deploy.structure import (
    Head,
    Layer,
    computed_of,
    layer_of,
    role_of,
    tensors_of,
    walk,
)
from rankwise.errors import CheckpointError, InvalidTypeError
from rankwise.modules import embedding, joined
from rankwise.split import splitting
from rankwise.swap import become

SHOWN = 5
"""Differences that an error names."""


@dataclass(frozen=True)
class Slot:
    """A place in the model where a tensor goes."""

    name: str
    module: nn.Module
    key: str
    holds: Tensor


def load(folder: str | os.PathLike[str], skeleton: nn.Module | None = None, *, verify: bool = True) -> nn.Module:
    """The model that was saved in `folder`, bit for bit.

    `skeleton` is the dense model, fresh from the code that built the one that was pruned; its weights do not matter,
    and it may be on the meta device. It becomes the saved model and is returned. If anything does not fit, it stays as
    it is. Models of rankwise's own architectures need none.

    A file that changed since it was saved is refused by its checksum, unless `verify` is False (or `RANKWISE_VERIFY=0`
    is in the environment). Folders of versions that wrote no checksums load without.
    """
    if skeleton is not None and not isinstance(skeleton, nn.Module):
        raise InvalidTypeError(f"`skeleton` must be a torch.nn.Module, but is a {type(skeleton).__name__} instead.")
    path = Path(folder)
    saved = read_structure(path, verify)
    skeleton = _empty(path, saved) if skeleton is None else skeleton
    # attention and recurrent modules whose layers were pruned
    with splitting(skeleton, saved.layers):
        instead = replacements(saved.layers, skeleton, {*saved.tensors, *saved.tied})
        slots = _slots(saved, skeleton, instead)
        check_files(path, saved)
        values = read_tensors(path, saved)
        check_masks(path, saved, values)
    return _filled(saved, skeleton, slots, instead, values)


def load_empty(folder: str | os.PathLike[str]) -> nn.Module:
    """The model that was saved in `folder` on the meta device: its layers, dtypes and ties, but no weights.

    Its architecture must be one of rankwise's own. The file of weights is not read.
    """
    path = Path(folder)
    saved = read_structure(path)
    skeleton = _empty(path, saved)
    instead = replacements(saved.layers, skeleton, {*saved.tensors, *saved.tied})
    slots = _slots(saved, skeleton, instead)
    try:
        values = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            for name, (dtype, shape) in saved.tensors.items()
        }
    except (AttributeError, TypeError, RuntimeError) as error:
        raise damaged(path / STRUCTURE, str(error)) from None
    return _filled(saved, skeleton, slots, instead, values)


def _filled(
    saved: Saved, skeleton: nn.Module, slots: list[Slot], instead: dict[int, nn.Module], values: dict[str, Tensor]
) -> nn.Module:
    """The skeleton, which takes on the saved layers and tensors."""
    placed = _place(saved, slots, values)
    casts = list(_casts(saved, skeleton, slots))

    for slot in slots:
        # by attribute: in older versions of torch a recurrent layer lists its weights beside the registry
        setattr(slot.module, slot.key, placed[saved.stored_as(slot.name)])
    for module, key, buffer in casts:
        setattr(module, key, buffer)
    for module in list({id(module): module for _, module in walk(skeleton)}.values()):
        if id(module) in instead:
            become(module, instead[id(module)])
    families.changed(skeleton)
    return skeleton


def dense_model(folder: str | os.PathLike[str]) -> nn.Module:
    """The dense model that a saved one of ours was pruned from, with fresh weights: as large and as slow."""
    path = Path(folder)
    return build(_dense_config(path, read_structure(path)))


def _empty(folder: Path, saved: Saved) -> nn.Module:
    with torch.device("meta"):
        return build(_dense_config(folder, saved))


def _dense_config(folder: Path, saved: Saved) -> Any:
    if saved.dense is None:
        raise CheckpointError(
            f"A model of your own needs its `skeleton`, but none was given for {folder}. "
            "Build the dense model and pass it: load(folder, build())."
        )
    try:
        return from_description(saved.dense)
    except (CheckpointError, TypeError) as error:
        raise damaged(folder / STRUCTURE, str(error)) from None


def replacements(layers: dict[str, Layer], skeleton: nn.Module, names: Collection[str] = ()) -> dict[int, nn.Module]:
    """New modules for the layers that pruning changed, by the identity of those in the skeleton.

    `names` are those of the saved tensors.
    """
    modules = dict(walk(skeleton))
    misfits = [f"{name or 'the model'} is gated" for name, module in modules.items() if isinstance(module, GatedLayer)]
    forms: dict[int, tuple[str, Layer]] = {}
    for name, layer in layers.items():
        here = f"{name or 'the model'} was saved as {layer}"
        module = modules.get(name)
        if module is None:
            misfits.append(f"{here}, but is not in the skeleton")
        elif (role := role_of(module)) != layer.role:
            misfits.append(f"{here}, but is {role or type(module).__name__} in the skeleton")
        elif forms.setdefault(id(module), (name, layer))[1] != layer:
            misfits.append(f"{here}, but is the same module as {forms[id(module)][0]} in the skeleton")
    _refuse(misfits)

    instead: dict[int, nn.Module] = {}

    def find(name: str) -> nn.Module:
        found = dict(walk(skeleton, instead)).get(name)
        if found is None:
            raise CheckpointError(f"{name} is not in the skeleton")
        # a layer that changes its form keeps its identity
        return next((modules[n] for n in layers if instead.get(id(modules[n])) is found), found)

    # heads come last: the embeddings they are tied to must be there
    for name, layer in sorted(layers.items(), key=lambda item: isinstance(item[1], Head)):
        module = modules[name]
        if id(module) not in instead and (layer_of(module) != layer or _is_renamed(name, module, names)):
            try:
                instead[id(module)] = _scaled(layer.build(next(module.parameters()), find), module)
            except CheckpointError as error:
                misfits.append(f"{name or 'the model'} was saved as {layer}, but {error}")
            # a damaged structure may ask for anything
            except Exception:
                misfits.append(f"{name or 'the model'} was saved as {layer}, but there can be no such layer")
    _refuse(misfits)
    return instead


def _scaled(made: nn.Module, module: nn.Module) -> nn.Module:
    """A table of words, or a pair that begins with one, that scales its rows as the module does that it replaces."""
    table = module[0] if isinstance(module, nn.Sequential) and len(module) else module
    words = made[0] if isinstance(made, nn.Sequential) else made
    if isinstance(table, nn.Embedding) and isinstance(words, nn.Embedding):
        weight = words.weight
        assert isinstance(weight, nn.Parameter)
        words = embedding(weight, words.padding_idx, table)
        return joined(words, made[1]) if isinstance(made, nn.Sequential) else words  # type: ignore[arg-type]
    return made


def _is_renamed(name: str, pair: nn.Module, names: Collection[str]) -> bool:
    """Whether a pair of the skeleton's shape was rebuilt: its layers, whatever they were called, are 0 and 1 then."""
    first = f"{name}.0.weight" if name else "0.weight"
    return isinstance(pair, nn.Sequential) and "0" not in pair._modules and first in names


def _slots(saved: Saved, skeleton: nn.Module, instead: dict[int, nn.Module]) -> list[Slot]:
    """Where each saved tensor goes; refuses a skeleton with other tensors than the saved model."""
    slots = list(_places(skeleton, instead))
    misfits: list[str] = []
    names: dict[tuple[int, str], str] = {}
    for slot in slots:
        stored = saved.stored_as(slot.name)
        if stored not in saved.tensors:
            misfits.append(f"{slot.name} is in the skeleton, but was not saved")
        elif list(slot.holds.shape) != (shape := saved.tensors[stored][1]):
            misfits.append(f"{slot.name} was saved as {shape}, but is {list(slot.holds.shape)} in the skeleton")
        elif (one := names.setdefault((id(slot.module), slot.key), stored)) != stored:
            misfits.append(f"{slot.name} and {one} were saved apart, but are one in the skeleton")
    present = {slot.name for slot in slots}
    missing = (name for name in (*saved.tensors, *saved.tied) if name not in present)
    misfits += [f"{name} was saved, but is not in the skeleton" for name in missing]
    misfits += [f"{name} is on the meta device and is not saved" for name in _lost(skeleton)]
    _refuse(misfits)
    return slots


def _places(skeleton: nn.Module, instead: dict[int, nn.Module]) -> Iterator[Slot]:
    for prefix, module in walk(skeleton, instead):
        for key, tensor in tensors_of(module):
            yield Slot(f"{prefix}.{key}" if prefix else key, module, key, tensor)


def _lost(skeleton: nn.Module) -> Iterator[str]:
    """Buffers that nothing will fill."""
    for prefix, module in walk(skeleton):
        for key, buffer in computed_of(module):
            if buffer.is_meta:
                yield f"{prefix}.{key}" if prefix else key


def _casts(saved: Saved, skeleton: nn.Module, slots: list[Slot]) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Buffers that are not saved, in the dtypes that they had in the saved model."""
    instead = None if saved.computed is not None else _dtype_of_all(saved, skeleton, slots)
    for prefix, module in walk(skeleton):
        for key, buffer in computed_of(module):
            dtype = (saved.computed or {}).get(f"{prefix}.{key}" if prefix else key, instead)
            if dtype is not None and buffer.is_floating_point() and buffer.dtype != dtype:
                yield module, key, buffer.to(dtype)


def _dtype_of_all(saved: Saved, skeleton: nn.Module, slots: list[Slot]) -> torch.dtype | None:
    """The one dtype of the saved parameters, where those of the skeleton have another: the model was cast."""
    names = {saved.tensors[saved.stored_as(slot.name)][0] for slot in slots if isinstance(slot.holds, nn.Parameter)}
    if len(names) != 1 or names == {dtype_name(parameter.dtype) for parameter in skeleton.parameters()}:
        return None
    dtype: torch.dtype = getattr(torch, names.pop())
    return dtype if dtype.is_floating_point else None


def _refuse(misfits: list[str]) -> None:
    if misfits:
        more = f"; and {len(misfits) - SHOWN} more" if len(misfits) > SHOWN else ""
        raise CheckpointError(
            f"The skeleton must be the dense form of the saved model, but {'; '.join(misfits[:SHOWN])}{more}. "
            "Build it with the code and the settings of the model that was pruned."
        )


def _place(saved: Saved, slots: list[Slot], values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor as its first slot wants it: a parameter or a buffer, on the right device."""
    placed: dict[str, Tensor] = {}
    for slot in slots:
        name = saved.stored_as(slot.name)
        if name not in placed:
            value = values.pop(name)
            value = value if slot.holds.is_meta else value.to(slot.holds.device)
            if isinstance(slot.holds, nn.Parameter):
                trainable = value.is_floating_point() or value.is_complex()
                value = nn.Parameter(value, trainable and slot.holds.requires_grad)
            placed[name] = value
    return placed
