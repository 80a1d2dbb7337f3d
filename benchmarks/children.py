"""Children that may be killed, what they do over and over, and how its results are compared: for `torture.py`."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

import rankwise as rw
from rankwise.core.budget import Budget
from rankwise.deploy.export import FORMATS
from rankwise.errors import RankwiseError
from rankwise.files import write_json
from rankwise.lab.experiments import pipeline
from rankwise.lab.experiments.launchers import Local
from rankwise.lab.experiments.sweeps import sweep
from rankwise.lab.models.sru import SRUConfig, SRULanguageModel

ROOT = Path(__file__).parents[1]
# for the toys of the tests
sys.path.append(str(ROOT))
ENGINES = {"onnx": ("onnxscript", "onnxruntime"), "openvino": ("openvino",)}
"""What an export needs beyond torch; where it is not installed, there is no such action."""
SLOW_IMPORTS = ("transformers", "torch.onnx", "torch.export", "rankwise.hf.saving")
"""Modules that are imported before children are forked."""
TWELVE: dict[str, Any] = {"methods": ("fac", "svd"), "removed": (0.3, 0.5), "seeds": (0, 1)}
"""With the base and the control of each seed these are 12 cells."""
BEGINS = "case "
"""What a child says before each of its cases, so that the words of a case that ended it can be told from others."""
Action = Callable[[Path], Any]
"""Does something in a folder; the same again goes on, or does it again."""
Outcome = tuple[str, str | None, dict[str, int]]
"""What a case did, what was wrong with it, if anything, and what else is counted."""
Case = Callable[[int, Path], Outcome]
"""Runs the case of a number in a folder of its own."""


def in_child(act: Callable[[], Any], kill_after: float | None = None) -> tuple[int, str]:
    """Run in a process of its own; its exit code (negative: the signal that ended it), and what it said."""
    with tempfile.TemporaryFile() as said:
        child, began = _fork(act, said), time.monotonic()
        while (done := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if kill_after is not None and time.monotonic() - began > kill_after:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.002)
        said.seek(0)
        return os.waitstatus_to_exitcode(done[1]), said.read().decode(errors="replace")


def _fork(act: Callable[[], Any], said: IO[bytes]) -> int:
    """The number of a child that does it, and whose words go into a file."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
        os._exit(_run(act))
    return child


def share_out(
    run: Case, cases: Sequence[int], work: Path, workers: int, chunk: int, seconds: float
) -> Iterator[Outcome]:
    """What became of each case, in children of `chunk` cases each, of which `workers` run at a time.

    A child that dies is the outcome of its case, and the rest goes on in another. After `seconds` none is begun. Cases
    are told as they are done, and children that still run when nobody asks any more are ended.
    """
    waiting = [list(cases[i : i + chunk]) for i in range(0, len(cases), chunk)][::-1]
    running: dict[int, tuple[list[int], Path, IO[bytes]]] = {}
    end = time.monotonic() + seconds
    try:
        while running or (waiting and time.monotonic() < end):
            while waiting and len(running) < workers and time.monotonic() < end:
                some, log, said = waiting.pop(), Path(tempfile.mkdtemp(dir=work)), tempfile.TemporaryFile()  # noqa: SIM115
                running[_fork(partial(_run_cases, run, some, log), said)] = some, log, said
            for child in list(running):
                done, status = os.waitpid(child, os.WNOHANG)
                if not done:
                    continue
                some, log, said = running.pop(child)
                outcomes = [json.loads(line) for line in (log / "outcomes").read_text().splitlines()]
                left = some[len(outcomes) :]
                if left:
                    said.seek(0)
                    code, words = os.waitstatus_to_exitcode(status), said.read().decode(errors="replace")
                    own = words.rpartition(f"{BEGINS}{left[0]}\n")[2][-300:]
                    outcomes.append((str(left[0]), f"the process ended with {code}: {own}", {}))
                    waiting += [left[1:]] if left[1:] else []
                said.close()
                shutil.rmtree(log, ignore_errors=True)
                yield from outcomes
            time.sleep(0.005)
    finally:
        for child, (_, _, said) in running.items():
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            said.close()


def _run_cases(run: Case, cases: Sequence[int], folder: Path) -> None:
    with (folder / "outcomes").open("w") as file:
        for case in cases:
            print(f"{BEGINS}{case}", flush=True)
            print(json.dumps(run(case, folder)), file=file, flush=True)


def _run(act: Callable[[], Any]) -> int:
    warnings.simplefilter("ignore")
    try:
        act()
        return 0
    except RankwiseError as error:
        print(f"error: {error}", flush=True)
        return 2
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return 70
    finally:
        # words that find no room, where files cannot grow, must not let the child go on as its parent
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()


def engines() -> list[str]:
    """The formats of `ENGINES` whose engine is installed."""
    return [form for form, names in ENGINES.items() if all(map(find_spec, names))]


