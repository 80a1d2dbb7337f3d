"""Settings of the whole suite: seeds, one thread per worker, hypothesis without a clock."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("suite", deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
settings.load_profile("suite")


@pytest.fixture(autouse=True, scope="module")
def _frozen_imports() -> None:
    """Keep what was imported out of garbage collections, and of the searches for optimizers that checks of loops make.

    Each of them would look at a million objects of libraries, and every module of tests may import more.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def pytest_unconfigure() -> None:
    """Let the interpreter free them at its end: nanobind would call them leaks."""
    gc.unfreeze()
