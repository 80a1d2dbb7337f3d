"""A GLUE experiment end to end on a tiny encoder: every size exact, every part kept, every mistake one line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf

import rankwise as rw
from rankwise.cli.settings import override, settings
from rankwise.core.budget import Budget
from rankwise.errors import CheckpointError, RankwiseError
from rankwise.lab.data.glue import TASKS, load_glue
from rankwise.lab.experiments.pipeline import run
from rankwise.lab.experiments.presets import glue
from rankwise.lab.experiments.sweeps import sweep
from rankwise.lab.report import table
from rankwise.lab.tasks.base import from_json
from rankwise.lab.tasks.sentences import (
    ENCODERS,
    GlueExperiment,
    TokenizedTexts,
    check_encoder,
    held_apart,
    load_encoder,
    predict,
)
from tests.lab.experiments.glue_toys import encoder, mrpc, toy

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* of the gates had not decided"),
    # of random weights, to which positions mean little
    pytest.mark.filterwarnings("ignore:These layers are left as they are"),
    # by modules of C code that transformers imports
    pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning"),
]

RECIPES: dict[str, dict[str, Any]] = {
    "all of it": {"sizes": (0.2, 0.3)},
    "the paper's": {"init": "svd", "distillation": None, "healing": None, "exclude": ("word_embeddings",)},
    "at once": {"method": rw.methods.make_method("svd", layout="pivot"), "sizes": (0.2,)},
    "at once, as in the paper": {"method": rw.methods.make_method("svd"), "init": "svd", "distillation": None},
    "magnitude": {"method": rw.methods.make_method("flop-agp", anneal_steps=1, mask_every=1)},
}


FINISH = """
import json, sys
from rankwise.lab.experiments.pipeline import run
from rankwise.lab.tasks.base import from_json
run(from_json(json.loads(sys.argv[1])), sys.argv[2])
"""


def test_a_process_can_finish_what_another_has_made_all_models_of(tmp_path: Path) -> None:
    experiment = toy(tmp_path, healing=None)
    rows = run(experiment, tmp_path / "run")["rows"]
    (tmp_path / "run" / "record.json").unlink()
    subprocess.run([sys.executable, "-c", FINISH, json.dumps(experiment.to_json()), str(tmp_path / "run")], check=True)
    again = json.loads((tmp_path / "run" / "record.json").read_text())["rows"]
    assert [row["valid"] for row in again] == [row["valid"] for row in rows]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_gives_models_of_the_sizes_asked_for(recipe: str, tmp_path: Path) -> None:
    experiment = toy(tmp_path, **RECIPES[recipe])
    record = run(experiment, tmp_path / "run")
    dense, *pruned = record["rows"]
    assert dense["name"] == "dense"
    wanted = sorted((*experiment.sizes, 0.4))
    assert len(pruned) == len(wanted)
    for row, removed in zip(pruned, wanted, strict=True):
        model = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / row["folder"] / "model")
        assert rw.count(model) == row["parameters"] <= (1 - removed) * dense["parameters"]
        assert set(row["test"]) == set(row["valid"]) == {"f1", "accuracy"}
        assert type(model.classifier) is torch.nn.Linear, "the head stays whole"
        # stock code gives the figures of the record
        data, tokenizer = load_glue("mrpc", data=experiment.data), hf.AutoTokenizer.from_pretrained(model.name_or_path)
        inputs = tokenizer(*map(list, zip(*data.dev.texts, strict=True)), padding=True, return_tensors="pt")
        with torch.no_grad():
            answers = model.eval()(**inputs).logits.argmax(1)
        right = (answers == torch.tensor(data.dev.labels)).double().mean()
        assert float(right) == pytest.approx(row["test"]["accuracy"])
    assert [row[0] for row in table(record).rows] == [row["name"] for row in record["rows"]]


def test_the_same_call_again_trains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = toy(tmp_path)
    record = run(experiment, tmp_path / "run")
    monkeypatch.setattr("rankwise.lab.experiments.variants.fit", None)
    assert run(experiment, tmp_path / "run") == record
    (tmp_path / "run" / "record.json").unlink()
    again = run(experiment, tmp_path / "run")
    assert [row["test"] for row in again["rows"]] == [row["test"] for row in record["rows"]]


def test_what_was_made_otherwise_is_refused_and_stays(tmp_path: Path) -> None:
    experiment = toy(tmp_path)
    run(experiment, tmp_path / "run")
    before = contents(tmp_path / "run")
    others = {
        "lr": replace(experiment, training=replace(experiment.training, lr=2e-3)),
        "removed": replace(experiment, budget=Budget(removed=0.3)),
        "seed": replace(experiment, seed=1),
        "steps": replace(experiment, base=replace(experiment.base, max_steps=7), compare=("dense",)),
    }
    for name, other in others.items():
        with pytest.raises(CheckpointError, match=f"`{name}` was .* and is now .* choose another folder"):
            run(other, tmp_path / "run")
    # a method that is new here is not trained before one that is refused
    other = replace(others["removed"].with_method("svd"), compare=("flop-l0",))
    with pytest.raises(CheckpointError, match="`removed` was 0.4 and is now 0.3"):
        run(other, tmp_path / "run")
    rows = mrpc(tmp_path / "data", rows=50)
    with pytest.raises(CheckpointError, match="`corpus` was"):
        run(replace(experiment, data=str(rows)), tmp_path / "run")
    assert contents(tmp_path / "run") == before


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_one_more_to_compare_with_leaves_what_is_finished(tmp_path: Path) -> None:
    first = run(toy(tmp_path), tmp_path / "run")
    before = contents(tmp_path / "run/flop-l0")
    both = run(toy(tmp_path, compare=("dense",)), tmp_path / "run")
    assert [row["name"] for row in both["rows"]] == ["dense", "flop-l0", "control"]
    assert contents(tmp_path / "run/flop-l0") == before
    assert both["rows"][1]["test"] == first["rows"][1]["test"]


def test_a_model_that_is_gone_is_made_again(tmp_path: Path) -> None:
    experiment = toy(tmp_path, sizes=(0.2,))
    first = run(experiment, tmp_path / "run")
    for name in ("base", "flop-l0-at-20"):
        shutil.rmtree(tmp_path / "run" / name / "model")
        again = run(experiment, tmp_path / "run")
        assert (tmp_path / "run" / name / "model").is_dir()
        assert [row["test"] for row in again["rows"]] == [row["test"] for row in first["rows"]]


def test_the_same_seed_gives_the_same_result(tmp_path: Path) -> None:
    records = [run(toy(tmp_path), tmp_path / name) for name in ("a", "b")]
    weights = [(tmp_path / name / "flop-l0/model/model.safetensors").read_bytes() for name in ("a", "b")]
    assert weights[0] == weights[1]
    assert records[0]["rows"][1]["valid"] == records[1]["rows"][1]["valid"]


def test_a_sweep_shares_the_base_of_a_seed(tmp_path: Path) -> None:
    experiment = toy(tmp_path, held_out=0.0)
    record = sweep(experiment, tmp_path / "sweep", methods=["flop-l0"], removed=[0.2, 0.4], seeds=[0, 1])
    names = [[row["name"] for row in each["rows"]] for each in record["runs"]]
    assert names == [["dense", "flop-l0-20", "flop-l0-40"]] * 2
    assert all(row["valid"] is None for each in record["runs"] for row in each["rows"])
    assert len(table(record).rows) == 3


def test_the_control_trains_on_for_as_long_with_nothing_removed(tmp_path: Path) -> None:
    dense, pruned, control = run(toy(tmp_path, compare=("dense",)), tmp_path / "run")["rows"]
    assert (control["name"], control["parameters"], control["steps"]) == (
        "control",
        dense["parameters"],
        pruned["steps"],
    )
    before, after = (
        (tmp_path / "run" / row["folder"] / "model/model.safetensors").read_bytes() for row in (dense, control)
    )
    assert before != after
    alone = run(toy(tmp_path, method=rw.methods.make_method("dense"), budget=None), tmp_path / "alone")
    assert [row["name"] for row in alone["rows"]] == ["dense"]


def test_held_out_rows_are_not_trained_on(tmp_path: Path) -> None:
    rows = load_glue("mrpc", data=mrpc(tmp_path)).train
    train, valid = held_apart(rows, 0.1)
    assert valid is not None
    assert (len(train), len(valid)) == (54, 6)
    assert sorted([*train.texts, *valid.texts]) == sorted(rows.texts)
    assert held_apart(rows, 0) == (rows, None)


def test_outputs_stand_in_the_order_of_the_rows(tmp_path: Path) -> None:
    rows = load_glue("mrpc", data=mrpc(tmp_path)).train
    tokenizer = hf.AutoTokenizer.from_pretrained(encoder(tmp_path))
    examples = TokenizedTexts(tokenizer, rows.texts, rows.labels, regression=True)

    class Length(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **more: Any) -> Any:
            return SimpleNamespace(logits=attention_mask.sum(1, keepdim=True))

    logits, labels = predict(Length(), examples)
    assert logits[:, 0].tolist() == [3 + len(a.split()) + len(b.split()) for a, b in rows.texts]
    assert labels.tolist() == list(rows.labels)


@pytest.mark.parametrize("name", ENCODERS)
def test_a_preset_has_the_size_of_its_encoder(name: str) -> None:
    widths = {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}
    config = {
        "glue-roberta": lambda: hf.RobertaConfig(vocab_size=50_265, max_position_embeddings=514, type_vocab_size=1),
        "glue-mpnet": lambda: hf.MPNetConfig(vocab_size=30_527, max_position_embeddings=514),
        "glue-minilm": lambda: hf.BertConfig(vocab_size=30_522, **widths),
    }[name]()
    with torch.device("meta"):
        model = hf.AutoModelForSequenceClassification.from_config(config)
    found = glue(name).size_preview()
    assert found.parameters == rw.count(model)
    assert found.prunable == rw.hf.find_plan(model).params
    assert found.exported <= 0.65 * found.parameters + 1


def test_every_setting_can_be_set_and_survives_json() -> None:
    experiment = override(
        glue("glue-mpnet"),
        {
            "task": "SST-2", "budget.removed": "0.6", "distillation": "none", "healing": "none", "init": "svd",
            "exclude": "word_embeddings", "sizes": "0.2,0.4", "model.name": "here", "both.epochs": "2",
        },
    )  # fmt: skip
    assert isinstance(experiment, GlueExperiment)
    assert (experiment.task, experiment.sizes, experiment.healing) == ("sst2", (0.2, 0.4), None)
    assert (experiment.base.epochs, experiment.training.epochs) == (2, 2)
    assert from_json(json.loads(json.dumps(experiment.to_json()))) == experiment
    assert [setting.name for setting in settings(experiment).values() if not setting.about] == []


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"task": "mrcp"}, "`task` must be one of .* but is 'mrcp' instead. Did you mean 'mrpc'"),
        ({"sizes": "0.5"}, "`sizes` must be fractions that are removed on the way to `budget.removed` .0.35., but one"),
        ({"held_out": "0.9"}, "`held_out` must be a share of 0 to 0.5, but is 0.9"),
        ({"distillation.labels": "-1"}, "`labels` must be at least 0 and finite, but is -1.0"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, str], message: str) -> None:
    with pytest.raises(RankwiseError, match=message):
        override(glue("glue-minilm"), changes)


def test_a_wrong_model_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    without = encoder(tmp_path / "without", tokenizer=False)
    three = encoder(tmp_path / "three", labels=3)
    cases = {
        str(without): "`model.name` must come with a tokenizer, but .* does not",
        str(three): "The head of .* must have 2 labels for MRPC, but has 3",
        str(tmp_path): "`model.name` must come with a tokenizer|must be a folder with a model",
    }
    for name, message in cases.items():
        experiment = toy(tmp_path)
        with pytest.raises(RankwiseError, match=message):
            run(replace(experiment, model=replace(experiment.model, name=name)), tmp_path / "run")
        assert not (tmp_path / "run").exists()
    with pytest.raises(RankwiseError, match="`model.max_length` must be at most 140, .* but is 141"):
        run(toy(tmp_path, model=replace(experiment.model, max_length=141)), tmp_path / "run")
    with pytest.raises(RankwiseError, match="must be at least .* parameters|cannot"):
        run(toy(tmp_path, budget=Budget(removed=0.99)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("family", ["bert", "roberta", "mpnet"])
def test_lengths_are_accepted_as_far_as_the_model_reads(family: str, tmp_path: Path) -> None:
    """RoBERTa and MPNet count positions from behind the one of padding."""
    folder = encoder(tmp_path, family=family)
    model = hf.AutoModel.from_pretrained(folder)
    read, accepted = [], []
    for length in range(136, 142):
        with suppress(IndexError, RuntimeError):
            model(torch.full((1, length), 6))
            read.append(length)
        with suppress(RankwiseError):
            check_encoder(folder, TASKS["mrpc"], length)
            accepted.append(length)
    assert accepted == read
    with pytest.raises(RankwiseError, match=f"`model.max_length` must be at most {read[-1]}, .* but is 141"):
        check_encoder(folder, TASKS["mrpc"], 141)


def test_a_head_of_the_right_labels_is_kept(tmp_path: Path) -> None:
    folder = encoder(tmp_path, labels=2)
    saved = hf.AutoModelForSequenceClassification.from_pretrained(folder)
    loaded = load_encoder(folder, TASKS["mrpc"], seed=5)
    torch.testing.assert_close(loaded.classifier.weight, saved.classifier.weight)
