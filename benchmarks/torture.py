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
import hashlib
import io
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import fuzz
import torch
from children import (
    ENGINES,
    ROOT,
    TWELVE,
    Case,
    Outcome,
    actions,
    engines,
    in_child,
    launched_sweep,
    leftovers,
    results,
    share_out,
)  # fmt: skip
from flips import flips
from torch import nn

import rankwise as rw
from rankwise.deploy import save as saving
from rankwise.errors import RankwiseError
from rankwise.files import write_json
from rankwise.lab.experiments.sweeps import sweep
from rankwise.lab.training.checkpoint import Checkpoint, Checkpoints
from rankwise.surroundings import surroundings

RECORD = ROOT / "results" / "torture.json"


@dataclass
class Row:
    """A row of the table."""

    name: str
    what: str
    tried: int = 0
    bad: list[str] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)

    def note(self, case: str, wrong: str | None, more: dict[str, int] | None = None) -> None:
        """Count a case."""
        self.tried += 1
        for key, value in (more or {}).items():
            self.more[key] = self.more.get(key, 0) + value
        if wrong is not None:
            self.bad.append(f"{case}: {wrong}")
            print(f"BAD {self.name}: {self.bad[-1]}", flush=True)


def kills(work: Path) -> Case:
    """Kill at random moments, one to four times, then run to the end."""
    known, times, expected = actions(work / "shared"), {}, {}
    for name, act in known.items():
        # the first time fills caches
        for place in ("first", "whole"):
            began, path = time.monotonic(), work / place / name
            code, said = in_child(partial(act, path))
            times[name] = time.monotonic() - began
            assert code == 0, (name, said)
        expected[name] = results(path)
        assert expected[name] == results(work / "first" / name) != {}, name

    def run(case: int, folder: Path) -> Outcome:
        draw, name = random.Random(case), list(known)[case % len(known)]
        path, landed = folder / "killed" / name, 0
        for _ in range(draw.randint(1, 4)):
            landed += in_child(partial(known[name], path), draw.uniform(0, times[name]))[0] == -signal.SIGKILL
        code, said = in_child(partial(known[name], path))
        wrong = f"ended with {code}: {said[-300:]}" if code else None
        if wrong is None and results(path) != expected[name]:
            wrong = "other results"
        if wrong is None and (left := leftovers(path)):
            wrong = f"left {left[0]}"
        shutil.rmtree(path.parent, ignore_errors=True)
        return f"{case} {name}", wrong, {"kills": landed}

    return run


def sweeps(work: Path) -> Case:
    """Kill a worker of a sweep at a random moment: every cell is there, and only the killed one was started twice."""
    from tests.lab.experiments.experiment_toys import PHASE, toy

    # sums depend on the number of threads
    os.environ["OMP_NUM_THREADS"] = "1"
    phase = dataclasses.replace(PHASE, steps=200, checkpoint_every=20)
    experiment = toy(work, base=phase, training=phase)
    code, said = in_child(lambda: sweep(experiment, work / "whole", **TWELVE))
    assert code == 0, said
    expected = results(work / "whole")

    def run(case: int, folder: Path) -> Outcome:
        path = folder / f"killed-{case}"
        code, said = in_child(partial(launched_sweep, path, experiment, random.Random(case).uniform(5, 30)))
        hit = (path / "killed").read_text() if (path / "killed").exists() else None
        logs = list(path.rglob("workers/*/*.log"))
        starts = {f"{log.parent.name}/{log.stem}": log.read_text().count("in process") for log in logs}
        wrong = f"ended with {code}: {said[-300:]}" if code else None
        if wrong is None and hit is None:
            wrong = "no worker was killed"
        if wrong is None and results(path) != expected:
            wrong = "other results"
        if wrong is None and (len(starts) != 14 or any(n != 1 + (name == hit) for name, n in starts.items())):
            wrong = f"started {starts}, killed {hit}"
        return str(case), wrong, {"kills": int(hit is not None)}

    return run


