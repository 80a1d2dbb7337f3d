"""What must not make the host wait for a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waiting(enabled: bool = True) -> Iterator[None]:
    """Whatever makes the host wait for the GPU is an error inside."""
    if not enabled:
        yield
        return
    with warnings.catch_warnings():
        # by torch, once in a process, after it has set the mode
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
