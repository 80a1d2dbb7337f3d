"""Handing freed memory back while a large model is rebuilt."""

from __future__ import annotations

import ctypes
import sys
from functools import cache


def trim() -> None:
    """Let the C library return what was freed.

    glibc keeps the holes that freed weights leave between other blocks, a few bytes too small for an aligned block of
    the same size, and grows the process instead: without this, gating a model takes half its size more.
    """
    library = _libc()
    if library is not None:
        library.malloc_trim(0)


@cache
def _libc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") else None
