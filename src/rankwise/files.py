"""Files: written so that a reader sees the old or the new, never a half; and where to keep what can be made again."""

from __future__ import annotations

import json
import os
import shutil
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor


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
    """`RANKWISE_CACHE`, or a folder where this system keeps what can be made again."""
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
