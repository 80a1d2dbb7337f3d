"""Loading a compact model: a dense skeleton takes on the saved structure and the saved weights.

Everything that a folder says is checked before the skeleton changes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from rankwise.adapters import families
from rankwise.core.budget import count
from rankwise.core.layers import GatedLayer
from rankwise.deploy.architectures import build, building_at_most, from_description
from rankwise.deploy.save import FORMAT, OF_RUN, OLD, STRUCTURE, WEIGHTS, dtype_name, left_beside
from rankwise.deploy.structure import (
    Head,
    Layer,
    SavedLayers,
    Slot,
    checking,
    damaged,
    layer_of,
    misfit,
    role_of,
    slots,
    walk,
)
from rankwise.errors import CheckpointError, InvalidTypeError, InvalidValueError, first_line, shortened
from rankwise.files import FILES, check_file, identity, read_json, read_whole, reason
from rankwise.modules import embedding, joined
from rankwise.split import splitting
from rankwise.swap import become

SHOWN = 5
"""Differences that an error names."""
SPARE_TENSORS = 4
"""Tensors that are registered for every saved one while a dense model is made, at most."""
LONGEST_MASK = 1 << 26
"""Entries of a mask where nothing is known of the weights."""
LONGEST_HEADER = 100 << 20
"""Bytes of the names and shapes in a file of weights, at most."""
SPARE_NUMBERS, FEW_NUMBERS = 100, 1 << 26
"""Numbers of fresh weights for every saved number, at most, where they are not few."""


def load(folder: str | os.PathLike[str], skeleton: nn.Module | None = None, *, verify: bool = True) -> nn.Module:
    """The model that was saved in `folder`, bit for bit.

    `skeleton` is the dense model, fresh from the code that built the one that was pruned; its weights do not matter,
    and it may be on the meta device. It becomes the saved model and is returned. If anything does not fit, it stays as
    it is. Models of rankwise's own architectures need none.

    A file that changed since it was saved is refused by its checksum, unless `verify` is False (or `RANKWISE_VERIFY=0`
    is in the environment).
    """
    if skeleton is not None and not isinstance(skeleton, nn.Module):
        raise InvalidTypeError(f"`skeleton` must be a torch.nn.Module, but is a {type(skeleton).__name__} instead.")
    path = Path(folder)
    return read_whole(path, lambda: _Folder(path, verify).load(skeleton, with_weights=True))


def load_empty(folder: str | os.PathLike[str]) -> nn.Module:
    """The model that was saved in `folder` on the meta device: its layers, dtypes and ties, but no weights.

    Its architecture must be one of rankwise's own. The file of weights is not read.
    """
    path = Path(folder)
    return read_whole(path, lambda: _Folder(path, verify=True).load(None, with_weights=False))


def dense_model(folder: str | os.PathLike[str]) -> nn.Module:
    """The dense model that a saved one of ours was pruned from, with fresh weights: as large and as slow."""
    path = Path(folder)
    return read_whole(path, lambda: _Folder(path, verify=True).fresh_model())


class _Folder:
    """A folder that `rankwise.save` wrote, and what its `rankwise.json` says."""

    def __init__(self, path: Path, verify: bool) -> None:
        self.path, self.structure, self.weights = path, path / STRUCTURE, path / WEIGHTS
        self.identity = identity(path)
        entry = self._read_json()
        if not isinstance(entry, dict) or entry.get("format") != FORMAT or type(entry.get("version")) is not int:
            raise CheckpointError(
                f"{self.structure} must say that a rankwise model is here, but does not. "
                "Give a folder that `rankwise.save` wrote."
            )
        saved = SavedLayers.read(entry, self.structure, verify)
        self.layers, self.tied, self.files = saved.layers, saved.tied, saved.files or {}
        # a folder chooses no other place to read
        if saved.files is not None and not {WEIGHTS} <= saved.files.keys() <= {WEIGHTS, *OF_RUN}:
            raise damaged(self.structure, f"`{FILES}` names {', '.join(saved.files) or 'nothing'}")
        try:
            self.tensors = {
                name: (str(t["dtype"]), [int(n) for n in t["shape"]]) for name, t in entry["tensors"].items()
            }
            self.computed = {str(name): _floating_dtype(dtype) for name, dtype in entry["computed"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise damaged(self.structure, error) from None
        self.dense: dict[str, Any] | None = entry.get("dense")

    def _read_json(self) -> Any:
        for path in (self.structure, self.weights):
            if not path.is_file():
                old = [entry for entry in left_beside(self.path) if entry.name.endswith(OLD)]
                remedy = "Give a folder that `rankwise.save` wrote."
                if old and not self.path.exists():
                    remedy = f"A save was killed while it took the place of {old[0]}: rename that to {self.path}."
                raise CheckpointError(
                    f"A saved model must hold {STRUCTURE} and {WEIGHTS}, but {self.path} has no {path.name}. {remedy}"
                )
        try:
            return read_json(self.structure)
        except (ValueError, OSError) as error:
            raise damaged(self.structure, reason(error)) from None

    def _check_shapes(self) -> None:
        """Refuse shapes that are not those of the file of weights: what they ask for is bounded by its bytes."""
        try:
            with safe_open(self.weights, framework="pt") as file:
                found = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            # a checksum says more, unless the file has no end in sight
            if self.weights.stat().st_size < LONGEST_HEADER + 16 * sum(math.prod(s) for _, s in self.tensors.values()):
                self._check_files()
            raise damaged(self.weights, error) from None
        for name in sorted(found.keys() | self.tensors.keys()):
            one, other = found.get(name, "missing"), self.tensors[name][1] if name in self.tensors else "nothing"
            if one != other:
                self._check_files()
                raise damaged(self.weights, f"{name} is {one}, but {STRUCTURE} says {other}")

    def _check_files(self) -> None:
        for name in self.files:
            with checking(self.path / name):
                check_file(self.path / name, self.files)

    def fresh_model(self) -> nn.Module:
        """The dense model with weights of its own, unless it is out of all proportion to what was saved."""
        self._check_shapes()
        with torch.device("meta"):
            number = count(self.dense_model())
        saved = sum(math.prod(shape) for _, shape in self.tensors.values())
        if number > max(SPARE_NUMBERS * saved, FEW_NUMBERS):
            raise damaged(self.structure, f"{saved:,} numbers were saved of a dense model of {number:,}")
        return self.dense_model()

    def dense_model(self) -> nn.Module:
        if self.dense is None:
            raise CheckpointError(
                f"A model of your own needs its `skeleton`, but none was given for {self.path}. "
                "Build the dense model and pass it: load(folder, build())."
            )
        try:
            with building_at_most(SPARE_TENSORS * (1 + len(self.tensors) + len(self.tied))):
                return build(from_description(self.dense))
        # a description may ask for anything
        except Exception as error:
            raise damaged(self.structure, first_line(error)) from None

    def load(self, skeleton: nn.Module | None, *, with_weights: bool) -> nn.Module:
        if with_weights:
            self._check_shapes()
        try:
            check_masks(self.layers.values(), [s for _, s in self.tensors.values()] if with_weights else None)
        except CheckpointError as error:
            raise damaged(self.structure, error) from None
        if skeleton is None:
            with torch.device("meta"):
                skeleton = self.dense_model()
        # attention and recurrent modules whose layers were pruned
        with splitting(skeleton, self.layers):
            instead = replacements(self.layers, skeleton)
            places = self._places(skeleton, instead)
            values = self._read_tensors(places) if with_weights else self._empty_tensors()
        placed = self._placed(places, values)
        # buffers that are not saved, in the dtypes that they had in the saved model
        casts = [
            slot._replace(holds=slot.holds.to(self.computed[slot.name]))
            for slot in slots(skeleton, computed=True)
            if slot.name in self.computed and slot.holds.is_floating_point()
        ]

        for slot in (*(slot._replace(holds=placed[self._stored_as(slot)]) for slot in places), *casts):
            # by attribute: in older versions of torch a recurrent layer lists its weights beside the registry
            setattr(slot.module, slot.key, slot.holds)
        for module in list({id(module): module for _, module in walk(skeleton)}.values()):
            if id(module) in instead:
                become(module, instead[id(module)])
        families.changed(skeleton)
        return skeleton

    def _stored_as(self, slot: Slot) -> str:
        """The name under which the tensor of a place is stored."""
        return self.tied.get(slot.name, slot.name)

    def _places(self, skeleton: nn.Module, instead: dict[int, nn.Module]) -> list[Slot]:
        """Where each saved tensor goes; refuses a skeleton with other tensors than the saved model."""
        places = list(slots(skeleton, instead))
        misfits: list[str] = []
        names: dict[tuple[int, str], str] = {}
        for slot in places:
            stored = self._stored_as(slot)
            if stored not in self.tensors:
                misfits.append(f"{slot.name} is in the skeleton, but was not saved")
            elif list(slot.holds.shape) != (shape := self.tensors[stored][1]):
                misfits.append(f"{slot.name} was saved as {shape}, but is {list(slot.holds.shape)} in the skeleton")
            elif (one := names.setdefault((id(slot.module), slot.key), stored)) != stored:
                misfits.append(f"{slot.name} and {one} were saved apart, but are one in the skeleton")
        present = {slot.name for slot in places}
        missing = (name for name in (*self.tensors, *self.tied) if name not in present)
        misfits += [f"{name} was saved, but is not in the skeleton" for name in missing]
        lost = (slot.name for slot in slots(skeleton, computed=True) if slot.holds.is_meta)
        misfits += [f"{name} is on the meta device and is not saved" for name in lost]
        _refuse(misfits)
        return places

    def _read_tensors(self, places: list[Slot]) -> dict[str, Tensor]:
        """The saved tensors by name, which must be those that the folder lists, and fit where they go."""
        self._check_files()
        try:
            with safe_open(self.weights, framework="pt") as file:
                # a tensor as it comes is a window on the file, which may change later
                values = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise damaged(self.weights, error) from None
        found = {name: (dtype_name(t.dtype), list(t.shape)) for name, t in values.items()}
        for name in sorted(found.keys() | self.tensors.keys()):
            one, other = found.get(name, "missing"), self.tensors.get(name, "nothing")
            if one != other:
                raise damaged(self.weights, f"{name} is {one}, but {STRUCTURE} says {other}")
        if identity(self.path) != self.identity:
            raise damaged(self.path, "another model took its place while it was read")
        for slot in places:
            if wrong := misfit(slot.name.rpartition(".")[0], slot.module, slot.key, values[self._stored_as(slot)]):
                raise damaged(self.weights, wrong)
        return values

    def _empty_tensors(self) -> dict[str, Tensor]:
        try:
            return {
                name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
                for name, (dtype, shape) in self.tensors.items()
            }
        except (AttributeError, TypeError, RuntimeError) as error:
            raise damaged(self.structure, error) from None

    def _placed(self, places: list[Slot], values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Each tensor as its first place wants it: a parameter or a buffer, on the right device."""
        placed: dict[str, Tensor] = {}
        for slot in places:
            name = self._stored_as(slot)
            if name not in placed:
                value = values.pop(name)
                value = value if slot.holds.is_meta else value.to(slot.holds.device)
                if isinstance(slot.holds, nn.Parameter):
                    trainable = value.is_floating_point() or value.is_complex()
                    value = nn.Parameter(value, trainable and slot.holds.requires_grad)
                placed[name] = value
        return placed


