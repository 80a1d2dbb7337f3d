"""Sizes of a folder of transformers, bounded by its weights: a stranger's `config.json` may ask for any model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import ne
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.utils import logging

from rankwise.deploy.architectures import building_at_most
from rankwise.deploy.load import FEW_NUMBERS
from rankwise.deploy.structure import damaged
from rankwise.errors import CheckpointError, RankwiseError, first_line
from rankwise.files import fingerprint, identity, opened, read_json, reason, verifies
from rankwise.hf.format import METHOD
from rankwise.hub import check_json_sizes

CONFIG, WHOLE = "config.json", "rankwise_checksum"
"""The configuration, and the entry of it that holds the checksum of all others."""
MOST_TENSORS = 50_000
"""Tensors of a model of which no weights are known."""
SPARE_TENSORS = 16
"""Tensors that are registered for every saved one while a model is made, at most: experts may be saved as one."""
FEW_TENSORS = 1_000
MOST_LAYERS = 10_000
SPARE_NUMBERS = 16
"""Numbers of a model for every saved number, at most, where they are not few: several may be packed into one."""

logger = logging.get_logger(__name__)
Shapes = Mapping[str, Sequence[int]]


def shapes_in(folder: Path) -> dict[str, list[int]] | None:
    """The shapes of the tensors in the files of weights in a folder, by name; None where there are none to read."""
    found: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
        found |= shapes_of(path)
    return found or None


def shapes_of(path: Path) -> dict[str, list[int]]:
    """The shapes of the tensors in a file of weights, by name."""
    if not path.is_file():
        raise CheckpointError(f"{path} must be a regular file, but is not.")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} must hold tensors, but cannot be read: {first_line(error)}.") from None


def check_counts(folder: Path) -> None:
    """Refuse a `config.json` with more layers than any model has: transformers makes lists of that length at once."""
    try:
        waiting = [read_json(folder / CONFIG)]
    except (OSError, ValueError):
        # there is none, or transformers says what is wrong
        return
    while waiting:
        here = waiting.pop()
        pairs = here.items() if isinstance(here, dict) else ((("", value) for value in here) if here else ())
        for key, value in pairs:
            if isinstance(value, dict | list):
                waiting.append(value)
            elif "layer" in key and isinstance(value, int | float) and value > MOST_LAYERS:
                raise CheckpointError(
                    f"A model must have at most {MOST_LAYERS:,} layers, but {folder / CONFIG} says `{key}` {value:,}."
                )


def most_tensors(shapes: Shapes | None) -> int:
    """The number of tensors that a model of such weights may have."""
    return MOST_TENSORS if shapes is None else max(FEW_TENSORS, SPARE_TENSORS * len(shapes))


def check_proportion(model: nn.Module, shapes: Shapes) -> None:
    """Refuse a model that would need far more memory than its saved weights: what is not saved is drawn anew."""
    saved = sum(map(math.prod, shapes.values()))
    described = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    if described > max(SPARE_NUMBERS * saved, FEW_NUMBERS):
        raise CheckpointError(
            f"A model must be of the size of its weights, but {CONFIG} describes {described:,} numbers, and the files "
            f"of weights hold {saved:,}. Load it with the {CONFIG} that it was saved with."
        )


@contextmanager
def checking_folder(folder: object) -> Iterator[None]:
    """Within this context a folder of ours is loaded: its sizes are bounded, and what is wrong is one clear error."""
    path = Path(str(folder))
    if not _is_ours(path):
        yield
        return
    before = identity(path)
    check_json_sizes(path)
    check_counts(path)
    if verifies():
        _check_unchanged(path / CONFIG)
    try:
        with building_at_most(most_tensors(shapes_in(path))):
            yield
    except (RankwiseError, KeyboardInterrupt):
        raise
    except Exception as error:
        remedy = "Another model took its place meanwhile; try again." if identity(path) != before else "Save it again."
        raise CheckpointError(
            f"{folder} must be as rankwise wrote it, but transformers cannot load it: {type(error).__name__}: "
            f"{first_line(error)} {remedy}"
        ) from error


def _check_unchanged(config: Path) -> None:
    """Tell of a configuration that changed since it was saved: it may have been on purpose, or a bit on a disk."""
    try:
        content = read_json(config)
    except (OSError, ValueError) as error:
        raise damaged(config, reason(error)) from None
    if not isinstance(content, dict):
        return
    written = content.pop(WHOLE, None)
    # the bit may be one of the entry's name
    is_renamed = any(len(name) == len(WHOLE) and sum(map(ne, name, WHOLE)) == 1 for name in content)
    if is_renamed or (written is not None and written != fingerprint(content)):
        logger.warning(
            f"{config} is not as it was saved. If nobody changed it on purpose, it is damaged: save or download the "
            f"model again. If somebody did, remove `{WHOLE}` from it."
        )


def _is_ours(folder: Path) -> bool:
    """Whether the configuration in a folder speaks of rankwise; it need not be JSON."""
    try:
        with opened(folder / CONFIG) as file:
            return f'"{METHOD}"'.encode() in file.read(1 << 24)
    except OSError:
        return False
