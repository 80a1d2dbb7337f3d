"""What a training run is asked to do. Gates and multipliers have their own settings, with the pruning method."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rankwise.errors import InvalidValueError
from rankwise.lab.data.vocabulary import Array
from rankwise.lab.data.windows import Evaluation
from rankwise.lab.training.schedules import SCHEDULES

Precision = Literal["no", "bf16"]
Schedule = Literal["inverse-sqrt", "cosine", "constant", "linear"]


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Settings of `fit`. A run resumes only with those it began with, but for `HOUSEKEEPING`."""

    steps: int
    """Optimizer steps in all, `dense_steps` included."""
    batch_size: int
    """Streams of text that are read side by side in one step."""
    window: int
    """Tokens that each stream reads in one step; gradients go no further back."""
    lr: float
    """The peak of the weights' learning rate."""
    reset_every: int | None = None
    """Steps after which a stream begins with an empty recurrent state again, streams taking turns; 0: never. None: as
    many as evaluation takes for a stream, which begins with an empty state: a model that has seen none for long answers
    poorly from it."""
    dense_steps: int = 0
    """Steps before the pruner is made: the warm-up of the dense model."""
    schedule: Schedule = "inverse-sqrt"
    """How the learning rate moves (`rankwise.lab.training.schedules`)."""
    warmup_steps: int = 0
    """The learning rate rises linearly for so many steps."""
    restart_schedule: bool = False
    """The schedule begins anew when pruning begins; otherwise one schedule spans all steps."""
    weight_decay: float = 0.0
    """Of AdamW, on every weight; gates are never decayed."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Of AdamW."""
    clip: float | None = None
    """Largest norm of the gradient of all weights together."""
    accumulate: int = 1
    """Parts that a batch is cut into, one after the other: the same gradient in less memory."""
    distill: float = 0.0
    """Share of the loss that asks for a teacher's answers in place of the text's own."""
    precision: Precision = "no"
    """"bf16" for mixed precision; weights, gates and losses stay float32."""
    device: Literal["auto", "cpu"] = "auto"
    """"auto" takes an accelerator where there is one."""
    eval_every: int = 1_000
    """Steps between evaluations on the validation text. The ends of both phases are evaluated in any case."""
    eval_tokens: int | None = None
    """Evaluate on so many tokens from the beginning of a text; None for all of it."""
    checkpoint_every: int = 1_000
    """Steps between checkpoints. A new best and the end are saved in any case."""
    keep: int = 2
    """The last checkpoints that are kept, beside the best one."""
    log_every: int = 100
    """Steps between lines of metrics."""
    seed: int = 0
    """Of dropout and of where the text is begun."""

    def __post_init__(self) -> None:
        # a config read from JSON brings a list
        object.__setattr__(self, "betas", tuple(self.betas))
        for name, least in _WHOLE.items():
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise InvalidValueError(
                    f"`{name}` must be a whole number of at least {least}, but is {value!r} instead."
                )
        if self.eval_tokens is not None and (type(self.eval_tokens) is not int or self.eval_tokens < 1):
            raise InvalidValueError(
                f"`eval_tokens` must be at least 1, or None for all, but is {self.eval_tokens!r} instead."
            )
        if self.reset_every is not None and (type(self.reset_every) is not int or self.reset_every < 0):
            raise InvalidValueError(
                f"`reset_every` must be a whole number of at least 0, or None to do as evaluation does, but is "
                f"{self.reset_every!r} instead."
            )
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                names = ", ".join(map(repr, known))
                raise InvalidValueError(f"`{name}` must be one of {names}, but is {getattr(self, name)!r} instead.")
        for name in ("lr", "clip"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InvalidValueError(f"`{name}` must be positive and finite, but is {value} instead.")
        if not 0 <= self.distill <= 1:
            raise InvalidValueError(f"`distill` must be a share of the loss, in [0, 1], but is {self.distill} instead.")
        if not 0 <= self.weight_decay < math.inf:
            raise InvalidValueError(
                f"`weight_decay` must be at least 0 and finite, but is {self.weight_decay} instead."
            )
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

    def evaluation(self, text: Array) -> Evaluation:
        """The part of a text that is evaluated on, in windows."""
        # the first token is no target
        part = text if self.eval_tokens is None else text[: self.eval_tokens + 1]
        return Evaluation(part, unroll=self.window)

    def lr_at(self, step: int, *, pruning: bool = False) -> float:
        """The learning rate of step 1, 2, ..., `steps`."""
        first, last = 0, self.steps
        if self.restart_schedule and self.dense_steps:
            first, last = (self.dense_steps, self.steps) if pruning else (0, self.dense_steps)
        return self.lr * SCHEDULES[self.schedule](step - first, self.warmup_steps, last - first)


HOUSEKEEPING = ("checkpoint_every", "keep")
"""Settings that change neither weights nor metrics, so a resumed run may have others."""


def binding(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a run's configuration that it may not change when it goes on."""
    training = {key: value for key, value in configuration["training"].items() if key not in HOUSEKEEPING}
    return {**configuration, "training": training}


_WHOLE = {
    "steps": 1,
    "batch_size": 1,
    "window": 1,
    "dense_steps": 0,
    "warmup_steps": 0,
    "accumulate": 1,
    "eval_every": 1,
    "checkpoint_every": 1,
    "keep": 1,
    "log_every": 1,
    "seed": 0,
}
_CHOICES = {"schedule": tuple(SCHEDULES), "precision": ("no", "bf16"), "device": ("auto", "cpu")}
