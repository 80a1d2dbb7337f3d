"""A watchdog for ranks: if one of them dies or hangs, the others end with a message instead of waiting for ever.

With gloo a rank that dies breaks its connections, which fails the others at once; with NCCL they would wait in the next
call for minutes. `torchrun` ends the others too, but not every launcher does, and none sees a rank that hangs.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from threading import Event, Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

PERIOD = 2.0
"""Seconds between two signs of life."""
PATIENCE = 120.0
"""Seconds without one after which a rank counts as dead: some calls, such as writing a large file, hold all threads."""
GRACE = 10.0
"""Seconds that a rank has to end by itself after another one has failed."""
STORE_TIMEOUT = timedelta(seconds=300)
FAILED, GONE = "failed", "gone"
EXIT_CODE = 1


class Watchdog(Thread):
    """Gives a sign of life for this rank, and looks for those of others: the first rank for all, the others for it."""

    def __init__(self, store: TCPStore, rank: int, count: int) -> None:
        super().__init__(daemon=True, name="rankwise-watchdog")
        self.store, self.rank, self.count = store, rank, count
        self.judges = False
        """Whether the others are needed now; a rank that is not may end when it likes."""
        self._over = Event()
        others = range(1, count) if rank == 0 else (0,)
        self._seen = dict.fromkeys(others, (0, time.monotonic()))
        """The last sign of life of others, and when it was new."""
        self._failed_at: float | None = None

    def run(self) -> None:
        while not self._over.wait(PERIOD):
            try:
                self._look()
            except RuntimeError:
                # the first rank keeps the store, so it is that one which has gone
                if self.judges and not self._over.is_set():
                    self._exit() if self._failed_at else self._end([0])

    def _look(self) -> None:
        now = time.monotonic()
        self.store.add(f"alive/{self.rank}", 1)
        dead = []
        for other, (sign, since) in self._seen.items():
            latest = self.store.add(f"alive/{other}", 0)
            self._seen[other] = (latest, now if latest != sign else since)
            if now - self._seen[other][1] > PATIENCE:
                dead.append(other)
        if not self.judges:
            return
        if self.store.add(FAILED, 0):
            self._failed_at = self._failed_at or now
            if now - self._failed_at > GRACE:
                self._exit()
        elif dead:
            self._end(dead)

    def fail(self) -> bool:
        """Tell the others that this rank ends with an error; whether it is the first to do so."""
        try:
            return self.store.add(FAILED, 1) == 1
        except RuntimeError:
            return self.rank == 1

    def leave(self) -> None:
        """Stop watching. The first rank leaves last, because it holds the store that the others read."""
        self._over.set()
        try:
            # a dead one never leaves; after an error, the living need only see that there was one
            longest = 2 * PERIOD if self.store.add(FAILED, 0) else 2 * GRACE
            gone, end = self.store.add(GONE, int(self.rank > 0)), time.monotonic() + longest
            while self.rank == 0 and gone < self.count - 1 and time.monotonic() < end:
                time.sleep(0.02)
                gone = self.store.add(GONE, 0)
        except RuntimeError:
            pass

    def _end(self, dead: list[int]) -> None:
        if self.fail():
            which = f"process {dead[0]} has" if len(dead) == 1 else f"processes {', '.join(map(str, dead))} have"
            print(
                f"rankwise: All processes of a run must go on together, but {which} given no sign of life for "
                f"{PATIENCE:g} s, or ended. Start the same command again: it goes on from the last checkpoint.",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        self._exit()

    def _exit(self) -> None:
        # the main thread may wait for the dead one in a call that no exception reaches
        self.leave()
        sys.stderr.flush()
        os._exit(EXIT_CODE)
