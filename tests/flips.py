"""Bits that change on a disk, and what was written before there were checksums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    """A file in which one bit is another."""
    whole = path.read_bytes()
    changed = bytearray(whole)
    changed[bit // 8] ^= 1 << bit % 8
    path.write_bytes(changed)
    try:
        yield
    finally:
        path.write_bytes(whole)


def unsealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """A description as version 1 of its format wrote it."""
    return {**{key: value for key, value in content.items() if key not in ("files", "checksum")}, "version": 1}
