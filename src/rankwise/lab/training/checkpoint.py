"""Checkpoints: all that a run needs to go on as if it had never stopped, in safetensors and JSON.

`checkpoints/step-N` holds `model.safetensors` (weights, gates, multipliers), `training.safetensors` (optimizer, carried
state, random numbers) and `checkpoint.json`, with the checksums of all three (`rankwise.files`). A folder gets its name
when it is complete. `step-N-unevaluated` is one that was interrupted before the evaluation of step N.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rankwise.errors import CheckpointError, InvalidValueError
from rankwise.files import (
    FILES,
    check_file,
    check_seal,
    reason,
    same_tensors,
    sealed,
    sync,
    verifies,
    write_json,
    write_tensors,
)

FORMAT, VERSION = "rankwise-checkpoint", 2
UNSEALED = 1
"""The version of the format that has no checksums."""
MODEL, TRAINING, ABOUT = "model.safetensors", "training.safetensors", "checkpoint.json"
_NAME = re.compile(r"step-(\d+)(-unevaluated)?")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What is written, and read back."""

    step: int
    evaluated: bool
    """Whether evaluation and metrics of `step` are done."""
    model: dict[str, Tensor]
    training: dict[str, Tensor]
    about: dict[str, Any]
    """JSON: the configuration, and numbers such as the best result so far."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def steps(self) -> list[tuple[int, bool]]:
        """(step, evaluated) of every complete checkpoint, the latest last."""
        if not self.folder.is_dir():
            return []
        found = (_NAME.fullmatch(entry.name) for entry in self.folder.iterdir())
        return sorted((int(match[1]), match[2] is None) for match in found if match)

    def save(self, checkpoint: Checkpoint, best: int | None) -> None:
        """Write a checkpoint, then remove what is older than the last `keep`, the one of step `best` excepted."""
        target = self._path(checkpoint.step, checkpoint.evaluated)
        if not target.exists():
            self._write(checkpoint, target)
        last = self.steps()[-self.keep :]
        for step, evaluated in self.steps():
            stale = not evaluated and (step, True) in last
            if stale or ((step, evaluated) not in last and not (evaluated and step == best)):
                self._remove(self._path(step, evaluated))

    def load(self, step: int, evaluated: bool = True) -> Checkpoint:
        """Read a checkpoint; what is damaged is refused."""
        path = self._path(step, evaluated)
        try:
            about = json.loads((path / ABOUT).read_bytes())
            if about["format"] != FORMAT or about["version"] not in (UNSEALED, VERSION):
                raise InvalidValueError(f"its format is {about['format']} {about['version']}, not {FORMAT} {VERSION}")
            if about["version"] != UNSEALED and verifies():
                _check(path, about)
            model = load_file(path / MODEL)
            model.update({name: model[first] for name, first in about["tied"].items()})
            return Checkpoint(step, evaluated, model, load_file(path / TRAINING), about["about"])
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
            before = [number for number, done in self.steps() if (number, done) < (step, evaluated)]
            then = f"goes on from the one before, of step {before[-1]}" if before else "begins anew"
            raise CheckpointError(
                f"A checkpoint must be whole, but {path} is not: {reason(error)}. Remove that folder; the run {then}."
            ) from error

    def latest_first(self) -> Iterator[Checkpoint]:
        for step, evaluated in reversed(self.steps()):
            yield self.load(step, evaluated)

    def has_best(self, checkpoint: Checkpoint) -> bool:
        """Whether the best weights before a checkpoint are there still, without which its run cannot end."""
        best = checkpoint.about["best"]
        return best is None or best["step"] == checkpoint.step or (best["step"], True) in self.steps()

    def remove(self, checkpoint: Checkpoint) -> None:
        self._remove(self._path(checkpoint.step, checkpoint.evaluated))

    def sweep(self) -> None:
        """Remove what a killed run left unfinished."""
        for entry in self.folder.glob(".step-*"):
            shutil.rmtree(entry, ignore_errors=True)

    def _write(self, checkpoint: Checkpoint, target: Path) -> None:
        unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
        try:
            unfinished.mkdir(parents=True)
            distinct, tied = same_tensors(checkpoint.model)
            write_tensors(unfinished / MODEL, distinct)
            write_tensors(unfinished / TRAINING, checkpoint.training)
            content = {"format": FORMAT, "version": VERSION, "tied": tied, "about": checkpoint.about}
            write_json(unfinished / ABOUT, sealed(content, (unfinished / MODEL, unfinished / TRAINING)))
            sync(unfinished)
            os.rename(unfinished, target)
            sync(self.folder)
        except (OSError, SafetensorError, ValueError) as error:
            steps = [step for step, _ in self.steps()]
            last = f"The last one, of step {steps[-1]}, is untouched" if steps else "There was none before"
            raise CheckpointError(
                f"The checkpoint of step {checkpoint.step} must be written to {self.folder}, but that failed: "
                f"{reason(error)}. {last}; free some space and run again."
            ) from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def _remove(self, path: Path) -> None:
        # renamed first: a run that is killed now leaves no half of a checkpoint under its name
        gone = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        try:
            os.rename(path, gone)
        except OSError:
            return
        shutil.rmtree(gone, ignore_errors=True)

    def _path(self, step: int, evaluated: bool) -> Path:
        return self.folder / f"step-{step}{'' if evaluated else '-unevaluated'}"


def _check(folder: Path, about: Mapping[str, Any]) -> None:
    """Refuse a checkpoint in which a bit changed, with the name of the file."""
    name = ABOUT
    try:
        check_seal(about)
        for name in (MODEL, TRAINING):
            check_file(folder / name, about[FILES])
    except CheckpointError as error:
        raise InvalidValueError(f"{name} is damaged: {error}") from None


def check_same(then: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """Refuse to resume a run with another configuration than it began with."""
    for key in sorted({*then, *now}):
        before, after = then.get(key), now.get(key)
        if before == after:
            continue
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            check_same(before, after, folder)
        else:
            raise CheckpointError(
                f"A run resumes with the configuration it began with, but in {folder} `{key}` was {_short(before)} "
                f"and is now {_short(after)}. Restore it, or choose another folder."
            )


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
