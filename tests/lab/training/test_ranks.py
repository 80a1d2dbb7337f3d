"""Several processes train as one does: the same weights, checkpoints that any number of them resumes, and one voice."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

import rankwise.lab.training.watchdog as watchdog
from rankwise.errors import RankwiseError
from rankwise.lab.tasks.language import StreamObjective
from rankwise.lab.training import Interrupted, Outcome
from rankwise.lab.training.ranks import FirstRankError, own_ranks
from rankwise.lab.training.records import RunFolder
from tests.lab.training.training_toys import CONFIG, At, KillError, kill, run
from tests.ranks import run_ranks, run_ranks_once

PRELOAD = ("tests.lab.training.training_toys",)
CASES: list[tuple[str, str | None]] = [("sru", None), ("sru", "flop-l0"), ("txl", "flop-agp"), ("adaptive", "flop-l0")]
States = dict[str, torch.Tensor]


def train(
    kind: str, method: str | None, folder: Path, *, dropout: float = 0.0, nonfinite: str = "stop", **more: Any
) -> Outcome:
    """Dense steps, a ramp, and more; on the way states are emptied, and components dropped."""
    changes = {"dense_steps": 4 if method else 0, "nonfinite": nonfinite}
    config = dataclasses.replace(CONFIG, accumulate=2, reset_every=5, checkpoint_every=3, **changes)
    return run(kind, method, folder, config=config, dropout=dropout, **more)


def states_of(outcome: Outcome) -> States:
    return {name: tensor.clone() for name, tensor in outcome.model.state_dict().items()}


def assert_close(found: States, expected: States) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def last_process() -> int:
    return int(own_ranks().gather(torch.tensor(os.getpid()))[-1])


def stop_last_rank(folder: Path, step: int, **more: Any) -> int:
    """Let a scheduler stop the last rank after a step; the signal that this rank has stopped by."""
    last = last_process()
    at = At(step, lambda: os.kill(last, signal.SIGTERM))
    with pytest.raises(Interrupted, match="Stopped after step") as stopped:
        train("sru", "flop-l0", folder, progress=at, **more)
    return stopped.value.signal


class StoppedWhileEvaluating(StreamObjective):
    """A scheduler stops the last rank in an evaluation that takes long."""

    last: int

    def evaluate(self, check: Any) -> float:
        os.kill(self.last, signal.SIGTERM)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            check()
            time.sleep(0.01)
        raise AssertionError("the request was not heard")


class Spoiled(StreamObjective):
    """The losses of two steps are not finite."""

    def begin_step(self, step: int) -> None:
        self.factor = math.nan if step in (2, 6) else 1.0
        super().begin_step(step)

    def loss(self, part: Any, index: int) -> Any:
        loss, reported, state = super().loss(part, index)
        return loss * self.factor, reported * self.factor, state


def on_two(rank: int, count: int, folder: Path, alone: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"signals": []}
    for kind, method in CASES:
        found[f"{kind}-{method}"] = states_of(train(kind, method, folder / f"{kind}-{method}"))
    # what one rank cannot use, all leave out
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr("rankwise.lab.tasks.language.StreamObjective", Spoiled)
        skipped = train("sru", "flop-l0", folder / "skipped", nonfinite="skip")
    found["skipped"] = states_of(skipped)
    # with dropout, so that each rank's random numbers matter
    found["whole"] = states_of(train("sru", "flop-l0", folder / "whole", dropout=0.2))
    for step in (2, 7, 10):
        found["signals"].append(stop_last_rank(folder / "stopped", step, dropout=0.2))
    with pytest.MonkeyPatch.context() as patch:
        StoppedWhileEvaluating.last = last_process()
        patch.setattr("rankwise.lab.tasks.language.StreamObjective", StoppedWhileEvaluating)
        with pytest.raises(Interrupted, match="Stopped after step 12 of 12") as stopped:
            train("sru", "flop-l0", folder / "stopped", dropout=0.2)
    found["signals"].append(stopped.value.signal)
    found["resumed"] = states_of(train("sru", "flop-l0", folder / "stopped", dropout=0.2))
    found["signals"].append(stop_last_rank(folder / "for-one", 6))
    found["from-one"] = states_of(train("sru", "flop-l0", alone))
    broken = folder / "broken"
    broken.mkdir(exist_ok=True)
    (broken / "checkpoints").touch()
    try:
        train("sru", None, broken)
    except RankwiseError as error:
        found["error"] = f"{type(error) is FirstRankError}: {error}"
    # whoever ends while another one still listens is taken for dead
    own_ranks().largest(0)
    return found


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    alone = tmp_path_factory.mktemp("one") / "run"
    with pytest.raises(KillError):
        train("sru", "flop-l0", alone, progress=At(8, kill))
    return run_ranks_once(tmp_path_factory, "loop", on_two, 2, alone, preload=PRELOAD)


@pytest.mark.parametrize("kind, method", CASES)
def test_two_processes_give_what_one_gives(kind: str, method: str | None, two: Any, tmp_path: Path) -> None:
    ranks, folder = two
    name = f"{kind}-{method}"
    whole = train(kind, method, tmp_path / "run")
    assert_close(ranks[0][name], states_of(whole))
    assert all(torch.equal(ranks[1][name][key], tensor) for key, tensor in ranks[0][name].items())
    lines, expected = RunFolder(folder / name).lines(), RunFolder(tmp_path / "run").lines()
    for line, other in zip(lines, expected, strict=True):
        assert line.keys() == other.keys()
        for figure in line.keys() & {"step", "loss", "valid_loss", "gradient_norm", "expected_size"}:
            assert line[figure] == pytest.approx(other[figure], rel=1e-3), figure


def test_a_run_that_one_rank_was_stopped_in_goes_on_bit_for_bit(two: Any) -> None:
    ranks, folder = two
    for found in ranks:
        assert found["signals"] == [signal.SIGTERM] * 5
        assert all(torch.equal(found["resumed"][name], tensor) for name, tensor in found["whole"].items())
    timed = ("seconds", "tokens_per_second")
    one, other = (
        [
            {name: value for name, value in line.items() if name not in timed}
            for line in RunFolder(folder / each).lines()
        ]
        for each in ("whole", "stopped")
    )
    assert one == other


def test_checkpoints_resume_on_another_number_of_processes(two: Any, tmp_path: Path) -> None:
    ranks, folder = two
    expected = states_of(train("sru", "flop-l0", tmp_path / "run"))
    assert_close(ranks[0]["from-one"], expected)
    shutil.copytree(folder / "for-one", tmp_path / "for-one")
    assert RunFolder(tmp_path / "for-one").finished() is None
    assert_close(states_of(train("sru", "flop-l0", tmp_path / "for-one")), expected)


def test_a_batch_that_one_rank_cannot_use_is_left_out_by_all(
    two: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, folder = two
    monkeypatch.setattr("rankwise.lab.tasks.language.StreamObjective", Spoiled)
    alone = train("sru", "flop-l0", tmp_path / "run", nonfinite="skip")
    assert_close(ranks[0]["skipped"], states_of(alone))
    record = RunFolder(folder / "skipped").finished()
    assert record is not None and record["skipped_steps"] == alone.record["skipped_steps"] == 2


def test_an_error_of_the_first_rank_is_that_of_all(two: Any) -> None:
    ranks, _ = two
    messages = [found["error"].partition(": ") for found in ranks]
    assert [kind for kind, _, _ in messages] == ["False", "True"]
    assert messages[0][2] == messages[1][2]


def hang_at_6(objective: StreamObjective, step: int) -> None:
    if step == 6:
        own_ranks().watchdog.leave()
        # so that the test itself can end it
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(600)


def hang(rank: int, count: int, folder: Path) -> None:
    """The last rank stops for ever in the middle of a training."""
    watchdog.PERIOD, watchdog.PATIENCE = 0.05, 1.0
    os.dup2(os.open(folder / f"said-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    if rank:
        StreamObjective.begin_step = hang_at_6  # type: ignore[method-assign]
    train("sru", "flop-l0", folder / "run")


def test_a_rank_that_hangs_ends_the_others_with_a_word(tmp_path: Path) -> None:
    with pytest.raises(mp.ProcessExitedException) as ended:
        run_ranks(hang, 2, tmp_path / "ranks", preload=PRELOAD)
    assert (ended.value.error_index, ended.value.exit_code) == (0, watchdog.EXIT_CODE)
    (line,) = (tmp_path / "ranks/said-0").read_text().splitlines()
    assert "process 1 has given no sign of life for 1 s" in line
    assert RunFolder(tmp_path / "ranks/run").finished() is None
    assert (tmp_path / "ranks/run/checkpoints/step-6").exists()
    assert train("sru", "flop-l0", tmp_path / "ranks/run").record["steps"] == CONFIG.steps
