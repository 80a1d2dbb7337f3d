"""An encoder at its size before any training, by what its own answers to training rows would lose."""

from __future__ import annotations

from typing import Any

from torch import nn

from rankwise.core.budget import Budget, SizeReport
from rankwise.core.plan import Plan
from rankwise.lab.experiments.glue.config import GlueExperiment
from rankwise.lab.training.tune import Batch
from rankwise.methods.svd import Svd
from rankwise.oneshot import compress, sampled_loss
from rankwise.pruner import plan_for_method, size_account


def compress_at_once(
    experiment: GlueExperiment, model: nn.Module, plan: Plan, budget: Budget, calibration: list[Batch] | None
) -> tuple[nn.Module, SizeReport]:
    """A small copy of `model`, and its size; without calibration rows by the SVD of the weights alone."""
    method = experiment.method
    assert isinstance(method, Svd)
    data: dict[str, Any] = {}
    if calibration is not None:
        data = {"calibration": calibration, "loss": sampled_loss(experiment.seed)}
    account = size_account(model, plan_for_method(model, plan, method), method, trained=True)
    small = compress(model, budget, plan=plan, layout=method.layout, **data)
    return small, SizeReport.of(small, account, budget)
