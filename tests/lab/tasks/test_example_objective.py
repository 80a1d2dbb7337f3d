"""Epochs over examples: the model learns, steps and schedule are kept, and a killed run ends with the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankwise as rw
from rankwise.core.budget import Budget
from rankwise.errors import BudgetError
from rankwise.lab.tasks.examples import ExampleObjective
from rankwise.lab.training import TuningConfig, fit
from rankwise.lab.training.records import RunFolder
from rankwise.lab.training.snapshots import Snapshots
from tests.lab.tasks.example_toys import Tuned, tune
from tests.lab.training.training_toys import At, KillError, kill

pytestmark = pytest.mark.filterwarnings("ignore:.* of the gates had not decided")


class Line:
    """y = x W for one W."""

    def __init__(self, number: int = 64) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(number, 12, generator=generator)
        self.y = self.x @ torch.randn(12, 3, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def double(self) -> Line:
        self.x, self.y = self.x.double(), self.y.double()
        return self

    def batches(self, batch_size: int, seed: int) -> Iterator[dict[str, Tensor]]:
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        for index in order.split(batch_size):
            yield {"x": self.x[index], "y": self.y[index]}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Linear(16, 3))


def config(**changes: Any) -> TuningConfig:
    return TuningConfig(**{"epochs": 10, "batch_size": 16, "lr": 4e-2, "log_every": 8, **changes})


def weights(trained: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trained.parameters()])


def test_it_learns_and_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    lines: list[list[Any]] = []
    ends = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        trained = model()
        tune(trained, Line(), config(), loss, tmp_path / name, seed=seed)
        lines.append(RunFolder(tmp_path / name).lines())
        ends.append(weights(trained))
    assert [line["step"] for line in lines[0]] == [8, 16, 24, 32, 40]
    assert lines[0][-1]["loss"] < 0.3 * lines[0][0]["loss"]
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


@pytest.mark.parametrize(
    "changes, steps", [({}, 40), ({"epochs": 0.5}, 2), ({"max_steps": 7}, 7), ({"epochs": 1, "min_steps": 9}, 9)]
)
def test_the_number_of_steps_is_the_one_asked_for(changes: dict[str, Any], steps: int, tmp_path: Path) -> None:
    settings = config(**changes)
    assert tune(model(), Line(), settings, loss, tmp_path).record["steps"] == settings.steps(64) == steps


def test_a_killed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    """Wherever it is killed: within an epoch of four batches, at its end, before and after a checkpoint."""
    settings = config(checkpoint_every=3)
    whole, killed = model(), model()
    tune(whole, Line(), settings, loss, tmp_path / "whole")
    for step in (1, 4, 5, 7, 8, 13, 39, 40):
        with pytest.raises(KillError):
            tune(model(), Line(), settings, loss, tmp_path / "killed", progress=At(step, kill))
    tune(killed, Line(), settings, loss, tmp_path / "killed")
    assert torch.equal(weights(whole), weights(killed))


def test_every_epoch_has_every_example_once_in_another_order() -> None:
    settings = config().counted(64, precision="no", device="cpu", seed=3)
    objective = ExampleObjective(model(), Line(), settings, torch.device("cpu"), loss)
    epochs = [torch.cat([objective.batch(step)[0]["x"] for step in range(4 * e, 4 * e + 4)]) for e in range(3)]
    assert all(torch.equal(epoch.sort(0).values, Line().x.sort(0).values) for epoch in epochs)
    assert not torch.equal(epochs[0], epochs[1])
    # a batch depends on the step alone
    assert torch.equal(objective.batch(6)[0]["x"], epochs[1][32:48])


def test_parts_of_a_batch_are_one_batch_however_short_it_is(tmp_path: Path) -> None:
    # the last batches of the epochs have 6 rows and 1
    for number in (22, 17):
        found = []
        for parts in (1, 4):
            settings = config(clip=None).counted(number, precision="no", device="cpu", seed=0)
            trained = model().double()
            lines, folder = Line(number).double(), tmp_path / f"{number}-{parts}"
            fit(trained, Tuned(lines, loss), replace(settings, accumulate=parts), folder)
            found.append((weights(trained), [line["loss"] for line in RunFolder(folder).lines()]))
        torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)


def test_the_learning_rate_rises_and_falls_to_zero() -> None:
    settings = config(warmup=0.25).counted(64, precision="no", device="cpu", seed=0)
    rates = [settings.lr_at(step) for step in range(1, 41)]
    assert rates[0] == pytest.approx(4e-3)
    assert rates[9] == max(rates) == pytest.approx(4e-2)
    assert rates[-1] == 0
    assert all(a - b == pytest.approx(4e-2 / 30) for a, b in pairwise(rates[9:]))


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"batch_size": 0}, "`batch_size` must be a whole number of at least 1, but is 0"),
        ({"warmup": 1.0}, "`warmup` must be a share of the steps, in .0, 1., but is 1.0"),
        ({"lr": -1.0}, "`lr` must be positive and finite, but is -1.0"),
        ({"schedule": "steep"}, "`schedule` must be one of 'linear', 'cosine', 'constant', but is 'steep'"),
        ({"weight_decay": -0.1}, "`weight_decay` must be at least 0 and finite, but is -0.1"),
    ],
)
def test_bad_settings_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**wrong)


def test_one_run_gives_a_model_of_every_size_on_the_way(tmp_path: Path) -> None:
    gated = model()
    dense = rw.count(gated)
    pruner = rw.Pruner(gated, Budget(removed=0.6), anneal_steps=20)
    snapshots = Snapshots(pruner, [Budget(removed=fraction) for fraction in (0.6, 0.2, 0.4)])
    tune(gated, Line(), config(), loss, tmp_path, pruner=pruner, after_step=lambda _: snapshots.take())
    assert [snapshot.budget.removed for snapshot in snapshots.taken] == [0.2, 0.4]
    found = snapshots.finish()
    for snapshot in found:
        assert rw.count(snapshot.model) == snapshot.size.exported <= (1 - (snapshot.budget.removed or 0)) * dense
    # taken as the target passed, the last one at the end of training
    passed = [next(k for k in range(21) if 1 - (1 - k / 20) ** 3 >= removed / 0.6) for removed in (0.2, 0.4)]
    assert [snapshot.step for snapshot in found] == [*passed, 40]
    x = Line().x
    gated.eval()
    torch.testing.assert_close(found[-1].model(x), gated(x))


def test_a_size_below_the_budget_is_refused() -> None:
    pruner = rw.Pruner(model(), Budget(removed=0.3), anneal_steps=20)
    with pytest.raises(BudgetError, match="must be at least the pruner's own .* Give the pruner the smallest"):
        Snapshots(pruner, [Budget(removed=0.5)])
