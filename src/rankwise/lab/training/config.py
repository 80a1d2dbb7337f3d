"""What a training run is asked to do. Gates and multipliers have their own settings, with the pruning method.

`LoopConfig` is what the loop reads. A task has settings of its own beside it: `TrainingConfig` for streams of text,
counted in steps; `TuningConfig` for examples, counted in epochs, which becomes a `LoopConfig` when they are counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch

from rankwise.errors import InvalidValueError, RankwiseError
from rankwise.lab.data.vocabulary import Array
from rankwise.lab.data.windows import Evaluation

Precision = Literal["no", "bf16"]
Schedule = Literal["inverse-sqrt", "cosine", "constant", "linear"]
Device = Literal["auto", "cpu"]
NonFinite = Literal["stop", "skip"]


# Learning rate schedules are factors on the peak: pure functions of the step k = 1, 2, ..., the number w of warm-up
# steps and the number n of all steps. A resumed run needs no state of theirs.
SCHEDULES: dict[str, Callable[[int, int, int], float]] = {
    "inverse-sqrt": lambda k, w, n: math.sqrt(max(w, 1) / k),
    "cosine": lambda k, w, n: (1 + math.cos(math.pi * (k - w) / (n - w))) / 2,
    "constant": lambda k, w, n: 1.0,
    "linear": lambda k, w, n: (n - k) / (n - w),
}
"""What comes after the warm-up."""


def lr_factor(schedule: Schedule, step: int, warmup_steps: int, num_steps: int) -> float:
    """k / w up to the peak at k = w; then, by "inverse-sqrt", k^-1/2 w^1/2.  Paper: appendix (Noam)."""
    return step / warmup_steps if step <= warmup_steps else SCHEDULES[schedule](step, warmup_steps, num_steps)


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """Settings of the loop. A run resumes only with those it began with, except `HOUSEKEEPING`."""

    decays_vectors: ClassVar[bool] = False
    """Whether weight decay is applied to biases and norms too."""
    keeps_checkpoints: ClassVar[bool] = False
    """Whether an experiment keeps the checkpoints of a phase whose model it has exported."""

    steps: int
    """Optimizer steps in all, `dense_steps` included."""
    batch_size: int
    """Examples in one step, or streams of text that are read side by side, of all processes together."""
    lr: float
    """The peak of the weights' learning rate."""
    dense_steps: int = 0
    """Steps before the pruner is made: the warm-up of the dense model."""
    schedule: Schedule = "inverse-sqrt"
    """How the learning rate moves after the warm-up: "constant", "inverse-sqrt" down with the root of the step, or
    "cosine" or "linear" down to 0 at the last step."""
    warmup_steps: int = 0
    """The learning rate rises linearly for so many steps."""
    restart_schedule: bool = False
    """The schedule starts again when pruning begins; otherwise one schedule spans all steps."""
    weight_decay: float = 0.0
    """The weight decay of AdamW; gates are never decayed."""
    betas: tuple[float, float] = (0.9, 0.999)
    """The betas of AdamW."""
    clip: float | None = None
    """Largest norm of the gradient of all weights together."""
    accumulate: int = 1
    """Parts that a batch is cut into, one after the other: the same gradient in less memory."""
    precision: Precision = "no"
    """"bf16" for mixed precision; weights, gates and losses stay float32."""
    device: Device = "auto"
    """"auto" takes an accelerator where there is one."""
    eval_every: int | None = None
    """Steps between evaluations on the validation data, by which the best weights are chosen; the ends of both phases
    are evaluated in any case. None: no evaluation, and the last weights are the result."""
    checkpoint_every: int = 1_000
    """Steps between checkpoints. A new best and the end are saved in any case."""
    keep: int = 2
    """The last checkpoints that are kept, beside the best one."""
    log_every: int = 100
    """Steps between lines of metrics."""
    nonfinite: NonFinite = "stop"
    """What a loss or gradient that is NaN or infinite does: "stop" the run, or "skip" the batch, which leaves weights,
    gates and carried states alone and is counted. On a GPU "skip" waits for every step, and records no graphs."""
    seed: int = 0
    """The seed of dropout and of the order of the data."""
    drop_closed: bool = True
    """After the ramp, components that stay closed are dropped with their optimizer state, for less memory and time.
    False keeps them, so that the pruner of the finished run can still export larger models than its own budget."""

    def __post_init__(self) -> None:
        # a config read from JSON brings a list
        object.__setattr__(self, "betas", tuple(self.betas))
        check_whole(self, 0, "dense_steps", "warmup_steps", "seed")
        check_whole(self, 1, "steps", "batch_size", "accumulate", "eval_every", "checkpoint_every", "log_every", "keep")
        check_choice(self, "schedule", tuple(SCHEDULES))
        check_choice(self, "precision", get_args(Precision))
        check_choice(self, "device", get_args(Device))
        check_choice(self, "nonfinite", get_args(NonFinite))
        check_positive(self, "lr", "clip")
        check_decay(self)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise InvalidValueError(f"`betas` must be two numbers in [0, 1), but are {self.betas} instead.")
        if self.batch_size % self.accumulate:
            raise InvalidValueError(
                f"`batch_size` must be a multiple of `accumulate`, but is {self.batch_size} with "
                f"accumulate={self.accumulate}. Change one of them."
            )
        if self.dense_steps > self.steps:
            raise InvalidValueError(
                f"`dense_steps` must be at most `steps` ({self.steps}), but is {self.dense_steps} instead. "
                "`steps` counts both phases."
            )

    def lr_at(self, step: int, *, pruning: bool = False) -> float:
        """The learning rate of step 1, 2, ..., `steps`."""
        first, last = 0, self.steps
        if self.restart_schedule and self.dense_steps:
            first, last = (self.dense_steps, self.steps) if pruning else (0, self.dense_steps)
        return self.lr * lr_factor(self.schedule, step - first, self.warmup_steps, last - first)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(LoopConfig):
    """Training on streams of text, a window of each in every step."""

    decays_vectors: ClassVar[bool] = True
    keeps_checkpoints: ClassVar[bool] = True

    window: int
    """Tokens that each stream reads in one step; gradients go no further back."""
    reset_every: int | None = None
    """The recurrent state of a stream is emptied after so many steps, streams taking turns; 0: never. None: as many as
    an evaluation takes. It starts from an empty state, and a model that has seen none for long predicts poorly."""
    distill: float = 0.0
    """The weight of a teacher's answers in the loss, from 0 to 1; the text itself has the rest."""
    eval_every: int = 1_000
    """Steps between evaluations on the validation text. The ends of both phases are evaluated in any case."""
    eval_tokens: int | None = None
    """Evaluate on so many tokens from the beginning of a text; None for all of it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self, 1, "window", "eval_tokens")
        check_whole(self, 0, "reset_every")
        if not 0 <= self.distill <= 1:
            raise InvalidValueError(f"`distill` must be a share of the loss, in [0, 1], but is {self.distill} instead.")

    def evaluation(self, text: Array) -> Evaluation:
        """The part of a text that is evaluated on, in windows."""
        # the first token is no target
        part = text if self.eval_tokens is None else text[: self.eval_tokens + 1]
        return Evaluation(part, unroll=self.window)


@dataclass(frozen=True, kw_only=True)
class TuningConfig:
    """A few epochs over examples. Checkpoints are kept until the trained model is exported."""

    epochs: float = 3.0
    """Passes over the training set; a part of one is allowed."""
    max_steps: int | None = None
    """No more steps than that, however large the training set is."""
    min_steps: int = 1
    """No fewer steps than that, however small it is."""
    batch_size: int = 32
    """Examples in a step, of all processes together."""
    lr: float = 5e-5
    """The peak of the learning rate."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """How the learning rate moves after its warm-up: linear and cosine fall to 0."""
    warmup: float = 0.1
    """The learning rate rises linearly in this share of the steps."""
    weight_decay: float = 0.01
    """The weight decay of AdamW, on matrices."""
    clip: float | None = 1.0
    """Largest norm of the gradient of all weights together."""
    log_every: int = 50
    """Steps between lines of metrics."""
    checkpoint_every: int = 500
    """Steps between checkpoints, from which a stopped phase resumes."""
    nonfinite: NonFinite = "stop"
    """What a loss or gradient that is NaN or infinite does: "stop" the run, or "skip" the batch and count it."""

    def __post_init__(self) -> None:
        check_whole(self, 1, "max_steps", "min_steps", "batch_size", "log_every", "checkpoint_every")
        check_positive(self, "epochs", "lr", "clip")
        check_decay(self)
        if not 0 <= self.warmup < 1:
            raise InvalidValueError(f"`warmup` must be a share of the steps, in [0, 1), but is {self.warmup} instead.")
        check_choice(self, "schedule", ("linear", "cosine", "constant"))
        check_choice(self, "nonfinite", get_args(NonFinite))

    def steps(self, num_examples: int) -> int:
        """The number of steps over a training set of that size."""
        steps = max(self.min_steps, math.ceil(self.epochs * math.ceil(num_examples / self.batch_size)))
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def counted(self, num_examples: int, *, precision: Precision, device: Device, seed: int) -> LoopConfig:
        """The settings of the loop over a training set of that size."""
        same = ("batch_size", "lr", "schedule", "weight_decay", "clip", "checkpoint_every", "log_every", "nonfinite")
        settings: dict[str, Any] = {name: getattr(self, name) for name in same}
        steps = self.steps(num_examples)
        warmup = int(self.warmup * steps)
        return LoopConfig(
            steps=steps, warmup_steps=warmup, keep=1, precision=precision, device=device, seed=seed, **settings
        )


HOUSEKEEPING = ("checkpoint_every", "keep", "drop_closed")
"""Settings that change neither weights nor metrics, or by rounding alone, so a resumed run may have others."""
ADDED = {"nonfinite": "stop"}
"""Settings that earlier versions did not have, with the value that they behaved like."""


def lasting(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide a result, as every version writes them."""
    return {
        name: value
        for name, value in settings.items()
        if name not in HOUSEKEEPING and not (name in ADDED and value == ADDED[name])
    }