def actions(folder: Path) -> dict[str, Action]:
    """Everything that writes, each by a function of the folder that it writes to."""
    for name in (*SLOW_IMPORTS, *(name for form in engines() for name in ENGINES[form])):
        import_module(name)

    from tests.lab.experiments import experiment_toys, glue_toys, healing_toys

    folder.mkdir(parents=True, exist_ok=True)
    language = experiment_toys.toy(folder, compare=("dense", "fac"))
    sentences = glue_toys.toy(folder / "glue")
    timed, latency = _with_a_time(language)
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    example = {"input": torch.randn(2, 64)}
    smaller = rw.compress(dense, rw.Budget(removed=0.3))
    (place := folder / "decoders").mkdir()
    text = healing_toys.make_place(place) / "text.txt"
    rw.save(SRULanguageModel(SRUConfig(num_words=9, embedding_width=8, width=12, num_layers=2)), folder / "sru")

    def run_timed(path: Path) -> None:
        # what a time allows is measured once and then kept: to be compared, all must begin with the same
        path.mkdir(parents=True, exist_ok=True)
        write_json(path / pipeline.LATENCY, latency)
        pipeline.run(timed, path)

    def export(form: str, path: Path) -> None:
        if not path.exists():
            FORMATS[form].export(smaller, example, path)

    return {
        "run": lambda path: pipeline.run(language, path),
        "run sentences": lambda path: pipeline.run(sentences, path),
        "run with a time": run_timed,
        "sweep": lambda path: sweep(language, path, methods=("fac", "svd"), removed=(0.3,), seeds=(0, 1)),
        "train": lambda path: pipeline.train(language, path),
        "save": lambda path: rw.save(smaller, path, overwrite=True),
        "compress": partial(_command, f"compress {folder}/sru --removed 0.2"),
        "compress --refine": partial(
            _command,
            f"compress {place}/decoder --removed 0.3 --ranks global --refine 3 --calibration {text} --window 12",
        ),
        "heal": partial(
            _command,
            f"heal {place}/decoder-small --teacher {place}/decoder --text {text} --steps 30 --window 12 --batch-size 4",
        ),
        **{f"export {form}": partial(export, form) for form in ("pt2", *engines())},
    }


def _with_a_time(language: Any) -> tuple[Any, dict[str, Any]]:
    """The experiment with a time for a budget, and the size that was found for it, as a run keeps it."""
    timed = dataclasses.replace(language, budget=Budget(latency_ms=0.001), compare=())
    task = timed.make_task(timed.read())
    parameters = rw.count(task.make())
    shapes = {name: list(tensor.shape) for name, tensor in task.example().items()}
    of = {"parameters": parameters, "inputs": shapes, "exclude": list(timed.exclude)}
    values = (0.001, 0.0009, 0.002, int(0.7 * parameters), [], of)
    return timed, dict(zip(pipeline.LATENCY_KEYS, values, strict=True))


def _command(words: str, path: Path) -> None:
    from rankwise.cli.app import run

    code = run([*words.split(), "--device", "cpu", "--out", str(path), "--overwrite"])
    if code:
        raise RankwiseError(f"exit code {code}")


def launched_sweep(path: Path, experiment: Any, kill_after: float) -> None:
    """A sweep of 12 cells over 3 workers, one of which is killed; `killed` in the folder names its process."""
    logs = path / "workers"

    def kill() -> None:
        time.sleep(kill_after)
        while True:
            # the first that has begun and is not finished
            for log in logs.rglob("*.log"):
                process = re.findall(r"in process (\d+) on", log.read_text())
                if process and not log.with_suffix(".json").exists():
                    (path / "killed").write_text(f"{log.parent.name}/{log.stem}")
                    os.kill(int(process[-1]), signal.SIGKILL)
                    return
            time.sleep(0.01)

    threading.Thread(target=kill, daemon=True).start()
    sweep(experiment, path, **TWELVE, launcher=Local(3))


def results(path: Path) -> dict[str, str]:
    """What must be the same again: all weights, and the figures of all rows."""
    found = {}
    for file in sorted(path.rglob("*")):
        parts = file.relative_to(path).parts
        if any(part.startswith(".") or part == "checkpoints" for part in parts) or not file.is_file():
            continue
        if file.suffix == ".safetensors":
            found["/".join(parts)] = hashlib.sha256(file.read_bytes()).hexdigest()
        elif file.name == "export.json" and "rows" in (content := json.loads(file.read_bytes())):
            keys = ("name", "parameters", "removed", "valid", "test", "steps")
            found["/".join(parts)] = json.dumps([[row[key] for key in keys] for row in content["rows"]])
        elif file.name in ("model.pt2", "model.onnx", "model.xml", "model.bin"):
            found["/".join(parts)] = str(file.stat().st_size)
    return found


def leftovers(path: Path) -> list[str]:
    """Hidden folders that nobody will remove, and what is beside the result."""
    hidden = [entry for entry in path.rglob(".*.????????*") if entry.is_dir()]
    return [str(entry) for entry in (*hidden, *path.parent.iterdir()) if entry != path]
