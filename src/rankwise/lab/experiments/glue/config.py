"""What a GLUE experiment is: a task, a pretrained encoder, its dense fine-tuning, then how it is made small.

Every part of the recipe is a setting that can be switched off: `method` (compressed at once or along a ramp), `init`
(whitening), `distillation`, `healing`, `exclude` (embeddings).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from rankwise.core.budget import Budget
from rankwise.distill import Distillation
from rankwise.errors import InvalidValueError, RankwiseError
from rankwise.lab.data.glue.tasks import task_named
from rankwise.lab.experiments.config import check_method, like
from rankwise.lab.training.tune import Precision, TuningConfig
from rankwise.methods.base import Method
from rankwise.pruner import Init

RAMP_STEPS = 1_000
"""Of a method that is not yet fitted to a number of rows."""


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """A pretrained model of transformers, with its tokenizer."""

    name: str
    """A folder, or a name on the hub."""
    max_length: int = 128
    """Longer texts are cut to so many tokens."""

    def __post_init__(self) -> None:
        if type(self.max_length) is not int or self.max_length < 8:
            raise InvalidValueError(
                f"`max_length` must be a whole number of at least 8, but is {self.max_length!r} instead."
            )


@dataclass(frozen=True, kw_only=True)
class GlueExperiment:
    """Fine-tune an encoder on a task, prune it to a size, heal it, and compare what comes out."""

    name: str
    """Of the preset."""
    task: str = "mrpc"
    """cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli."""
    data: str | None = None
    """A folder that holds the task's files (MRPC/train.tsv, ...); without it, they are downloaded."""
    held_out: float = 0.1
    """The share of the training set that is kept from training, to choose settings on. 0: all is trained on."""
    model: EncoderConfig
    base: TuningConfig
    """Fine-tuning of the dense model, which every method starts from and learns from."""
    method: Method
    budget: Budget | None
    """The size of the exported model; None with the method "dense"."""
    training: TuningConfig
    """Training from the base on: with the method's gates, or, of "svd", after it has compressed the model at once."""
    ramp: float = 0.6
    """The size is reached in this share of the steps of `training`; sets the method's `anneal_steps`."""
    healing: TuningConfig | None
    """Training of the compact model itself."""
    init: Init = "whitened"
    """How plain matrices are factorized: "svd", or "whitened" by training data.

    With the method "svd" these data also say what each component is worth to the model's answers.
    """
    calibration_rows: int = 1_024
    """Training rows that this looks at."""
    distillation: Distillation | None
    """What is learned from the dense model while pruning and healing; None: the labels alone."""
    exclude: tuple[str, ...] = ()
    """Modules that are neither pruned nor counted as prunable. The head never is."""
    sizes: tuple[float, ...] = ()
    """Fractions removed of further models, taken along the way to the budget and healed each."""
    compare: tuple[str, ...] = ()
    """Methods that start from the same base and reach the same size, for comparison."""
    precision: Precision = "auto"
    """"bf16" for mixed precision, weights stay float32; "auto": on a GPU. What is reported is evaluated in float32."""
    device: Literal["auto", "cpu"] = "auto"
    """"auto" takes a GPU where there is one."""
    seed: int = 0
    """Of the head's start, of dropout, of the order of the rows and of the gates' noise."""

    def __post_init__(self) -> None:
        for name in ("exclude", "sizes", "compare"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "task", task_named(self.task).name)
        check_method(self.method, self.budget, self.compare, self.seed)
        for name, most in (("held_out", 0.5), ("ramp", 1.0)):
            value = getattr(self, name)
            if not 0 <= value <= most:
                raise InvalidValueError(f"`{name}` must be a share of 0 to {most:g}, but is {value!r} instead.")
        if self.calibration_rows < 1:
            raise InvalidValueError(f"`calibration_rows` must be at least 1, but is {self.calibration_rows!r} instead.")
        removed = None if self.budget is None else self.budget.removed
        for size in self.sizes:
            if removed is None or not 0 < size <= removed:
                raise RankwiseError(
                    f"`sizes` must be fractions that are removed on the way to `budget.removed` ({removed}), but one "
                    f"is {size} instead. Raise --budget.removed to the largest."
                )

    def with_method(self, name: str, budget: Budget | None = None) -> GlueExperiment:
        """The same experiment with another method, and another size if one is given; shared settings are kept."""
        # where it has a ramp, `ramp` decides how long it is once the rows are counted
        method = like(self.method, name, anneal_steps=RAMP_STEPS)
        if name == "dense":
            return replace(self, method=method, budget=None, sizes=(), compare=())
        return replace(self, method=method, budget=budget or self.budget)
