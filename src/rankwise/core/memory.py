"""Handing freed memory back while a large model is rebuilt."""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache
from pathlib import Path

from torch import Tensor

M_MMAP_THRESHOLD = -3
"""glibc's number of the setting."""


def trim() -> None:
    """Let the C library return what was freed.

    glibc keeps the holes that freed weights leave between other blocks, a few bytes too small for an aligned block of
    the same size, and grows the process instead: without this, gating a model takes half its size more.
    """
    library = _libc()
    if library is not None:
        library.malloc_trim(0)


def return_large_blocks() -> None:
    """Let the C library hand blocks of a megabyte or more back at once, in all of this process.

    Else it learns from the sizes it sees to keep ever larger ones, tens of megabytes in all, for later.
    """
    library = _libc()
    if library is not None:
        library.mallopt(M_MMAP_THRESHOLD, 2**20)


def drop_pages(tensor: Tensor) -> None:
    """Let go of the memory of a tensor that nobody reads any more, where it is a window on a file.

    Weights that were read by mapping a file share one mapping, which lives as long as the last of them.
    """
    library = _libc()
    if library is None or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    # whole pages alone: the first and the last may hold other tensors
    start, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end and _is_file(start, end):
        library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def _is_file(start: int, end: int) -> bool:
    """Whether these addresses are a window on a file of weights: of any other memory the content would be lost."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *rest = line.split(maxsplit=5)
        first, last = (int(each, 16) for each in addresses.split("-"))
        if first <= start and end <= last:
            return len(rest) == 5 and rest[4].endswith(".safetensors")
    return False


@cache
def _libc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") else None