WATCHED = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.truncate", "shutil.rmtree")
"""Events of Python before an operation on files; those without an event are replaced in the child."""


def die_at(operation: int, folder: Path) -> None:
    """Kill this process before the so many-th operation on files of a folder."""
    count = iter(range(1, 1_000_000))

    def step(event: str, arguments: tuple[Any, ...] = ()) -> None:
        if event in WATCHED and str(folder) in str(arguments[:2]) and next(count) == operation:
            os.kill(os.getpid(), signal.SIGKILL)

    def stepping(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            step("open", (str(folder),))
            return function(*args, **kwargs)

        return call

    sys.addaudithook(step)
    import safetensors.torch

    os.fsync = stepping("fsync", os.fsync)
    saving.exchange = stepping("exchange", saving.exchange)
    safetensors.torch.save_file = stepping("save_file", safetensors.torch.save_file)


def saves(number: int, work: Path) -> Row:
    """Kill at every operation on files of every kind of save; there is a model before and after each."""
    row = Row("saves", "`kill -9` at every file operation of `save`, `save_pretrained` and a checkpoint")
    import transformers as hf

    import rankwise.hf

    hf.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    old, new = nn.Linear(8, 8), rw.compress(nn.Linear(8, 8), rw.Budget(removed=0.5, of="prunable"))
    config = hf.BertConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=8,
    )  # fmt: skip
    berts = [hf.BertModel(config).eval(), rw.compress(hf.BertModel(config).eval(), rw.Budget(removed=0.2))]

    def value(model: nn.Module) -> str:
        return hashlib.sha256(b"".join(t.numpy().tobytes() for t in model.state_dict().values())).hexdigest()

    def checkpoint(step: int, path: Path) -> None:
        state = Checkpoint(step, True, {"weight": torch.full((4,), float(step))}, {"x": torch.ones(2)}, {"best": None})
        Checkpoints(path, keep=1).save(state, None)

    def last(path: Path) -> float:
        found = Checkpoints(path, keep=1)
        return float(found.load(*found.steps()[-1]).model["weight"][0])

    kinds: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any], Callable[[Path], Any], set[Any]]] = {
        "save": (
            lambda path: rw.save(old, path, overwrite=True),
            lambda path: rw.save(new, path, overwrite=True),
            lambda path: value(rw.load(path, nn.Linear(8, 8))),
            {value(old), value(new)},
        ),
        "save_pretrained": (
            lambda path: rankwise.hf.save_pretrained(berts[0], path, overwrite=True),
            lambda path: rankwise.hf.save_pretrained(berts[1], path, overwrite=True),
            lambda path: value(hf.BertModel.from_pretrained(path)),
            {value(berts[0]), value(berts[1])},
        ),
        "checkpoint": (lambda path: checkpoint(1, path), lambda path: checkpoint(2, path), last, {1.0, 2.0}),
    }
    for name, (first, second, read, wanted) in kinds.items():
        for operation in range(1, 1_000):
            shutil.rmtree(work / "save", ignore_errors=True)
            path = work / "save" / "model"
            first(path)

            def act(operation: int = operation, second: Any = second, path: Path = path) -> None:
                die_at(operation, path.parent)
                second(path)

            code, said = in_child(act)
            if code == 0:
                break
            assert code == -signal.SIGKILL, said
            code, said = in_child(lambda read=read, wanted=wanted, path=path: _must(read(path) in wanted))
            wrong = f"no model: {said[-200:]}" if code else None
            if wrong is None:
                code, said = in_child(lambda second=second, path=path: second(path))
                Checkpoints(path, keep=1).sweep()
                left = leftovers(path)
                wrong = f"not saved again: {said[-200:]}" if code else f"left {left[0]}" if left else None
            row.note(f"{name}, operation {operation}", wrong)
    return row


def _must(holds: bool) -> None:
    if not holds:
        raise RankwiseError("it is another model")


