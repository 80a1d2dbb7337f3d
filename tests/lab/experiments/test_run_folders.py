"""The folder of a run: what is in it is used again only for the same, and never replaced by something else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rankwise as rw
from rankwise.errors import CheckpointError, DataError, RankwiseError
from rankwise.lab.experiments.pipeline import prune, run, train
from rankwise.lab.experiments.run_folder import load_run
from rankwise.lab.experiments.sweeps import sweep
from rankwise.lab.tasks.streams import StreamExperiment
from rankwise.methods import make_method
from tests.lab.experiments.experiment_toys import PHASE, Phases, toy


def run_sweep(experiment: StreamExperiment, folder: Path) -> dict[str, Any]:
    return sweep(experiment, folder, methods=["fac"], removed=[0.5])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a folder of each kind is; nobody may change them."""
    folder = tmp_path_factory.mktemp("kinds")
    experiment = toy(folder)
    run(experiment, folder / "run")
    run_sweep(experiment, folder / "sweep")
    prune(experiment, folder / "run" / "base", folder / "prune")
    train(experiment, folder / "train")
    return folder


@pytest.fixture
def finished(place: Path, tmp_path: Path) -> Path:
    """A finished run of one's own."""
    return Path(shutil.copytree(place / "run", tmp_path / "run"))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


COMMANDS: dict[str, Callable[[StreamExperiment, Path, Path], Any]] = {
    "run": lambda experiment, folder, _: run(experiment, folder),
    "train": lambda experiment, folder, _: train(experiment, folder),
    "sweep": lambda experiment, folder, _: run_sweep(experiment, folder),
    "prune": lambda experiment, folder, place: prune(experiment, place / "run" / "base", folder),
}


@pytest.mark.parametrize(
    "kind, command",
    [
        ("run", "sweep"), ("run", "prune"), ("train", "sweep"), ("train", "prune"), ("sweep", "run"),
        ("sweep", "train"), ("sweep", "prune"), ("prune", "run"), ("prune", "train"), ("prune", "sweep"),
    ],
)  # fmt: skip
def test_a_folder_of_another_kind_is_refused_and_left_alone(kind: str, command: str, place: Path) -> None:
    before = contents(place / kind)
    with pytest.raises(CheckpointError, match='`format` was "rankwise-.*" and is now "rankwise-.*choose another'):
        COMMANDS[command](toy(place), place / kind, place)
    assert contents(place / kind) == before


@pytest.mark.parametrize("gone", [["record.json"], ["record.json", "experiment.json"]])
def test_a_sweep_that_was_stopped_ends_by_the_same_call_and_is_no_folder_of_a_run(
    gone: list[str], place: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(place / "sweep", tmp_path / "sweep"))
    for name in gone:
        (folder / name).unlink()
    for command in ("run", "train", "prune"):
        with pytest.raises(CheckpointError, match='`format` was "rankwise-sweep" and is now "rankwise-'):
            COMMANDS[command](toy(place), folder, place)
    run_sweep(toy(place), folder)
    assert contents(folder).keys() == {folder / path.relative_to(place / "sweep") for path in contents(place / "sweep")}


@pytest.mark.parametrize("command", [run, train])
def test_a_text_that_changed_is_refused(command: Callable[..., Any], tmp_path: Path) -> None:
    experiment = toy(tmp_path)
    command(experiment, tmp_path / "run")
    text = Path(experiment.corpus.name)
    text.write_text(text.read_text()[::-1])
    with pytest.raises(CheckpointError, match="`corpus` was .* and is now .* choose another folder"):
        command(experiment, tmp_path / "run")


@pytest.mark.parametrize("new", [{"a": "x"}, {"a": "b", "b": "a"}, {"a": "b"}])
def test_a_base_is_pruned_on_its_own_vocabulary(new: dict[str, str], finished: Path, tmp_path: Path) -> None:
    """Also where the letters are as many as before, or the same in another order."""
    experiment = toy(tmp_path)
    text = Path(experiment.corpus.name)
    text.write_text(text.read_text().translate(str.maketrans(new)))
    with pytest.raises(DataError, match="must have the vocabulary that the model was trained on .9 characters., but"):
        prune(experiment, finished / "base", tmp_path / "pruned")
    assert not (tmp_path / "pruned").exists()


