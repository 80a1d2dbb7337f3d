"""Kills, full disks, flipped bits and strangers' folders, counted: does what is promised hold?

python benchmarks/torture.py kills --number 300     # kill -9 at random moments of every command, resumed
python benchmarks/torture.py saves                  # kill -9 at every file operation of a save
python benchmarks/torture.py disk --number 100      # a disk that is full after so many bytes of a file
python benchmarks/torture.py fuzz --number 100000   # mutated folders (benchmarks/fuzz.py)
python benchmarks/torture.py flips --number 5000    # single bits of models and checkpoints
python benchmarks/torture.py memory --number 100000 # memory over so many steps
python benchmarks/torture.py table                  # the table of docs/reliability.md

Each prints its row and what went wrong, and keeps the row in `results/torture.json` (or --record FILE). Everything runs
in children of this process, which are forked after the imports, so that hundreds of runs take minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import fuzz
import torch
from children import ROOT, actions, in_child, leftovers, results
from torch import nn

import rankwise as rw
from rankwise.deploy import save as saving
from rankwise.errors import RankwiseError
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

    def note(self, case: str, wrong: str | None) -> None:
        """Count a case."""
        self.tried += 1
        if wrong is not None:
            self.bad.append(f"{case}: {wrong}")
            print(f"BAD {self.name}: {self.bad[-1]}", flush=True)


def kills(number: int, seed: int, work: Path) -> Row:
    """Kill at random moments, one to four times, then run to the end."""
    row = Row(
        "kills", "`kill -9` at random moments of runs, sentences, time budgets, sweeps, compress, exports; resumed"
    )
    known, draw, times, expected = actions(work / "shared"), random.Random(seed), {}, {}
    for name, act in known.items():
        # the first time fills caches
        for place in ("first", "whole"):
            began, path = time.monotonic(), work / place / name
            code, said = in_child(partial(act, path))
            times[name] = time.monotonic() - began
            assert code == 0, (name, said)
        expected[name] = results(path)
        assert expected[name] == results(work / "first" / name) != {}, name
    landed = 0
    for case in range(number):
        name = list(known)[case % len(known)]
        path = work / "killed" / name
        shutil.rmtree(path.parent, ignore_errors=True)
        for _ in range(draw.randint(1, 4)):
            landed += in_child(partial(known[name], path), draw.uniform(0, times[name]))[0] == -signal.SIGKILL
        code, said = in_child(partial(known[name], path))
        wrong = f"ended with {code}: {said[-300:]}" if code else None
        if wrong is None and results(path) != expected[name]:
            wrong = "other results"
        if wrong is None and (left := leftovers(path)):
            wrong = f"left {left[0]}"
        row.note(f"{case} {name}", wrong)
    row.more = {"kills": landed}
    return row


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


def saves(number: int, seed: int, work: Path) -> Row:
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


def disk(number: int, seed: int, work: Path) -> Row:
    """Files that cannot grow beyond some bytes: one clear error, the old result in its place, a run that resumes."""
    row = Row("disk", "full disks: one clear error, what was there is kept, the same again ends with the same result")
    known, draw, expected, sizes = actions(work / "shared"), random.Random(seed), {}, {}
    for name, act in known.items():
        path = work / "whole" / name
        code, said = in_child(lambda act=act, path=path: act(path))
        assert code == 0, (name, said)
        expected[name] = results(path)
        sizes[name] = max(file.stat().st_size for file in path.rglob("*") if file.is_file())
    for case in range(number):
        name = list(known)[case % len(known)]
        path = work / "full" / name
        shutil.rmtree(path.parent, ignore_errors=True)
        if name in ("save", "compress"):
            shutil.copytree(work / "whole" / name, path)
        before, most = results(path), int(sizes[name] * draw.uniform(0.02, 0.98))

        def full(name: str = name, path: Path = path, most: int = most) -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
            known[name](path)

        code, said = in_child(full)
        lines = said.strip().splitlines()
        wrong = None if code in (0, 2) else f"ended with {code}: {said[-300:]}"
        if wrong is None and code == 2 and name in ("save", "compress") and results(path) != before:
            wrong = "the old model is gone"
        if wrong is None and code == 2 and not lines:
            wrong = "no word"
        code, said = in_child(lambda name=name, path=path: known[name](path))
        if wrong is None and (code or results(path) != expected[name]):
            wrong = f"then ended with {code}: {said[-300:]}"
        row.note(f"{case} {name}, {most:,} bytes", wrong)
    return row


def flips(number: int, seed: int, work: Path) -> Row:
    """One bit: noticed, or without meaning (white space in JSON)."""
    row = Row("flips", "single flipped bits of models and checkpoints: refused or told of, or without meaning")
    draw, known = random.Random(seed), fuzz.subjects(work / "subjects")
    read: dict[str, Callable[[Path], Any]] = {
        "load sru": rw.load,
        "load mlp np-l0": lambda path: known["load mlp np-l0"].read(path),
        "from_pretrained llama": lambda path: _llama().from_pretrained(path),
        "checkpoint": lambda path: _checkpoint_of(path),
    }
    noticed = 0
    expected = {name: _state(load(known[name].folder)) for name, load in read.items()}
    for case in range(number):
        name = list(read)[case % len(read)]
        folder = work / "flipped" / "step-4"
        shutil.rmtree(folder.parent, ignore_errors=True)
        shutil.copytree(known[name].folder, folder)
        files = sorted(path for path in folder.iterdir() if path.name != "generation_config.json")
        path = draw.choice(files)
        content, bit = bytearray(path.read_bytes()), draw.randrange(8 * path.stat().st_size)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        wrong = None
        try:
            with _warnings() as told:
                same = _same(_state(read[name](folder)), expected[name])
            noticed += bool(told)
            wrong = None if same or told else "another model, and no word"
        except RankwiseError:
            noticed += 1
        # a configuration of transformers may be one of another library after a flip
        except (OSError, ValueError) as error:
            noticed += 1
            wrong = None if name.startswith("from_pretrained") else f"{type(error).__name__}: {error}"
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        row.note(f"{case} {name} {path.name}, bit {bit}", wrong)
    row.more = {"noticed": noticed}
    return row


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """What is said about a configuration that changed, which may be on purpose."""
    from rankwise.hf import bounds

    told: list[str] = []
    before, bounds.logger.warning = bounds.logger.warning, told.append
    try:
        yield told
    finally:
        bounds.logger.warning = before


def _llama() -> Any:
    import transformers

    return transformers.LlamaForCausalLM


def _checkpoint_of(path: Path) -> Any:
    found = Checkpoints(path.parent, keep=1).load(4)
    return {**found.model, **found.training, "about": torch.tensor(list(json.dumps(found.about).encode()))}


def _state(found: Any) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in (found if isinstance(found, dict) else found.state_dict()).items()}


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def fuzzed(number: int, seed: int, work: Path) -> Row:
    """Mutated folders, in children of some thousand cases each: one that dies is a bad case, and the rest goes on."""
    row = Row(
        "fuzz", "mutated folders by `load`, commands and `from_pretrained`: an answer or one clear error, 2 s, 1 GB"
    )
    at, step = seed * 1_000_000, 2_000
    end = at + number
    while at < end:
        with tempfile.TemporaryDirectory(dir=work) as scratch:
            log = Path(scratch) / "log"

            def act(first: int = at, log: Path = log, scratch: str = scratch) -> None:
                with log.open("w") as file:
                    for told, wrong in fuzz.fuzz(first, min(first + step, end), Path(scratch)):
                        print(json.dumps([told, wrong]), file=file, flush=True)

            code, said = in_child(act)
            cases = [json.loads(line) for line in log.read_text().splitlines()]
            for told, wrong in cases:
                row.note(told, wrong)
            at += len(cases)
            if code:
                row.note(str(at), f"the process ended with {code}: {said[-200:]}")
                at += 1
    return row


def memory(number: int, seed: int, work: Path) -> Row:
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


ROWS: dict[str, tuple[Callable[[int, int, Path], Row], int]] = {
    "kills": (kills, 300),
    "saves": (saves, 0),
    "disk": (disk, 100),
    "fuzz": (fuzzed, 100_000),
    "flips": (flips, 5_000),
    "memory": (memory, 100_000),
}


def torture(name: str, number: int | None = None, seed: int = 0) -> Row:
    """One row of the table."""
    make, usual = ROWS[name]
    with tempfile.TemporaryDirectory() as work, contextlib.ExitStack() as stack:
        threads = torch.get_num_threads()
        # a child of a process with threads may wait for one that it does not have
        torch.set_num_threads(1)
        stack.callback(torch.set_num_threads, threads)
        return make(usual if number is None else number, seed, Path(work))


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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, default=RECORD)
    options = parser.parse_args()
    if options.row == "table":
        print(table(json.loads(options.record.read_text())))
        return
    began = time.monotonic()
    made = torture(options.row, options.number, options.seed)
    about = {"seed": options.seed, "seconds": round(time.monotonic() - began), "date": date.today().isoformat()}
    row = {**dataclasses.asdict(made), **about, **surroundings(torch.device("cpu"))}
    rows = {each["name"]: each for each in read_rows(options.record)} | {options.row: row}
    ordered = [rows[name] for name in ROWS if name in rows]
    content = {"format": "rankwise-torture", "version": 1, "rows": ordered}
    options.record.write_text(json.dumps(content, indent=1) + "\n")
    print(table({"rows": [row]}))
    sys.exit(1 if made.bad else 0)


if __name__ == "__main__":
    main()
