"""Long runs: batches that are not finite, memory that runs out, memory that must not grow."""

from __future__ import annotations

import dataclasses
import gc
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from rankwise.errors import RankwiseError
from rankwise.lab.tasks.language import StreamObjective
from rankwise.lab.training import Progress
from rankwise.lab.training.records import RunFolder
from rankwise.lab.training.run import SKIPPED_IN_A_ROW
from tests.lab.training.test_training_resume import assert_same
from tests.lab.training.training_toys import CONFIG, At, KillError, kill, run

SKIP = dataclasses.replace(CONFIG, nonfinite="skip")


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes the loss of some steps NaN, and with it the carried state."""
    real, steps = StreamObjective.loss, []
    begin = StreamObjective.begin_step

    def begin_step(self: Any, step: int) -> None:
        self.current = step
        begin(self, step)

    def loss(self: Any, part: Any, index: int) -> Any:
        found, reported, state = real(self, part, index)
        if self.current not in steps:
            return found, reported, state
        return found * torch.nan, reported * torch.nan, tree_map(lambda t: None if t is None else t * torch.nan, state)

    monkeypatch.setattr(StreamObjective, "begin_step", begin_step)
    monkeypatch.setattr(StreamObjective, "loss", loss)
    return steps.extend


@pytest.mark.parametrize("kind", ["sru", "txl"])
@pytest.mark.parametrize("method", [None, "flop-l0", "flop-agp"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_batch_that_is_not_finite_is_skipped_and_counted(
    kind: str, method: str | None, clip: float | None, spoil: Any, tmp_path: Path
) -> None:
    spoil([2, 6, 7])
    config = dataclasses.replace(SKIP, clip=clip, accumulate=2, dense_steps=4 if method else 0)
    whole = run(kind, method, tmp_path / "whole", config=config)
    assert whole.record["skipped_steps"] == 3
    lines = [line for line in RunFolder(whole.folder).lines() if "lr" in line]
    assert [line["skipped_steps"] for line in lines] == [0, 1, 1, 3, 3, 3]
    # steps 7 and 8 have no loss to tell of
    assert [line["step"] for line in lines if line.get("loss", 0) == 0] == [8]
    assert "loss" not in lines[3]
    assert all(torch.isfinite(tensor).all() for tensor in whole.model.state_dict().values())
    assert whole.pruner is None or whole.pruner.steps == config.steps - config.dense_steps
    for step in (3, 7, 8, 10):
        with pytest.raises(KillError):
            run(kind, method, tmp_path / "killed", config=config, progress=At(step, kill))
    again = run(kind, method, tmp_path / "killed", config=config)
    assert_same(whole, again)
    assert again.record["skipped_steps"] == 3


def test_a_skipped_batch_moves_no_weight(spoil: Any, tmp_path: Path) -> None:
    spoil(range(4, 100))
    config = dataclasses.replace(SKIP, dense_steps=0, eval_every=100)
    short = dataclasses.replace(config, steps=4)
    one, other = (run("sru", None, tmp_path / str(each.steps), config=each) for each in (short, config))
    for name, tensor in one.model.state_dict().items():
        assert torch.equal(tensor, other.model.state_dict()[name]), name


def test_without_the_setting_a_loss_that_is_not_finite_stops_the_run(spoil: Any, tmp_path: Path) -> None:
    spoil([6])
    with pytest.raises(RankwiseError, match="is not any more at step 8. .*set `nonfinite` to skip"):
        run("sru", "flop-l0", tmp_path / "run")
    assert "skipped_steps" not in run("sru", None, tmp_path / "dense", config=_dense(CONFIG, 5)).record


def test_a_run_that_only_skips_is_stopped(spoil: Any, tmp_path: Path) -> None:
    spoil(range(10_000))
    with pytest.raises(RankwiseError, match=f"was not in {SKIPPED_IN_A_ROW} steps one after the other, up to step 99"):
        run("sru", None, tmp_path / "run", config=_dense(SKIP, 200))


def _dense(config: Any, steps: int) -> Any:
    return dataclasses.replace(config, dense_steps=0, steps=steps, eval_every=1_000, log_every=1_000)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB"), MemoryError("no more"), "DefaultCPUAllocator: no"],
)
def test_a_step_that_does_not_fit_says_what_to_try(
    error: Exception | str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real, calls = StreamObjective.loss, []

    def loss(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 6:
            raise RuntimeError(error) if isinstance(error, str) else error
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(StreamObjective, "loss", loss)
        with pytest.raises(RankwiseError, match=r"memory of cpu, but step 6 .*`accumulate` \(1;.*`batch_size` \(4\)"):
            run("sru", "flop-l0", tmp_path / "run")
    whole = run("sru", "flop-l0", tmp_path / "whole")
    assert_same(whole, run("sru", "flop-l0", tmp_path / "run"))


def test_other_errors_of_torch_are_not_called_a_matter_of_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def loss(*args: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(StreamObjective, "loss", loss)
    with pytest.raises(RuntimeError, match="^a bug$"):
        run("sru", "flop-l0", tmp_path / "run")


class _Memory(Progress):
    """Bytes that Python holds, now and then."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def advance(self, step: int) -> None:
        if step % 200 == 0:
            gc.collect()
            self.found.append(tracemalloc.get_traced_memory()[0])


def test_memory_does_not_grow_over_many_steps(tmp_path: Path) -> None:
    """In all phases, with evaluations, checkpoints and lines of metrics; 100,000 steps: benchmarks/torture.py."""
    config = dataclasses.replace(
        CONFIG, steps=1_600, dense_steps=200, eval_every=100, checkpoint_every=100, log_every=20, window=2
    )
    tracemalloc.start()
    try:
        run("sru", "flop-l0", tmp_path / "run", config=config, progress=(memory := _Memory()))
    finally:
        tracemalloc.stop()
    # pruning holds more than dense training, so the first two do not count
    first, last = memory.found[2], memory.found[-1]
    assert last - first < 30_000, memory.found
