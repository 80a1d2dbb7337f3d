"""A whole run on several processes: every task, trained, pruned, compressed, healed and exported as by one."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rankwise.distill import Distillation
from rankwise.lab.experiments.pipeline import prune, run, train
from rankwise.lab.tasks.base import Experiment
from rankwise.lab.training.ranks import own_ranks
from tests.lab.tasks.task_toys import TASKS
from tests.ranks import run_ranks_once

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* of the gates had not decided"),
    pytest.mark.filterwarnings("ignore:These layers are left as they are"),
    pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning"),
]
NAMES = ("streams", "sentences", "causal")
FIGURES = ("loss", "accuracy")


def experiment_of(name: str, folder: Path) -> Experiment:
    """One without dropout, and with a loss that is a mean over rows."""
    folder.mkdir(exist_ok=True)
    experiment: Any = TASKS[name](folder)
    if name == "streams":
        further = {"sizes": (0.25,), "method": replace(experiment.method, schedule="linear")}
        return replace(experiment, compare=("svd",), model=replace(experiment.model, dropout=0.0), **further)
    config = folder / "encoder" / "config.json"
    plain = json.loads(config.read_text())
    plain |= {key: 0.0 for key in plain if "dropout" in key}
    config.write_text(json.dumps(plain))
    return replace(experiment, distillation=Distillation(hidden=0.0))


def on_two(rank: int, count: int, folder: Path) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    ranks = own_ranks()
    experiments = ranks.first(lambda: {name: experiment_of(name, folder / f"data-{name}") for name in NAMES})
    found = {name: run(experiment, folder / name)["rows"] for name, experiment in experiments.items()}
    experiment = experiments["streams"]
    # a model that was taken on the way is lost, so the training must be done again
    ranks.first(lambda: shutil.rmtree(folder / "streams/flop-l0-at-25"))
    found["again"] = run(experiment, folder / "streams")["rows"]
    train(experiment, folder / "apart")
    prune(experiment, folder / "apart/base", folder / "apart/flop-l0")
    ranks.largest(0)
    return found


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    return run_ranks_once(tmp_path_factory, "pipeline", on_two, 2, preload=("tests.lab.tasks.task_toys",))


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_make_the_models_of_one(name: str, two: Any, tmp_path: Path) -> None:
    ranks, folder = two
    assert ranks[0][name] == ranks[1][name]
    rows = run(experiment_of(name, tmp_path / "data"), tmp_path / "run")["rows"]
    for row, other in zip(ranks[0][name], rows, strict=True):
        assert (row["name"], row["parameters"]) == (other["name"], other["parameters"])
        for split in ("valid", "test"):
            for figure in row[split].keys() & set(FIGURES):
                assert row[split][figure] == pytest.approx(other[split][figure], rel=1e-4), (row["name"], figure)
    assert files_of(folder / name) == files_of(tmp_path / "run")


def files_of(folder: Path) -> set[str]:
    paths = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    return {path for path in paths if "step-" not in path}


def test_a_training_that_cannot_be_resumed_is_done_again_by_all(two: Any) -> None:
    for found in two[0]:
        assert [row["test"] for row in found["again"]] == [row["test"] for row in found["streams"]]


def test_a_base_that_two_processes_trained_is_pruned_later(two: Any) -> None:
    _, folder = two
    apart = json.loads((folder / "apart/flop-l0/export.json").read_text())["rows"][-1]
    whole = next(row for row in two[0][0]["streams"] if row["name"] == "flop-l0")
    assert apart["test"] == whole["test"]
