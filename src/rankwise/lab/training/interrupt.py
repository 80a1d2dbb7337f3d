"""Ctrl-C that ends a run between two steps, where it can be resumed exactly."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """The user stopped the run; its message says how to resume it."""


class Stop:
    """Remembers that the user asked to stop."""

    requested = False

    def check(self) -> None:
        """Raise where a stop was asked for: called where nothing is half-done."""
        if self.requested:
            raise Interrupted


@contextmanager
def interruption() -> Iterator[Stop]:
    """Turn the first Ctrl-C into a request; a second one ends the program at once."""
    stop = Stop()

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True

    # only the main thread gets signals, and only it may say what happens then
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
