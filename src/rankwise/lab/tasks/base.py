"""An experiment is a recipe (base, method, budget, training) for a task (model, data, loss, measures).

A task is one file here: a subclass of `Experiment`, the settings, and one of `Task`, which they make. The pipeline and
the loop know these two classes and no subclass of them. See README.md of `rankwise.lab`.
"""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from rankwise.core.budget import Budget, SizeReport
from rankwise.core.plan import Plan
from rankwise.errors import InvalidTypeError, RankwiseError, nearest, shortened
from rankwise.lab.data.vocabulary import Progress
from rankwise.lab.training.config import LoopConfig, check_seed
from rankwise.lab.training.objective import Objective
from rankwise.methods import METHODS, like, make_method
from rankwise.methods.base import Method
from rankwise.sizes import Init, plan_for_method, size_account

RAMP = 0.25
"""Share of the steps from the base on in which a size is reached, where nothing says how many."""


class Data(Protocol):
    """The data of a task, read once and shared by all variants of an experiment."""

    @property
    def fingerprint(self) -> str:
        """The same for the same data."""

    def record(self) -> dict[str, Any]:
        """What the record of a run keeps of the data."""


@dataclass(frozen=True)
class SizePreview:
    """What an experiment amounts to before anything is run; sizes in parameters."""

    parameters: int
    """The size of the dense model."""
    prunable: int
    exported: int
    """The size that the exported model may have."""
    steps: int
    """Dense and pruning steps of the method itself, comparisons not counted."""
    tokens: int
    """Tokens that are read in them."""
    corpus: str
    download_megabytes: int
    """0 where nothing is downloaded."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """Batches of training data on which a model is factorized or compressed, and a loss of its answers to them."""

    batches: Sequence[Any]
    loss: Callable[[Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class Experiment(ABC):
    """Train a dense base, prune it to a size, and compare what comes out: the settings that all tasks share."""

    kinds: ClassVar[dict[str, type[Experiment]]] = {}
    """Every kind of experiment, by its `key`."""
    key: ClassVar[str] = ""
    """A setting that no other kind of experiment has: a saved experiment is recognized by it."""
    reference: ClassVar[Literal["control", "base"]] = "base"
    """The dense model that the others are compared with and learn from, called "dense" in tables: the base itself, or
    the control, which is the base trained for as long as they are."""
    base_settings: ClassVar[tuple[str, ...]] = ()
    """Settings that the base depends on, beside its training."""
    variant_settings: ClassVar[tuple[str, ...]] = ()
    """Settings that what is made from the base depends on, beside its training."""
    optional: ClassVar[tuple[str, ...]] = ()
    """Settings that are written down only where they are not the default, so that earlier records stay equal."""

    name: str
    """The name of the preset."""
    base: Any
    method: Method
    budget: Budget | None
    """The size of the exported model; None with the method "dense"."""
    training: Any
    healing: Any = None
    """Training of the compact model itself; None: no more training."""
    init: Init | Literal["fisher"] = "svd"
    """How matrices become factors: "svd", "fisher" (the SVD weighed by the loss), or "random" to train from scratch."""
    exclude: tuple[str, ...] = ()
    """Modules that are neither pruned nor counted as prunable."""
    sizes: tuple[float, ...] = ()
    """Fractions removed of further models, taken along the way to the budget."""
    compare: tuple[str, ...] = ()
    """Methods that start from the same base, train as long and reach the same size, for comparison."""
    seed: int = 0
    """The seed of the weights' start, of dropout, of the order of the data and of the gates' noise."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.key:
            Experiment.kinds[cls.key] = cls

    def __post_init__(self) -> None:
        for name in ("exclude", "sizes", "compare"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check_seed(self.seed)
        method, budget = self.method.name, self.budget
        if (budget is None) != (method == "dense"):
            found = f"given with {method}. Leave it out."
            if budget is None:
                found = f"missing with {method}. Example: --budget.removed 0.8."
            raise RankwiseError(f"`budget` goes with every method but dense, but is {found}")
        if self.init == "random" and self.starts_by_worth:
            raise RankwiseError(
                '`method.start` must be "open" with random factors, whose components are worth nothing yet, but is '
                '"worth" instead. Add --method.start open, and a longer --method.anneal_steps.'
            )
        for name in self.compare:
            if name not in METHODS:
                known = ", ".join(METHODS)
                raise RankwiseError(f"`compare` must name methods ({known}), but has {name!r}.{nearest(name, METHODS)}")
        removed = None if budget is None else budget.removed
        for size in self.sizes:
            if removed is None or not 0 < size <= removed:
                raise RankwiseError(
                    f"`sizes` must be fractions that are removed on the way to `budget.removed` ({removed}), but one "
                    f"is {size} instead. Raise --budget.removed to the largest."
                )

    def check_model(self) -> None:  # noqa: B027
        """Refuse a model that cannot be used, before any data are read."""

    @abstractmethod
    def read(self, progress: Progress | None = None) -> Data:
        """Read the data."""

    @abstractmethod
    def make_task(self, data: Any) -> Task[Any, Any]:
        """The task on data that `read` returned."""

    @property
    @abstractmethod
    def reads(self) -> str:
        """The data in a few words, for messages."""

    @property
    @abstractmethod
    def device(self) -> Literal["auto", "cpu"]:
        """The device that models are evaluated and timed on."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens of the texts that models are timed on."""

    def read_saved(self, given: Collection[str], fingerprint: str | None, progress: Progress | None = None) -> Data:
        """Read the data of an experiment that was read from a folder, and whose training data had that fingerprint.

        The folder may be a stranger's: no file is opened that the user did not name, by one of the `given` settings.
        """
        return self.read(progress)

    def for_saved(self, saved: SavedModel) -> Any:
        """The experiment as it evaluates a saved model, whatever it was made from."""
        return self

    def read_to_evaluate(
        self, saved: SavedModel, given: Collection[str], split: str, progress: Progress | None = None
    ) -> Data:
        """Read data to evaluate a saved model on; `given` are the names of the settings that the user gave."""
        return self.read_saved(given, saved.fingerprint, progress)

    @abstractmethod
    def portable(self) -> Experiment:
        """The experiment without the places on this machine that were named for it."""

    @abstractmethod
    def size_preview(self) -> SizePreview:
        """What the experiment amounts to, without reading anything."""

    @property
    def distills(self) -> bool:
        """Whether what is made from the base learns from the dense model's answers."""
        return False

    @property
    def starts_by_worth(self) -> bool:
        """Whether gates start by what a loss says components are worth."""
        asked = self.init == "fisher" or getattr(self.method, "start", None) == "worth"
        return asked and self.method.can_start_by_worth

    def method_for(self, steps: int) -> Method:
        """The method for a training of so many steps."""
        return self.method

    def new_ramp(self) -> int:
        """Steps in which a method that has had no ramp reaches its size."""
        return max(1, int(RAMP * self.training.steps))

    def control(self) -> Experiment:
        """The experiment that trains the base for as long, with nothing removed."""
        changes = self.control_changes()
        return replace(self, method=make_method("dense"), budget=None, sizes=(), compare=(), **changes)

    def taught_control(self) -> Experiment:
        """The control as it is compared with models that learn from a teacher: it learns from the same one."""
        return self.control()

    def control_changes(self) -> dict[str, Any]:
        """Further settings of the control that differ."""
        return {}

    def with_method(self, name: str, budget: Budget | None = None) -> Experiment:
        """The same experiment with another method, and another size if one is given; shared settings are kept."""
        if name == "dense":
            return self.control()
        method = like(self.method, name, anneal_steps=self.new_ramp())
        made = replace(self, method=method, budget=budget or self.budget)
        if self.starts_by_worth and not made.starts_by_worth and hasattr(method, "anneal_steps"):
            # the ramp of gates that start by worth is too short for others
            ramp = max(method.anneal_steps, self.new_ramp())
            made = replace(made, method=replace(method, anneal_steps=ramp))  # type: ignore[call-arg]
        return made

    def budgets(self) -> list[Budget]:
        """The budget itself, last, and those of `sizes`."""
        if self.budget is None:
            return []
        budget = self.budget
        return [*(replace(budget, removed=size) for size in self.sizes if size != budget.removed), budget]

    def row(self) -> dict[str, Any]:
        """Further settings that the row of a table tells."""
        return {}

    def to_json(self) -> dict[str, Any]:
        """All settings, for JSON."""
        plain = dataclasses.asdict(self)
        plain["method"] = {"name": self.method.name, **plain["method"]}
        if self.budget is not None and self.budget.dtype is not None:
            plain["budget"]["dtype"] = str(self.budget.dtype).removeprefix("torch.")
        for field in fields(self):
            if field.name in self.optional and getattr(self, field.name) == field.default:
                del plain[field.name]
        return plain

    @classmethod
    def parts_from_json(cls, plain: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that `to_json` described, by name."""
        parts, hints = dict(plain), get_type_hints(cls)
        method = dict(parts["method"])
        parts["method"] = make_method(method.pop("name"), **method)
        if parts["budget"] is not None and (dtype := parts["budget"].get("dtype")) is not None:
            parts["budget"] = {**parts["budget"], "dtype": getattr(torch, dtype)}
        for name, value in parts.items():
            choices = get_args(hints[name]) if get_origin(hints[name]) in (Union, UnionType) else (hints[name],)
            group: Any = next(filter(dataclasses.is_dataclass, choices), None)
            if isinstance(value, dict) and group is not None:
                parts[name] = group(**value)
            elif group is not None and not isinstance(value, tuple(c for c in choices if isinstance(c, type))):
                raise InvalidTypeError(f"`{name}` is {shortened(value, 80)!r}")
        return parts


@dataclass(frozen=True, eq=False)
class SavedModel:
    """Where a run saved a model, and what it was made by."""

    folder: Path
    """The part of the run, with its settings."""
    path: Path
    """The model itself."""
    experiment: Experiment
    fingerprint: str | None
    """The fingerprint of the text that it was trained on, where the folder has it."""


def from_json(plain: Mapping[str, Any]) -> Experiment:
    """The experiment that `Experiment.to_json` described."""
    kind = next((kind for key, kind in Experiment.kinds.items() if key in plain), None)
    if kind is None:
        known = ", ".join(Experiment.kinds)
        raise RankwiseError(f"A saved experiment must have one of the settings {known}, but has none of them.")
    try:
        return kind(**kind.parts_from_json(plain))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise RankwiseError(f"A saved experiment must hold all of its settings, but {shortened(error)}.") from error


def described(experiment: Experiment) -> dict[str, Any]:
    """An experiment as records keep it: without places on this machine, as JSON gives it back."""
    plain: dict[str, Any] = json.loads(json.dumps(experiment.portable().to_json()))
    return plain


E = TypeVar("E", bound=Experiment)
D = TypeVar("D", bound=Data)


class Task(ABC, Generic[E, D]):
    """The model, the data, the loss and the measures of an experiment."""

    beside: ClassVar[tuple[str, ...]] = ()
    """Files that `save` writes beside the folder of a model."""

    def __init__(self, experiment: E, data: D) -> None:
        self.experiment, self.data = experiment, data
        on_gpu = experiment.device == "auto" and torch.cuda.is_available()
        self.device = torch.device("cuda" if on_gpu else "cpu")
        """Where models are evaluated and timed."""

    @property
    def fingerprint(self) -> str:
        return self.data.fingerprint

    def record(self) -> dict[str, Any]:
        return self.data.record()

    # the model

    @abstractmethod
    def make(self) -> nn.Module:
        """The dense model before any training."""

    @abstractmethod
    def skeleton(self) -> nn.Module:
        """The dense model for its shapes alone: without weights, where that saves time."""

    @abstractmethod
    def load(self, folder: Path) -> nn.Module:
        """A model that `save` wrote."""

    @abstractmethod
    def save(self, model: nn.Module, folder: Path, size: SizeReport | None) -> None:
        """Write an exported model into a folder, in place of one that is there."""

    def start(self, base: Path | None) -> nn.Module:
        """The model that pruning starts from: the base in that folder, or a fresh one."""
        return self.make() if base is None else self.load(base)

    @abstractmethod
    def plan(self, model: nn.Module) -> Plan:
        """The matrices of a dense model that are pruned."""

    # training

    @abstractmethod
    def phase(self, settings: Any, seed: int) -> LoopConfig:
        """The loop's settings of a phase (`base`, `training` or `healing`) of the experiment."""

    @abstractmethod
    def objective(
        self, model: nn.Module, config: Any, device: torch.device, teacher: nn.Module | None = None
    ) -> Objective:
        """The loss of a model; with a teacher, what it learns from the teacher's answers is part of it."""

    def distills(self, config: Any) -> bool:
        """Whether a phase needs a teacher."""
        return self.experiment.distills

    @abstractmethod
    def calibration(self) -> Calibration | None:
        """Training data for factorizing or compressing; None to go by the weights alone."""

    # measures

    @abstractmethod
    def evaluate(self, model: nn.Module, split: str) -> dict[str, float] | None:
        """The measures of an exported model on "valid" or "test", by name; None where there are no such data."""

    @abstractmethod
    def example(self) -> dict[str, Tensor]:
        """Inputs that models are timed on, by name: one text of the usual length."""

    def check_base(self, folder: Path) -> None:
        """Refuse to prune the model in `folder`/model where it was trained for other data."""

    def check(self) -> None:
        """Refuse what would fail after hours of training, such as a budget out of reach."""
        experiment, model = self.experiment, self.skeleton()
        plan, method = self.plan(model), experiment.method
        if experiment.budget is not None:
            pruned = plan_for_method(model, plan, method)
            account = size_account(model, pruned, method, trained=experiment.init != "random")
            for budget in experiment.budgets():
                budget.resolve(account)
