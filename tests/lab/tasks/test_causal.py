"""Causal decoders on a text of one's own: every token is predicted once, figures are those of stock code."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st

from rankwise.cli import app
from rankwise.errors import DataError, RankwiseError
from rankwise.lab.experiments.pipeline import run
from rankwise.lab.experiments.presets import causal as preset
from rankwise.lab.tasks.causal import _windows
from tests.lab.experiments.experiment_toys import Phases, text_file
from tests.lab.experiments.glue_toys import encoder
from tests.lab.tasks.task_toys import causal, decoder

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* of the gates had not decided"),
    pytest.mark.filterwarnings("ignore:These layers are left as they are"),
    pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning"),
]


@given(length=st.integers(2, 60), window=st.integers(3, 20), begins=st.booleans())
def test_every_number_is_a_target_once(length: int, window: int, begins: bool) -> None:
    """The first one only after a beginning; a target is every number of a window but its first."""
    numbers = torch.arange(1, length + 1)
    before = torch.zeros(int(begins), dtype=torch.long)
    windows = _windows(numbers, before, window)
    targets = torch.cat([part[0, 1:] for part in windows])
    assert targets.tolist() == numbers.tolist()[0 if begins else 1 :]
    assert all(part.shape[1] == window for part in windows[:-1])
    assert not begins or all(part[0, 0] == 0 for part in windows)


@pytest.mark.parametrize("bos", [True, False])
def test_perplexity_is_that_of_stock_code(bos: bool, tmp_path: Path) -> None:
    experiment = causal(tmp_path, healing=None)
    decoder(tmp_path, bos=bos)
    record = run(experiment, tmp_path / "run")
    data = experiment.read()
    for row in record["rows"]:
        model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / row["folder"] / "model").eval()
        total, targets = 0.0, 0
        with torch.no_grad():
            for window in data.test:
                logits = model(window).logits[0, :-1].double()
                total += float(F.cross_entropy(logits, window[0, 1:], reduction="sum"))
                targets += window.shape[1] - 1
        assert row["test"]["perplexity"] == pytest.approx(math.exp(total / targets), rel=1e-5)
        assert row["test"]["num_targets"] == targets
    assert (int(data.test[0][0, 0]) == 0) == bos


def test_held_out_text_is_the_end_and_is_not_trained_on(tmp_path: Path) -> None:
    experiment = causal(tmp_path, held_out=0.1)
    before = experiment.read()
    path = Path(experiment.text or "")
    text = path.read_text()
    path.write_text(text[: int(0.85 * len(text))] + "h " * 200)
    after = experiment.read()
    assert torch.equal(before.train[:20], after.train[:20])
    assert before.fingerprint != after.fingerprint
    assert {int(number) for window in after.test for number in window[0, 1:]} == {13}


def test_the_table_of_words_is_pruned_only_if_asked(tmp_path: Path) -> None:
    for embeddings in (False, True):
        task = causal(tmp_path, embeddings=embeddings).make_task(causal(tmp_path).read())
        tables = [site for site in task.plan(task.make()).sites if site.has_embedding]
        assert bool(tables) == embeddings


def test_what_is_distilled_is_nearer_to_the_dense_model(tmp_path: Path) -> None:
    """All of the loss the dense model's answers, or none of it: measured by the difference of their answers."""
    from rankwise.distill import Distillation

    long = replace(causal(tmp_path).training, max_steps=60, lr=3e-3)
    shares = {"labels": None, "answers": Distillation(labels=0.0, logits=1.0, hidden=0.0)}
    differences = {}
    for name, distillation in shares.items():
        experiment = causal(tmp_path, training=long, healing=None, distillation=distillation).with_method("svd")
        run(experiment, tmp_path / name)
        dense, small = (
            hf.AutoModelForCausalLM.from_pretrained(tmp_path / name / part / "model").eval() for part in ("base", "svd")
        )
        tokens = causal(tmp_path).read().train[:32]
        with torch.no_grad():
            p, q = (torch.log_softmax(model(tokens).logits, -1) for model in (dense, small))
        differences[name] = float(F.kl_div(q, p, log_target=True, reduction="sum"))
    assert differences["answers"] < differences["labels"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "must hold a text, but is empty"),
        ("a b c d", "must hold at least a window of 16 tokens to train on, .* but has 4 tokens"),
    ],
)
def test_a_text_that_is_too_short_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text(text)
    with pytest.raises(DataError, match=message) as refused:
        run(causal(tmp_path, text=str(path)), tmp_path / "run", watcher=(watcher := Phases()))
    assert "\n" not in str(refused.value)
    assert watcher.steps == 0
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"text": None}, "`text` must be a text file, but is not given. Example: --text book.txt"),
        ({"text": "nowhere.txt"}, "nowhere.txt must be a readable file, but: No such file"),
    ],
)
def test_without_a_text_nothing_is_run(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        run(causal(tmp_path, **changes), tmp_path / "run")


def test_a_model_without_a_causal_head_is_refused(tmp_path: Path) -> None:
    cases = {
        str(encoder(tmp_path / "a", labels=2)): "must be a decoder with a head for the next token, but .* is BertFor",
        str(decoder(tmp_path / "b", head=False)): "must be a decoder with a head for the next token, but .* LlamaModel",
        str(tmp_path): "`model.name` must be a folder with a model",
    }
    for name, message in cases.items():
        experiment = causal(tmp_path / "own", text=str(text_file(tmp_path)))
        with pytest.raises(RankwiseError, match=message):
            run(replace(experiment, model=replace(experiment.model, name=name)), tmp_path / "run")
    experiment = causal(tmp_path / "own", text=str(text_file(tmp_path)))
    with pytest.raises(RankwiseError, match="`model.max_length` must be at most 64, .* but is 65"):
        run(replace(experiment, model=replace(experiment.model, max_length=65)), tmp_path / "run")
    for file in Path(experiment.model.name).glob("tokenizer*"):
        file.unlink()
    with pytest.raises(RankwiseError, match="must come with a tokenizer"):
        run(experiment, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_preset_has_the_size_of_its_decoder() -> None:
    config = hf.LlamaConfig(
        vocab_size=49_152, hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        intermediate_size=1_536, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config)
    found = preset().size_preview()
    assert found.parameters == sum(p.numel() for p in model.parameters())
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    assert found.prunable == sum(p.numel() for p in matrices)


def test_the_command_line_runs_and_evaluates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = str(text_file(tmp_path))
    words = ["--text", text, "--model.name", str(decoder(tmp_path)), "--model.max_length", "16", "--device", "cpu"]
    short = ["--both.max_steps", "3", "--calibration_rows", "8"]
    assert app.run(["run", "causal", *words, *short]) == 0
    assert "perplexity" in capsys.readouterr().out
    place = tmp_path / "runs/causal"
    row = json.loads((place / "record.json").read_text())["rows"][1]
    assert app.run(["evaluate", str(place), "--split", "test", "--json", "--text", text]) == 0
    assert json.loads(capsys.readouterr().out)["perplexity"] == pytest.approx(row["test"]["perplexity"])
