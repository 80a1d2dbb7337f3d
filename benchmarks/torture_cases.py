"""What `torture.py` does to runs, saves and folders, and what it finds wrong: the cases of each of its rows."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import fuzz
import torch
from children import TWELVE, Case, Outcome, actions, in_child, launched_sweep, leftovers, results
from torch import nn

import rankwise as rw
from rankwise.deploy import save as saving
from rankwise.errors import RankwiseError
from rankwise.lab.experiments.sweeps import sweep
from rankwise.lab.training.checkpoint import Checkpoint, Checkpoints


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
