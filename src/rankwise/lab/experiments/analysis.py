"""What the row of a model tells: its size, what each matrix kept, and how its gates decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from rankwise.core.budget import SizeReport, count
from rankwise.core.plan import Site, get_module
from rankwise.lab.training.run import GATES
from rankwise.pruner import Pruner


def size_row(model: nn.Module, size: SizeReport | None) -> dict[str, Any]:
    """The size of an exported model, and what that removes; without a report the model is dense."""
    if size is None:
        return {"parameters": count(model), "removed": 0.0, "removed_of_prunable": 0.0, "nonzeros": False}
    return {
        "parameters": size.exported,
        "removed": size.removed,
        "removed_of_prunable": size.removed_of_prunable,
        "nonzeros": size.nonzeros,
    }


def kept_by_gates(pruner: Pruner, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Parameters of each matrix, before and after; and how the gates of the first and the last matrix decided.

    `lines` are the metrics of the training.
    """
    counts = pruner.controller.num_kept(pruner.limit)
    triples = zip(pruner.plan.sites, pruner.account.curves, counts, strict=True)
    found: dict[str, Any] = {"matrices": {site.name: [site.params, curve(k)] for site, curve, k in triples}}
    lines = [line for line in lines if GATES in line]
    if lines:
        shown = dict.fromkeys((pruner.plan.sites[0].name, pruner.plan.sites[-1].name))
        histograms = {name: [line[GATES][name] for line in lines] for name in shown}
        found["gates"] = {"steps": [line["step"] for line in lines], "histograms": histograms}
    return found


def kept_by_shape(sites: Sequence[Site], small: nn.Module) -> dict[str, Any]:
    """Parameters of each matrix, before and after, as the compact model has them; biases are not counted."""

    def kept(site: Site) -> int:
        return sum(p.numel() for p in get_module(small, site.uses[0]).parameters() if p.dim() > 1)

    return {"matrices": {site.name: [site.params, kept(site)] for site in sites}}
