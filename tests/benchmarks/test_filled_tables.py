"""benchmarks/tables.py: cells are run once, kept one by one, and go on after a stop or a lost base."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from results_page.page import KNOWN

from rankwise.errors import RankwiseError
from rankwise.lab.report.comparison import VARIANTS, cells

ROOT = Path(__file__).parents[2]
import tables  # noqa: E402

from tests.lab.experiments.experiment_toys import toy  # noqa: E402

CELLS = "dense flop-l0-50 fac-50-scratch agp-50 flop-l0-50-published"
OPTIONS: dict[str, Any] = {
    "seeds": "0", "base_steps": None, "steps": None, "ramp": 0.4, "data": None, "device": "cpu", "cells": None,
}  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:.* of the gates had not decided")


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A table of a toy, and how it is filled by the command."""
    base = tables.Base(make=lambda: toy(tmp_path), dense=1e3, pruned=1e3, overhead=60)
    monkeypatch.setitem(tables.BASES, "toy", base)
    monkeypatch.setitem(tables.TABLES, "toy", {"toy": CELLS})
    return ["toy", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--device", "cpu", "--ramp", "0.4"]


def read(tmp_path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((tmp_path / "out/table-toy.json").read_text())
    return record


@pytest.mark.parametrize("table", [name for name in tables.TABLES if name != "demo"])
def test_every_cell_can_be_reached_and_is_in_the_report(table: str) -> None:
    known = {form.format(level) for _, _, form in VARIANTS for level in (50, 70, 80, 85, 90)}
    known |= {"dense", "dense-distilled"}
    assert f"table-{table}" in KNOWN
    for task in tables.tasks(table, argparse.Namespace(**OPTIONS)):
        arm = tables.variant_of(task.experiment, task.cell).experiment
        assert task.cell in known
        assert bool(arm.training.distill) == task.cell.endswith("-distilled")
        found = arm.size_preview()
        if arm.budget is not None and arm.budget.removed is not None:
            kept = found.exported - (found.parameters - found.prunable)
            assert kept / found.prunable == pytest.approx(1 - arm.budget.removed, abs=1e-3)
        # every row but those from scratch trains for as long as the control
        assert arm.training.steps == task.experiment.training.steps or arm.base is None
        assert task.seconds() > 0


def test_a_cell_says_what_is_run(tmp_path: Path) -> None:
    experiment = toy(tmp_path)
    published = tables.variant_of(experiment, "flop-l0-70-published").experiment
    assert published == replace(
        experiment,
        budget=replace(experiment.budget, removed=0.7),
        method=replace(experiment.method, recipe="published", refactor=False),
    )
    scratch = tables.variant_of(experiment, "fac-70-scratch").experiment
    assert (scratch.base, scratch.init, scratch.method.name, scratch.training.steps) == (None, "random", "fac", 16)
    distilled = tables.variant_of(experiment, "flop-l0-70-distilled").experiment
    plain = tables.variant_of(experiment, "flop-l0-70").experiment
    assert distilled == replace(plain, training=replace(plain.training, distill=tables.DISTILL))
    assert tables.variant_of(experiment, "fac-75").experiment.dropout == experiment.model.dropout / 2
    assert tables.variant_of(experiment, "dense").experiment.dropout is None
    with pytest.raises(RankwiseError, match="must be dense or METHOD-PERCENT"):
        tables.variant_of(experiment, "flop-l0")


def test_cells_are_kept_one_by_one_and_never_run_twice(
    toys: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables.main([*toys, "--cells", "dense,flop-l0-50"])
    first = read(tmp_path)
    tables.main(toys)
    said = capsys.readouterr().out
    assert said.count("training the dense model on") == 1
    (run,) = read(tmp_path)["runs"]
    assert [row["name"] for row in run["rows"]] == CELLS.split()
    assert run["rows"][:2] == first["runs"][0]["rows"]
    assert run["base"]["valid"] != run["rows"][0]["valid"]
    assert cells(read(tmp_path), "toy", "flop-l0-50")[0].lost("bits_per_character") is not None
    histograms = run["rows"][1]["gates"]["histograms"]
    assert re.search(r'"sru.layers.0.projection": \[\n\s+\[\d[\d, ]+\],', (tmp_path / "out/table-toy.json").read_text())
    assert len(next(iter(histograms.values()))) == len(run["rows"][1]["gates"]["steps"])


def test_a_base_that_is_lost_is_trained_again(toys: list[str], tmp_path: Path) -> None:
    tables.main([*toys, "--cells", "dense"])
    shutil.rmtree(tmp_path / "work")
    tables.main([*toys, "--cells", "fac-50-scratch"])
    # on a CPU it is the same base, to the last bit
    (run,) = read(tmp_path)["runs"]
    assert [row["name"] for row in run["rows"]] == ["dense", "fac-50-scratch"]
    shutil.rmtree(tmp_path / "work")
    path = tmp_path / "out/table-toy.json"
    run["base"]["valid"]["loss"] += 1e-6
    path.write_text(json.dumps({**read(tmp_path), "runs": [run]}))
    tables.main([*toys, "--cells", "flop-l0-50"])
    assert [[row["name"] for row in run["rows"]] for run in read(tmp_path)["runs"]] == [
        ["dense", "fac-50-scratch"],
        ["flop-l0-50"],
    ]
    # the control is that of the first base
    assert cells(read(tmp_path), "toy", "flop-l0-50")[0].lost("bits_per_character") is not None


def test_when_time_is_up_a_run_stops_where_it_can_go_on(
    toys: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    toys += ["--cells", "dense"]
    tables.main(toys)
    whole = read(tmp_path)["runs"][0]
    for folder in ("work", "out"):
        shutil.rmtree(tmp_path / folder)

    def time_is_up(self: tables.Lines, line: dict[str, Any]) -> None:
        if line["step"] == 6:
            signal.raise_signal(signal.SIGALRM)

    with monkeypatch.context() as patch:
        patch.setattr(tables.Lines, "report", time_is_up)
        tables.main([*toys, "--seconds", "1000"])
    assert "Stopped after step 6 of 8; run the same again to go on" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    tables.main([*toys, "--seconds", "30", "--whole"])
    assert "left out for want of time" in capsys.readouterr().out
    tables.main(toys)
    run = read(tmp_path)["runs"][0]
    assert run["base"]["valid"] == whole["base"]["valid"]
    assert run["rows"][0]["test"] == whole["rows"][0]["test"]


def test_other_settings_do_not_mix(toys: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables.main([*toys, "--cells", "dense"])
    with pytest.raises(RankwiseError, match="must be of the same settings"):
        tables.main([*toys, "--steps", "4"])
    capsys.readouterr()
    tables.main([*toys, "--plan"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[1:]] == ["dense", "base", *CELLS.split()[1:]]
    assert "done" in lines[1]


@pytest.mark.parametrize("file", sorted((ROOT / "results").glob("table-*.json")), ids=lambda file: file.stem)
def test_the_records_here_can_be_gone_on_with(file: Path) -> None:
    name = file.stem.removeprefix("table-")
    options = argparse.Namespace(**OPTIONS | {"ramp": 0.05, "device": "auto"})
    assert any(map(tables.Record(file, name).has, tables.tasks(name, options)))


def test_settings_that_came_later_do_not_count(toys: list[str], tmp_path: Path) -> None:
    tables.main([*toys, "--cells", "dense"])
    record = read(tmp_path)
    for phase in ("base", "training"):
        del record["runs"][0]["experiment"][phase]["drop_closed"]
    (tmp_path / "out/table-toy.json").write_text(json.dumps(record))
    tables.main([*toys, "--cells", "dense"])
    assert len(read(tmp_path)["runs"][0]["rows"]) == 1
