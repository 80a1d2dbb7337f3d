"""The process of one cell of a sweep: `python -m rankwise.lab.experiments.cell FOLDER SEED NAME [WITHOUT ...]`.

NAME is a part of that seed, or "table". What it says goes to the log of the cell.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from rankwise.lab.data.vocabulary import digest_of
from rankwise.lab.experiments.cells import PLAN, TABLE, WORKERS, Cell
from rankwise.lab.experiments.launchers import ignore_user_signals
from rankwise.lab.experiments.pipeline import begin, from_base, parts_of, run_variants
from rankwise.lab.experiments.sweeps import Grid
from rankwise.lab.training import Watcher
from rankwise.lab.training.records import LOCK, read_json, write_file


class Log(Watcher):
    """Tells every phase."""

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
