"""What every task promises: it runs with every kind of method, resumes bit for bit, and its models load."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import rankwise as rw
from rankwise.cli.settings import override, settings
from rankwise.core.budget import Budget
from rankwise.lab.experiments.pipeline import prune, run, train
from rankwise.lab.experiments.run_folder import find_run, read_experiment
from rankwise.lab.experiments.saved_models import find_models
from rankwise.lab.report import table
from rankwise.lab.tasks.base import Experiment, from_json
from tests.lab.experiments.experiment_toys import Phases
from tests.lab.tasks.task_toys import TASKS

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* of the gates had not decided"),
    # random weights, to which some layers mean little
    pytest.mark.filterwarnings("ignore:These layers are left as they are"),
    # modules of C code that transformers imports
    pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning"),
]
COMPARED = ("svd", "fac")


@pytest.fixture(scope="module", params=TASKS)
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Experiment, Path]:
    """A finished run of each task; nobody may change it."""
    folder = tmp_path_factory.mktemp(request.param)
    experiment = replace(TASKS[request.param](folder), compare=COMPARED)
    run(experiment, folder / "run")
    return experiment, folder / "run"


def weights(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.glob("*/model/model.safetensors")}


def test_there_is_a_row_for_every_kind_of_experiment(tmp_path: Path) -> None:
    assert {type(make(tmp_path)) for make in TASKS.values()} == set(Experiment.kinds.values())


def test_sizes_are_met_and_saved_models_give_the_figures_of_the_record(finished: tuple[Experiment, Path]) -> None:
    experiment, folder = finished
    record = json.loads((folder / "record.json").read_text())
    dense, *rows = record["rows"]
    assert [row["method"] for row in rows] == ["flop-l0", "svd", "fac"]
    task = experiment.make_task(experiment.read())
    budget = experiment.budget
    assert budget is not None
    for row in rows:
        model = task.load(folder / row["folder"] / "model")
        share = row["removed" if budget.of == "model" else "removed_of_prunable"]
        assert rw.count(model) == row["parameters"] < dense["parameters"]
        assert share >= (budget.removed or 0)
        for split in ("valid", "test"):
            assert task.evaluate(model, split) == pytest.approx(row[split], rel=1e-5)
        assert row["matrices"] and row["milliseconds"]["median"] > 0
    assert len(table(record).rows) == 4


STOPS = [
    ("training the dense model", 3),
    ("evaluating base", None),
    ("pruning with flop-l0", 5),
    ("healing flop-l0", 3),
    ("training svd", 7),
    ("pruning with fac", 9),
    ("timing", None),
]


def test_a_run_that_is_stopped_anywhere_ends_with_the_same_weights(
    finished: tuple[Experiment, Path], tmp_path: Path
) -> None:
    experiment, folder = finished
    for title, step in STOPS:
        step = step if step is None else min(step, 7)
        with pytest.raises(KeyboardInterrupt):
            run(experiment, tmp_path / "run", watcher=Phases(title, step))
    run(experiment, tmp_path / "run", watcher=(rest := Phases()))
    assert rest.steps == 0
    assert weights(tmp_path / "run") == weights(folder)


def test_a_finished_run_is_only_read_and_one_with_other_settings_refused(finished: tuple[Experiment, Path]) -> None:
    experiment, folder = finished
    before = (folder / "record.json").read_bytes()
    assert run(experiment, folder, watcher=(watcher := Phases())) == json.loads(before)
    assert watcher.titles == [f"reading {experiment.reads}"]
    other = replace(experiment, base=replace(experiment.base, lr=5e-3))
    with pytest.raises(rw.CheckpointError, match="`lr` was .* and is now 0.005"):
        run(other, folder)
    assert (folder / "record.json").read_bytes() == before


@pytest.mark.parametrize("name", TASKS)
def test_a_base_is_trained_once_and_pruned_later(name: str, tmp_path: Path) -> None:
    experiment = TASKS[name](tmp_path)
    row = train(experiment, tmp_path / "run")
    assert row["method"] == "dense"
    pruned = prune(experiment, tmp_path / "run/base", tmp_path / "run/flop-l0")
    whole = run(experiment, tmp_path / "whole")["rows"][-1]
    assert pruned["test"] == whole["test"]
    assert pruned["parameters"] == whole["parameters"]


@pytest.mark.parametrize("name", TASKS)
def test_further_sizes_come_from_one_ramp_and_survive_a_kill(name: str, tmp_path: Path) -> None:
    """The models that were taken before a kill are the ones that are exported after it."""
    experiment = TASKS[name](tmp_path)
    budget = experiment.budget
    assert budget is not None and budget.removed is not None
    sizes = (0.25 * budget.removed, 0.5 * budget.removed)
    experiment = replace(experiment, sizes=sizes, method=replace(experiment.method, schedule="linear"))  # type: ignore[call-arg]
    record = run(experiment, tmp_path / "run")
    names = [f"flop-l0-at-{100 * size:g}" for size in sizes]
    assert [row["name"] for row in record["rows"][1:]] == [*names, "flop-l0"]
    sized = [row["parameters"] for row in record["rows"]]
    assert sized == sorted(sized, reverse=True) and len(set(sized)) == 4
    for step in (2, 4, 6):
        with pytest.raises(KeyboardInterrupt):
            run(experiment, tmp_path / "killed", watcher=Phases("pruning with flop-l0", step))
    run(experiment, tmp_path / "killed")
    assert weights(tmp_path / "killed") == weights(tmp_path / "run")
    # a model that is lost is taken from the same training again
    shutil.rmtree(tmp_path / "killed" / names[0])
    run(experiment, tmp_path / "killed")
    assert weights(tmp_path / "killed") == weights(tmp_path / "run")


@pytest.mark.parametrize("name", TASKS)
def test_an_experiment_survives_json_and_its_settings_have_names(name: str, tmp_path: Path) -> None:
    experiment = TASKS[name](tmp_path)
    assert from_json(json.loads(json.dumps(experiment.to_json()))) == experiment
    assert not [setting.name for setting in settings(experiment).values() if not setting.about]
    changed: Any = override(experiment, {"training.lr": "3e-4", "healing": "none", "budget.removed": "0.1"})
    assert (changed.training.lr, changed.healing) == (3e-4, None)
    assert changed.budget == replace(experiment.budget, removed=0.1) if experiment.budget else Budget(removed=0.1)


def test_the_models_of_a_run_can_be_timed_against_each_other(finished: tuple[Experiment, Path]) -> None:
    experiment, folder = finished
    found = find_models(folder)
    assert set(found.models) == {"dense", "flop-l0", *COMPARED}
    assert found.length == experiment.length
    for model in found.models.values():
        model.eval()(found.tokens(2, found.length))


def test_what_was_saved_names_no_place_on_this_machine(finished: tuple[Experiment, Path], tmp_path: Path) -> None:
    experiment, folder = finished
    saved = find_run(folder)
    assert saved.experiment == read_experiment(folder / "flop-l0") == saved.experiment.portable()
    assert saved.path == folder / "flop-l0" / "model"
    kept = {name: value for name, value in saved.experiment.to_json().items() if name not in ("corpus", "model")}
    assert str(tmp_path.parent) not in json.dumps(kept)
    assert all(torch.isfinite(p).all() for p in experiment.make_task(experiment.read()).load(saved.path).parameters())
