"""Checkpoints: all that a run needs to resume as if it had never stopped, in safetensors and JSON.

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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import Optimizer

from rankwise.errors import CheckpointError, InvalidValueError, shortened
from rankwise.files import (
    FILES,
    check_file,
    check_header,
    check_seal,
    read_json,
    reason,
    same_tensors,
    sealed,
    sync,
    verifies,
    write_json,
    write_tensors,
)  # fmt: skip
from rankwise.lab.training.ranks import Ranks

FORMAT, VERSION = "rankwise-checkpoint", 2
MODEL, TRAINING, ABOUT = "model.safetensors", "training.safetensors", "checkpoint.json"
_NAME = re.compile(r"step-(\d+)(-unevaluated)?")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The content of a checkpoint."""

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
        found = self.steps()
        # the evaluated one takes the place of the other
        of_steps = [(step, evaluated) for step, evaluated in found if evaluated or (step, True) not in found]
        for saved in {*found} - {*of_steps[-self.keep :], (best, True)}:
            self.remove(*saved)

    def load(self, step: int, evaluated: bool = True) -> Checkpoint:
        """Read a checkpoint; what is damaged is refused."""
        path = self._path(step, evaluated)
        with self.reading(step, evaluated):
            about = read_json(path / ABOUT)
            if (about["format"], about["version"]) != (FORMAT, VERSION):
                raise InvalidValueError(f"its format is {about['format']} {about['version']}, not {FORMAT} {VERSION}")
            if verifies():
                _check(path, about)
            model = load_file(path / MODEL)
            model.update({name: model[first] for name, first in about["tied"].items()})
            return Checkpoint(step, evaluated, model, load_file(path / TRAINING), about["about"])

    @contextmanager
    def reading(self, step: int, evaluated: bool) -> Iterator[None]:
        """Say in one line what is wrong with a checkpoint that cannot be read or used, and what the run does next."""
        try:
            yield
        except (OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
            path = self._path(step, evaluated)
            before = [number for number, done in self.steps() if (number, done) < (step, evaluated)]
            then = f"continues from the one before, of step {before[-1]}" if before else "starts again"
            why = shortened(reason(error))
            raise CheckpointError(
                f"A checkpoint must be whole, but {path} is not: {why}. Remove that folder; the run {then}."
            ) from error

    def has_best(self, checkpoint: Checkpoint) -> bool:
        """Whether the best weights before a checkpoint are there still, without which its run cannot end."""
        best = checkpoint.about["best"]
        return best is None or int(best["step"]) == checkpoint.step or (int(best["step"]), True) in self.steps()

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

    def remove(self, step: int, evaluated: bool) -> None:
        """Remove a checkpoint; a run that is killed meanwhile leaves no half of it under its name."""
        path = self._path(step, evaluated)
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
            # which a file of zeros without end does not have, however long it would take to read
            check_header(folder / name)
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
            was, now_is = (json.dumps(value)[:80] for value in (before, after))
            raise CheckpointError(
                f"A run resumes with the configuration it began with, but in {folder} `{key}` was {was} and is now "
                f"{now_is}. Restore it, or choose another folder."
            )


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """`optimizer.<parameter>.<key>`; the settings are the configuration's."""
    tensors = {}
    for index, values in optimizer.state_dict()["state"].items():
        for key, value in values.items():
            assert isinstance(value, Tensor), f"optimizer state {key} is no tensor"
            tensors[f"optimizer.{index}.{key}"] = value
    return tensors


def load_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Restore what `optimizer_tensors` returned."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            index, key = rest.split(".")
            state.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def random_tensors(device: torch.device, ranks: Ranks) -> dict[str, Tensor]:
    """The states of torch's generators: `random.cpu` and `random.cuda`, with the number of a rank but the first."""
    own = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        own["random.cuda"] = torch.cuda.get_rng_state(device)
    gathered = {name: ranks.gather(state) for name, state in own.items()}
    return {_of_rank(name, rank): state for name, states in gathered.items() for rank, state in enumerate(states)}


def load_random(tensors: Mapping[str, Tensor], device: torch.device, ranks: Ranks, seed: int, step: int) -> None:
    """Restore what `random_tensors` returned; a rank that did not exist then gets a seed of its own."""
    cpu, cuda = (_of_rank(name, ranks.rank) for name in ("random.cpu", "random.cuda"))
    if ranks.rank and cpu not in tensors:
        torch.manual_seed(ranks.seed(seed, step))
        return
    torch.set_rng_state(tensors[cpu])
    if device.type == "cuda" and cuda in tensors:
        torch.cuda.set_rng_state(tensors[cuda], device)


def _of_rank(name: str, rank: int) -> str:
    return f"{name}.{rank}" if rank else name
