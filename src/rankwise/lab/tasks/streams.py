"""Language modelling by streams: texts that are read side by side, with a state that is carried from window to window.

The models are the paper's, SRU and Transformer-XL. Shapes: B = streams, T = window, V = words, N = targets.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from rankwise.adapters.plans import find_plan
from rankwise.core.budget import SizeReport, count
from rankwise.core.plan import Plan
from rankwise.deploy.architectures import build, describe_config, from_description
from rankwise.deploy.load import load
from rankwise.deploy.save import OF_RUN, save
from rankwise.errors import CheckpointError, DataError, InvalidValueError, RankwiseError
from rankwise.lab.data.corpus import Corpus, Unit
from rankwise.lab.data.download import PUBLISHED
from rankwise.lab.data.sources import NAMES, load_corpus, load_prepared
from rankwise.lab.data.vocabulary import Progress, Vocabulary
from rankwise.lab.data.windows import Windows
from rankwise.lab.models import ModelConfig
from rankwise.lab.tasks.base import Calibration, Experiment, SavedModel, SizePreview, Task
from rankwise.lab.tasks.language import LanguageModel, StreamObjective, evaluate
from rankwise.lab.training.config import TrainingConfig, check_whole
from rankwise.lab.training.records import foreign_file, read_json, write_file
from rankwise.oneshot import loss_of_choices
from rankwise.sizes import plan_for_method, size_account

OUTPUT_LAYERS = {"output": "head", "head": "output"}
"""What one of our architectures calls its output layer, and what the other does."""
NUM_CALIBRATION_WINDOWS, CALIBRATION_BATCH = 512, 16
"""Windows of training text, at equal distances, each as long as a window of training, and how many of them at once."""
VOCABULARY = OF_RUN[1]
NAMED = {"corpus.name", "corpus.data", "corpus.unit", "corpus.min_count"}
"""Settings by which a user asks for another text than that of the training, or for another copy of it."""


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

    def __post_init__(self) -> None:
        check_whole(self, 0, "min_count")

    def load(self, progress: Progress | None = None) -> Corpus:
        how = {name: value for name, value in asdict(self).items() if name != "name"}
        return load_corpus(self.name, **how, progress=progress)


@dataclass(frozen=True, kw_only=True)
class StreamExperiment(Experiment):
    """Train a language model on a text, prune it to a size, and compare what comes out."""

    key: ClassVar[str] = "corpus"
    reference: ClassVar[Literal["control", "base"]] = "control"
    base_settings: ClassVar[tuple[str, ...]] = ("model", "seed")
    variant_settings: ClassVar[tuple[str, ...]] = ("model", "method", "budget", "dropout", "init", "exclude", "seed")
    optional: ClassVar[tuple[str, ...]] = ("healing", "sizes")

    corpus: CorpusConfig
    model: ModelConfig
    """The dense model. Its `num_words` gives way to the size of the corpus's vocabulary."""
    base: TrainingConfig | None
    """Training of the dense model, which every method starts from. None: the method starts from fresh weights."""
    training: TrainingConfig
    """Training from the base on, with the method's gates."""
    healing: TrainingConfig | None = None
    """Training of the compact model itself; None: no more training."""
    dropout: float | None = None
    """The dropout of the model from the base on; None: its own. What is left of a model needs less of it: the
    dropout of the dense one times the root of the fraction kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.init == "whitened":
            raise RankwiseError('`init` must be "svd", "fisher" or "random" here, but is "whitened" instead.')
        if self.init == "fisher" and self.base is None:
            raise RankwiseError('`init` must be "random" without a base, but is "fisher" instead.')
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
            raise RankwiseError(
                f"`training.distill` must be 0 {reason}, but is {self.training.distill:g}. Add --training.distill 0."
            )
        for phase in self.phases:
            if phase.dense_steps or phase.restart_schedule:
                raise RankwiseError("`dense_steps` must be 0 in an experiment: its dense phase is `base`.")

    @property
    def phases(self) -> list[TrainingConfig]:
        return [phase for phase in (self.base, self.training, self.healing) if phase is not None]

    @property
    def reads(self) -> str:
        return self.corpus.name

    @property
    def device(self) -> Literal["auto", "cpu"]:
        return self.training.device

    @property
    def distills(self) -> bool:
        return self.training.distill > 0

    @property
    def pruned_model(self) -> ModelConfig:
        """`model`, with the dropout that it has from the base on."""
        return self.model if self.dropout is None else replace(self.model, dropout=self.dropout)

    def control_changes(self) -> dict[str, Any]:
        # the control is the teacher, so it learns from the text alone
        changes: dict[str, Any] = {"dropout": None, "training": replace(self.training, distill=0.0)}
        if self.healing is not None:
            changes["healing"] = replace(self.healing, distill=0.0)
        return changes

    def taught_control(self) -> StreamExperiment:
        return replace(self.control(), training=self.training, healing=self.healing)  # type: ignore[return-value]

    def read(self, progress: Progress | None = None) -> Corpus:
        return self.corpus.load(progress)

    def make_task(self, data: Corpus) -> StreamTask:
        return StreamTask(self, data)

    def plan(self, model: nn.Module) -> Plan:
        """What is pruned of `model`, whose output layer `exclude` may call by either name."""
        names = [name if hasattr(model, name) else OUTPUT_LAYERS.get(name, name) for name in self.exclude]
        return find_plan(model, exclude=names)

    @property
    def length(self) -> int:
        return self.training.window

    def read_saved(self, given: Collection[str], fingerprint: str | None, progress: Progress | None = None) -> Corpus:
        """The text of the training, where the user's cache holds it prepared, or a published or a named one."""
        if fingerprint is not None and not NAMED.intersection(given):
            prepared = load_prepared(fingerprint, cache=self.corpus.cache)
            if prepared is not None:
                return prepared
        if self.corpus.name not in NAMES and "corpus.name" not in given:
            raise DataError(
                "A text that is not in the cache must be named by whoever reads it, because a saved run chooses no "
                f"file to open, but `corpus.name` is not given. This run was trained on {self.corpus.name!r}: add "
                "--corpus.name FILE, or --corpus.cache FOLDER if the training had a cache of its own."
            )
        return self.read(progress)

    def read_to_evaluate(
        self, saved: SavedModel, given: Collection[str], split: str, progress: Progress | None = None
    ) -> Corpus:
        """The corpus, with its split in the numbers of the model's vocabulary."""
        own, vocabulary = saved.experiment.corpus, read_vocabulary(saved.folder)  # type: ignore[attr-defined]
        if vocabulary is None:
            raise CheckpointError(f"A model must have a vocabulary, but {saved.folder} has no {VOCABULARY}.")
        config = self.corpus
        if config.name not in NAMES and config.unit is None:
            config = replace(config, unit="word" if vocabulary.kind == "word" else "character")
        elif config.name in NAMES and (config.unit, config.min_count) == (own.unit, own.min_count):
            # how the model's own text was split
            config = replace(config, unit=None, min_count=None)
        corpus = replace(self, corpus=config).read_saved(given, saved.fingerprint, progress)
        if corpus.vocabulary == vocabulary:
            return corpus
        if config.unit == "word":
            # which words are known is for the model's vocabulary to say
            corpus = replace(config, min_count=0).load(progress)
        read: Any = {split: vocabulary.renumber(getattr(corpus, split), corpus.vocabulary)}
        return replace(corpus, vocabulary=vocabulary, **read)

    def portable(self) -> StreamExperiment:
        return replace(self, corpus=replace(self.corpus, data=None, cache=None))

    def size_preview(self) -> SizePreview:
        """Sizes for the vocabulary that the preset expects; the model is built without memory for weights."""
        with torch.device("meta"):
            model = build(self.model)
        plan, exported = self.plan(model), count(model)
        if self.budget is not None:
            pruned = plan_for_method(model, plan, self.method)
            exported = self.budget.resolve(size_account(model, pruned, self.method, trained=self.init != "random"))
        published = PUBLISHED.get(self.corpus.name.removesuffix("-words"))
        return SizePreview(
            parameters=count(model),
            prunable=plan.params,
            exported=exported,
            steps=sum(phase.steps for phase in self.phases),
            tokens=sum(phase.steps * phase.batch_size * phase.window for phase in self.phases),
            corpus=self.corpus.name,
            download_megabytes=0 if published is None or self.corpus.data else published.megabytes,
        )

    def row(self) -> dict[str, Any]:
        taught = {"distill": self.training.distill} if self.training.distill else {}
        return {"dropout": self.pruned_model.dropout, **taught}

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "model": describe_config(self.model)}

    @classmethod
    def parts_from_json(cls, plain: Mapping[str, Any]) -> dict[str, Any]:
        return super().parts_from_json({**plain, "model": from_description(plain["model"])})


