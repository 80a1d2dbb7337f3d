"""Classification and regression of sentences, or pairs of them: the tasks of GLUE, and files of one's own.

`rankwise run glue-mpnet --task mrpc` and `rankwise run sentences --data rows.csv --text_column text`. Texts are
tokenized once and stay on the device; the texts of a batch have similar lengths, and batches few shapes.

Shapes: N = examples, B = batch, L = tokens of the longest example.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from rankwise.adapters.plans import find_plan
from rankwise.core.plan import Plan
from rankwise.errors import DataError, RankwiseError
from rankwise.lab.data.glue import ARCHIVES, load_glue, task_named
from rankwise.lab.data.rows import Columns, Dataset, Rows, read_table, score
from rankwise.lab.data.rows import Task as LabelTask
from rankwise.lab.data.vocabulary import Progress
from rankwise.lab.tasks.pretrained import (
    Head,
    KnownModel,
    PretrainedExperiment,
    PretrainedTask,
    check_share,
    load_config,
    load_tokenizer,
)  # fmt: skip

CLASSIFIER = Head("AutoModelForSequenceClassification", "can classify texts")
SPLIT_SEED = 0
"""Which rows are held out is the same for every seed of an experiment."""
EVALUATION_BATCH = 64
POOL = 50
"""Batches whose examples are sorted by length together: enough for similar lengths in each, and still random."""
MULTIPLE = 16
"""Lengths of batches are multiples of it, so that there are few."""

ENCODERS = {
    "glue-roberta": KnownModel("FacebookAI/roberta-base", 124_647_170, 123_933_696, 499),
    "glue-mpnet": KnownModel("sentence-transformers/all-mpnet-base-v2", 109_488_002, 108_774_528, 438),
    "glue-minilm": KnownModel("sentence-transformers/all-MiniLM-L6-v2", 22_713_986, 22_682_112, 91),
}
"""Encoders by preset; sizes with a head of two labels."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Splits:
    """The rows of a task: what is trained on, what settings are chosen on, what is reported."""

    dataset: Dataset
    train: Rows
    valid: Rows | None
    """Rows to choose settings on; None where there are none."""
    test: Rows
    """Rows that are reported; nothing is chosen on them."""
    tokenized: dict[Any, TokenizedTexts] = field(default_factory=dict)
    """Splits as tokens, made once for all variants of an experiment."""

    @property
    def fingerprint(self) -> str:
        return self.dataset.fingerprint

    def record(self) -> dict[str, Any]:
        return self.dataset.record()


@dataclass(frozen=True, kw_only=True)
class GlueExperiment(PretrainedExperiment):
    """Fine-tune an encoder on a task of GLUE, prune it to a size, heal it, and compare what comes out."""

    key: ClassVar[str] = "task"
    base_settings: ClassVar[tuple[str, ...]] = ("task", "held_out", *PretrainedExperiment.base_settings)
    variant_settings: ClassVar[tuple[str, ...]] = ("task", "held_out", *PretrainedExperiment.variant_settings)
    known_models: ClassVar[dict[str, KnownModel]] = ENCODERS

    task: str = "mrpc"
    """cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli."""
    data: str | None = None
    """A folder that holds the task's files (MRPC/train.tsv, ...); without it, they are downloaded."""
    held_out: float = 0.1
    """The share of the training set that is kept from training, to choose settings on. 0: all is trained on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "task", task_named(self.task).name)
        check_share(self, "held_out", 0.5)

    @property
    def reads(self) -> str:
        return f"GLUE {task_named(self.task).title}"

    def check_model(self) -> None:
        check_encoder(self.model.name, task_named(self.task), self.model.max_length)
        super().check_model()

    def read(self, progress: Progress | None = None) -> Splits:
        """The rows; reported is GLUE's development set, because the labels of its test sets are not published."""
        dataset = load_glue(self.task, data=self.data, progress=progress)
        train, valid = held_apart(dataset.train, self.held_out)
        return Splits(dataset=dataset, train=train, valid=valid, test=dataset.dev)

    def make_task(self, data: Splits) -> SentenceTask:
        return SentenceTask(self, data)

    def portable(self) -> GlueExperiment:
        return replace(self, data=None)

    @property
    def expected_examples(self) -> int:
        return round((1 - self.held_out) * task_named(self.task).train_rows)

    @property
    def data_megabytes(self) -> int:
        if self.data is not None:
            return 0
        archive = ARCHIVES.get(task_named(self.task).title)
        return 1 if archive is None else archive.megabytes


