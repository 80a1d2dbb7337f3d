"""An experiment from its base to its table: sizes, quality, resuming, and what is refused."""

from __future__ import annotations

import concurrent.futures
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import rankwise as rw
from rankwise.deploy.architectures import build
from rankwise.errors import CheckpointError, RankwiseError
from rankwise.lab.data.windows import Evaluation
from rankwise.lab.experiments.pipeline import Variant, prune, run, run_variants, train
from rankwise.lab.experiments.run_folder import load_run, read_experiment
from rankwise.lab.experiments.sample import sample
from rankwise.lab.experiments.sweeps import sweep
from rankwise.lab.report import table
from rankwise.lab.tasks.streams import StreamExperiment
from rankwise.lab.training.records import RunFolder
from rankwise.methods import make_method
from tests.lab.experiments.experiment_toys import MODELS, PHASE, Phases, toy

METHODS = {
    "fac": make_method("fac"),
    "np-l0": make_method("np-l0", anneal_steps=3),
    "agp": make_method("agp", anneal_steps=3, mask_every=1),
    "flop-agp": make_method("flop-agp", anneal_steps=3, mask_every=1),
    "flop-l0": make_method("flop-l0", anneal_steps=3),
    "svd": make_method("svd"),
}


@pytest.mark.filterwarnings("ignore:These layers are left as they are")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_on_every_model(kind: str, method: str, tmp_path: Path) -> None:
    """Train, prune, compact, save, load, evaluate: the size is met, and the record tells of the model that is saved."""
    experiment = toy(tmp_path, kind, method=METHODS[method])
    record = run(experiment, tmp_path / "run")
    dense, row = record["rows"]
    assert (dense["method"], row["method"]) == ("dense", method)
    exported = load_run(tmp_path / "run")
    corpus = experiment.corpus.load()
    shortfall = dense["parameters"] - row["parameters"] - math.ceil(row_prunable(experiment) / 2)
    assert 0 <= shortfall < 60  # the costliest component of these models
    size = rw.count(exported.model)
    if method == "agp":
        assert row["nonzeros"]
        assert size == dense["parameters"]
        # a weight may be zero by itself, so the count is an upper bound
        assert sum(int(p.count_nonzero()) for p in exported.model.parameters()) <= row["parameters"]
    else:
        assert size == row["parameters"]
    for split in ("valid", "test"):
        assert row[split]["loss"] == pytest.approx(plain_loss(exported.model, getattr(corpus, split)), rel=1e-5)
    assert row["milliseconds"]["p20"] <= row["milliseconds"]["median"] <= row["milliseconds"]["p80"]
    before, after = (sum(books) for books in zip(*row["matrices"].values(), strict=True))
    assert (before, dense["parameters"] - before + after) == (row_prunable(experiment), row["parameters"])
    assert record["base"] == dense


def row_prunable(experiment: StreamExperiment) -> int:
    corpus = experiment.corpus.load()
    model = replace(experiment.model, num_words=len(corpus.vocabulary))
    return replace(experiment, model=model).size_preview().prunable


@torch.no_grad()
def plain_loss(model: torch.nn.Module, text: Any) -> float:
    """Mean negative log likelihood by `log_softmax` over everything, target by target."""
    total, targets = 0.0, 0
    state = None
    for x, y in Evaluation(text, unroll=PHASE.window):
        logits, state = model(x, state)
        logp = torch.log_softmax(logits.double(), -1)
        counted = y >= 0
        total -= float(logp.gather(-1, y.clamp(min=0)[..., None]).squeeze(-1)[counted].sum())
        targets += int(counted.sum())
    return total / targets


