"""What an experiment is: a corpus, a model, its dense training, then a method and the size it is to reach.

`presets` makes them, `fields` changes them, `pipeline` runs them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn

from rankwise.adapters.plans import find_plan
from rankwise.core.budget import Budget
from rankwise.core.plan import Plan
from rankwise.errors import InvalidValueError, RankwiseError, nearest
from rankwise.lab.data.corpus import Corpus, Unit
from rankwise.lab.data.sources import load_corpus
from rankwise.lab.models import ModelConfig
from rankwise.lab.training import TrainingConfig
from rankwise.methods import METHODS, make_method
from rankwise.methods.base import Method
from rankwise.pruner import Init

RAMP = 0.25
"""Share of the steps from the base on in which a size is reached, where nothing says how many."""
OUTPUT_LAYERS = {"output": "head", "head": "output"}
"""What one of our architectures calls its output layer, and what the other does."""


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """Which text is read; the arguments of `rankwise.lab.data.load_corpus`."""

    name: str = "pydoc"
    """pydoc, enwik8, enwik8-words, wikitext-2, wikitext-103, a text file, or a folder with train, valid and test."""
    data: str | None = None
    """A folder that holds a published corpus; without it, one is downloaded."""
    cache: str | None = None
    """Where prepared corpora are kept. Default: the user's cache folder."""
    unit: Unit | None = None
    """How a text of your own is split: "character" or "word"."""
    min_count: int | None = None
    """Words that the training text has fewer times become <unk>."""

    def load(self, progress: Any = None) -> Corpus:
        return load_corpus(
            self.name,
            data=self.data,
            cache=self.cache,
            unit=self.unit,
            min_count=self.min_count,
            progress=progress,
        )


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Train a dense base, prune it to a size, and compare what comes out."""

    name: str
    """Of the preset."""
    corpus: CorpusConfig
    model: ModelConfig
    """The dense model. Its `num_words` gives way to the size of the corpus's vocabulary."""
    base: TrainingConfig | None
    """Training of the dense model, which every method starts from. None: the method starts from fresh weights."""
    method: Method
    budget: Budget | None
    """The size of the exported model; None with the method "dense"."""
    training: TrainingConfig
    """Training from the base on, with the method's gates."""
    dropout: float | None = None
    """Of the model from the base on; None: its own. What is left of a model needs less of it (`lighter_dropout`)."""
    init: Init = "svd"
    """How plain matrices are factorized: "svd", or "random" to train factors from scratch."""
    exclude: tuple[str, ...] = ()
    """Modules that are neither pruned nor counted as prunable."""
    compare: tuple[str, ...] = ()
    """Methods that start from the same base, train as long and reach the same size, for comparison."""
    seed: int = 0
    """Of the weights' start, of dropout, of the order of the text and of the gates' noise."""

    def __post_init__(self) -> None:
        for name in ("exclude", "compare"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check_method(self.method, self.budget, self.compare, self.seed)
        if self.init == "whitened":
            raise RankwiseError('`init` must be "svd" or "random" in an experiment, but is "whitened" instead.')
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise InvalidValueError(f"`dropout` must lie in [0, 1), but is {self.dropout} instead.")
        if self.dropout is not None and self.method.name == "dense":
            raise RankwiseError(
                f"`dropout` goes with every method but dense, which keeps its model's, but is {self.dropout:g}. "
                "Leave it out."
            )
        if self.base is not None and self.base.distill:
            raise RankwiseError("`base.distill` must be 0: there is no teacher yet. Set `training.distill`.")
        if self.training.distill and (self.base is None or getattr(self.model, "clusters", None) is not None):
            reason = "without a base, from which a teacher is trained" if self.base is None else "with adaptive softmax"
            raise RankwiseError(f"`training.distill` must be 0 {reason}, but is {self.training.distill:g}.")
        for phase in (self.base, self.training):
            if phase is not None and (phase.dense_steps or phase.restart_schedule):
                raise RankwiseError("`dense_steps` must be 0 in an experiment: its dense phase is `base`.")

    @property
    def base_training(self) -> TrainingConfig | None:
        """`base`, with the seed of the experiment."""
        return None if self.base is None else replace(self.base, seed=2 * self.seed)

    @property
    def pruning_training(self) -> TrainingConfig:
        """`training`, with the seed of the experiment: another order of the text than in the base."""
        return replace(self.training, seed=2 * self.seed + 1)

    def plan(self, model: nn.Module) -> Plan:
        """What is pruned of `model`, whose output layer `exclude` may call by either name."""
        names = [name if hasattr(model, name) else OUTPUT_LAYERS.get(name, name) for name in self.exclude]
        return find_plan(model, exclude=names)

    def with_method(self, name: str, budget: Budget | None = None) -> Experiment:
        """The same experiment with another method, and another size if one is given.

        Settings that both methods have are kept. One that gains a ramp reaches its size in a share `RAMP` of the steps.
        """
        if name == "dense":
            # the control, who teaches where others are taught
            alone = replace(self.training, distill=0.0)
            return replace(self, method=make_method(name), budget=None, dropout=None, training=alone, compare=())
        method = like(self.method, name, anneal_steps=max(1, int(RAMP * self.training.steps)))
        return replace(self, method=method, budget=budget or self.budget)

    @property
    def pruned_model(self) -> ModelConfig:
        """`model`, with the dropout that it has from the base on."""
        return self.model if self.dropout is None else replace(self.model, dropout=self.dropout)


def lighter_dropout(dropout: float, removed: float) -> float:
    """D_o sqrt(C_r / C_o), to three digits: less capacity, less dropout.  Han et al. 2015, section 3.2."""
    return round(dropout * math.sqrt(1 - removed), 3)


def check_method(method: Method, budget: Budget | None, compare: tuple[str, ...], seed: int) -> None:
    """What every experiment refuses."""
    if type(seed) is not int or seed < 0:
        raise InvalidValueError(f"`seed` must be a whole number of at least 0, but is {seed!r} instead.")
    if (budget is None) != (method.name == "dense"):
        found, remedy = ("missing", "Example: --budget.removed 0.8.") if budget is None else ("given", "Leave it out.")
        raise RankwiseError(f"`budget` goes with every method but dense, but is {found} with {method.name}. {remedy}")
    for name in compare:
        if name not in METHODS:
            known = ", ".join(METHODS)
            raise RankwiseError(f"`compare` must name methods ({known}), but has {name!r}.{nearest(name, METHODS)}")


def like(method: Method, name: str, **otherwise: Any) -> Method:
    """The method of that name, with the settings of `method` that it has too, or else those of `otherwise`."""
    if name not in METHODS:
        return make_method(name)
    if METHODS[name] is type(method):
        return method
    names = {field.name for field in fields(METHODS[name])}
    given = {key: value for key, value in otherwise.items() if key in names}
    shared = {key: getattr(method, key) for key in names if hasattr(method, key)}
    return make_method(name, **given | shared)
