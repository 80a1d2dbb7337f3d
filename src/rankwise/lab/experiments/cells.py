"""The cells of a sweep, each in a process of its own: which may start, which have ended, which are tried again.

A cell is one part of one seed: the base, a variant, or at last the table. Its process waits for the lock of its folder
and leaves a finished part alone, so none is made twice, whoever started it. When it came to its end it writes a file
into `workers/`; one that ended without is tried once more, and goes on from its last checkpoint.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rankwise.errors import shortened
from rankwise.lab.data.vocabulary import digest_of
from rankwise.lab.experiments.launchers import SAVING_SECONDS, Job, Launcher
from rankwise.lab.experiments.run_folder import EXPORT, RECORD
from rankwise.lab.training import Interrupted, Watcher
from rankwise.lab.training.interruption import interruption
from rankwise.lab.training.ranks import own_ranks
from rankwise.lab.training.records import read_json

WORKERS, PLAN = "workers", "plan.json"
"""The folder of logs in that of a sweep, and the file in it that says what the cells are."""
TABLE = "table"
"""The cell that times the models of a seed and writes its record."""
TRIES = 2


@dataclass(frozen=True)
class Cell:
    """One part of one seed."""

    seed: int
    name: str
    after: tuple[str, ...] = ()
    """The parts of this seed that it is made from."""
    without: tuple[str, ...] = ()
    """For a table: the parts that failed."""

    @property
    def title(self) -> str:
        return f"seed-{self.seed}/{self.name}"

    def log(self, folder: Path) -> Path:
        return folder / WORKERS / f"{self.title}.log"

    def done_file(self, folder: Path) -> Path:
        """The file that a process writes when it came to its end."""
        return folder / WORKERS / f"{self.title}.json"

    def is_finished(self, folder: Path) -> bool:
        """Whether it was made by the plan that is in the folder."""
        done = read_json(self.done_file(folder)) or {}
        made = folder / f"seed-{self.seed}" / (RECORD if self.name == TABLE else f"{self.name}/{EXPORT}")
        asked = {"plan": digest_of(folder / WORKERS / PLAN), "without": list(self.without)}
        return done == asked and made.exists()


@dataclass
class Scheduler:
    """Runs cells by a launcher."""

    launcher: Launcher
    folder: Path
    watcher: Watcher
    finished: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    """Why, by title."""
    running: dict[int, tuple[Cell, Job]] = field(default_factory=dict)
    """By the number of the worker."""
    tries: Counter[str] = field(default_factory=Counter)

    def run(self, cells: Iterable[Cell], at_most: int | None = None) -> None:
        """Run cells to their end, all that need no failed one; Ctrl-C and SIGTERM stop them."""
        waiting = []
        for cell in cells:
            self.finished.add(cell.title) if cell.is_finished(self.folder) else waiting.append(cell)
        # not fewer where less is left: a cell that goes on has as many threads as before, and the same rounding
        self.launcher.at_a_time = limit = at_most or self.launcher.workers or max(1, len(waiting))
        self.tell(waiting)
        with interruption(own_ranks()) as stop:
            try:
                while (waiting or self.running) and stop.requested is None:
                    before = len(waiting), len(self.running)
                    waiting += self.ended()
                    waiting = self.start(waiting, limit)
                    if before != (len(waiting), len(self.running)):
                        self.tell(waiting)
                    time.sleep(self.launcher.pause)
                if stop.requested is not None:
                    self.stop(waiting, stop.requested)
            finally:
                for _, job in self.running.values():
                    job.stop(at_once=True)

    def ended(self) -> list[Cell]:
        """Take note of processes that ended; the cells that are to be tried again."""
        again = []
        for worker, (cell, job) in list(self.running.items()):
            if not job.is_over():
                continue
            del self.running[worker]
            if self.came_to_its_end(cell):
                self.finished.add(cell.title)
            elif self.tries[cell.title] < TRIES:
                again.append(cell)
            else:
                self.failed[cell.title] = last_line(cell.log(self.folder))
        return again

    def came_to_its_end(self, cell: Cell) -> bool:
        """Whether a cell is finished; what another machine wrote may take a while to be seen here."""
        until = time.monotonic() + (0 if self.launcher.here else self.launcher.patience)
        while not (finished := cell.is_finished(self.folder)) and time.monotonic() < until:
            time.sleep(self.launcher.pause / 4)
        return finished

    def start(self, waiting: list[Cell], limit: int) -> list[Cell]:
        """Start what can be started; the cells that still wait."""
        later = []
        for cell in waiting:
            needs = [f"seed-{cell.seed}/{name}" for name in cell.after]
            if lost := [title for title in needs if title in self.failed]:
                self.failed[cell.title] = f"it needs {lost[0]}, which failed"
            elif len(self.running) >= limit or not self.finished.issuperset(needs):
                later.append(cell)
            else:
                worker = next(number for number in range(limit) if number not in self.running)
                cell.done_file(self.folder).unlink(missing_ok=True)
                self.tries[cell.title] += 1
                where = [str(self.folder.absolute()), str(cell.seed), cell.name, *cell.without]
                command = [sys.executable, "-m", "rankwise.lab.experiments.cell", *where]
                self.running[worker] = cell, self.launcher.start(command, cell.log(self.folder), worker, cell.title)
        return later

    def stop(self, waiting: list[Cell], signal: int) -> None:
        """Let all processes save and end; a second Ctrl-C ends them at once."""
        for _, job in self.running.values():
            job.stop()
        until = time.monotonic() + SAVING_SECONDS
        while self.running and time.monotonic() < until:
            waiting += self.ended()
            time.sleep(self.launcher.pause)
        left = len(waiting) + len(self.running) + len(self.failed)
        stopped = Interrupted(f"Stopped with {left} cells to do; run the same again to go on from there.")
        stopped.signal = signal
        raise stopped

    def tell(self, waiting: list[Cell]) -> None:
        counts = {"done": self.finished, "waiting": waiting, "failed": self.failed, "running": self.running}
        told = ", ".join(f"{len(which)} {what}" for what, which in counts.items() if which or what == "done")
        titles = ", ".join(cell.title for cell, _ in self.running.values())
        self.watcher.phase(shortened(f"cells: {told}{': ' * bool(titles)}{titles}", 200))


def last_line(log: Path) -> str:
    """What a log says last."""
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return shortened(next((line for line in reversed(lines) if line.strip()), "it said nothing"), 300)