def binding(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a run's configuration that it may not change when it is resumed."""
    return {**configuration, "training": lasting(configuration["training"])}


def device_of(device: Device) -> torch.device:
    """The device that models are trained on."""
    found = None if device == "cpu" else torch.accelerator.current_accelerator(check_available=True)
    return found or torch.device("cpu")


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """The precision of a model's forward pass; its weights stay float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def check_whole(config: object, least: int, *names: str) -> None:
    """Refuse settings that are given and are not whole numbers of at least `least`."""
    for name in names:
        value = getattr(config, name)
        if value is not None and (type(value) is not int or value < least):
            raise InvalidValueError(f"`{name}` must be a whole number of at least {least}, but is {value!r} instead.")


def check_positive(config: object, *names: str) -> None:
    """Refuse settings that are given and not positive."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not 0 < value < math.inf:
            raise InvalidValueError(f"`{name}` must be positive and finite, but is {value} instead.")


def check_choice(config: object, name: str, known: tuple[str, ...]) -> None:
    """Refuse a setting that is none of the known words."""
    if getattr(config, name) not in known:
        words = ", ".join(map(repr, known))
        raise InvalidValueError(f"`{name}` must be one of {words}, but is {getattr(config, name)!r} instead.")


def check_decay(config: LoopConfig | TuningConfig) -> None:
    if not 0 <= config.weight_decay < math.inf:
        raise InvalidValueError(f"`weight_decay` must be at least 0 and finite, but is {config.weight_decay} instead.")


def check_seed(seed: int) -> None:
    """Refuse a seed that random numbers cannot be drawn from."""
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise RankwiseError(f"`seed` must be a whole number from 0 to 2^63 - 1, but is {seed!r} instead.")
