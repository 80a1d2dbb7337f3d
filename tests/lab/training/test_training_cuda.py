"""Training on a GPU, where steps are recorded as a graph; skipped where there is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import rankwise as rw
from rankwise.lab.tasks.language import LanguageModel, StreamObjective, Streams, evaluate
from rankwise.lab.training.run import Run
from tests.lab.training.training_toys import CONFIG, SETTINGS, make_corpus, make_model

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("ignore:.* of the gates had not decided"),
]
GPU = replace(CONFIG, device="auto", steps=40, dense_steps=0, accumulate=2, reset_every=3)


def start(folder: Path, kind: str, method: str | None, config: Any = GPU) -> Run:
    corpus = make_corpus(folder)

    def gate(model: torch.nn.Module) -> rw.Pruner:
        settings = {**SETTINGS[method or "dense"], "anneal_steps": 20} if method != "fac" else {}
        return rw.Pruner(model, rw.Budget(removed=0.4), method or "dense", **settings)

    model = make_model(kind, len(corpus.vocabulary), dropout=0.0)
    teacher = make_model(kind, len(corpus.vocabulary), dropout=0.0) if config.distill else None
    run = Run(model, Streams(corpus), config, folder, pruner=gate if method else None, teacher=teacher)
    run.begin_pruning()
    return run


@pytest.mark.parametrize("kind, distill", [("sru", 0.0), ("txl", 0.0), ("adaptive", 0.0), ("sru", 0.5), ("txl", 0.5)])
@pytest.mark.parametrize("method", [None, "flop-l0", "flop-agp", "fac", "agp", "np-l0"])
def test_a_graph_trains_the_weights_that_single_commands_train(
    kind: str, method: str | None, distill: float, tmp_path: Path
) -> None:
    graphed, plain = (start(tmp_path / name, kind, method, replace(GPU, distill=distill)) for name in "ab")
    assert graphed.weights.graphs is not None
    plain.weights.graphs = None
    replays = 0
    for _ in range(30):
        graphed.train_step()
        plain.train_step()
        replays += len(graphed.weights.graphs.recorded)
    assert replays > 5
    if method in ("flop-l0", "flop-agp"):
        # closed components were dropped after step 20, and steps recorded anew
        assert graphed.pruner is not None and graphed.pruner.controller.is_narrowed
        assert graphed.weights.graphs.recorded
    assert torch.isfinite(graphed.weights.sums).all()
    for (name, got), want in zip(graphed.model.named_parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-3, msg=name)


@pytest.mark.parametrize("kind", ["sru", "adaptive"])
@pytest.mark.parametrize("method", [None, "flop-l0"])
def test_a_step_does_not_wait_for_the_gpu(kind: str, method: str | None, tmp_path: Path) -> None:
    run = start(tmp_path, kind, method)
    for _ in range(6):
        run.train_step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        run.train_step()
    waits = [e.name for e in profile.events() if e.name in ("cudaStreamSynchronize", "cudaDeviceSynchronize")]
    # the profiler's own, when it stops
    assert waits in ([], ["cudaDeviceSynchronize"])


@pytest.mark.parametrize("kind", ["sru", "txl", "adaptive"])
def test_an_evaluation_on_a_gpu_finds_the_quality_of_one_on_a_cpu(kind: str, tmp_path: Path) -> None:
    run = start(tmp_path, kind, None)
    for _ in range(20):
        run.train_step()
    objective = run.objective
    assert isinstance(objective, StreamObjective)
    found = evaluate(objective.language, objective.valid, objective.corpus.unit)
    wanted = evaluate(LanguageModel(run.model.cpu()), objective.valid, objective.corpus.unit)
    assert found.num_targets == wanted.num_targets
    assert found.loss == pytest.approx(wanted.loss, abs=1e-4)
