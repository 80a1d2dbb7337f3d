"""Histograms of gates: every component counted, few of them, and none but 0 and 1 once the choice is made."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from rankwise.lab.training.histograms import BINS, GATES, POINTS
from rankwise.lab.training.records import RunFolder
from tests.lab.training.training_toys import CONFIG, run


def test_every_component_is_counted_and_in_the_end_is_open_or_closed(tmp_path: Path) -> None:
    pruner = run("txl", "flop-l0", tmp_path / "run").pruner
    assert pruner is not None
    lines = [line for line in RunFolder(tmp_path / "run").lines() if GATES in line]
    assert [line["step"] for line in lines] == [6, 8]
    sizes = {site.name: site.pair_rank or min(site.shape) for site in pruner.plan.sites}
    for line in lines:
        assert {name: sum(found) for name, found in line[GATES].items()} == sizes
    ranks = pruner.ranks()
    for name, found in lines[-1][GATES].items():
        assert len(found) == BINS
        assert (found[0], found[-1]) == (sizes[name] - ranks[name], ranks[name])


@pytest.mark.parametrize("drop_closed", [True, False])
def test_components_that_were_dropped_count_as_closed(drop_closed: bool, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, steps=24, log_every=1, drop_closed=drop_closed)
    pruner = run("sru", "flop-agp", tmp_path / "run", config=config).pruner
    assert pruner is not None
    assert pruner.controller.is_narrowed == drop_closed
    lines = [line for line in RunFolder(tmp_path / "run").lines() if GATES in line]
    after = [line for line in lines if line["step"] > CONFIG.dense_steps + pruner.controller.anneal_steps]
    assert after
    sizes = {site.name: site.pair_rank or min(site.shape) for site in pruner.plan.sites}
    ranks = pruner.ranks()
    for line in lines:
        assert {name: sum(found) for name, found in line[GATES].items()} == sizes
    for line in after:
        assert all(found[0] >= sizes[name] - ranks[name] for name, found in line[GATES].items())


def test_histograms_are_few_however_many_lines_there_are(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, steps=104, log_every=1)
    for method, expected in (("flop-l0", [5, 6, 7, 8]), ("flop-agp", [5, 6, 7, 8, 10, 15, 20])):
        run("sru", method, tmp_path / method, config=config)
        lines = RunFolder(tmp_path / method).lines()
        steps = [line["step"] for line in lines if GATES in line]
        assert len(lines) == 104 and steps[: len(expected)] == expected
        # four steps of ramp, a line each; then none once gates stand still, or one of five
        assert len(steps) == (4 if method == "flop-l0" else 4 + POINTS - 1)


@pytest.mark.parametrize("method", ["dense", "fac", "agp"])
def test_gates_that_nobody_learns_have_no_histogram(method: str, tmp_path: Path) -> None:
    run("sru", method, tmp_path / "run")
    assert not any(GATES in line for line in RunFolder(tmp_path / "run").lines())


def test_a_gate_that_learns_is_as_open_as_the_mean_of_its_samples(tmp_path: Path) -> None:
    pruner = run("sru", "flop-l0", tmp_path / "run").pruner
    assert pruner is not None
    controller, gate = pruner.controller, pruner.controller.gates[0]
    gate.alpha.copy_(torch.linspace(-3, 3, gate.num_components))
    controller._step = 0
    noise = torch.rand(50_000, gate.num_components, generator=torch.Generator().manual_seed(0))
    opened = controller.open_fractions()
    assert opened is not None
    torch.testing.assert_close(opened[0], gate.distribution.sample(gate.alpha, noise).mean(0), atol=0.01, rtol=0)
