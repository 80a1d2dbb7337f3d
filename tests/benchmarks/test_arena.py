"""The arena: calibration samples, components that are dropped by ZS-SVD's rule, and a plan that sees no test text."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")
import arena_peers
import arena_plans
from arena import Cell, Protocol, calibration


@pytest.mark.parametrize("bos", [None, 7])
def test_each_text_gives_its_share_of_windows(bos: int | None) -> None:
    texts = {"a": torch.arange(1000, 2000), "b": torch.arange(2000, 3000), "g": torch.full((9, 20), 5)}
    cell = Cell(name="ours", removed=0.2, calibrate="a+b+b+g", calibration_windows=16, calibration_length=10)
    windows = calibration(texts, cell, Protocol(bos=bos))
    assert windows.shape == (16, 10)
    assert bos is None or bool((windows[:, 0] == bos).all())
    first = windows[:, 1] // 1000
    assert [int((first == kind).sum()) for kind in (1, 2, 0)] == [4, 8, 4]
    # another sample has other windows
    other = calibration(texts, Cell(**{**vars(cell), "seed": 1}), Protocol(bos=bos))
    assert not torch.equal(windows, other)


@given(st.data())
def test_components_go_from_the_last_until_enough_is_saved(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.tuples(st.integers(4, 9), st.integers(4, 9)), min_size=1, max_size=4))
    sites: Any = [argparse.Namespace(name=str(i), shape=shape) for i, shape in enumerate(sizes)]
    plan: Any = argparse.Namespace(sites=sites)
    change = {
        site.name: data.draw(st.lists(st.floats(-1, 1), min_size=min(site.shape), max_size=min(site.shape)))
        for site in sites
    }
    most = sum(site.shape[0] * site.shape[1] - sum(site.shape) for site in sites)
    wanted = data.draw(st.integers(1, max(1, most)))
    counts = arena_peers._zero_sum(plan, change, wanted)
    saved = sum(max(0, a * b - counts[str(i)] * (a + b)) for i, (a, b) in enumerate(sizes))
    assert saved >= wanted or all(count == 1 for count in counts.values())


def test_the_plan_has_every_job_once_and_is_calibrated_on_no_text_that_is_measured() -> None:
    plan = arena_plans.plan()
    keys = [job.key for job in plan]
    assert len(keys) == len(set(keys))
    # no job is calibrated on what is measured, nor on what is close to it
    texts = {text for job in plan if job.cell for text in job.cell.calibrate.split("+")}
    assert not texts & {"valid", "test", "other", "docstrings", "news"}