def lighter_dropout(dropout: float, removed: float) -> float:
    """D_o sqrt(C_r / C_o), to three digits: less capacity, less dropout.  Han et al. 2015, section 3.2."""
    return round(dropout * math.sqrt(1 - removed), 3)


class StreamTask(Task[StreamExperiment, Corpus]):
    """A language model of ours on a corpus."""

    beside: ClassVar[tuple[str, ...]] = (VOCABULARY,)

    def make(self) -> nn.Module:
        torch.manual_seed(self.experiment.seed)
        return build(self._sized(self.experiment.model))

    def skeleton(self) -> nn.Module:
        with torch.device("meta"):
            return build(self._sized(self.experiment.model))

    def start(self, base: Path | None) -> nn.Module:
        torch.manual_seed(self.experiment.seed)
        config = self._sized(self.experiment.pruned_model)
        if base is None:
            return build(config)
        with torch.device("meta"):
            skeleton = build(config)
        return load(base, skeleton)

    def load(self, folder: Path) -> nn.Module:
        return load(folder)

    def save(self, model: nn.Module, folder: Path, size: SizeReport | None) -> None:
        save(model, folder, overwrite=True)
        write_file(folder.parent / VOCABULARY, self.data.vocabulary.to_json())

    def plan(self, model: nn.Module) -> Plan:
        return self.experiment.plan(model)

    def phase(self, settings: TrainingConfig, seed: int) -> TrainingConfig:
        return replace(settings, seed=seed)

    def objective(
        self, model: nn.Module, config: TrainingConfig, device: torch.device, teacher: nn.Module | None = None
    ) -> StreamObjective:
        return StreamObjective(model, self.data, config, device, teacher)

    def calibration(self) -> Calibration:
        """Windows of training text, and the loss of what the model itself would answer to them."""
        text, window = self.data.train, self.experiment.training.window
        length = min(window, len(text))
        starts = torch.linspace(0, len(text) - length, NUM_CALIBRATION_WINDOWS).long().tolist()
        windows = torch.stack([torch.from_numpy(text[i : i + length].astype("int64")) for i in starts])
        generator = torch.Generator().manual_seed(self.experiment.seed)
        batches = torch.split(windows.to(self.device), CALIBRATION_BATCH)
        return Calibration(batches, lambda output: loss_of_choices(output[0], generator))

    def evaluate(self, model: nn.Module, split: str) -> dict[str, float]:
        """The quality on a split: in float32, products on a GPU in TF32."""
        text = self.experiment.training.evaluation(getattr(self.data, split))
        return evaluate(LanguageModel(model.to(self.device)), text, self.data.unit).record()

    def example(self) -> dict[str, Tensor]:
        text = self.data.valid
        window = text[: min(self.experiment.training.window, len(text))]
        return {"tokens_BT": torch.from_numpy(window.astype("int64"))[None].to(self.device)}

    def distills(self, config: TrainingConfig) -> bool:
        return config.distill > 0

    def check_base(self, folder: Path) -> None:
        known = read_vocabulary(folder)
        if known is None:
            raise CheckpointError(
                f"A base must have a vocabulary, but {folder} has no {VOCABULARY}. Run `rankwise train` again."
            )
        corpus = self.data
        if corpus.vocabulary != known:
            raise DataError(
                f"The corpus must have the vocabulary that the model was trained on ({len(known):,} {known.kind}s), "
                f"but {corpus.name} has another ({len(corpus.vocabulary):,} {corpus.vocabulary.kind}s). "
                "Give the corpus of its training."
            )

    def check(self) -> None:
        super().check()
        for phase in self.experiment.phases:
            Windows(self.data.train, batch=phase.batch_size, unroll=phase.window)
            phase.evaluation(self.data.valid)
            phase.evaluation(self.data.test)

    def _sized(self, config: ModelConfig) -> ModelConfig:
        return replace(config, num_words=len(self.data.vocabulary))


def read_vocabulary(folder: Path) -> Vocabulary | None:
    """The vocabulary of the model in a folder; None where there is none."""
    path = folder / VOCABULARY
    plain = read_json(path, "kind", "tokens")
    try:
        return None if plain is None else Vocabulary.from_json(plain)
    except DataError as error:
        raise foreign_file(path, f"does not fit: {error}") from error
