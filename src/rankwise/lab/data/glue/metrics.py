"""GLUE's official metrics, as plain closed forms. Shapes: N = rows, C = classes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from rankwise.lab.data.glue.tasks import Task

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
