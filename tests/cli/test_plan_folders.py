"""`rankwise plan` of folders: what it would be of the loaded model, from the configuration alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import rankwise as rw
from rankwise.cli.app import run
from rankwise.hf import save_pretrained
from rankwise.hf.loading import load_model
from rankwise.methods import make_method
from rankwise.sizes import plan_for_method, size_account
from tests.cli.cli_toys import answer, refusal

SMALL: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 20,
}  # fmt: skip
DECODER = {**SMALL, "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
T5 = {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
FAMILIES: dict[str, Callable[[], hf.PreTrainedModel]] = {
    "bert": lambda: hf.BertForSequenceClassification(hf.BertConfig(**SMALL)),
    "bert-base": lambda: hf.BertModel(hf.BertConfig(**SMALL)),
    "llama-tied": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER, tie_word_embeddings=True)),
    "llama-bf16": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)).to(torch.bfloat16),
    "gemma": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**DECODER, head_dim=8)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=60, n_embd=16, n_layer=1, n_head=2, n_positions=20)),
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)),
}


def without_weights(folder: Path) -> Path:
    """The folder as it is before anyone has downloaded its weights."""
    for path in folder.rglob("*.safetensors"):
        path.write_bytes(b"")
    return folder


def check(got: Any, model: nn.Module) -> None:
    """It must be what a pruner would do with the loaded model."""
    plan = rw.find_plan(model)
    assert [row["names"] for row in got["matrices"]] == [[use.name for use in site.uses] for site in plan.sites]
    assert [row["kinds"] for row in got["matrices"]] == [[use.kind for use in site.uses] for site in plan.sites]
    assert [tuple(row["shape"]) for row in got["matrices"]] == [site.shape for site in plan.sites]
    assert [row["parameters"] for row in got["matrices"]] == [site.params for site in plan.sites]
    dense = rw.count(model)
    assert got["dense"] == dense
    assert [(each["name"], each["parameters"], each["reason"]) for each in got["left_out"]] == [
        (each.name, each.params, each.reason) for each in plan.left_out
    ]
    assert [each["share"] for each in got["left_out"]] == [each.params / dense for each in plan.left_out]


def megabytes_for(model: nn.Module, removed: float) -> float:
    """The bytes of a size, in the dtypes of the loaded model."""
    method = make_method("fac")
    storage = size_account(model, plan_for_method(model, None, method), method, trained=True).storage
    assert storage is not None
    return (round(rw.count(model) * (1 - removed)) * storage.itemsize(None) + storage.other_bytes(None)) / 1e6


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_transformers_needs_no_weights(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / family
    FAMILIES[family]().save_pretrained(folder)
    model = load_model(str(folder))
    size = megabytes_for(model, 0.2)
    without_weights(folder)
    got = answer(capsys, "plan", folder, "--megabytes", f"{size!r}")
    check(got, model)
    assert got["budget"] == round(rw.count(model) * 0.8)
    assert got["exported"] <= got["budget"]
    assert "those of heads too, are taken to be in the checkpoint" in got["notes"][0]


@pytest.mark.parametrize("family, layout", [("bert", "pair"), ("llama-tied", "pair"), ("gpt2", "pivot")])
def test_a_compact_folder_of_transformers_is_planned_as_it_is(
    family: str, layout: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / family
    save_pretrained(rw.compress(FAMILIES[family](), rw.Budget(removed=0.4), embeddings=True, layout=layout), folder)
    model = load_model(str(folder))
    check(answer(capsys, "plan", without_weights(folder)), model)


@pytest.mark.parametrize("part", ["", "base", "fac", "fac/model"])
def test_a_run_and_its_models_need_no_weights(
    part: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = rw.load(finished / (part or "flop-l0") / ("" if part.endswith("model") else "model"))
    shutil.copytree(finished, tmp_path / "run")
    got = answer(capsys, "plan", without_weights(tmp_path / "run") / part, "--removed", "0.1")
    check(got, model)
    assert got["notes"] == []


def test_a_tied_model_of_our_own_stays_tied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rankwise.lab.models.transformer_xl import TransformerXL, TransformerXLConfig

    config = TransformerXLConfig(num_words=30, width=8, num_heads=2, head_width=4, inner=12, num_layers=1)
    small = rw.compress(TransformerXL(config), rw.Budget(removed=0.3), embeddings=True)
    rw.save(small.half(), tmp_path / "small")
    got = answer(capsys, "plan", without_weights(tmp_path / "small"), "--megabytes", f"{rw.count(small) * 2 / 1e6}")
    check(got, small)


def test_the_table_says_what_is_assumed_and_joins_layers_that_are_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    FAMILIES["bert"]().save_pretrained(tmp_path / "bert")
    capsys.readouterr()
    assert run(["plan", str(tmp_path / "bert")]) == 0
    out = capsys.readouterr().out
    assert "Only the configuration was read." in out
    names = [line.split()[0] for line in out.splitlines() if line.startswith("bert.encoder")]
    assert names == list(dict.fromkeys(names))
    assert all(name.startswith("bert.encoder.layer.0-1.") for name in names)
    assert len(names) == 6
    assert "The smallest size that can be reached is " in out


def test_a_missing_folder_is_refused_before_anyone_asks_the_hub(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf.AutoConfig, "from_pretrained", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "file").write_text("")
    for name in (tmp_path / "none", "./none", "../none", "~/none-such", "runs/none", "a/b/none"):
        assert f"or a name on the hub such as org/name, but there is no {str(name)!r}." in refusal(capsys, "plan", name)
    assert "but file is a file." in refusal(capsys, "plan", "file")
    assert "runs holds none of them" in refusal(capsys, "plan", "runs")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "must not be quantized to be planned, but its .* 'gptq'"),
        ({"quantization_config": {"quant_method": "rankwise", "version": 99}}, "at most, but is version 99"),
        ({"model_type": "nothing"}, "or name that transformers can load, but .* is not"),
    ],
)
def test_a_configuration_that_cannot_be_planned_is_one_line(
    change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    FAMILIES["bert"]().save_pretrained(tmp_path / "bert")
    file = tmp_path / "bert" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    assert re.search(message, refusal(capsys, "plan", tmp_path / "bert"))


def test_what_is_left_out_is_named_where_a_size_is_out_of_reach(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    FAMILIES["bert"]().save_pretrained(tmp_path / "bert")
    line = refusal(capsys, "plan", tmp_path / "bert", "--removed", "0.9", "--exclude", "word_embeddings")
    plan = answer(capsys, "plan", tmp_path / "bert", "--exclude", "word_embeddings")
    (words,) = (each for each in plan["left_out"] if each["name"].endswith("word_embeddings"))
    assert f"The budget must be at least {plan['fixed']:,} parameters" in line
    assert line.count(words["name"]) == 1
    assert f"Left out of the plan: {words['name']} {words['parameters']:,} ({words['share']:.1%})," in line
