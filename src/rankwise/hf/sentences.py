"""The files by which sentence-transformers knows a folder: they say how token vectors become one for a sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

MODULES = "modules.json"
FILES = (MODULES, "sentence_bert_config.json", "config_sentence_transformers.json")
PLAIN = (".json", ".txt", ".safetensors")
"""What files may be called that are copied: none of them can hold code."""
USUAL = ("config.json", "model.safetensors")
"""What a folder of a module holds, where it cannot be listed."""


def copy_files(source: str, target: Path) -> list[str]:
    """Copy what `source`, a folder or a name on the hub, has of them; names of what `modules.json` asks for in vain.

    Those are other files than JSON, text and safetensors.
    """
    for name in FILES:
        _copy(_found(source, name), target / name)
    left: list[str] = []
    for folder in sorted(module_folders(target)):
        for name in _names(Path(source) / folder):
            if not name.endswith(PLAIN):
                left.append(f"{folder}/{name}")
            else:
                _copy(_found(source, f"{folder}/{name}"), target / folder / name)
    return left


def module_folders(folder: Path) -> set[str]:
    """The folders that `modules.json` of a folder names, as far as they lie directly in it."""
    try:
        entries: Any = json.loads((folder / MODULES).read_bytes())
        paths = [entry.get("path") for entry in entries]
    except (OSError, ValueError, TypeError, AttributeError):
        return set()
    return {path for path in paths if isinstance(path, str) and path not in ("", "..") and _is_name(path)}


def _is_name(path: str) -> bool:
    return PurePosixPath(path).name == path and "\\" not in path


def _names(folder: Path) -> Iterable[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.is_file()) if folder.is_dir() else USUAL


def _found(source: str, name: str) -> Path | None:
    folder = Path(source)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    # the model itself was there: what else is wrong with the hub need not stop us
    except Exception:
        return None
    return None if found is None else Path(found)


def _copy(source: Path | None, target: Path) -> None:
    if source is not None:
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(source, target)
