"""The tasks of GLUE: which columns hold the texts and the label, how labels are written, and the official metrics.

Shapes: N = rows, C = classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rankwise.errors import DataError, nearest


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task. Data, no code."""

    name: str
    """The name on the command line."""
    title: str
    """The published name, which is also that of its folder."""
    texts: tuple[str, ...]
    """The columns of the one or two texts."""
    label: str
    """The column of the label."""
    labels: tuple[str, ...] = ()
    """How the classes 0, 1, ... are written in the file; none: the label is a number in `limits`."""
    limits: tuple[float, float] = (0.0, 5.0)
    metrics: tuple[str, ...]
    """The official ones; the first is shown where one must do."""
    columns: tuple[str, ...] = ()
    """The columns of a file without a header."""
    dev: str = "dev.tsv"
    """The file of the development set. Labels of the test sets are not published."""
    train_rows: int
    """The number of rows in the whole training set."""

    @property
    def num_labels(self) -> int:
        """Outputs of a head for this task."""
        return len(self.labels) or 1

    @property
    def is_regression(self) -> bool:
        return not self.labels


BINARY = ("0", "1")
ENTAILMENT = ("entailment", "not_entailment")
SENTENCES = ("sentence1", "sentence2")

TASKS = {
    task.name: task
    for task in (
        Task(
            name="cola", title="CoLA", texts=("sentence",), label="label", labels=BINARY, metrics=("matthews",),
            columns=("source", "label", "mark", "sentence"), train_rows=8_551,
        ),
        Task(
            name="sst2", title="SST-2", texts=("sentence",), label="label", labels=BINARY, metrics=("accuracy",),
            train_rows=67_349,
        ),
        Task(
            name="mrpc", title="MRPC", texts=("#1 String", "#2 String"), label="Quality", labels=BINARY,
            metrics=("f1", "accuracy"), train_rows=3_668,
        ),
        Task(
            name="stsb", title="STS-B", texts=SENTENCES, label="score", metrics=("spearman", "pearson"),
            train_rows=5_749,
        ),
        Task(
            name="qqp", title="QQP", texts=("question1", "question2"), label="is_duplicate", labels=BINARY,
            metrics=("f1", "accuracy"), train_rows=363_846,
        ),
        Task(
            name="mnli", title="MNLI", texts=SENTENCES, label="gold_label",
            labels=("entailment", "neutral", "contradiction"), metrics=("accuracy",), dev="dev_matched.tsv",
            train_rows=392_702,
        ),
        Task(
            name="qnli", title="QNLI", texts=("question", "sentence"), label="label", labels=ENTAILMENT,
            metrics=("accuracy",), train_rows=104_743,
        ),
        Task(
            name="rte", title="RTE", texts=SENTENCES, label="label", labels=ENTAILMENT, metrics=("accuracy",),
            train_rows=2_490,
        ),
        Task(
            name="wnli", title="WNLI", texts=SENTENCES, label="label", labels=BINARY, metrics=("accuracy",),
            train_rows=635,
        ),
    )
}  # fmt: skip


def task_named(name: str) -> Task:
    """The task of that name, as "sst2" or as "SST-2"."""
    plain = name.lower().replace("-", "")
    if plain not in TASKS:
        raise DataError(f"`task` must be one of {', '.join(TASKS)}, but is {name!r} instead.{nearest(plain, TASKS)}")
    return TASKS[plain]


Numbers = npt.NDArray[Any]


def accuracy(answers_N: Numbers, labels_N: Numbers) -> float:
    """The share of right answers."""
    return float(np.mean(answers_N == labels_N))


def f1(answers_N: Numbers, labels_N: Numbers) -> float:
    """2 TP / (2 TP + FP + FN) of class 1; 0 where that is undefined."""
    tp = int(np.sum((answers_N == 1) & (labels_N == 1)))
    wrong = int(np.sum((answers_N == 1) != (labels_N == 1)))
    return 2 * tp / (2 * tp + wrong) if tp else 0.0


def matthews(answers_N: Numbers, labels_N: Numbers) -> float:
    """(TP TN - FP FN) / sqrt((TP + FP)(TP + FN)(TN + FP)(TN + FN)); 0 where that is undefined."""
    a, b = answers_N == 1, labels_N == 1
    tp, tn, fp, fn = (int(np.sum(x & y)) for x, y in ((a, b), (~a, ~b), (a, ~b), (~a, b)))
    product = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    return (tp * tn - fp * fn) / math.sqrt(product) if product else 0.0


def pearson(answers_N: Numbers, labels_N: Numbers) -> float:
    """The correlation of the two; 0 where one of them never changes."""
    x, y = (values.astype(np.float64) - values.mean(dtype=np.float64) for values in (answers_N, labels_N))
    scale = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / scale if scale else 0.0


def spearman(answers_N: Numbers, labels_N: Numbers) -> float:
    """The correlation of their ranks, equal values sharing the mean of theirs."""
    return pearson(ranks(answers_N), ranks(labels_N))


def ranks(values_N: Numbers) -> Numbers:
    """1 for the smallest; equal values share the mean of their ranks."""
    _, place, counts = np.unique(values_N, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[place], dtype=np.float64)


METRICS: dict[str, Callable[[Numbers, Numbers], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}


def score(task: Task, logits_NC: Numbers, labels_N: Numbers) -> dict[str, float]:
    """The official metrics of a model's outputs, by name."""
    answers_N = logits_NC[:, 0] if task.is_regression else logits_NC.argmax(1)
    return {name: METRICS[name](answers_N, labels_N) for name in task.metrics}
