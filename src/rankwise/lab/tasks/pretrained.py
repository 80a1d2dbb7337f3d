"""What tasks with a pretrained model of transformers share: settings, checks, batches, saving and loading."""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import nn

from rankwise.adapters.plans import find_plan
from rankwise.core.budget import SizeReport
from rankwise.core.plan import Plan
from rankwise.deploy.inputs import positions_of
from rankwise.distill import Distillation, distillation_loss
from rankwise.errors import InvalidValueError, MissingPackageError, RankwiseError, first_line, install_extra
from rankwise.hub import source_of
from rankwise.lab.tasks.base import Calibration, D, Experiment, SavedModel, SizePreview, Task
from rankwise.lab.tasks.examples import ExampleObjective, Examples, Loss
from rankwise.lab.training.config import LoopConfig, TuningConfig, check_whole
from rankwise.methods.base import Method
from rankwise.oneshot import sampled_loss
from rankwise.sizes import Init

RAMP_STEPS = 1_000
"""The ramp of a method that is not yet fitted to a number of examples."""
CALIBRATION_BATCH, SETTING = 32, "`model.name`"


@dataclass(frozen=True, kw_only=True)
class PretrainedConfig:
    """A pretrained model of transformers, with its tokenizer."""

    name: str
    """A folder, or a name on the hub."""
    max_length: int = 128
    """Longer texts are cut to so many tokens."""

    def __post_init__(self) -> None:
        check_whole(self, 8, "max_length")


@dataclass(frozen=True)
class KnownModel:
    """The sizes of a model on the hub, so that a preset can be listed without a download."""

    hub: str
    parameters: int
    prunable: int
    """Parameters in matrices and embeddings that are pruned."""
    megabytes: int


