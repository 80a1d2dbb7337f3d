"""The loop: one call for every model and method, exact budgets, accumulation, best-on-validation, flat memory."""

from __future__ import annotations

import dataclasses
import gc
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import rankwise as rw
from rankwise.errors import DataError, RankwiseError
from rankwise.lab.data.windows import Evaluation
from rankwise.lab.tasks.language import LanguageModel, Streams, evaluate
from rankwise.lab.training import Progress, TrainingConfig, fit
from rankwise.lab.training.records import RunFolder
from rankwise.lab.training.run import Run
from rankwise.lab.training.trackers import TRACKERS
from tests.lab.training.training_toys import CONFIG, SETTINGS, make_corpus, make_model, pruner_of, run

DENSE = dataclasses.replace(CONFIG, dense_steps=0)


@pytest.mark.parametrize("kind", ["sru", "txl", "adaptive"])
@pytest.mark.parametrize("method", SETTINGS)
def test_every_method_trains_prunes_compacts_saves_and_loads(kind: str, method: str, tmp_path: Path) -> None:
    outcome = run(kind, method, tmp_path / "run")
    assert outcome.pruner is not None and outcome.best is not None
    size = outcome.pruner.size()
    small = outcome.pruner.compact()
    kept = sum(int((p != 0).sum()) for p in small.parameters()) if size.nonzeros else rw.count(small)
    assert kept <= size.exported <= size.budget == outcome.pruner.limit
    assert kept == size.exported or size.nonzeros
    assert outcome.record["sizes"]["exported"] == size.exported

    corpus = make_corpus(tmp_path / "data", "word" if kind == "adaptive" else "character")
    rw.save(small, tmp_path / "small")
    loaded = rw.load(tmp_path / "small", make_model(kind, len(corpus.vocabulary)))
    text = Evaluation(corpus.valid, unroll=CONFIG.window)
    for model in (outcome.model, small, loaded):
        quality = evaluate(LanguageModel(model), text, corpus.unit)
        assert quality.loss == pytest.approx(outcome.best.loss, rel=1e-5)


