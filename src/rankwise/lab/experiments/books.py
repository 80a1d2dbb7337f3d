"""What the row of a model tells of its size, of what each matrix kept, and of how its gates decided."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rankwise.core.budget import SizeReport, count
from rankwise.core.plan import Site, get_module
from rankwise.deploy.architectures import build
from rankwise.lab.experiments.config import Experiment
from rankwise.lab.training import Outcome
from rankwise.lab.training.histograms import GATES
from rankwise.lab.training.records import RunFolder
from rankwise.pruner import plan_for_method, size_account


def sizes(experiment: Experiment, outcome: Outcome, small: nn.Module, num_words: int) -> dict[str, Any]:
    """Of the exported model, and what that removes."""
    if outcome.pruner is not None:
        report = outcome.pruner.size()
    elif experiment.budget is None:
        return {"parameters": count(small), "removed": 0.0, "removed_of_prunable": 0.0, "nonzeros": False}
    else:
        model = _fresh(experiment, num_words)
        plan = plan_for_method(model, experiment.plan(model), experiment.method)
        account = size_account(model, plan, experiment.method, trained=True)
        report = SizeReport.of(small, account, experiment.budget)
    return {
        "parameters": report.exported,
        "removed": report.removed,
        "removed_of_prunable": report.removed_of_prunable,
        "nonzeros": report.nonzeros,
    }


def analysis(experiment: Experiment, outcome: Outcome, small: nn.Module, num_words: int) -> dict[str, Any]:
    """What was kept of each matrix, (parameters before, after); and how the gates of the first and the last decided."""
    pruner = outcome.pruner
    if pruner is None:
        if experiment.budget is None:
            return {}
        sites = experiment.plan(_fresh(experiment, num_words)).sites
        return {"matrices": {site.name: [site.params, _kept(small, site)] for site in sites}}
    counts = pruner.controller.num_kept(pruner.limit)
    books = zip(pruner.plan.sites, pruner.account.curves, counts, strict=True)
    found: dict[str, Any] = {"matrices": {site.name: [site.params, curve(k)] for site, curve, k in books}}
    lines = [line for line in RunFolder(outcome.folder).lines() if GATES in line]
    if lines:
        shown = dict.fromkeys((pruner.plan.sites[0].name, pruner.plan.sites[-1].name))
        histograms = {name: [line[GATES][name] for line in lines] for name in shown}
        found["gates"] = {"steps": [line["step"] for line in lines], "histograms": histograms}
    return found


def _fresh(experiment: Experiment, num_words: int) -> nn.Module:
    """The dense model, without weights."""
    with torch.device("meta"):
        return build(replace(experiment.model, num_words=num_words))


def _kept(small: nn.Module, site: Site) -> int:
    """Parameters of a matrix in a compact model, its bias not among them."""
    return sum(p.numel() for p in get_module(small, site.uses[0]).parameters() if p.dim() > 1)