def replacements(layers: dict[str, Layer], skeleton: nn.Module) -> dict[int, nn.Module]:
    """New modules for the layers that pruning changed, by the identity of those in the skeleton."""
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
        if id(module) not in instead and layer_of(module) != layer:
            try:
                instead[id(module)] = _scaled(layer.build(next(module.parameters()), find), module)
            # a damaged structure may ask for anything
            except Exception as error:
                why = error if isinstance(error, CheckpointError) else "there can be no such layer"
                misfits.append(f"{name or 'the model'} was saved as {layer}, but {why}")
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


def check_masks(layers: Iterable[Layer], shapes: Iterable[Sequence[int]] | None) -> None:
    """Refuse masks that no saved tensor has the length of: unlike weights, they take memory before they are read.

    `shapes` are those of the saved tensors; None where they are not known.
    """
    longest = LONGEST_MASK
    if shapes is not None:
        longest = max((n for shape in shapes if math.prod(shape) for n in shape), default=0)
    for layer in layers:
        size = getattr(layer, layer.masked) if layer.masked else 0
        if size > longest:
            raise CheckpointError(f"a {layer} needs {size:,} numbers, but no tensor has more than {longest:,}")


def _refuse(misfits: list[str]) -> None:
    if misfits:
        more = f"; and {len(misfits) - SHOWN} more" if len(misfits) > SHOWN else ""
        told = "; ".join(map(shortened, misfits[:SHOWN]))
        raise CheckpointError(
            f"The skeleton must be the dense form of the saved model, but {told}{more}. "
            "Build it with the code and the settings of the model that was pruned."
        )


def _floating_dtype(name: object) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InvalidValueError(f"a dtype must be a floating one of torch, but is {name!r}")
    return dtype