@pytest.mark.parametrize("kind", ["sru", "txl", "adaptive"])
@pytest.mark.parametrize("method", ["flop-l0", "flop-agp", "np-l0", "agp", "fac"])
def test_closed_components_are_dropped_after_the_ramp_and_change_nothing(
    kind: str, method: str, tmp_path: Path
) -> None:
    outcomes = [
        run(kind, method, tmp_path / str(drop), config=dataclasses.replace(CONFIG, drop_closed=drop), dropout=0.0)
        for drop in (True, False)
    ]
    pruners = [outcome.pruner for outcome in outcomes]
    assert pruners[0] is not None and pruners[1] is not None
    assert pruners[0].controller.is_narrowed or not method.startswith("flop")
    assert not pruners[1].controller.is_narrowed
    assert pruners[0].ranks() == pruners[1].ranks() and pruners[0].size() == pruners[1].size()
    found, want = (pruner.compact().state_dict() for pruner in pruners)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    lines = [RunFolder(outcome.folder).lines() for outcome in outcomes]
    for one, other in zip(*lines, strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() - {"seconds", "tokens_per_second", "gates"}:
            assert one[name] == pytest.approx(other[name], rel=1e-4), name


def test_checkpoints_after_the_ramp_hold_the_kept_components_alone(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, checkpoint_every=1, keep=12)
    outcome = run("txl", "flop-l0", tmp_path / "run", config=config)
    # the ramp ends with step 8
    for name, moments in (("model", 0), ("training", 2)):
        paths = [tmp_path / "run" / "checkpoints" / f"step-{step}" / f"{name}.safetensors" for step in (8, 9, 12)]
        held = [sum(tensor.numel() for tensor in load_file(path).values()) for path in paths]
        assert held[0] > held[1] == held[2]
        assert moments * rw.count(outcome.model) < held[2]


def test_the_best_weights_may_be_from_before_components_were_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation at the end of the ramp is of the size asked for, and may be the best."""
    outcomes = []
    for drop in (True, False):
        losses = iter(range(100))
        monkeypatch.setattr(Run, "evaluate", lambda *args, losses=losses: float(next(losses)))
        config = dataclasses.replace(CONFIG, eval_every=4, drop_closed=drop)
        outcomes.append(run("txl", "flop-l0", tmp_path / str(drop), config=config))
        assert outcomes[-1].best is not None and outcomes[-1].best.step == 8
    found, want = (outcome.model.state_dict() for outcome in outcomes)
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want)


def test_a_pruner_made_by_the_caller_is_taken_as_it_is(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path)
    model = make_model("sru", len(corpus.vocabulary))
    pruner = pruner_of("flop-agp")(model)
    outcome = fit(model, Streams(corpus), DENSE, tmp_path / "run", pruner=pruner)
    assert outcome.pruner is pruner
    assert pruner.steps == DENSE.steps
    with pytest.raises(ValueError, match="`dense_steps` must be 0"):
        fit(model, Streams(corpus), CONFIG, tmp_path / "other", pruner=pruner)
    with pytest.raises(ValueError, match="`dense_steps` must be 0 without a `pruner`, but is 4"):
        fit(model, Streams(corpus), CONFIG, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("kind", ["sru", "txl"])
@pytest.mark.parametrize("method", [None, "flop-agp"])
def test_accumulated_parts_are_one_large_batch(kind: str, method: str | None, tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path)
    weights = []
    for parts in (1, 2, 4):
        model = make_model(kind, len(corpus.vocabulary), dropout=0.0).double()
        pruner = pruner_of(method)(model) if method else None
        config = dataclasses.replace(DENSE, accumulate=parts, reset_every=5)
        fit(model, Streams(corpus), config, tmp_path / str(parts), pruner=pruner)
        weights.append({name: p.detach() for name, p in model.named_parameters()})
    # gates are float32, so a learned diagonal rounds there
    tolerance = {"rtol": 1e-9, "atol": 1e-10} if method is None else {"rtol": 1e-4, "atol": 1e-6}
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0], **tolerance)


class Counter(nn.Module):
    """A model whose state counts the windows it has seen, and which remembers what it was given."""

    def __init__(self, num_words: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(num_words))
        self.seen: list[tuple[bool, float]] = []

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        state = torch.zeros(tokens.shape[0], 1) if state is None else state
        assert not state.requires_grad
        self.seen.append((self.training, float(state[0])))
        return self.logits.expand(*tokens.shape, -1), state + 1 + 0 * self.logits.sum()


def test_training_carries_its_state_for_ever_and_evaluation_starts_from_none(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path)
    model = Counter(len(corpus.vocabulary))
    fit(model, Streams(corpus), DENSE, tmp_path / "run")
    assert [state for training, state in model.seen if training] == list(range(DENSE.steps))
    windows = len(Evaluation(corpus.valid, unroll=DENSE.window))
    evaluations = [state for training, state in model.seen if not training]
    assert evaluations == list(range(windows)) * (DENSE.steps // DENSE.eval_every)


@pytest.mark.parametrize("every, parts", [(1, 1), (3, 1), (3, 4), (4, 2), (7, 2), (None, 1)])
def test_streams_take_turns_to_begin_anew(every: int | None, parts: int, tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path)
    model = make_model("sru", len(corpus.vocabulary))
    empty: list[Tensor] = []

    def look(module: nn.Module, args: tuple[Tensor, Tensor | None]) -> None:
        if module.training:
            tokens, state = args
            empty.append(torch.ones(len(tokens)).bool() if state is None else (state == 0).all(2).all(0))

    model.register_forward_pre_hook(look)  # type: ignore[arg-type]
    # a single window, where all of the text would be two
    config = dataclasses.replace(DENSE, reset_every=every, accumulate=parts, eval_tokens=5)
    fit(model, Streams(corpus), config, tmp_path / "run")
    every = every or len(config.evaluation(corpus.valid))
    empty_SB = torch.cat(empty).view(DENSE.steps, DENSE.batch_size)
    assert empty_SB[0].all()
    for stream in range(DENSE.batch_size):
        begun = empty_SB[1:, stream].nonzero().flatten() + 1
        assert begun[0] <= every
        assert begun.tolist() == list(range(int(begun[0]), DENSE.steps, every))


def test_best_counts_only_at_the_size_asked_for_and_its_weights_come_back(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, steps=16, lr=0.3, schedule="constant", eval_every=1, keep=1)
    outcome = run("sru", "flop-l0", tmp_path / "run", config=config)
    lines = RunFolder(tmp_path / "run").lines()
    at_size = CONFIG.dense_steps + SETTINGS["flop-l0"]["anneal_steps"]
    assert next(line["step"] for line in lines if line["is_best"]) == at_size
    eligible = [line for line in lines if line["step"] >= at_size]
    best = min(eligible, key=lambda line: line["valid_loss"])
    assert outcome.best is not None
    assert (outcome.best.step, outcome.best.loss) == (best["step"], best["valid_loss"])
    assert best["step"] < config.steps
    corpus = make_corpus(tmp_path / "data")
    quality = evaluate(LanguageModel(outcome.model), Evaluation(corpus.valid, unroll=config.window), corpus.unit)
    assert quality.loss == best["valid_loss"]
    names = {entry.name for entry in (tmp_path / "run" / "checkpoints").iterdir()}
    assert names == {f"step-{best['step']}", "step-16"}


def test_a_ramp_longer_than_the_run_is_a_warning(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, steps=6)
    with pytest.warns(UserWarning, match="pruning has only 2 steps"):
        outcome = run("sru", "flop-agp", tmp_path / "run", config=config)
    assert outcome.best is None
    assert outcome.record["quality"] == {"valid": None}
    corpus = make_corpus(tmp_path / "data")
    model = make_model("sru", len(corpus.vocabulary))
    with pytest.warns(UserWarning, match="pruning has only 3 steps"):
        fit(
            model,
            Streams(corpus),
            dataclasses.replace(DENSE, steps=3),
            tmp_path / "given",
            pruner=pruner_of("agp")(model),
        )


def test_metrics_and_record_tell_what_was_done(tmp_path: Path) -> None:
    reports: list[Any] = []
    progress = Progress()
    progress.report = reports.append  # type: ignore[method-assign]
    outcome = run("sru", "flop-l0", tmp_path / "run", progress=progress, about={"preset": "demo"})
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines == reports
    for line in lines:
        if line["step"] % CONFIG.log_every == 0:
            assert line["bits_per_character"] == pytest.approx(line["loss"] / np.log(2))
            assert line["lr"] == CONFIG.lr_at(line["step"], pruning=line["step"] > CONFIG.dense_steps)
            assert line["tokens_per_second"] > 0
            assert ("target_size" in line) == (line["step"] > CONFIG.dense_steps)
    assert lines[-1]["target_size"] == outcome.record["sizes"]["budget"]
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record == outcome.record
    assert record["configuration"]["about"] == {"preset": "demo"}
    assert {"seed", "versions", "commit", "hardware", "sizes", "quality", "seconds"} <= record.keys()
    assert record["tokens"] == CONFIG.steps * CONFIG.batch_size * CONFIG.window
    written = json.loads((tmp_path / "run" / "config.json").read_text())["training"]
    assert TrainingConfig(**written) == CONFIG


class Untouchable:
    def __len__(self) -> int:
        return 100

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("the test text was read")

    __getitem__ = __array__ = __iter__ = None


def test_training_never_reads_the_test_text(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path)
    hidden = dataclasses.replace(corpus, test=Untouchable())  # type: ignore[arg-type]
    model = make_model("sru", len(corpus.vocabulary))
    fit(model, Streams(hidden), CONFIG, tmp_path / "run", pruner=pruner_of("flop-agp"))


def test_texts_that_are_too_short_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path)
    model = make_model("sru", len(corpus.vocabulary))
    for split in ("train", "valid"):
        short = dataclasses.replace(corpus, **{split: corpus.train[:1]})  # type: ignore[arg-type]
        with pytest.raises(DataError, match="must hold at least"):
            fit(model, Streams(short), DENSE, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_loss_that_is_not_finite_ends_the_run_and_is_never_saved(clip: float | None, tmp_path: Path) -> None:
    config = dataclasses.replace(DENSE, lr=1e30, clip=clip, schedule="constant", warmup_steps=0, checkpoint_every=1)
    with pytest.raises(RankwiseError, match="The loss must stay finite, but is not any more at step"):
        run("sru", None, tmp_path / "run", config=config)
    for line in RunFolder(tmp_path / "run").lines():
        assert np.isfinite(line["loss"])


@pytest.mark.parametrize("kind", ["sru", "txl", "adaptive"])
def test_mixed_precision_keeps_weights_and_gates_in_float32(kind: str, tmp_path: Path) -> None:
    exact = run(kind, "flop-l0", tmp_path / "exact", dropout=0.0)
    mixed = run(kind, "flop-l0", tmp_path / "mixed", dropout=0.0, config=dataclasses.replace(CONFIG, precision="bf16"))
    assert exact.best is not None and mixed.best is not None
    assert mixed.best.loss != exact.best.loss
    assert mixed.best.loss == pytest.approx(exact.best.loss, rel=0.1)
    state = mixed.model.state_dict()
    assert {t.dtype for t in state.values() if t.is_floating_point()} == {torch.float32}
    assert mixed.pruner is not None
    assert rw.count(mixed.pruner.compact()) <= mixed.pruner.limit


def test_memory_stays_flat(tmp_path: Path) -> None:
    counts: dict[int, tuple[int, int]] = {}

    class Census(Progress):
        def advance(self, step: int) -> None:
            if step in (150, 250, 350):
                gc.collect()
                tensors = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
                counts[step] = len(tensors), sum(t.numel() for t in tensors)

    config = dataclasses.replace(CONFIG, steps=350, eval_every=60, checkpoint_every=80, log_every=25)
    run("sru", "flop-l0", tmp_path / "run", config=config, progress=Census())
    assert counts[150] == counts[250] == counts[350]


def test_tensorboard_gets_the_metrics(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run("sru", "flop-agp", tmp_path / "run", trackers=("tensorboard",))
    events = list((tmp_path / "run").glob("**/events.out.tfevents.*"))
    assert any(b"valid_bits_per_character" in path.read_bytes() for path in events)


def test_an_unknown_tracker_is_refused(tmp_path: Path) -> None:
    known = "A tracker must be one of .*tensorboard.*, but is 'bensorboard' instead. Did you mean 'tensorboard'"
    with pytest.raises(RankwiseError, match=known):
        run("sru", None, tmp_path / "run", config=DENSE, trackers=("bensorboard",))


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    missing = next((name for name in TRACKERS if find_spec(name) is None), None)
    if missing is None:
        pytest.skip("every tracker is installed")
    with pytest.raises(RankwiseError, match=f"tracker {missing} needs its package, .* pip install {missing}."):
        run("sru", None, tmp_path / "run", config=DENSE, trackers=(missing,))
    assert not list(tmp_path.glob("run/**/step-*"))
