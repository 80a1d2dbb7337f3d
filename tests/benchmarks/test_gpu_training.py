"""benchmarks/gpu_training.py: a row is of its own model."""

from __future__ import annotations

import argparse
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
import gpu_training


def test_nothing_is_left_of_the_models_before_where_memory_is_measured() -> None:
    training = gpu_training.Training(
        torch.zeros(1, 2), argparse.Namespace(repeats=2, compile=False, profile=False, record=None)
    )
    before: Any = nn.Linear(2, 2)
    # as a model and its pruner know each other
    before.itself = [before]
    left, seen = weakref.ref(before), list[bool]()
    del before
    gc.disable()
    try:
        training.measure("small", nn.Linear(2, 2), lambda: seen.append(left() is None))
    finally:
        gc.enable()
    assert seen[-2:] == [True, True]