FOREIGN = [
    ("record.json", "{}"),
    ("record.json", "[]"),
    ("record.json", "nonsense"),
    ("base/export.json", "{}"),
    ("flop-l0/export.json", '{"of": 1}'),
    ("flop-l0/export.json", '{"of": {}}'),
    ("flop-l0/record.json", "{}"),
    ("flop-l0/metrics.jsonl", "nonsense\n"),
    ("flop-l0/metrics.jsonl", "[]\n"),
]


@pytest.mark.parametrize("name, text", FOREIGN)
def test_what_rankwise_did_not_write_is_refused(name: str, text: str, finished: Path, place: Path) -> None:
    (finished / "record.json").unlink()
    if not name.endswith("export.json"):
        (finished / "flop-l0/export.json").unlink()
    (finished / name).write_text(text)
    with pytest.raises(CheckpointError, match=r"must be|resumes with") as caught:
        run(toy(place), finished)
    assert str(finished / name) in str(caught.value) or "{}}" in text


@pytest.mark.parametrize("text", ["{}", '{"kind": "x", "tokens": []}', '{"kind": "word", "tokens": 1}'])
def test_a_vocabulary_that_is_none_is_refused(text: str, finished: Path) -> None:
    (finished / "flop-l0/vocabulary.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"vocabulary.json must be JSON that rankwise wrote, but"):
        load_run(finished)


def test_a_time_that_was_not_measured_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/latency.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"latency.json must be JSON that rankwise wrote, but has no `asked`"):
        run(toy(tmp_path, budget=rw.Budget(latency_ms=5)), tmp_path / "run")


@pytest.mark.parametrize("gone", ["model", "vocabulary.json"])
@pytest.mark.parametrize("part", ["base", "flop-l0"])
def test_a_part_of_which_something_is_gone_is_made_again(part: str, gone: str, finished: Path, place: Path) -> None:
    whole = load_run(finished / part).model.state_dict()
    path = finished / part / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(CheckpointError, match="Run the same command again"):
        load_run(finished / part)
    run(toy(place), finished, watcher=(watcher := Phases()))
    # its checkpoints are there
    assert watcher.steps == 0
    again = load_run(finished / part).model.state_dict()
    assert all(again[name].equal(tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("stopped", [False, True])
def test_an_arm_that_was_made_otherwise_is_refused_before_any_training(stopped: bool, tmp_path: Path) -> None:
    experiment = toy(tmp_path)
    if stopped:
        with pytest.raises(KeyboardInterrupt):
            run(experiment, tmp_path / "run", watcher=Phases("pruning with flop-l0", 6))
    else:
        run(experiment, tmp_path / "run")
    before = contents(tmp_path / "run")
    method = make_method("np-l0", anneal_steps=3)
    other = replace(experiment, method=method, budget=rw.Budget(removed=0.3, of="prunable"), compare=("flop-l0",))
    with pytest.raises(CheckpointError, match="`removed` was 0.5 and is now 0.3. Restore it, or choose another folder"):
        run(other, tmp_path / "run", watcher=(watcher := Phases()))
    assert watcher.steps == 0
    assert contents(tmp_path / "run") == before


def test_how_often_checkpoints_are_written_may_change(finished: Path, place: Path) -> None:
    phase = replace(PHASE, checkpoint_every=3)
    run(toy(place, base=phase, training=phase), finished, watcher=(watcher := Phases()))
    assert watcher.steps == 0


def test_a_pruned_model_is_refused_another_size(place: Path) -> None:
    with pytest.raises(RankwiseError, match="`removed` was 0.5 and is now 0.3"):
        prune(toy(place, budget=rw.Budget(removed=0.3, of="prunable")), place / "run/base", place / "prune")
