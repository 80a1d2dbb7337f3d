"""How a compressed model is healed, and what healing asks of the two models: `HealingConfig` and `Pair`."""

from __future__ import annotations

import hashlib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from rankwise.deploy.compress import ABOUT, Beside
from rankwise.deploy.save import COMPRESSION
from rankwise.errors import CheckpointError, InvalidValueError
from rankwise.lab.training.checkpoint import check_same
from rankwise.lab.training.config import Device, LoopConfig, check_choice, check_positive, check_whole, device_of
from rankwise.lab.training.objective import Trainable

RATES = (3e-4, 1e-3)
"""Learning rates that are tried first: the better one decides on which side a third is tried."""
MOST_RATES = 6
"""Rates that are tried in all."""
LEAST_TRIED = 5
"""Steps of the shortest trial of a learning rate."""
STATE_OF = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja")
SAMPLES, SAMPLE_BYTES = 64, 4096
"""What is read of a file of weights to tell whether it is the same."""
Count = Callable[[int, int], None]
"""Called with how many windows are generated, and of how many."""
REMEDY = "Give the dense model that it was made from."
"""For a teacher that is another model."""
BEGAN_WITH = {"student": "model", "teacher": "teacher", "text": "text"}
"""What a healing goes on with, in words."""


@dataclass(frozen=True, kw_only=True)
class HealingConfig:
    """How a compressed model is healed."""

    steps: int = 300
    """Optimizer steps, after those that choose a learning rate."""
    batch_size: int = 16
    """Windows in a step."""
    window: int | None = None
    """Tokens of a window. None: 512 for a decoder, 256 for an encoder, and for a model of a run as in its training."""
    lr: float | None = None
    """The peak of the learning rate. None: the best of `rates` in short trials, on text that is held out."""
    rates: tuple[float, ...] | None = None
    """Learning rates that are tried. None: 3e-4 and 1e-3, and the next one as long as the best is at an end."""
    checkpointing: bool | None = None
    """Compute activations again in the backward pass, for less memory. None: for a billion parameters and more."""
    accumulate: int | None = None
    """Parts that a batch is cut into, for less memory. None: by the size of the vocabulary."""
    device: Device = "auto"
    """"auto" takes a GPU where there is one, and computes in bfloat16 there."""
    generated: bool = False
    """Whether as many windows as of each text are those that the dense model generates itself, a decoder."""
    seed: int = 0
    """The seed of dropout, of the order of the windows, and of what is generated."""

    def __post_init__(self) -> None:
        if self.rates is not None:
            object.__setattr__(self, "rates", tuple(self.rates))
        check_whole(self, 1, "batch_size", "accumulate")
        # the learning rate of the last step is 0
        check_whole(self, 2, "steps", "window")
        check_whole(self, 0, "seed")
        check_positive(self, "lr")
        check_choice(self, "device", get_args(Device))
        if not isinstance(self.generated, bool):
            raise InvalidValueError(f"`generated` must be True or False, but is {self.generated!r} instead.")
        check_divides(self.accumulate, self.batch_size)
        if self.rates is not None and not (self.rates and all(0 < rate < math.inf for rate in self.rates)):
            raise InvalidValueError(f"`rates` must be positive and finite, but are {list(self.rates)} instead.")

    @property
    def trial_steps(self) -> int:
        """Steps of a trial: a quarter of the whole, for in shorter ones lower rates look better than they are."""
        return min(self.steps, max(LEAST_TRIED, self.steps // 4))

    def phase(self, steps: int, lr: float, device: torch.device, **more: Any) -> dict[str, Any]:
        """Settings of the loop for `steps` steps."""
        often, rarely = max(1, steps // 20), max(1, steps // 4) if steps == self.steps else steps
        return {
            "steps": steps, "lr": lr, "schedule": "cosine", "warmup_steps": steps // 20, "betas": (0.9, 0.95),
            "clip": 1.0, "precision": "bf16" if device.type == "cuda" else "no", "device": self.device, "keep": 1,
            # a checkpoint takes as long as a few steps of a GPU, and a small part of one of a CPU
            "checkpoint_every": often if device.type == "cpu" else rarely, "eval_every": rarely, "log_every": often,
            "seed": self.seed, "batch_size": self.batch_size, **more,
        }  # fmt: skip


def check_divides(accumulate: int | None, windows: int) -> None:
    """Refuse a batch of so many windows that is not cut into equal parts."""
    if accumulate is not None and windows % accumulate:
        raise InvalidValueError(
            f"`accumulate` must divide the {windows} windows of a batch, but is {accumulate} instead."
        )


class Pair(ABC):
    """A compressed model, called the student, and its teacher."""

    measure: str
    """What is measured on text that is held out; less is better."""
    dense: float
    """The teacher's figure, once `prepare` was called."""
    held_out: str
    """The text that is held out, in words."""
    task: Trainable
    teacher: nn.Module
    next_command: str = "bench"
    """The command of rankwise that suits the result."""

    def __init__(self, folder: str, teacher: str, config: HealingConfig) -> None:
        self.folder, self.teacher_name, self.config = folder, teacher, config
        self.student: str | None = None
        """The state of the student's folder (`state_of`), where the healed model is in its place by now."""
        self.device = device_of(config.device)
        self.notes: list[str] = []

    @abstractmethod
    def check_target(self, out: Path, overwrite: bool) -> None:
        """Refuse a folder that must not be written."""

    @abstractmethod
    def read(self, texts: Sequence[Path], valid: Sequence[Path], folder: Path, count: Count) -> str:
        """Read the texts, and generate what was not generated in `folder` before; their fingerprint."""

    @abstractmethod
    def prepare(self) -> None:
        """Load the teacher, and measure it."""

    @abstractmethod
    def load(self) -> nn.Module:
        """The student in float32, ready to be trained."""

    @abstractmethod
    def phase(self, steps: int, lr: float) -> LoopConfig:
        """The settings of the loop."""

    @abstractmethod
    def measured(self, model: nn.Module) -> float:
        """The measure of a model on text that is held out, in float32."""

    @abstractmethod
    def rounded(self, model: nn.Module) -> nn.Module:
        """The model with weights of the precision that they have in the folder."""

    @abstractmethod
    def save(self, model: nn.Module, out: Path, after: float, done: str, overwrite: bool, beside: Beside) -> list[str]:
        """Write the folder, with the JSON files `beside` the model; gives lines that a user should read.

        `done` says what was done.
        """

    def made_from(self) -> dict[str, str]:
        """Tells whether folders are the same as before, without reading their weights."""
        return {"student": self.student or state_of(self.folder), "teacher": state_of(self.teacher_name)}


def state_of(name: str) -> str:
    """Names, sizes and samples of the files of a folder: weights that were trained on differ everywhere.

    Of a model on the hub, its name and the commit that is here.
    """
    sha = hashlib.sha256(b"" if os.path.isdir(name) else f"{name} {_commit_of(name)}".encode())
    for path in sorted(Path(name).glob("*")) if os.path.isdir(name) else ():
        # the same compression takes other milliseconds each time
        if path.suffix in STATE_OF and path.is_file() and path.name != COMPRESSION:
            size = path.stat().st_size
            sha.update(f"{path.name} {size}".encode())
            with path.open("rb") as file:
                for place in range(SAMPLES):
                    file.seek(place * size // SAMPLES)
                    sha.update(file.read(SAMPLE_BYTES))
    return sha.hexdigest()


def best_rate(losses: Mapping[str, float | None]) -> float | None:
    """The rate of the lowest loss; None if all diverged."""
    found = {name: loss for name, loss in losses.items() if loss is not None and math.isfinite(loss)}
    return float(min(found, key=lambda name: found[name])) if found else None


def rates_beyond(losses: Mapping[str, float | None]) -> list[float]:
    """The rate after the best of those tried, in steps of 1, 3, 10, if no rate beyond the best was tried.

    If all diverged, the next lower one.
    """
    found, tried = best_rate(losses), [float(name) for name in losses]
    best = min(tried) if found is None else found
    if min(tried) < best < max(tried):
        return []
    half_powers = round(2 * math.log10(best)) + (1 if found == max(tried) else -1)
    return [float(f"{10 ** (half_powers / 2):.0e}")]


def check_goes_on(before: Mapping[str, Any], now: Mapping[str, Any], place: Path) -> None:
    """Refuse to go on with the state in `place` of another healing."""
    afresh = f"remove {place} to begin afresh"
    if (before.get(ABOUT) is None) != (now.get(ABOUT) is None):
        command = "rankwise heal" if before.get(ABOUT) is None else "rankwise compress --heal"
        raise CheckpointError(
            f"A healing goes on with the command that it began with, but the state in {place} is that of `{command}`. "
            f"Repeat that command, or {afresh}."
        )
    for name, words in BEGAN_WITH.items():
        if name in now and before.get(name) != now[name]:
            raise CheckpointError(
                f"A healing goes on with the {words} that it began with, but the state in {place} is that of another "
                f"{words}. Give it again, or {afresh}."
            )
    try:
        check_same(before, now, place)
    except CheckpointError as error:
        raise CheckpointError(f"{error} Or {afresh}.") from None


def weights_of(model: nn.Module) -> str:
    """Samples of a model's weights, which tell it from others: the same on any device, and after a round trip."""
    sha = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        values = parameter.detach().flatten()
        sha.update(f"{name} {list(parameter.shape)}".encode())
        sha.update(values[:: max(1, len(values) // SAMPLES)].float().cpu().numpy().tobytes())
    return sha.hexdigest()


def _commit_of(name: str) -> str:
    with suppress(ImportError, ValueError, OSError):
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json")
        return Path(found).parent.name if isinstance(found, str) else ""
    return ""
