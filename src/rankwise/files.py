"""Files: written so that a reader sees the old or the new one, never a part, with checksums that tell a changed bit.

A JSON file that describes others holds the SHA-256 of each under `files`, and one of itself under `checksum`: that of
its content without this entry, so white space and the order of keys do not matter.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from rankwise.errors import CheckpointError, DataError

CHECKSUM, FILES = "checksum", "files"
BLOCK = 1 << 18
"""Bytes that are read at a time."""


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a JSON file by a new one, whole."""
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        unfinished.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        sync(unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as safetensors takes them: contiguous, and no two in the same memory."""
    plain = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    memory: set[int] = set()
    for name, tensor in plain.items():
        # an empty tensor has no memory to share
        if tensor.numel() and (address := tensor.untyped_storage().data_ptr()) in memory:
            plain[name] = tensor.clone()
        elif tensor.numel():
            memory.add(address)
    save_file(plain, path, metadata={"format": "pt"})
    # safetensors writes files that only their owner can read
    shutil.copymode(path.parent, path)
    path.chmod(path.stat().st_mode & ~0o111)
    sync(path)


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    sha = hashlib.sha256()
    block = memoryview(bytearray(BLOCK))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(block):
            sha.update(block[:size])
    return sha.hexdigest()


def sealed(content: Mapping[str, Any], paths: Iterable[Path]) -> dict[str, Any]:
    """`content` with the checksums of these files, and one of itself."""
    described = {**content, FILES: {path.name: digest(path) for path in paths}}
    return {**described, CHECKSUM: _fingerprint(described)}


def check_seal(content: Mapping[str, Any]) -> None:
    """Refuse content that changed since `sealed` gave it."""
    _check(_fingerprint({key: value for key, value in content.items() if key != CHECKSUM}), content.get(CHECKSUM))
    if not isinstance(content.get(FILES), dict):
        raise CheckpointError(f"it has no `{FILES}`")


def check_file(path: Path, files: Mapping[str, str]) -> None:
    """Refuse a file that changed since its checksum was taken."""
    if path.name not in files:
        raise CheckpointError("it has no checksum, so it was not written with the others")
    _check(digest(path), files[path.name])


def verifies() -> bool:
    """Whether checksums are compared: unless `RANKWISE_VERIFY=0` is in the environment."""
    return os.environ.get("RANKWISE_VERIFY") != "0"


def _fingerprint(content: Mapping[str, Any]) -> str:
    # as it is read back from JSON, with strings as keys
    plain = json.loads(json.dumps(content))
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _check(found: str, written: object) -> None:
    if found != written:
        raise CheckpointError(f"its checksum is {found[:12]}..., but was {str(written)[:12]}... when it was written")


def same_tensors(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor once, under its first name; and that name for every other."""
    first: dict[tuple[Any, ...], str] = {}
    distinct: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and key in first:
            tied[name] = first[key]
        else:
            first[key] = name
            distinct[name] = tensor
    return distinct, tied


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def reason(error: Exception) -> str:
    """What went wrong, in a few words."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def cache_folder() -> Path:
    """The cache: `RANKWISE_CACHE`, or a folder in the place that this system has for caches."""
    if named := os.environ.get("RANKWISE_CACHE"):
        return Path(named)
    home = Path(os.path.expanduser("~"))
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "rankwise"


def not_utf8(label: object, position: int, error: UnicodeDecodeError) -> DataError:
    """The error for bytes that are not UTF-8; what could not be decoded begins at `position`."""
    return DataError(
        f"A text of characters or words must be UTF-8, but {label} has the byte 0x{error.object[error.start]:02x} at "
        f"position {position + error.start:,}. Convert it to UTF-8 first."
    )
