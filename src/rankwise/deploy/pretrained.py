"""The entry `quantization_config` in `config.json` of a folder: read by `rankwise.hf` and by engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rankwise.deploy.structure import Layer, from_json
from rankwise.errors import CheckpointError
from rankwise.files import FILES, check_seal, verifies

METHOD = "rankwise"
VERSION = 2
UNSEALED = 1
"""The version without checksums."""
AGAIN = "Save the model again or download it again; RANKWISE_VERIFY=0 in the environment loads it as it is."
"""The remedy for a checksum that does not fit."""


@dataclass(frozen=True)
class Entry:
    """What a checked entry says."""

    gated: bool
    layers: dict[str, Layer]
    tied: dict[str, str]
    """For every name of a tensor but the first, that first name."""
    files: dict[str, str] | None
    """Checksums of the files of weights; None where they are not to be compared."""


def read_entry(entry: dict[str, Any]) -> Entry:
    """Read an entry; one of a newer version, or one that rankwise did not write, is refused."""
    version = entry.get("version")
    verify = version != UNSEALED and verifies()
    if type(version) is int and version > VERSION:
        raise CheckpointError(
            f"The `quantization_config` in config.json must be version {VERSION} at most, but is version "
            f"{version}, written by rankwise {entry.get('rankwise')}. Upgrade rankwise."
        )
    try:
        if version not in (UNSEALED, VERSION):
            raise CheckpointError(f"its version is {version!r}")
        if verify:
            check_seal(entry)
        if entry.get("gated") is True:
            return Entry(True, {}, {}, None)
        layers = {str(name): from_json(layer) for name, layer in _part_of(entry, "layers").items()}
        tied = {str(name): str(source) for name, source in _part_of(entry, "tied").items()}
    except (AttributeError, TypeError, ValueError, CheckpointError) as error:
        raise CheckpointError(
            f"The `quantization_config` in config.json must be as rankwise wrote it, but is damaged: {error}. "
            f"{AGAIN if verify else 'Save the model again.'}"
        ) from None
    return Entry(False, layers, tied, entry[FILES] if verify else None)


def _part_of(entry: dict[str, Any], key: str) -> dict[str, Any]:
    if key not in entry:
        raise CheckpointError(f"it has no `{key}`")
    part: dict[str, Any] = entry[key]
    return part
