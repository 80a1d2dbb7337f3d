"""Settings of the whole suite: seeds, one thread per worker, hypothesis without a clock."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("suite", deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
