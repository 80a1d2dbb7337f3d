"""Stopping: the first Ctrl-C or SIGTERM is a request, which the loop grants where nothing is half-done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rankwise.lab.training.ranks import Ranks


class Interrupted(KeyboardInterrupt):
    """The run was stopped, by Ctrl-C or by a scheduler; its message says how to resume it."""

    signal: int = signal.SIGINT
    """The signal that stopped it."""


class Stop:
    """Remembers that a stop was asked for."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.requested: int | None = None
        """The signal."""

    def check(self) -> None:
        """Raise where a stop was asked for, of this rank or of one that waits for it."""
        if self.requested is None:
            self.requested = self.ranks.signalled()
        if self.requested is not None:
            raise Interrupted

    def agree(self) -> None:
        """Raise on all ranks where one was asked to stop, so that all stop at the same step."""
        asked = self.ranks.largest(self.requested or 0)
        if asked:
            # and if not: a signal that has come meanwhile is for the next step
            self.requested = asked
            raise Interrupted


@contextmanager
def interruption(ranks: Ranks) -> Iterator[Stop]:
    """Turn the first Ctrl-C, or SIGTERM of a scheduler, into a request; a second one ends the program at once.

    To one of several processes a launcher repeats the signal that it gets, so that a second one means nothing.
    """
    stop = Stop(ranks)

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.requested is not None and ranks.count == 1:
            raise KeyboardInterrupt
        stop.requested = number

    # only the main thread gets signals, and only it may say what happens then
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
