"""A checkpoint in which a bit changed is not gone on from: it is named, and so is what the run does without it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rankwise.errors import CheckpointError
from rankwise.files import CHECKSUM, sealed
from rankwise.lab.training.checkpoint import Checkpoint, Checkpoints
from tests.flips import flipped
from tests.lab.training.test_training_resume import assert_same
from tests.lab.training.training_toys import At, KillError, kill, run

FILES = ["checkpoint.json", "model.safetensors", "training.safetensors"]
FLIPS = 150


@pytest.fixture
def checkpoint() -> Checkpoint:
    weight = torch.randn(3, 2)
    model = {"weight": weight, "same": weight, "steps": torch.tensor(4)}
    training = {"optimizer.0.exp_avg": torch.randn(3, 2), "random.cpu": torch.get_rng_state()[:64]}
    return Checkpoint(4, True, model, training, {"configuration": {"lr": 0.1}, "best": None, "logged": 4, 1: (2, 3)})


def same(one: Checkpoint, other: Checkpoint) -> bool:
    pairs = [(one.model, other.model), (one.training, other.training)]
    tensors = all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs)
    return tensors and json.dumps(one.about) == json.dumps(other.about)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_refused_or_changes_nothing(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(checkpoint, None)
    assert sorted(path.name for path in (tmp_path / "step-4").iterdir()) == FILES
    path = tmp_path / "step-4" / name
    num_bits = 8 * path.stat().st_size
    loaded = 0
    for bit in range(0, num_bits, num_bits // FLIPS | 1):
        with flipped(path, bit):
            try:
                found = checkpoints.load(4)
            except CheckpointError:
                continue
            loaded += 1
            assert same(found, checkpoint)
    # white space in `checkpoint.json` means nothing
    assert loaded == 0 or name == "checkpoint.json"
    assert same(checkpoints.load(4), checkpoint)


def test_as_many_steps_are_kept_as_asked_for_and_the_best(checkpoint: Checkpoint, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    # step 3 is stopped before its evaluation, which is done when the run goes on
    saved = [(1, True), (2, True), (3, False), (3, True), (4, True)]
    kept = [[1], [1, 2], [1, 2, 3], [1, 2, 3], [1, 3, 4]]
    for (step, evaluated), steps in zip(saved, kept, strict=True):
        checkpoints.save(replace(checkpoint, step=step, evaluated=evaluated), best=1)
        assert [number for number, _ in checkpoints.steps()] == steps


@pytest.mark.parametrize("name", FILES)
def test_the_file_and_what_the_run_does_without_it_are_named(
    name: str, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(checkpoint, None)
    path = tmp_path / "step-4" / name
    # within the last value
    bit = 8 * path.stat().st_size - 40
    with flipped(path, bit), pytest.raises(CheckpointError, match=rf"step-4 is not: {name} .*; the run starts again"):
        checkpoints.load(4)
    checkpoints.save(Checkpoint(2, True, checkpoint.model, checkpoint.training, checkpoint.about), None)
    with flipped(path, bit), pytest.raises(CheckpointError, match="the run continues from the one before, of step 2"):
        checkpoints.load(4)
    monkeypatch.setenv("RANKWISE_VERIFY", "0")
    weights = tmp_path / "step-4" / "model.safetensors"
    with flipped(weights, 8 * weights.stat().st_size - 2):
        assert not same(checkpoints.load(4), checkpoint)


def test_a_run_with_a_flipped_bit_ends_with_the_same_weights_once_that_checkpoint_is_gone(tmp_path: Path) -> None:
    whole = run("sru", "flop-l0", tmp_path / "whole")
    with pytest.raises(KillError):
        run("sru", "flop-l0", tmp_path / "run", progress=At(9, kill))
    last = tmp_path / "run" / "checkpoints" / "step-8"
    for name in FILES[1:]:
        with (
            flipped(last / name, 8 * (last / name).stat().st_size - 2),
            pytest.raises(
                CheckpointError, match=f"{name} is damaged: its checksum is .*from the one before, of step 6"
            ),
        ):
            run("sru", "flop-l0", tmp_path / "run")
    shutil.rmtree(last)
    assert_same(whole, run("sru", "flop-l0", tmp_path / "run"))


@pytest.mark.parametrize(
    "changes",
    [
        {"configuration": 5}, {"configuration": {"training": []}}, {"best": 5}, {"best": {"loss": 1.0}},
        {"best": {"step": [], "loss": 1}}, {"logged": "x"}, {"seconds": None}, {"skipped": {"x": 1}},
    ],
)  # fmt: skip
def test_a_checkpoint_that_says_what_none_says_is_one_error(changes: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(KillError):
        run("sru", "flop-l0", tmp_path / "run", progress=At(7, kill))
    path = tmp_path / "run" / "checkpoints" / "step-6" / "checkpoint.json"
    content = json.loads(path.read_text())
    plain = {key: value for key, value in content.items() if key not in (CHECKSUM, "files")}
    plain["about"] |= changes
    path.write_text(json.dumps(sealed(plain, [path.with_name(name) for name in FILES[1:]])))
    with pytest.raises(CheckpointError, match="A checkpoint must be whole, but .*step-6 is not: .*of step 4"):
        run("sru", "flop-l0", tmp_path / "run")
