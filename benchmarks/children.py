"""Children that may be killed, what they do over and over, and how its results are compared: for `torture.py`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rankwise as rw
from rankwise.core.budget import Budget
from rankwise.deploy.export import FORMATS
from rankwise.errors import RankwiseError
from rankwise.files import write_json
from rankwise.lab.experiments import pipeline
from rankwise.lab.models.sru import SRUConfig, SRULanguageModel

ROOT = Path(__file__).parents[1]
# for the toys of the tests
sys.path.append(str(ROOT))
SLOW_IMPORTS = ("onnxscript", "onnxruntime", "openvino", "torch.onnx", "torch.export", "rankwise.hf.saving")
"""Modules that are imported before children are forked."""
Action = Callable[[Path], Any]
"""Does something in a folder; the same again goes on, or does it again."""


def in_child(act: Callable[[], Any], kill_after: float | None = None) -> tuple[int, str]:
    """Run in a process of its own; its exit code (negative: the signal that ended it), and what it said."""
    with tempfile.TemporaryFile() as said:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
            os._exit(_run(act))
        began = time.monotonic()
        while (done := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if kill_after is not None and time.monotonic() - began > kill_after:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.002)
        said.seek(0)
        return os.waitstatus_to_exitcode(done[1]), said.read().decode(errors="replace")


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


def actions(folder: Path) -> dict[str, Action]:
    """Everything that writes, each by a function of the folder that it writes to."""
    # before children are forked
    for name in (
        "transformers",
        "onnxscript",
        "onnxruntime",
        "openvino",
        "torch.onnx",
        "torch.export",
        "rankwise.hf.saving",
    ):
        import_module(name)

    from tests.lab.experiments import experiment_toys, glue_toys

    folder.mkdir(parents=True, exist_ok=True)
    language = experiment_toys.toy(folder, compare=("dense", "fac"))
    sentences = glue_toys.toy(folder / "glue")
    timed, latency = _with_a_time(language)
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    example = {"input": torch.randn(2, 64)}
    smaller = rw.compress(dense, rw.Budget(removed=0.3))

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
        "sweep": lambda path: pipeline.sweep(language, path, methods=("fac", "svd"), removed=(0.3,), seeds=(0, 1)),
        "train": lambda path: pipeline.train(language, path),
        "save": lambda path: rw.save(smaller, path, overwrite=True),
        "compress": lambda path: _compress(folder, path),
        "export pt2": lambda path: export("pt2", path),
        "export onnx": lambda path: export("onnx", path),
        "export openvino": lambda path: export("openvino", path),
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


def _compress(folder: Path, path: Path) -> None:
    from rankwise.cli.app import run

    source = folder / "to compress"
    if not source.exists():
        torch.manual_seed(0)
        rw.save(SRULanguageModel(SRUConfig(num_words=9, embedding_width=8, width=12, num_layers=2)), source)
    code = run(["compress", str(source), "--removed", "0.2", "--out", str(path), "--overwrite"])
    if code:
        raise RankwiseError(f"exit code {code}")


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
    """Hidden folders that nobody will remove."""
    return [str(entry) for entry in path.parent.rglob(".*.????????*") if entry.is_dir()]
