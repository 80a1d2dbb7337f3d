"""A preview says what a pruner would do, from shapes alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rankwise as rw
from rankwise.errors import OutOfReachError
from rankwise.methods import make_method
from rankwise.preview import preview


def build() -> nn.Module:
    return nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 30))


def test_it_is_what_the_pruner_exports_and_needs_no_weights() -> None:
    budget = rw.Budget(removed=0.4)
    with torch.device("meta"):
        empty = build()
    found = preview(empty, make_method("fac"), budget, None, [])
    pruner = rw.Pruner(build(), budget, "fac")
    assert {matrix.names[0]: matrix.kept for matrix in found.matrices} == pruner.ranks()
    assert (found.dense, found.exported) == (pruner.size().dense, pruner.size().exported)
    assert found.exported == found.fixed + sum(matrix.exported or 0 for matrix in found.matrices)
    assert found.final


def test_without_a_budget_there_are_no_ranks() -> None:
    found = preview(build(), make_method("np-l0", anneal_steps=1), None, None, ["3"])
    assert found.component == "feature"
    assert [(item["name"], item["reason"]) for item in found.left_out][-1] == (
        "0",
        "an embedding has no input features to prune",
    )
    assert (found.budget, found.exported) == (None, None)
    assert all(matrix.kept is None for matrix in found.matrices)


def test_a_size_out_of_reach_names_what_is_left_out() -> None:
    with pytest.raises(OutOfReachError, match=r"Left out of the plan: 3 510 \(.*\), biases, norms and the like 16 "):
        preview(build(), make_method("fac"), rw.Budget(params=10), None, ["3"])