@dataclass(frozen=True, kw_only=True)
class SentenceExperiment(PretrainedExperiment):
    """Fine-tune an encoder on rows of one's own, prune it to a size, heal it, and compare what comes out."""

    key: ClassVar[str] = "text_column"
    _own: ClassVar[tuple[str, ...]] = ("text_column", "second_text_column", "label_column", "regression", "held_out")
    base_settings: ClassVar[tuple[str, ...]] = (*_own, *PretrainedExperiment.base_settings)
    variant_settings: ClassVar[tuple[str, ...]] = (*_own, *PretrainedExperiment.variant_settings)
    known_models: ClassVar[dict[str, KnownModel]] = {"sentences": ENCODERS["glue-minilm"]}

    data: str | None = None
    """The file with the training rows: CSV with a header, TSV, or JSONL."""
    valid: str | None = None
    """A file with rows to choose settings on; without it, the share `held_out` of the training rows."""
    test: str | None = None
    """A file with rows to report; without it, a further share `held_out` of the training rows."""
    text_column: str = "text"
    """The column of the text."""
    second_text_column: str | None = None
    """The column of the second text, for pairs of texts."""
    label_column: str = "label"
    """The column of the label: a name or a number for each class."""
    regression: bool = False
    """The label is a number to be estimated, not a class."""
    held_out: float = 0.1
    """The share of the training rows that is kept from training for each of `valid` and `test` that has no file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "held_out", 0.4)

    @property
    def reads(self) -> str:
        return "rows of your own" if self.data is None else self.data

    @property
    def columns(self) -> Columns:
        texts = (self.text_column, *((self.second_text_column,) if self.second_text_column else ()))
        return Columns(texts=texts, label=self.label_column, regression=self.regression)

    def read(self, progress: Progress | None = None) -> Splits:
        if self.data is None:
            raise DataError("`data` must be a file with rows, but is not given. Example: --data rows.csv.")
        dataset, files = read_table(Path(self.data), self.columns, [self.valid, self.test])
        check_encoder(self.model.name, dataset.task, self.model.max_length)
        train, found = dataset.train, []
        for rows, which in zip(files, ("valid", "test"), strict=True):
            held = rows
            if rows is None:
                # the same number of rows for both, whichever of them has a file
                train, held = held_apart(train, self.held_out, round(self.held_out * len(dataset.train)))
            if held is None and which == "test":
                raise DataError("`held_out` must be above 0 without a file `test`, but is 0. Give one of them.")
            found.append(held)
        valid, test = found
        assert test is not None
        return Splits(dataset=replace(dataset, train=train, dev=test), train=train, valid=valid, test=test)

    def make_task(self, data: Splits) -> SentenceTask:
        return SentenceTask(self, data)

    def portable(self) -> SentenceExperiment:
        return replace(self, data=None, valid=None, test=None)


def held_apart(rows: Rows, share: float, number: int | None = None) -> tuple[Rows, Rows | None]:
    """The rows that are trained on, and a share of them, or a number, that is held out, chosen at random."""
    if share == 0:
        return rows, None
    number = round(share * len(rows)) if number is None else number
    if not 0 < number < len(rows):
        raise DataError(
            f"`held_out` must leave rows on both sides, but {share:g} of {len(rows)} rows is {number}. Change it, or 0."
        )
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(SPLIT_SEED)).tolist()
    return rows.take(sorted(order[number:])), rows.take(sorted(order[:number]))


class SentenceTask(PretrainedTask[PretrainedExperiment, Splits]):
    """An encoder with a head for one label of each row."""

    @property
    def glue(self) -> LabelTask:
        """The labels and the metrics."""
        return self.data.dataset.task

    @cached_property
    def train(self) -> TokenizedTexts:
        found = self._examples("train")
        assert found is not None
        return found

    def open(self, name: str | os.PathLike[str]) -> nn.Module:
        return load_encoder(name, self.glue)

    def plan(self, model: nn.Module) -> Plan:
        """The matrices of the encoder. The head, which is small, stays whole."""
        base = getattr(model, "base_model_prefix", "")
        heads = [name for name, part in model.named_children() if name != base and any(True for _ in part.parameters())]
        return find_plan(model, exclude=[*self.experiment.exclude, *heads])

    def evaluate(self, model: nn.Module, split: str) -> dict[str, float] | None:
        """The metrics of the task, in float32."""
        examples = self._examples(split)
        return None if examples is None else score(self.glue, *predict(model.to(self.device), examples))

    def example(self) -> dict[str, Tensor]:
        """A text of the greatest length."""
        tokens: Tensor = self.train.tensors["input_ids"]
        return {"input_ids": tokens[:1, :1].expand(1, tokens.shape[1]).contiguous()}

    def _examples(self, split: str) -> TokenizedTexts | None:
        rows: Rows | None = getattr(self.data, split)
        if rows is None:
            return None
        model, known = self.experiment.model, self.data.tokenized
        key = split, model.name, model.max_length, self.device
        if key not in known:
            labels = [int(label) for label in rows.labels] if self.glue.labels else rows.labels
            known[key] = TokenizedTexts(
                self.tokenizer, rows.texts, labels, max_length=model.max_length, regression=self.glue.is_regression,
                device=self.device,
            )  # fmt: skip
        return known[key]


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


def check_encoder(name: str | os.PathLike[str], task: LabelTask, max_length: int) -> None:
    """Refuse a model that is not there, has a head for other labels, or cannot read batches of `max_length` tokens."""
    config = load_config(name)
    # a head that was trained for other labels would give answers that mean something else
    trained = any("ForSequenceClassification" in each for each in config.architectures or ())
    if trained and config.num_labels != task.num_labels:
        raise RankwiseError(
            f"The head of {name} must have {task.num_labels} labels for {task.title}, but has {config.num_labels}. "
            "Give a model without a head, or one that was fine-tuned for this task."
        )
    CLASSIFIER.check(config, name, max_length)
    if load_tokenizer(name).pad_token_id is None:
        raise RankwiseError(
            f"The tokenizer of {name} must have a padding token, but has none. Set its `pad_token`, and `pad_token_id` "
            "of the model's config, and save both again."
        )


def load_encoder(name: str | os.PathLike[str], task: LabelTask, *, seed: int | None = None) -> nn.Module:
    """An encoder with a head for `task`: the one that was saved, or a fresh one."""
    if seed is not None:
        torch.manual_seed(seed)
    kind = "regression" if task.is_regression else "single_label_classification"
    model = CLASSIFIER.load(name, num_labels=task.num_labels, problem_type=kind)
    config: Any = model.config
    if task.labels:
        config.id2label = dict(enumerate(task.labels))
        config.label2id = {label: place for place, label in enumerate(task.labels)}
    return model


class TokenizedTexts:
    """Examples on a device."""

    def __init__(
        self,
        tokenizer: Any,
        texts: Sequence[tuple[str, ...]],
        labels: Sequence[float] | None = None,
        *,
        max_length: int = 128,
        regression: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        columns = [list(column) for column in zip(*texts, strict=True)]
        found = tokenizer(*columns, truncation=True, max_length=max_length)
        self.lengths = [len(ids) for ids in found["input_ids"]]
        self.device = torch.device(device)
        width = min(_rounded(max(self.lengths)), max_length)
        pads = {"input_ids": tokenizer.pad_token_id, "attention_mask": 0, "token_type_ids": 0}
        self.tensors = {name: self._padded(found[name], pad, width) for name, pad in pads.items() if name in found}
        if labels is not None:
            kind = torch.float32 if regression else torch.long
            self.tensors["labels"] = torch.tensor(labels, dtype=kind, device=self.device)

    def __len__(self) -> int:
        return len(self.lengths)

    def batches(self, batch_size: int, seed: int) -> Iterator[dict[str, Tensor]]:
        """One epoch in random order, with examples of similar length in each batch."""
        generator = torch.Generator().manual_seed(seed % 2**63)
        order = torch.randperm(len(self), generator=generator).tolist()
        chunks = []
        for start in range(0, len(order), POOL * batch_size):
            pool = sorted(order[start : start + POOL * batch_size], key=self.lengths.__getitem__)
            chunks += [pool[i : i + batch_size] for i in range(0, len(pool), batch_size)]
        mixed = [chunks[i] for i in torch.randperm(len(chunks), generator=generator).tolist()]
        yield from self._cut(mixed)

    def in_order(self, batch_size: int) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        """Every example once, the shortest first, with their places."""
        order = sorted(range(len(self)), key=self.lengths.__getitem__)
        chunks = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
        yield from zip(chunks, self._cut(chunks), strict=True)

    def _cut(self, chunks: list[list[int]]) -> Iterator[dict[str, Tensor]]:
        # one copy to the device for the whole epoch
        places = torch.tensor([place for chunk in chunks for place in chunk], device=self.device)
        start = 0
        for chunk in chunks:
            index, start = places[start : start + len(chunk)], start + len(chunk)
            length = _rounded(max(self.lengths[place] for place in chunk))
            picked = {name: tensor.index_select(0, index) for name, tensor in self.tensors.items()}
            yield {name: tensor[:, :length] if tensor.dim() > 1 else tensor for name, tensor in picked.items()}

    def _padded(self, rows: list[list[int]], pad: int, width: int) -> Tensor:
        padded_NL = torch.full((len(rows), width), pad, dtype=torch.long)
        for place, row in enumerate(rows):
            padded_NL[place, : len(row)] = torch.tensor(row)
        return padded_NL.to(self.device)


def _rounded(length: int) -> int:
    return -(-length // MULTIPLE) * MULTIPLE
