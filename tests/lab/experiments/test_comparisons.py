"""What the rows of a table are compared with, and how one method takes the place of another in an experiment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import rankwise as rw
from rankwise.cli.settings import override
from rankwise.lab.experiments.pipeline import prune, run
from rankwise.lab.experiments.run_folder import read_experiment
from rankwise.lab.experiments.sweeps import sweep
from rankwise.lab.report import table
from rankwise.lab.tasks.streams import StreamExperiment
from rankwise.methods import make_method
from tests.lab.experiments.experiment_toys import PHASE, toy


def test_only_a_control_is_called_dense(tmp_path: Path) -> None:
    """It trains as long as what is compared with it. Without one the base stands there, and nothing is compared."""
    base, longer = replace(PHASE, steps=4), replace(PHASE, steps=8)
    taught = replace(longer, distill=0.5)
    cases = {"asked": (("dense",), longer), "teacher": ((), taught), "neither": ((), longer)}
    found = {
        name: run(toy(tmp_path, base=base, training=training, compare=compare), tmp_path / name)
        for name, (compare, training) in cases.items()
    }
    rows = {name: [(row["name"], row["steps"]) for row in record["rows"]] for name, record in found.items()}
    assert rows["asked"] == rows["teacher"] == [("dense", 8), ("flop-l0", 8)]
    assert rows["neither"] == [("base", 4), ("flop-l0", 8)]
    for name, record in found.items():
        assert record["base"]["steps"] == 4
        made = table(record)
        lost = [row[made.columns.index("against dense")] for row in made.rows]
        assert [bool(words) for words in lost] == [False, name != "neither"]


def test_the_table_shows_the_share_that_was_asked_for(tmp_path: Path) -> None:
    """Of the prunable part; a share of the model is all there is where that was asked for."""
    made = table(run(toy(tmp_path, budget=rw.Budget(removed=0.5, of="prunable")), tmp_path / "prunable"))
    _, row = made.rows
    of_model, of_prunable = (float(row[made.columns.index(name)].rstrip("%")) for name in ("removed", "of prunable"))
    assert of_model < 50 <= of_prunable
    made = table(run(toy(tmp_path, budget=rw.Budget(removed=0.3)), tmp_path / "model"))
    assert "of prunable" not in made.columns
    assert float(made.rows[1][made.columns.index("removed")].rstrip("%")) >= 30


def test_a_base_for_a_method_without_a_ramp_can_be_pruned_by_one_with_gates(tmp_path: Path) -> None:
    experiment = toy(tmp_path, method=make_method("fac"), compare=("flop-l0",))
    rows = {row["name"]: row for row in run(experiment, tmp_path / "run")["rows"]}
    gated = override(read_experiment(tmp_path / "run"), {"method": "flop-l0", "corpus.cache": str(tmp_path / "cache")})
    assert isinstance(gated, StreamExperiment)
    assert prune(gated, tmp_path / "run/base", tmp_path / "alone")["test"] == rows["flop-l0"]["test"]


def test_a_dense_experiment_can_be_swept(tmp_path: Path) -> None:
    experiment = toy(tmp_path).with_method("dense")
    (found,) = sweep(experiment, tmp_path / "sweep", methods=["flop-l0"], removed=[0.3])["runs"]
    dense, pruned = found["rows"]
    assert (dense["name"], pruned["name"]) == ("dense", "flop-l0-30")
    assert pruned["parameters"] <= 0.7 * dense["parameters"]
