"""The rows of a task as tokens: what is trained on, what settings are chosen on, what is reported."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rankwise.errors import DataError
from rankwise.lab.data.glue import Dataset, Rows, load_glue, score
from rankwise.lab.data.text import Progress
from rankwise.lab.data.tokenized import TokenizedTexts
from rankwise.lab.experiments.glue.config import GlueExperiment
from rankwise.lab.experiments.glue.encoder import load_tokenizer

SPLIT_SEED = 0
"""Which rows are held out is the same for every seed of an experiment."""
EVALUATION_BATCH = 64


@dataclass(frozen=True, eq=False)
class Splits:
    """Tokenized, on the device."""

    dataset: Dataset
    tokenizer: Any
    train: TokenizedTexts
    valid: TokenizedTexts | None
    """Held out of the training set; None where all of it is trained on."""
    test: TokenizedTexts
    """GLUE's development set: the labels of its test sets are not published. Nothing is chosen on it."""

    def quality(self, model: nn.Module, split: str) -> dict[str, float] | None:
        """The official metrics of a model, in float32."""
        examples: TokenizedTexts | None = getattr(self, split)
        if examples is None:
            return None
        logits, labels = predict(model, examples)
        return score(self.dataset.task, logits, labels)


def load_splits(experiment: GlueExperiment, device: torch.device, progress: Progress | None = None) -> Splits:
    """The data of an experiment; what was tokenized before is not tokenized again."""
    name = experiment.model.name
    folder = str(Path(name).resolve()) if Path(name).is_dir() else name
    dataset = load_glue(experiment.task, data=experiment.data, progress=progress)
    return _splits(_Key(dataset), folder, experiment.model.max_length, experiment.held_out, str(device))


@dataclass(frozen=True)
class _Key:
    """A dataset that equals another of the same rows."""

    dataset: Dataset

    def __hash__(self) -> int:
        return hash(self.dataset.fingerprint)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and (self.dataset.task, self.dataset.fingerprint) == (
            other.dataset.task,
            other.dataset.fingerprint,
        )


@cache
def _splits(key: _Key, name: str, max_length: int, held_out: float, device: str) -> Splits:
    dataset, tokenizer = key.dataset, load_tokenizer(name)
    train, valid = held_apart(dataset.train, held_out)

    def tokens(rows: Rows) -> TokenizedTexts:
        return TokenizedTexts(
            tokenizer,
            rows.texts,
            [int(label) for label in rows.labels] if dataset.task.labels else rows.labels,
            max_length=max_length,
            regression=dataset.task.is_regression,
            device=device,
        )

    return Splits(dataset, tokenizer, tokens(train), None if valid is None else tokens(valid), tokens(dataset.dev))


def held_apart(rows: Rows, share: float) -> tuple[Rows, Rows | None]:
    """The rows that are trained on, and those held out of them, chosen at random."""
    if share == 0:
        return rows, None
    number = round(share * len(rows))
    if not 0 < number < len(rows):
        raise DataError(
            f"`held_out` must leave rows on both sides, but {share:g} of {len(rows)} rows is {number}. Change it, or 0."
        )
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(SPLIT_SEED)).tolist()
    return rows.take(sorted(order[number:])), rows.take(sorted(order[:number]))


@torch.inference_mode()
def predict(model: nn.Module, examples: TokenizedTexts) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Outputs and labels of every example, in the order of the examples."""
    model.eval()
    places: list[int] = []
    outputs: list[Tensor] = []
    for chunk, batch in examples.in_order(EVALUATION_BATCH):
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        places += chunk
        outputs.append(model(**inputs).logits.float())
    logits = torch.empty(len(examples), outputs[0].shape[1])
    logits[places] = torch.cat(outputs).cpu()
    return logits.numpy(), examples.tensors["labels"].cpu().numpy()
