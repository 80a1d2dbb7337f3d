"""Every tracker gets the numbers and the histograms of every line of metrics."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rankwise.lab.training.histograms import GATES
from rankwise.lab.training.records import RunFolder
from tests.lab.training.training_toys import run

Logged = dict[int, dict[str, Any]]


class StandIn(ModuleType):
    """The part of wandb's interface that trackio has too, which remembers what it is given."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.begun: list[dict[str, Any]] = []
        self.logged: Logged = {}
        self.finished = 0

    def init(self, **settings: Any) -> StandIn:
        self.begun.append(settings)
        return self

    def log(self, content: dict[str, Any], step: int) -> None:
        self.logged[step] = content

    def finish(self) -> None:
        self.finished += 1

    class Histogram(tuple[Any, Any]):
        """Counts, and the edges between them."""

        def __new__(cls, np_histogram: tuple[Any, Any]) -> StandIn.Histogram:
            return super().__new__(cls, map(list, np_histogram))


def check(lines: list[dict[str, Any]], logged: Logged) -> None:
    """What was logged is what the run wrote down."""
    assert any(GATES in line for line in lines)
    for line in lines:
        found = logged[line["step"]]
        scalars = {name: float(value) for name, value in line.items() if name not in ("step", GATES)}
        assert {name: found[name] for name in scalars} == pytest.approx(scalars)
        for name, counts in line.get(GATES, {}).items():
            assert found[f"{GATES}/{name}"][0] == counts
            assert len(found[f"{GATES}/{name}"][1]) == len(counts) + 1
    assert len(logged) == len(lines)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_hosted_trackers_get_scalars_and_histograms(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = StandIn(name)
    monkeypatch.setitem(sys.modules, name, tracker)
    run("sru", "flop-l0", tmp_path / "runs" / "mine", trackers=(name,))
    check(RunFolder(tmp_path / "runs" / "mine").lines(), tracker.logged)
    (settings,) = tracker.begun
    assert (settings["project"], settings["name"], settings["group"]) == ("rankwise", "runs-mine", "runs")
    assert tracker.finished == 1
    # a run that is given again goes on under the same identity
    run("sru", "flop-l0", tmp_path / "runs" / "mine", trackers=(name,))
    again = tracker.begun[1]
    assert again["resume"] == "allow" and again["name"] == "runs-mine"
    assert again.get("id") == settings.get("id")


def test_tensorboard_gets_scalars_and_histograms(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run("sru", "flop-l0", tmp_path / "run", trackers=("tensorboard",))
    events = EventAccumulator(str(tmp_path / "run" / "trackers"), size_guidance={"scalars": 0, "histograms": 0})
    events.Reload()
    logged: Logged = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            logged.setdefault(event.step, {})[name] = event.value
    for name in events.Tags()["histograms"]:
        for event in events.Histograms(name):
            found = event.histogram_value
            counts = np.asarray(found.bucket)
            logged.setdefault(event.step, {})[name] = (counts.tolist(), [0.0, *found.bucket_limit])
            assert found.num == counts.sum() and 0 <= found.sum <= found.num
    check(RunFolder(tmp_path / "run").lines(), logged)
