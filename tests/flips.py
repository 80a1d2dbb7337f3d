"""Bits that change on a disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
