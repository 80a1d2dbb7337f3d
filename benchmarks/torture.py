"""Kills, full disks, flipped bits and strangers' folders, counted: does what is promised hold?

python benchmarks/torture.py kills --number 300     # kill -9 at random moments of every command, resumed
python benchmarks/torture.py sweep --number 3       # kill -9 of one of the three workers of a sweep
python benchmarks/torture.py saves                  # kill -9 at every file operation of a save
python benchmarks/torture.py disk --number 100      # a disk that is full after so many bytes of a file
python benchmarks/torture.py fuzz --number 100000   # mutated folders (benchmarks/fuzz.py)
python benchmarks/torture.py flips --number 5000    # single bits of models and checkpoints
python benchmarks/torture.py memory --number 100000 # memory over so many steps
python benchmarks/torture.py table                  # the table of docs/reliability.md

Each prints its row and what went wrong, and keeps the row in `results/torture.json` (or --record FILE), every few
seconds what there is of it; with `--add` it goes on with the row that is there. Everything runs in children of this
process, which are forked after the imports, so that hundreds of runs take minutes. Cases are numbered: `--workers N`
shares them out among processes, and `--case NUMBER` repeats one.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import fuzz
import torch
from children import ENGINES, ROOT, Case, Outcome, engines, share_out
from flips import flips
from torture_cases import Row, disk, fuzzed, kills, memory, saves, sweeps

from rankwise.files import write_json
from rankwise.surroundings import surroundings

RECORD = ROOT / "results" / "torture.json"


@dataclass(frozen=True)
class Cases:
    """A row of cases that do not depend on each other."""

    what: str
    make: Callable[[Path], Case]
    """Prepares in a folder what all cases share, and returns what runs one of them."""
    number: int
    chunk: int = 1
    """Cases that a child runs before another takes its place."""


ROWS: dict[str, Cases | Callable[[int, Path], Row]] = {
    "kills": Cases(
        "`kill -9` at random moments of runs, sentences, time budgets, sweeps, compress, heal, exports; resumed",
        kills,
        300,
    ),
    "sweep": Cases("a sweep of 12 cells over 3 local workers, one `kill -9` each: all cells, none twice", sweeps, 3),
    "saves": saves,
    "disk": Cases(
        "full disks: one clear error, what was there is kept, the same again ends with the same result", disk, 100
    ),
    "fuzz": Cases(
        "mutated folders by `load`, commands and `from_pretrained`: an answer or one clear error, 2 s, 1 GB",
        fuzzed,
        100_000,
        50,
    ),
    "flips": Cases(
        "single flipped bits of models and checkpoints: refused or told of, or without meaning", flips, 5_000, 250
    ),
    "memory": memory,
}


@contextlib.contextmanager
def prepared(kind: Cases) -> Iterator[tuple[Case, Path]]:
    """What runs a case, and the folder for it."""
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as work, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # a child of a process with threads may wait for one that it does not have
        torch.set_num_threads(1)
        torch.manual_seed(0)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                run = kind.make(Path(work))
            yield run, Path(work)
        finally:
            torch.set_num_threads(threads)


def torture(
    name: str,
    number: int | None = None,
    seed: int = 0,
    workers: int = 1,
    seconds: float = math.inf,
    keep: Callable[[Row], None] = lambda row: None,
) -> Row:
    """One row of the table; `keep` gets what there is of it every few seconds."""
    kind = ROWS[name]
    if not isinstance(kind, Cases):
        with tempfile.TemporaryDirectory() as work:
            return kind(100_000 if number is None else number, Path(work))
    row, first, kept = Row(name, kind.what), seed * 1_000_000, time.monotonic()
    cases = range(first, first + (kind.number if number is None else number))
    with (
        prepared(kind) as (run, work),
        contextlib.closing(share_out(run, cases, work, workers, kind.chunk, seconds)) as outcomes,
        # Ctrl-C ends it, and what was tried until then counts
        contextlib.suppress(KeyboardInterrupt),
    ):
        for outcome in outcomes:
            row.note(*outcome)
            if time.monotonic() > kept + 2:
                keep(row)
                kept = time.monotonic()
    if kind.make in (kills, disk) and (missing := [form for form in ENGINES if form not in engines()]):
        row.more["without"] = " and ".join(missing)
    return row


def one_case(name: str, number: int) -> Outcome:
    """The case of a number, in this process."""
    kind = ROWS[name]
    if not isinstance(kind, Cases):
        sys.exit(f"{name} has no cases by number")
    fuzz.is_tracing = True
    with prepared(kind) as (run, work):
        return run(number, work)


def table(record: dict[str, Any]) -> str:
    """The table of docs/reliability.md."""
    lines = ["| | tried | held | |", "|---|---|---|---|"]
    for row in record["rows"]:
        more = ", ".join(f"{key} {value}" for key, value in row["more"].items())
        lines.append(f"| {row['what']} | {row['tried']:,} | {row['tried'] - len(row['bad']):,} | {more} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", choices=[*ROWS, "table"])
    parser.add_argument("--number", type=int, help="of cases, or of steps")
    parser.add_argument("--seed", type=int, default=0, help="cases are numbered from a million times this on")
    parser.add_argument("--workers", type=int, default=1, help="processes among which cases are shared out")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no further case after so long")
    parser.add_argument("--case", type=int, help="run the case of this number alone, and keep nothing")
    parser.add_argument("--commit", help="of this source, for the record, where git does not know it")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--add", action="store_true", help="add to the row that the record has; give another seed")
    options = parser.parse_args()
    if options.row == "table":
        print(table(json.loads(options.record.read_text())))
        return
    # nothing here is for a GPU, and a process that has used one cannot be forked
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if options.case is not None:
        print(*one_case(options.row, options.case), sep="\n")
        return
    began, record = time.monotonic(), options.record
    rows = {each["name"]: each for each in json.loads(record.read_text())["rows"]} if record.exists() else {}
    before = rows.get(options.row) if options.add else None

    def keep(made: Row) -> None:
        row: dict[str, Any] = {**dataclasses.asdict(made), "seed": options.seed, "workers": options.workers}
        row |= {"seconds": round(time.monotonic() - began), "date": date.today().isoformat()}
        row |= surroundings(torch.device("cpu"))
        row["commit"] = options.commit or row["commit"]
        rows[options.row] = row if before is None else added(before, row)
        content = {"format": "rankwise-torture", "version": 1, "rows": [rows[name] for name in ROWS if name in rows]}
        write_json(record, content)

    made = torture(options.row, options.number, options.seed, options.workers, options.seconds, keep)
    keep(made)
    print(table({"rows": [rows[options.row]]}))
    sys.exit(1 if made.bad else 0)


def added(before: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """A row with the cases of an earlier one."""
    counts = {key: before["more"].get(key, 0) + value for key, value in row["more"].items() if isinstance(value, int)}
    sums = {key: before[key] + row[key] for key in ("tried", "bad", "seconds")}
    return {**row, **sums, "seed": before["seed"], "more": {**row["more"], **counts}}


if __name__ == "__main__":
    main()
