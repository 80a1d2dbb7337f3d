"""Returning freed host memory to the system while a large model is rebuilt."""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache
from pathlib import Path

from torch import Tensor

M_MMAP_THRESHOLD = -3
"""glibc's number for the `mallopt` setting."""


def release_freed_memory() -> None:
    """Make the C library return freed memory to the system.

    glibc keeps the holes that freed weights leave between other blocks. They are a few bytes too small for an aligned
    block of the same size, so the process grows instead: without this call, gating a model takes half its size more.
    """
    library = _libc()
    if library is not None:
        library.malloc_trim(0)


def return_large_blocks() -> None:
    """Make the C library return every freed block of a megabyte or more immediately, for the whole process.

    By default glibc adapts to the sizes it sees and keeps ever larger blocks, tens of megabytes in total.
    """
    library = _libc()
    if library is not None:
        library.mallopt(M_MMAP_THRESHOLD, 2**20)


def release_mapped_pages(tensor: Tensor) -> None:
    """Release the memory of a tensor that is no longer read, if it is mapped from a file of weights.

    All weights of such a file share one mapping, which lives as long as the last of them.
    """
    library = _libc()
    if library is None or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    # only whole pages: the first and the last may hold other tensors
    start, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end and _is_weights_file(start, end):
        library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def _is_weights_file(start: int, end: int) -> bool:
    """Whether these addresses map a safetensors file; other memory would lose its content."""
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
