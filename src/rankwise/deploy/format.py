"""The folder of a saved model: what `rankwise.json` says, and the checks of it and of the tensors beside it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rankwise.deploy.save import FORMAT, OF_RUN, STRUCTURE, VERSION, WEIGHTS, dtype_name
from rankwise.deploy.structure import (
    Layer,
    PivotEmbedding,
    PivotHead,
    PivotPair,
    Selected,
    floating_dtype,
    from_json,
    is_order,
)
from rankwise.errors import CheckpointError
from rankwise.files import FILES, check_file, check_seal, verifies

UNSEALED = 1
"""The last version of the format without checksums."""


@dataclass(frozen=True)
class Saved:
    """What `rankwise.json` says."""

    layers: dict[str, Layer]
    tensors: dict[str, tuple[str, list[int]]]
    """Dtype and shape, by the name under which a tensor is stored."""
    tied: dict[str, str]
    computed: dict[str, torch.dtype] | None
    """Dtypes of the floating buffers that are not saved; None where the folder does not say."""
    dense: dict[str, Any] | None
    """The dense model, where its architecture is one of ours."""
    files: dict[str, str]
    """Checksums of the other files; empty where they are not to be compared."""

    def stored_as(self, name: str) -> str:
        """The name under which the tensor of that name is stored."""
        return self.tied.get(name, name)


def read_structure(folder: Path, verify: bool = True) -> Saved:
    """What the folder says of its model, checked against its checksum where it has one."""
    entry = _read_json(folder)
    if not isinstance(entry, dict) or entry.get("format") != FORMAT or type(entry.get("version")) is not int:
        raise CheckpointError(
            f"{folder / STRUCTURE} must say that a rankwise model is here, but does not. "
            "Give a folder that `rankwise.save` wrote."
        )
    if entry["version"] > VERSION:
        raise CheckpointError(
            f"The format of {folder} must be version {VERSION} at most, but is version {entry['version']}, "
            f"written by rankwise {entry.get('rankwise')}. Upgrade rankwise."
        )
    if entry["version"] < UNSEALED:
        raise damaged(folder / STRUCTURE, f"its version is {entry['version']}")
    files = _read_checksums(folder, entry) if entry["version"] > UNSEALED and verify and verifies() else {}
    try:
        layers = {name: from_json(layer) for name, layer in entry["layers"].items()}
        tensors = {name: (str(t["dtype"]), [int(n) for n in t["shape"]]) for name, t in entry["tensors"].items()}
        tied = {str(name): str(first) for name, first in entry["tied"].items()}
        computed = (
            {str(name): floating_dtype(dtype) for name, dtype in entry["computed"].items()}
            if "computed" in entry
            else None
        )
    except (KeyError, TypeError, ValueError, AttributeError, CheckpointError) as error:
        raise damaged(folder / STRUCTURE, str(error)) from None
    return Saved(layers, tensors, tied, computed, entry.get("dense"), files)


def _read_json(folder: Path) -> Any:
    for name in (STRUCTURE, WEIGHTS):
        if not (folder / name).is_file():
            raise CheckpointError(
                f"A saved model must hold {STRUCTURE} and {WEIGHTS}, but {folder} has no {name}. "
                "Give a folder that `rankwise.save` wrote."
            )
    try:
        return json.loads((folder / STRUCTURE).read_bytes())
    except (ValueError, RecursionError) as error:
        raise damaged(folder / STRUCTURE, str(error)) from None
    except OSError as error:
        raise CheckpointError(f"{folder / STRUCTURE} must be readable, but is not: {error.strerror}.") from None


def _read_checksums(folder: Path, entry: dict[str, Any]) -> dict[str, str]:
    try:
        check_seal(entry)
    except CheckpointError as error:
        raise _changed(folder / STRUCTURE, error) from None
    files: dict[str, str] = entry[FILES]
    # a folder chooses no other place to read
    if WEIGHTS not in files or not files.keys() <= {WEIGHTS, *OF_RUN}:
        raise damaged(folder / STRUCTURE, f"`{FILES}` names {', '.join(files) or 'nothing'}")
    return files


def check_files(folder: Path, saved: Saved) -> None:
    """Refuse a file that changed since it was saved."""
    for name in saved.files:
        path = folder / name
        try:
            check_file(path, saved.files)
        except CheckpointError as error:
            raise _changed(path, error) from None
        except OSError as error:
            raise damaged(path, error.strerror or str(error)) from None


def read_tensors(folder: Path, saved: Saved) -> dict[str, Tensor]:
    """The saved tensors by name, which must be those that the folder lists."""
    path = folder / WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            # a tensor as it comes is a window on the file, which may change later
            values = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise damaged(path, str(error)) from None
    found = {name: (dtype_name(t.dtype), list(t.shape)) for name, t in values.items()}
    for name in sorted(found.keys() | saved.tensors.keys()):
        if found.get(name) != saved.tensors.get(name):
            said = f"{name} is {found.get(name, 'missing')}, but {STRUCTURE} says {saved.tensors.get(name, 'nothing')}"
            raise damaged(path, said)
    return values


def check_masks(folder: Path, saved: Saved, values: dict[str, Tensor]) -> None:
    """Selected inputs must be as many as the weight has columns, and places an order of the outputs."""
    for name, layer in saved.layers.items():
        part = {PivotPair: "1.", PivotEmbedding: "1.", PivotHead: "projection."}.get(type(layer))
        if part is not None:
            places = values[saved.stored_as(f"{name}.{part}places" if name else f"{part}places")]
            if not is_order(places):
                raise damaged(folder / WEIGHTS, f"the places of {name} must be an order of its outputs")
        if isinstance(layer, Selected):
            kept = values[saved.stored_as(f"{name}.kept" if name else "kept")]
            if kept.dtype is not torch.bool or int(kept.sum()) != layer.kept:
                raise damaged(folder / WEIGHTS, f"{name} must keep {layer.kept} inputs, but keeps {int(kept.sum())}")


def damaged(path: Path, what: str) -> CheckpointError:
    """The error for a file that is not as it was saved."""
    return CheckpointError(f"{path} must be as `rankwise.save` wrote it, but is damaged: {what}. Save the model again.")


def _changed(path: Path, error: CheckpointError) -> CheckpointError:
    return CheckpointError(
        f"{path} must be as `rankwise.save` wrote it, but is damaged: {error}. Save the model again or download it "
        "again; pass verify=False (RANKWISE_VERIFY=0) to load it as it is."
    )
