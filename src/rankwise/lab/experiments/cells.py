"""The cells of a sweep, each made by a process of its own: which may start, which have ended, which are tried again.

A cell is one part of one seed: the base, a variant, or at last the table. Its process,
`python -m rankwise.lab.experiments.cells FOLDER SEED NAME [WITHOUT ...]`, waits for the lock of its folder and leaves a
finished part alone, so no part is made twice, whoever started it. At its end it writes a file into `workers/`. A cell
whose process ended without one is tried once more, and goes on from its last checkpoint.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from rankwise.core.budget import Budget
from rankwise.errors import shortened
from rankwise.lab.data.vocabulary import digest_of
from rankwise.lab.experiments.launchers import SAVING_SECONDS, Job, Launcher, ignore_user_signals
from rankwise.lab.experiments.pipeline import begin, from_base, parts_of, run_variants
from rankwise.lab.experiments.run_folder import EXPORT, RECORD
from rankwise.lab.experiments.variants import DENSE, Variant
from rankwise.lab.tasks.base import Experiment, from_json
from rankwise.lab.training import Interrupted, Watcher
from rankwise.lab.training.interruption import interruption
from rankwise.lab.training.ranks import own_ranks
from rankwise.lab.training.records import LOCK, read_json, write_file

WORKERS, PLAN = "workers", "plan.json"
"""The folder of logs in that of a sweep, and the file in it that says what the cells are."""
TABLE = "table"
"""The cell that times the models of a seed and writes its record."""
TRIES = 2


@dataclass(frozen=True)
class Grid:
    """What a sweep runs with every seed."""

    experiment: Experiment
    methods: Sequence[str]
    removed: Sequence[float]

    def of_seed(self, seed: int) -> tuple[Experiment, list[Variant]]:
        """The experiment whose base is shared, and its variants."""
        experiment = replace(self.experiment, seed=seed)
        of = "model" if experiment.budget is None else experiment.budget.of
        sizes = {f"{100 * level:g}": Budget(removed=level, of=of) for level in self.removed}
        with_control = experiment.reference == "base" or DENSE in self.methods
        variants = []
        for method in self.methods if with_control else [DENSE, *self.methods]:
            if method == DENSE:
                variants.append(Variant(DENSE, experiment.control()))
            else:
                variants += [
                    Variant(f"{method}-{n}", experiment.with_method(method, size)) for n, size in sizes.items()
                ]
        return experiment, variants

    def to_json(self, trackers: Sequence[str]) -> dict[str, Any]:
        """What a process needs to make a cell."""
        plain = self.experiment.to_json()
        return {"experiment": plain, "methods": [*self.methods], "removed": [*self.removed], "trackers": [*trackers]}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> tuple[Grid, list[str]]:
        """The grid and the trackers."""
        return cls(from_json(plain["experiment"]), plain["methods"], plain["removed"]), plain["trackers"]


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
        """The file that a process writes at its end."""
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
        """Sort out the processes that ended; returns the cells to be tried again."""
        again = []
        for worker, (cell, job) in list(self.running.items()):
            if not job.is_over():
                continue
            del self.running[worker]
            if self.has_finished(cell):
                self.finished.add(cell.title)
            elif self.tries[cell.title] < TRIES:
                again.append(cell)
            else:
                self.failed[cell.title] = last_line(cell.log(self.folder))
        return again

    def has_finished(self, cell: Cell) -> bool:
        """Whether a cell is finished; what another machine wrote may take a while to be seen here."""
        until = time.monotonic() + (0 if self.launcher.here else self.launcher.patience)
        while not (finished := cell.is_finished(self.folder)) and time.monotonic() < until:
            time.sleep(self.launcher.pause / 4)
        return finished

    def start(self, waiting: list[Cell], limit: int) -> list[Cell]:
        """Start what can be started; returns the cells that still wait."""
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
                command = [sys.executable, "-m", "rankwise.lab.experiments.cells", *where]
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
    """The last line of a log that is not empty."""
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return shortened(next((line for line in reversed(lines) if line.strip()), "it said nothing"), 300)


class Log(Watcher):
    """Prints every phase, into the log of the cell."""

    def phase(self, title: str) -> None:
        print(title, flush=True)


def make(folder: Path, cell: Cell) -> None:
    """Make a cell, unless that is done already."""
    plan = folder / WORKERS / PLAN
    digest = digest_of(plan)
    grid, trackers = Grid.from_json(read_json(plan, "experiment", "methods", "removed") or {})
    own, variants = grid.of_seed(cell.seed)
    place = folder / f"seed-{cell.seed}"
    if cell.name == TABLE:
        run_variants(own, variants, place, watcher=Log(), trackers=trackers, failed=cell.without)
    else:
        context = begin(own, place, Log(), trackers)
        (part,) = (part for part in parts_of(context, own, from_base(own, variants)) if part.name == cell.name)
        part.folder.mkdir(parents=True, exist_ok=True)
        # one that outlived the command which started it may still work there
        with FileLock(part.folder / LOCK, timeout=0, is_singleton=True).acquire(timeout=-1):
            part.make()
    write_file(cell.done_file(folder), {"plan": digest, "without": list(cell.without)})


def end_with_parent() -> None:
    """Save and end when the process that started this one is gone, which closes our input."""

    def wait() -> None:
        os.read(0, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def main(arguments: Sequence[str]) -> None:
    folder, seed, name, *without = arguments
    print(f"{name} in process {os.getpid()} on {socket.gethostname()}", flush=True)
    ignore_user_signals()
    end_with_parent()
    try:
        make(Path(folder), Cell(int(seed), name, without=tuple(without)))
    except KeyboardInterrupt as stopped:
        print(stopped or "Stopped.", flush=True)
        sys.exit(128 + getattr(stopped, "signal", signal.SIGINT))


if __name__ == "__main__":
    main(sys.argv[1:])
