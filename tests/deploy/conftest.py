"""A small compact model, for tests of what is done with one."""

from __future__ import annotations

import pytest
from torch import nn

import rankwise as rw
from tests.deploy.saved_toys import mlp


@pytest.fixture
def small() -> nn.Module:
    return rw.compress(mlp(), rw.Budget(removed=0.5))
