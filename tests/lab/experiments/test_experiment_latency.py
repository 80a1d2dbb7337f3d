"""A time as an experiment's budget: measured once, kept, and turned into a size before anything is trained."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import rankwise as rw
from rankwise.adapters.plans import find_plan
from rankwise.cli.settings import override
from rankwise.lab.experiments.pipeline import LATENCY, find_latency, run, with_size
from rankwise.lab.experiments.presets import PRESETS
from rankwise.lab.tasks.base import Experiment
from rankwise.lab.tasks.sentences import SentenceTask
from tests.lab.experiments import glue_toys
from tests.lab.experiments.experiment_toys import toy

INPUTS = {"x": torch.randn(2, 128)}

pytestmark = pytest.mark.filterwarnings("ignore:.* of the gates had not decided")


class Slow(nn.Module):
    """Takes 25 ms, and least when it is small; a model on the meta device cannot be timed at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(128, 128) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(5e-7 * rw.count(self))
        return self.layers(x)


def asked(milliseconds: float, folder: Path) -> Experiment:
    return toy(folder, budget=rw.Budget(latency_ms=milliseconds), exclude=())


def test_what_is_found_is_a_size_and_a_plan_of_an_experiment(tmp_path: Path) -> None:
    model, experiment = Slow(), asked(16, tmp_path)
    found = find_latency(experiment, model, find_plan(model), INPUTS, tmp_path / "run")
    assert found["measured"] <= found["asked"] == 16 < found["dense"]
    sized = with_size(experiment, found)
    assert sized.budget == rw.Budget(params=found["params"])
    plan = find_plan(model, exclude=sized.exclude)
    small = rw.compress(model, sized.budget, plan=plan)
    assert rw.count(small) <= found["params"] < rw.count(model)
    names = {name for name, _ in model.named_modules()}
    assert {site.name for site in plan.sites} == {"layers.0", "layers.1", "layers.2"} - set(found["left_dense"])
    assert set(found["left_dense"]) <= names
    # what asks for a size keeps it
    assert with_size(toy(tmp_path), found) == toy(tmp_path)


def test_it_is_measured_once(tmp_path: Path) -> None:
    model, experiment = Slow(), asked(16, tmp_path)
    found = find_latency(experiment, model, find_plan(model), INPUTS, tmp_path)
    (tmp_path / LATENCY).write_text(json.dumps(found))
    unable = model.to("meta")
    assert find_latency(experiment, unable, find_plan(unable), INPUTS, tmp_path) == found
    # another time, or other inputs, must be measured
    for other, inputs in ((asked(15, tmp_path), INPUTS), (experiment, {"x": torch.randn(3, 128)})):
        with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
            find_latency(other, unable, find_plan(unable), inputs, tmp_path)


@pytest.mark.parametrize("name", ["demo", "glue-minilm"])
def test_a_time_takes_the_place_of_a_presets_size(name: str) -> None:
    changed = override(PRESETS[name].make(), {"budget.latency_ms": "20"})
    assert changed.budget == rw.Budget(latency_ms=20)


@pytest.mark.parametrize("make", [toy, glue_toys.toy])
@pytest.mark.parametrize("goal, words", [(1e9, "must be below what the dense model takes"), (1e-9, "must be at least")])
def test_a_time_out_of_reach_is_refused_before_anything_is_written(
    make: Callable[..., Experiment], goal: float, words: str, tmp_path: Path
) -> None:
    experiment = make(tmp_path, budget=rw.Budget(latency_ms=goal))
    with pytest.raises(rw.BudgetError, match=f"`latency_ms` {words}.* but is {re.escape(f'{goal:g}')} instead"):
        run(experiment, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def measured_before(folder: Path, parameters: int, inputs: dict[str, list[int]], **changes: Any) -> dict[str, Any]:
    """A folder of a run whose size was found already: how fast a toy is, nobody can rely on."""
    of = {"parameters": parameters, "inputs": inputs, "exclude": changes.pop("exclude")}
    known = {"asked": 5.0, "measured": 4.0, "dense": 8.0, "params": parameters // 2, "left_dense": [], "of": of}
    folder.mkdir()
    (folder / LATENCY).write_text(json.dumps(known | changes))
    return known | changes


def test_a_language_model_is_pruned_to_the_size_that_was_found(tmp_path: Path) -> None:
    experiment = toy(tmp_path)
    (dense, _) = run(experiment, tmp_path / "plain")["rows"]
    inputs = {"tokens_BT": [1, experiment.training.window]}
    known = measured_before(tmp_path / "run", dense["parameters"], inputs, exclude=list(experiment.exclude))
    record = run(replace(experiment, budget=rw.Budget(latency_ms=5)), tmp_path / "run")
    assert record["latency"] == known
    assert record["experiment"]["budget"]["latency_ms"] == 5
    (_, pruned) = record["rows"]
    assert rw.count(rw.load(tmp_path / "run" / "flop-l0" / "model")) == pruned["parameters"] <= known["params"]


def test_an_encoder_is_pruned_to_the_size_that_was_found_and_keeps_layers_dense(tmp_path: Path) -> None:
    experiment = glue_toys.toy(tmp_path)
    width = SentenceTask(experiment, experiment.read()).train.tensors["input_ids"].shape[1]
    dense = hf.AutoModelForSequenceClassification.from_pretrained(experiment.model.name)
    slow = [name for name, module in dense.named_modules() if "attention" in name and isinstance(module, nn.Linear)]
    known = measured_before(tmp_path / "run", rw.count(dense), {"input_ids": [1, width]}, exclude=[], left_dense=slow)
    record = run(replace(experiment, budget=rw.Budget(latency_ms=5)), tmp_path / "run")
    assert record["latency"] == known
    (_, pruned) = record["rows"]
    model = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "flop-l0" / "model")
    assert rw.count(model) == pruned["parameters"] <= known["params"]
    assert all(type(model.get_submodule(name)) is nn.Linear for name in slow)