@dataclass(frozen=True, kw_only=True)
class PretrainedExperiment(Experiment):
    """Fine-tune a pretrained model, prune it to a size, heal it, and compare what comes out.

    Every part of the recipe is a setting that can be switched off: `method` (one-shot or along a ramp), `init`
    (whitening), `distillation`, `healing`, `exclude` (embeddings).
    """

    base_settings: ClassVar[tuple[str, ...]] = ("model", "seed")
    variant_settings: ClassVar[tuple[str, ...]] = (
        "model", "method", "budget", "ramp", "healing", "init", "calibration_rows", "distillation", "exclude", "sizes",
        "seed",
    )  # fmt: skip
    known_models: ClassVar[dict[str, KnownModel]] = {}
    """Models of presets, by the preset's name."""

    model: PretrainedConfig
    base: TuningConfig
    """Fine-tuning of the dense model, which every method starts from and learns from."""
    training: TuningConfig
    """Training from the base on: with the method's gates, or, with "svd", after it has compressed the model."""
    ramp: float = 0.6
    """The size is reached in this share of the steps of `training`; sets the method's `anneal_steps`."""
    healing: TuningConfig | None
    """Training of the compact model itself."""
    init: Init = "whitened"
    """How plain matrices are factorized: "svd", or "whitened" by training data.

    With the method "svd" these data also say what each component is worth to the model's answers.
    """
    calibration_rows: int = 1_024
    """Training examples that this looks at."""
    distillation: Distillation | None
    """What is learned from the dense model while pruning and healing; None: the labels alone."""
    precision: Literal["auto", "no", "bf16"] = "auto"
    """"bf16" for mixed precision, weights stay float32; "auto": on a GPU. What is reported is evaluated in float32."""
    device: Literal["auto", "cpu"] = "auto"
    """"auto" takes a GPU where there is one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "ramp", 1.0)
        if self.calibration_rows < 1:
            raise InvalidValueError(f"`calibration_rows` must be at least 1, but is {self.calibration_rows!r} instead.")

    def check_model(self) -> None:
        load_config(self.model.name)
        load_tokenizer(self.model.name)

    @property
    def length(self) -> int:
        return self.model.max_length

    @property
    def distills(self) -> bool:
        return self.distillation is not None

    @property
    def phases(self) -> list[TuningConfig]:
        return [phase for phase in (self.base, self.training, self.healing) if phase is not None]

    def for_saved(self, saved: SavedModel) -> Any:
        return replace(self, model=replace(self.model, name=str(saved.path)))

    def method_for(self, steps: int) -> Method:
        """The method with its ramp in steps, if it has one."""
        if not hasattr(self.method, "anneal_steps"):
            return self.method
        return replace(self.method, anneal_steps=max(1, int(self.ramp * steps)))  # type: ignore[call-arg]

    def new_ramp(self) -> int:
        # `ramp` decides once the examples are counted
        return RAMP_STEPS

    def size_preview(self) -> SizePreview:
        """Sizes of the model that the preset names; steps for as many examples as `max_steps` allows."""
        known = self.known_models[self.name]
        removed = 0.0 if self.budget is None else self.budget.removed or 0.0
        steps = [phase.steps(self.expected_examples) for phase in self.phases]
        examples = sum(number * phase.batch_size for number, phase in zip(steps, self.phases, strict=True))
        return SizePreview(
            parameters=known.parameters,
            prunable=known.prunable,
            exported=known.parameters - int(removed * known.parameters),
            steps=sum(steps),
            tokens=examples * self.model.max_length,
            corpus=self.reads,
            download_megabytes=self.data_megabytes + (0 if Path(self.model.name).is_dir() else known.megabytes),
        )

    @property
    def expected_examples(self) -> int:
        """Training examples, as far as they are known before anything is read."""
        return 10**9

    @property
    def data_megabytes(self) -> int:
        """What is downloaded beside the model."""
        return 0


def check_share(config: object, name: str, most: float) -> None:
    """Refuse a setting that is no share of at most `most`."""
    value = getattr(config, name)
    if not 0 <= value <= most:
        raise InvalidValueError(f"`{name}` must be a share of 0 to {most:g}, but is {value!r} instead.")


P = TypeVar("P", bound=PretrainedExperiment)


class PretrainedTask(Task[P, D]):
    """A model of transformers on examples that fit in memory."""

    @property
    @abstractmethod
    def train(self) -> Examples:
        """The training examples, on the device."""

    @abstractmethod
    def open(self, name: str | os.PathLike[str]) -> nn.Module:
        """The model of a folder or of the hub, in float32, with the head of the task."""

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.experiment.model.name)

    def make(self) -> nn.Module:
        torch.manual_seed(self.experiment.seed)
        return self.open(self.experiment.model.name)

    def skeleton(self) -> nn.Module:
        # with its weights: what a plan leaves out may depend on which of them are fresh
        return self.make()

    def load(self, folder: Path) -> nn.Module:
        # so that transformers can read what another process saved
        import rankwise.hf  # noqa: F401

        torch.manual_seed(0)
        return self.open(folder).to(self.device)

    def save(self, model: nn.Module, folder: Path, size: SizeReport | None) -> None:
        """A folder that `from_pretrained` loads."""
        from rankwise.hf.saving import save_pretrained

        folder.parent.mkdir(parents=True, exist_ok=True)
        known: Any = model
        with quiet():
            save_pretrained(known, folder, tokenizer=self.tokenizer, size=size, overwrite=True)

    def plan(self, model: nn.Module) -> Plan:
        return find_plan(model, exclude=self.experiment.exclude)

    def phase(self, settings: TuningConfig, seed: int) -> LoopConfig:
        precision = self.experiment.precision
        if precision == "auto":
            precision = "bf16" if self.device.type == "cuda" else "no"
        return settings.counted(len(self.train), precision=precision, device=self.experiment.device, seed=seed)

    def objective(
        self, model: nn.Module, config: LoopConfig, device: torch.device, teacher: nn.Module | None = None
    ) -> ExampleObjective:
        # without a teacher: the loss that the model itself computes from the labels
        loss: Loss = lambda model, batch: model(**batch).loss  # noqa: E731
        if teacher is not None:
            loss = distillation_loss(teacher.to(device), self.experiment.distillation)
        return ExampleObjective(model, self.train, config, device, loss)

    def calibration(self) -> Calibration | None:
        """Training examples without their labels, where `init` or the start of gates asks for data."""
        experiment = self.experiment
        if experiment.init != "whitened" and not experiment.starts_by_worth:
            return None
        found, batches = 0, []
        for batch in self.train.batches(CALIBRATION_BATCH, experiment.seed):
            batches.append({name: tensor for name, tensor in batch.items() if name != "labels"})
            found += len(batch["input_ids"])
            if found >= experiment.calibration_rows:
                break
        return Calibration(batches, sampled_loss(experiment.seed))


def load_tokenizer(name: str | os.PathLike[str]) -> Any:
    """The tokenizer of a folder or of a name on the hub."""
    from transformers import AutoTokenizer

    source: dict[str, Any] = source_of(name, SETTING)
    with quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, **source)
            # where a folder has no vocabulary, transformers makes up one of special tokens alone
            files = list(tokenizer.vocab_files_names.values())
            if not Path(name).is_dir() or any((Path(name) / file).is_file() for file in files):
                return tokenizer
            why = f"it holds none of {', '.join(files)}."
        except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
            why = first_sentence(error)
    raise RankwiseError(
        f"`model.name` must come with a tokenizer, but {name} does not: {why} Save the model's tokenizer beside it."
    )


def load_config(name: str | os.PathLike[str]) -> Any:
    """The configuration of a folder or of a name on the hub."""
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise MissingPackageError(
            f"Pretrained models need the package transformers, which is not installed. {install_extra('hf')}"
        ) from error

    source: dict[str, Any] = source_of(name, SETTING)
    with quiet():
        try:
            return AutoConfig.from_pretrained(name, **source)
        except (OSError, ValueError) as error:
            what = "a folder without a model" if Path(name).is_dir() else "neither a folder nor to be had from the hub"
            raise RankwiseError(
                f"`model.name` must be a folder with a model, or a name on the hub, but {name} is {what}: "
                f"{first_sentence(error)}"
            ) from error


@dataclass(frozen=True)
class Head:
    """What a pretrained model answers with."""

    auto: str
    """The class of transformers that loads such models."""
    does: str
    """What such a model does, for messages."""

    def load(self, name: str | os.PathLike[str], **settings: Any) -> nn.Module:
        """The model of a folder or of a name on the hub, in float32; its head is fresh where none was saved."""
        import transformers

        source: dict[str, Any] = source_of(name, SETTING)
        with quiet():
            try:
                auto = getattr(transformers, self.auto)
                model: nn.Module = auto.from_pretrained(name, dtype=torch.float32, **source, **settings)
            except (OSError, ValueError, RuntimeError) as error:
                raise self._refused(name, error) from error
        return model

    def check(self, config: Any, name: str | os.PathLike[str], max_length: int) -> None:
        """Refuse a model that cannot have this head, or cannot read texts of `max_length` tokens."""
        import transformers

        try:
            with quiet(), torch.device("meta"):
                positions = positions_of(getattr(transformers, self.auto).from_config(config))
        except ValueError as error:
            raise self._refused(name, error) from error
        if positions is not None and positions < max_length:
            raise RankwiseError(
                f"`model.max_length` must be at most {positions}, the positions of {name}, but is {max_length} instead."
            )

    def _refused(self, name: str | os.PathLike[str], error: Exception) -> RankwiseError:
        why = first_sentence(error)
        return RankwiseError(f"`model.name` must be a model that {self.does}, but {name} is not: {why}")


def first_sentence(error: BaseException) -> str:
    """The first line of what went wrong, as a sentence."""
    return f"{first_line(error).rstrip('.')}."


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars, and its report that a head is fresh: here it always is, or was checked."""
    import transformers

    logger, bars = logging.getLogger("transformers"), transformers.utils.logging.is_progress_bar_enabled()
    level = logger.level
    logger.setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logger.setLevel(level)
        if bars:
            transformers.utils.logging.enable_progress_bar()  # type: ignore[no-untyped-call]