def disk(work: Path) -> Case:
    """Files that cannot grow beyond some bytes: one clear error, the old result in its place, a run that resumes."""
    known, expected, sizes = actions(work / "shared"), {}, {}
    for name, act in known.items():
        path = work / "whole" / name
        code, said = in_child(partial(act, path))
        assert code == 0, (name, said)
        expected[name] = results(path)
        sizes[name] = max(file.stat().st_size for file in path.rglob("*") if file.is_file())

    def run(case: int, folder: Path) -> Outcome:
        draw, name = random.Random(case), list(known)[case % len(known)]
        path, replaces = folder / "full" / name, name.startswith(("save", "compress", "heal"))
        if replaces:
            shutil.copytree(work / "whole" / name, path)
        before, most = results(path), int(sizes[name] * draw.uniform(0.02, 0.98))

        def full() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
            known[name](path)

        code, said = in_child(full)
        wrong = None if code in (0, 2) else f"ended with {code}: {said[-300:]}"
        if wrong is None and code == 2 and replaces and results(path) != before:
            wrong = "the old model is gone"
        if wrong is None and code == 2 and not said.strip():
            wrong = "no word"
        code, said = in_child(partial(known[name], path))
        if wrong is None and (code or results(path) != expected[name]):
            wrong = f"then ended with {code}: {said[-300:]}"
        shutil.rmtree(path.parent, ignore_errors=True)
        return f"{case} {name}, {most:,} bytes", wrong, {}

    return run


def fuzzed(work: Path) -> Case:
    """Mutated folders: an answer or one clear error."""
    known = fuzz.subjects(work / "subjects")
    for subject in known.values():
        # what reads it is imported before children are forked, not in each of them
        shutil.copytree(subject.folder, work / "whole")
        subject.read(work / "whole")
        shutil.rmtree(work / "whole", ignore_errors=True)

    def run(case: int, folder: Path) -> Outcome:
        return *fuzz.run_case(case, known, folder), {}

    return run


def memory(number: int, work: Path) -> Row:
    """Resident memory after a tenth of the steps, and at the end."""
    row = Row("memory", f"resident memory of a pruning run over {number:,} steps: growth after the first tenth")
    from rankwise.lab.training import Progress
    from tests.lab.training.training_toys import CONFIG, run

    class Watch(Progress):
        def __init__(self) -> None:
            self.found: list[float] = []

        def advance(self, step: int) -> None:
            if step % max(number // 10, 1) == 0:
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                self.found.append(pages * os.sysconf("SC_PAGE_SIZE") / 1e6)

    config = dataclasses.replace(
        CONFIG, steps=number, dense_steps=number // 20, eval_every=max(number // 50, 1),
        checkpoint_every=max(number // 50, 1), log_every=max(number // 500, 1),
    )  # fmt: skip
    watch = Watch()
    run("sru", "flop-l0", work / "run", config=config, progress=watch)
    grown = watch.found[-1] - watch.found[0]
    row.more = {"steps": number, "megabytes": [round(each, 1) for each in watch.found]}
    row.note(f"{number} steps", None if grown < 20 else f"grew by {grown:.1f} MB")
    return row


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


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows that were measured so far."""
    if path.exists():
        yield from json.loads(path.read_text())["rows"]


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
    began, rows = time.monotonic(), {each["name"]: each for each in read_rows(options.record)}
    before = rows.get(options.row) if options.add else None

    def keep(made: Row) -> None:
        row: dict[str, Any] = {**dataclasses.asdict(made), "seed": options.seed, "workers": options.workers}
        row |= {"seconds": round(time.monotonic() - began), "date": date.today().isoformat()}
        row |= surroundings(torch.device("cpu"))
        row["commit"] = options.commit or row["commit"]
        rows[options.row] = row if before is None else added(before, row)
        content = {"format": "rankwise-torture", "version": 1, "rows": [rows[name] for name in ROWS if name in rows]}
        write_json(options.record, content)

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