STOPS = [
    ("training the dense model", 3),
    ("evaluating base", None),
    ("pruning with flop-l0", 2),
    ("pruning with flop-l0", 6),
    ("evaluating flop-l0", None),
    ("training the dense model on", 5),
    ("pruning with fac", None),
    ("timing", None),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[StreamExperiment, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("whole")
    experiment = toy(folder, compare=("dense", "fac"))
    return experiment, run(experiment, folder / "run")


@pytest.mark.parametrize("title, step", STOPS)
def test_a_stopped_experiment_goes_on(
    title: str, step: int | None, whole: tuple[StreamExperiment, dict[str, Any]], tmp_path: Path
) -> None:
    """Wherever it is stopped, the same call again ends with the same figures, and repeats nothing that was finished."""
    experiment, expected = whole
    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path / "run", watcher=(stopped := Phases(title, step)))
    record = run(experiment, tmp_path / "run", watcher=(rest := Phases()))
    for found, wanted in zip(record["rows"], expected["rows"], strict=True):
        for key in ("name", "parameters", "valid", "test", "steps"):
            assert found[key] == wanted[key], key
    assert rest.steps <= 4 * PHASE.steps - stopped.steps + PHASE.checkpoint_every


@pytest.mark.parametrize("title", ["evaluating base", "training the dense model on", "evaluating fac", "timing"])
def test_a_second_run_in_the_folder_is_refused_also_between_two_parts(title: str, tmp_path: Path) -> None:
    experiment, refusals = toy(tmp_path, compare=("dense", "fac")), []

    class Second(Phases):
        def phase(self, now: str) -> None:
            super().phase(now)
            if now == title:
                with concurrent.futures.ThreadPoolExecutor(1) as pool:
                    refusals.append(pool.submit(run, experiment, tmp_path / "run").exception())

    record = run(experiment, tmp_path / "run", watcher=Second())
    assert [str(each).partition(",")[0] for each in refusals] == ["One process may run in a folder"]
    assert len(record["rows"]) == 3


def test_a_finished_experiment_is_only_read(whole: tuple[StreamExperiment, dict[str, Any]], tmp_path: Path) -> None:
    experiment, _ = whole
    first = run(experiment, tmp_path / "run")
    again = run(experiment, tmp_path / "run", watcher=(watcher := Phases()))
    assert again == json.loads(json.dumps(first))
    assert watcher.titles == [f"reading {experiment.corpus.name}"]


def test_another_method_shares_the_base(tmp_path: Path) -> None:
    experiment = toy(tmp_path)
    train(experiment, tmp_path / "run")
    row = prune(experiment, tmp_path / "run" / "base", tmp_path / "run" / "flop-l0", watcher=(first := Phases()))
    other = prune(
        experiment.with_method("fac"), tmp_path / "run" / "base", tmp_path / "other" / "small", watcher=Phases()
    )
    assert first.steps == PHASE.steps
    assert (row["name"], other["name"]) == ("flop-l0", "small")
    assert rw.count(load_run(tmp_path / "other" / "small").model) == other["parameters"]
    whole = run(experiment, tmp_path / "run", watcher=(rest := Phases()))
    assert rest.steps == 0
    assert whole["rows"][1]["test"] == row["test"]


def test_another_experiment_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    run(toy(tmp_path), tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"lr.*\n?.*another"):
        run(toy(tmp_path, base=replace(PHASE, lr=2e-2)), tmp_path / "run")
    with pytest.raises(CheckpointError, match="another"):
        run(toy(tmp_path, model=replace(MODELS["sru"], num_layers=3)), tmp_path / "run")


def test_seeds_differ_and_repeat(tmp_path: Path) -> None:
    first, again, other = (
        run(toy(tmp_path, seed=seed), tmp_path / name)["rows"] for seed, name in ((0, "a"), (0, "b"), (1, "c"))
    )
    assert [row["test"] for row in first] == [row["test"] for row in again]
    assert all(one["test"] != two["test"] for one, two in zip(first, other, strict=True))


def test_the_dense_control_teaches_every_arm(tmp_path: Path) -> None:
    """With all of the loss the teacher's, a copy of it has nothing to learn, and what was cut from it has."""
    phase, model = replace(PHASE, distill=1.0, lr=1e-9, clip=1.0), replace(MODELS["sru"], dropout=0.0)
    experiment = toy(tmp_path, training=phase, model=model)
    arms = {name: experiment.with_method(name) for name in ("flop-l0", "svd", "fac")}
    arms["again"] = replace(experiment.with_method("dense"), training=phase)
    record = run_variants(experiment, [Variant(name, arm) for name, arm in arms.items()], tmp_path / "run")
    norms = {
        name: [line["gradient_norm"] for line in RunFolder(tmp_path / "run" / name).lines() if "gradient_norm" in line]
        for name in ("dense", *arms)
    }
    assert max(norms["again"]) < 1e-5
    assert all(norms[name][-1] > 1e-3 for name in ("flop-l0", "svd", "fac"))
    # who teaches learns from the text
    assert min(norms["dense"]) > 1e-3
    assert {row["folder"] for row in record["rows"]} == {"dense", *arms}


def test_a_pruned_model_is_taught_by_a_control_of_its_own(tmp_path: Path) -> None:
    """The same teacher, and so the same model, as in a run of all."""
    experiment = toy(tmp_path, training=replace(PHASE, distill=0.5), compare=("dense",))
    rows = {row["name"]: row for row in run(experiment, tmp_path / "run")["rows"]}
    assert prune(experiment, tmp_path / "run/base", tmp_path / "alone")["test"] == rows["flop-l0"]["test"]
    # who teaches is the control of a run in which nobody is taught
    plain = {row["name"]: row for row in run(toy(tmp_path, compare=("dense",)), tmp_path / "plain")["rows"]}
    assert plain["dense"]["test"] == rows["dense"]["test"]
    assert plain["flop-l0"]["test"] != rows["flop-l0"]["test"]


def test_where_the_control_is_compared_it_is_taught_too(tmp_path: Path) -> None:
    """Every row of a table learns by the same loss: the dense one from a control that learned from the text alone."""
    experiment = toy(tmp_path, training=replace(PHASE, distill=0.5), compare=("dense", "fac"))
    record = run(experiment, tmp_path / "run")
    rows = {row["name"]: row for row in record["rows"]}
    assert list(rows) == ["dense", "taught", "flop-l0", "fac"]
    assert {name: row.get("distill", 0) for name, row in rows.items()} == {
        "dense": 0, "taught": 0.5, "flop-l0": 0.5, "fac": 0.5,
    }  # fmt: skip
    assert rows["taught"]["parameters"] == rows["dense"]["parameters"]
    assert rows["taught"]["steps"] == rows["dense"]["steps"]
    assert rows["taught"]["test"] != rows["dense"]["test"]
    # finished, it is only read
    assert run(experiment, tmp_path / "run", watcher=(watcher := Phases())) == record
    assert watcher.steps == 0


def test_a_teacher_cannot_be_taught(tmp_path: Path) -> None:
    experiment = toy(tmp_path, method=make_method("dense"), budget=None, training=replace(PHASE, distill=0.5))
    with pytest.raises(RankwiseError, match="`training.distill` must be 0 with the method dense: it is the teacher"):
        run(experiment, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "kind, changes, message",
    [
        ("sru", {"base": replace(PHASE, distill=0.5)}, "`base.distill` must be 0: there is no teacher yet"),
        (
            "sru",
            {"base": None},
            "`training.distill` must be 0 without a base, from which a teacher is trained, but is 0.5",
        ),
        ("words", {}, "`training.distill` must be 0 with adaptive softmax, but is 0.5"),
    ],
)
def test_without_a_teacher_distillation_is_refused(
    kind: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(RankwiseError, match=message):
        toy(tmp_path, kind, **{"training": replace(PHASE, distill=0.5), **changes})


@pytest.mark.parametrize("kind", MODELS)
def test_dropout_changes_from_the_base_on(kind: str, tmp_path: Path) -> None:
    """The base and the dense control keep the model's; pruned arms have their own, and are saved with it."""
    model = replace(MODELS[kind], dropout=0.3)
    rows = {}
    for dropout in (None, 0.3, 0.0):
        experiment = toy(tmp_path, kind, model=model, dropout=dropout, compare=("dense",))
        rows[dropout] = run(experiment, tmp_path / str(dropout))["rows"]
    tests = {dropout: {row["name"]: row["test"] for row in found} for dropout, found in rows.items()}
    assert tests[None] == tests[0.3]
    assert tests[0.0]["dense"] == tests[None]["dense"]
    assert tests[0.0]["flop-l0"] != tests[None]["flop-l0"]
    assert {row["name"]: row["dropout"] for row in rows[0.0]} == {"dense": 0.3, "flop-l0": 0.0}
    for folder, rate in (("base", 0.3), ("dense", 0.3), ("flop-l0", 0.0)):
        assert load_run(tmp_path / "0.0" / folder).model.config.dropout == rate


def test_a_dropout_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`dropout` must lie in \[0, 1\), but is 1 instead"):
        toy(tmp_path, dropout=1)
    with pytest.raises(RankwiseError, match="`dropout` goes with every method but dense"):
        toy(tmp_path, dropout=0.0, method=make_method("dense"), budget=None)


def test_from_scratch_there_is_no_base(tmp_path: Path) -> None:
    experiment = toy(tmp_path, base=None, init="random", method=METHODS["fac"])
    record = run(experiment, tmp_path / "run", watcher=(watcher := Phases()))
    assert [row["name"] for row in record["rows"]] == ["fac"]
    assert watcher.steps == PHASE.steps
    with pytest.raises(CheckpointError, match="no base to train"):
        train(experiment, tmp_path / "other")


def test_an_arm_from_scratch_stands_beside_those_with_a_base(tmp_path: Path) -> None:
    experiment = toy(tmp_path)
    scratch = replace(experiment, base=None, init="random", method=METHODS["fac"])
    arms = [Variant("scratch", scratch), Variant("svd", experiment.with_method("fac"))]
    beside = run_variants(experiment, arms, tmp_path / "run")["rows"]
    alone = run(scratch, tmp_path / "alone")["rows"]
    assert [row["name"] for row in beside] == ["base", "scratch", "svd"]
    assert beside[1]["test"] == alone[0]["test"] != beside[2]["test"]


def test_a_base_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="must be trained before it is pruned.*Run `rankwise train` first"):
        prune(toy(tmp_path), tmp_path / "none", tmp_path / "out")
    with pytest.raises(CheckpointError, match="must hold experiment.json"):
        load_run(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run(toy(tmp_path), tmp_path / "run", watcher=Phases("training the dense model", 3))
    own = toy(tmp_path)
    # where things are kept is for every user to say
    assert read_experiment(tmp_path / "run") == replace(own, corpus=replace(own.corpus, cache=None))
    with pytest.raises(CheckpointError, match="must be finished before its model can be used"):
        load_run(tmp_path / "run")


def test_a_sweep_shares_its_bases_and_reports_means(tmp_path: Path) -> None:
    experiment = toy(tmp_path)
    record = sweep(
        experiment,
        tmp_path / "sweep",
        methods=["flop-l0", "fac"],
        removed=[0.4, 0.6],
        seeds=[0, 1],
        watcher=(watcher := Phases()),
    )
    # a base and a dense control beside the four
    assert watcher.steps == 2 * 6 * PHASE.steps
    found = table(record)
    assert [row[0] for row in found.rows] == ["dense", "flop-l0-40", "flop-l0-60", "fac-40", "fac-60"]
    tests = [run["rows"][1]["test"]["bits_per_character"] for run in record["runs"]]
    assert found.rows[1][found.columns.index("test bits per character")].startswith(f"{sum(tests) / 2:.4f} ± ")
    assert "± " in found.rows[1][found.columns.index("against dense")]
    sizes = [row["parameters"] for row in record["runs"][0]["rows"]]
    assert sizes[0] > sizes[1] > sizes[2]
    for wrong in ({"methods": []}, {"removed": [0.5, 0.5]}, {"seeds": [1, 1]}):
        arguments: dict[str, Any] = {"methods": ["fac"], "removed": [0.5], "seeds": [0], **wrong}
        with pytest.raises(RankwiseError, match=f"`{next(iter(wrong))}` must hold at least one value"):
            sweep(experiment, tmp_path / "wrong", **arguments)


@pytest.mark.parametrize("kind", MODELS)
def test_samples_follow_the_model(kind: str, tmp_path: Path) -> None:
    """At temperature 0 each token is the likeliest after all the text so far, read at once."""
    experiment = toy(tmp_path, kind)
    run(experiment, tmp_path / "run")
    exported = load_run(tmp_path / "run")
    prompt = "a b c "
    drawn = list(sample(exported.model, exported.vocabulary, prompt, length=6, temperature=0))
    text = exported.vocabulary.encode(prompt)
    for token in drawn:
        with torch.no_grad():
            logits, _ = exported.model(torch.tensor([text]))
        assert token == int(logits[0, -1].argmax())
        text.append(token)

    def tokens(**settings: Any) -> list[int]:
        return list(sample(exported.model, exported.vocabulary, prompt, length=20, **settings))

    assert tokens(seed=1) == tokens(seed=1) != tokens(seed=2)
    assert tokens(top_k=1) == tokens(temperature=0)
    for wrong in ({"length": 0}, {"temperature": -1.0}, {"top_k": 0}):
        with pytest.raises(RankwiseError, match=f"`{next(iter(wrong))}` must be at least"):
            list(sample(exported.model, exported.vocabulary, prompt, **wrong))
    with pytest.raises(RankwiseError, match="`prompt` must hold at least one token"):
        list(sample(exported.model, exported.vocabulary, ""))


def test_a_sample_is_drawn_from_the_softmax() -> None:
    """Frequencies of many draws against the probabilities of one position, within five standard deviations."""
    from rankwise.lab.data.vocabulary import Vocabulary

    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])

    class Fixed(torch.nn.Linear):
        def forward(self, tokens: Any, state: Any = None) -> Any:  # type: ignore[override]
            return logits.expand(*tokens.shape, 4), None

    vocabulary = Vocabulary("character", (b"a", b"b", b"c", b"d"))
    num = 4000
    drawn = torch.tensor(list(sample(Fixed(1, 1), vocabulary, "a", length=num, temperature=0.5)))
    p = torch.softmax(logits / 0.5, 0)
    found = torch.bincount(drawn, minlength=4) / num
    assert ((found - p).abs() <= 5 * (p * (1 - p) / num).sqrt() + 1e-9).all()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"budget": rw.Budget(removed=0.99)}, "The budget must be at least"),
        ({"training": replace(PHASE, batch_size=400)}, "must hold at least one window of 400 x 8"),
        ({"exclude": ("embedding", "outputs")}, "but 'outputs' matches none. Did you mean 'output'?"),
    ],
)
def test_what_pruning_would_refuse_is_refused_before_training(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(RankwiseError, match=message):
        run(toy(tmp_path, **changes), tmp_path / "run", watcher=(watcher := Phases()))
    assert watcher.steps == 0
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["output", "head"])
@pytest.mark.parametrize("kind", ["sru", "transformer-xl"])
def test_an_output_layer_is_excluded_by_the_name_of_either_architecture(kind: str, name: str, tmp_path: Path) -> None:
    plan = toy(tmp_path, kind, exclude=(name,)).plan(build(MODELS[kind]))
    assert [item.reason for item in plan.left_out if item.name in ("output", "head")] == ["in `exclude`"]


def test_a_refused_run_leaves_the_experiment_as_it_was(tmp_path: Path) -> None:
    experiment = toy(tmp_path)
    run(experiment, tmp_path / "run")
    with pytest.raises(CheckpointError):
        run(replace(experiment, base=replace(PHASE, lr=2e-2)), tmp_path / "run")
    assert read_experiment(tmp_path / "run").base == experiment.base
