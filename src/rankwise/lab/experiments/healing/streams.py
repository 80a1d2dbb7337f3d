"""Healing of models of rankwise's own architectures, from a run or compressed from one, with the run's vocabulary."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from rankwise.deploy.documents import MOST_UNKNOWN
from rankwise.deploy.inputs import BYTES_PER_CHARACTER, BYTES_PER_TOKEN
from rankwise.deploy.save import check_target, save
from rankwise.errors import DataError, RankwiseError
from rankwise.files import not_utf8
from rankwise.lab.data.corpus import Corpus, Unit
from rankwise.lab.data.vocabulary import UNKNOWN, Array, smallest_dtype
from rankwise.lab.experiments.healing.pair import REMEDY, HealingConfig, Pair
from rankwise.lab.experiments.run_folder import EXPERIMENT
from rankwise.lab.experiments.saved_models import OwnModel, open_model, open_own
from rankwise.lab.tasks.base import from_json
from rankwise.lab.tasks.healing import HELD_OUT_SHARE, TEXT
from rankwise.lab.tasks.language import LanguageModel, Quality, Streams, evaluate
from rankwise.lab.training.config import TrainingConfig

SHARE = 0.8
"""The share of the loss that is the teacher's; the rest is the text's own (docs/log/training.md)."""


class StreamPair(Pair):
    """Models of rankwise's own architectures, from a run or compressed from one; read with the run's vocabulary."""

    next_command = "evaluate"

    def __init__(self, folder: str, teacher: str, config: HealingConfig) -> None:
        super().__init__(folder, teacher, config)
        own, dense = open_own(Path(folder)), open_own(Path(teacher))
        assert own is not None and dense is not None
        self.own: OwnModel = own
        vocabulary, theirs = own.vocabulary, dense.vocabulary
        for name, found in ((folder, vocabulary), (teacher, theirs)):
            if found is None:
                raise DataError(
                    f"A text needs the model's vocabulary, but {name} holds none. Give the folder of the run that made "
                    "the model."
                )
        if vocabulary is None or vocabulary != theirs:
            raise RankwiseError(f"`teacher` must have the vocabulary of {folder}, but {teacher} has another. {REMEDY}")
        for name, model in ((folder, own.model), (teacher, dense.model)):
            if getattr(model.config, "clusters", None) is not None:
                raise RankwiseError(
                    f"Models that learn from each other must give logits of all words, but {name} has an adaptive "
                    "softmax, which is made to avoid them. Train it with `rankwise run` instead."
                )
        if config.checkpointing:
            raise RankwiseError("`checkpointing` must be left out for models of a run, which do not offer it.")
        self.vocabulary, self.teacher = vocabulary, dense.model

    def check_target(self, out: Path, overwrite: bool) -> None:
        check_target(out.resolve(), overwrite)

    def read(self, texts: Sequence[Path], valid: Sequence[Path]) -> str:
        experiment: Any = from_json({**self.own.beside[EXPERIMENT], "corpus": {}})
        self.window = self.config.window or experiment.training.window
        wanted = self.config.steps * self.config.batch_size * self.window
        parts = [self._tokens(path, wanted) for path in texts]
        held = [max(2, int(HELD_OUT_SHARE / 2 * len(part))) for part in parts]
        if valid:
            train, valid_parts = parts, [self._tokens(path, wanted) for path in valid]
        else:
            train = [part[:-last] for part, last in zip(parts, held, strict=True)]
            valid_parts = [part[-last:] for part, last in zip(parts, held, strict=True)]
        whole, kept = np.concatenate(train), np.concatenate(valid_parts)
        size = self.config.batch_size
        if len(whole) < size * self.window or len(kept) < 2:
            raise DataError(
                f"{TEXT} must hold at least {size} x {self.window} tokens to train on, but {texts[0]} has "
                f"{len(whole):,}. Give a longer text, smaller batches or shorter windows."
            )
        fingerprint = hashlib.sha256(whole.tobytes() + b"|" + kept.tobytes()).hexdigest()
        name = ", ".join(path.name for path in texts)
        unit: Unit = "word" if self.vocabulary.kind == "word" else "character"
        self.corpus = Corpus(
            name=name, unit=unit, train=whole, valid=kept, test=kept, vocabulary=self.vocabulary, provenance={},
            fingerprint=fingerprint, folder=texts[0].parent,
        )  # fmt: skip
        self.held_out = f"{len(kept):,} {unit}s held out"
        return fingerprint

    def _tokens(self, path: Path, most: int) -> Array:
        """The first `most` tokens of a text, or somewhat more."""
        try:
            with path.open("rb") as file:
                block = file.read(most * (BYTES_PER_TOKEN if self.vocabulary.kind == "word" else BYTES_PER_CHARACTER))
        except OSError as error:
            raise DataError(f"{TEXT} must be a text, but {path} is not: {error.strerror}.") from None
        try:
            text = block.decode("utf-8", "surrogateescape" if self.vocabulary.kind == "byte" else "strict")
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                raise not_utf8(path, 0, error) from None
            text = block[: error.start].decode("utf-8")
        numbers = np.array(self.vocabulary.encode(text), dtype=smallest_dtype(len(self.vocabulary)))
        if not len(numbers):
            raise DataError(f"{TEXT} must be a text, but {path} is empty.")
        share = float((numbers == self.vocabulary.numbers.get(UNKNOWN, -1)).mean())
        if share > MOST_UNKNOWN:
            raise DataError(
                f"The vocabulary must know the words of {TEXT}, but {share:.0%} of {path} are unknown to it."
            )
        return numbers

    def prepare(self) -> None:
        self.task = Streams(self.corpus)
        self.teacher = self.teacher.float().to(self.device)
        self.measure = self._quality(self.teacher).measure.replace("_", " ")
        self.dense = self.measured(self.teacher)

    def load(self) -> nn.Module:
        model = open_model(self.folder)
        self.dtype = next(model.parameters()).dtype
        return model.float()

    def phase(self, steps: int, lr: float) -> TrainingConfig:
        more = {"window": self.window, "distill": SHARE, "accumulate": self.config.accumulate or 1}
        return TrainingConfig(**self.config.phase(steps, lr, self.device, **more))

    def _quality(self, model: nn.Module) -> Quality:
        text = self.phase(1, 1.0).evaluation(self.corpus.valid)
        return evaluate(LanguageModel(model.to(self.device)), text, self.corpus.unit)

    def measured(self, model: nn.Module) -> float:
        return self._quality(model).value

    def rounded(self, model: nn.Module) -> nn.Module:
        return model.to(self.dtype).float()

    def save(self, model: nn.Module, out: Path, after: float, done: str, overwrite: bool) -> list[str]:
        save(model.to(self.dtype).cpu().eval(), out, overwrite=overwrite, beside=self.own.beside)
        return []
