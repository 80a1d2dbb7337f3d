"""The model card: metadata that the hub's own tools read, whatever the model is called, and only what was measured."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard, parse_eval_result_entries
from hypothesis import example, given, settings
from hypothesis import strategies as st

import rankwise as rw
from rankwise.hf import save_pretrained
from rankwise.hf.card import UNNAMED, Card, metadata, write_card
from tests.hf.hf_families import QUIET, build, compact, pruned

pytestmark = QUIET
MEASURED: dict[str, Any] = {
    "quality": {"perplexity": (10.5, 12.25)},
    "speed": {"128 tokens on cpu": (8.0, 5.0), "1 token on cpu": (4.0, 3.5)},
}


def read(folder: Path) -> tuple[ModelCard, dict[str, list[Any]]]:
    """The card, and the entries of `.eval_results` by file."""
    files = sorted((folder / ".eval_results").glob("*.yaml"))
    entries = {path.stem: parse_eval_result_entries(yaml.safe_load(path.read_text())) for path in files}
    return ModelCard.load(folder / "README.md"), entries


def test_the_hub_reads_size_quality_and_speed_of_both_models(tmp_path: Path) -> None:
    pruner = pruned("llama", removed=0.5)
    small, size = pruner.compact(), pruner.size()
    save_pretrained(small, tmp_path / "small", size=size, base_model="org/llama", measured_on="my text", **MEASURED)  # type: ignore[arg-type]
    card, entries = read(tmp_path / "small")
    data = card.data
    assert (data.library_name, data.base_model, data.model_name) == ("transformers", "org/llama", "small")
    assert data.tags == ["rankwise", "pruning", "low-rank"]
    want = {
        "parameters": rw.count(small), "parameters of the dense model": size.dense,
        "perplexity": 12.25, "perplexity, dense model": 10.5,
        "128 tokens on cpu": 5.0, "128 tokens on cpu, dense model": 8.0,
        "1 token on cpu": 3.5, "1 token on cpu, dense model": 4.0,
    }  # fmt: skip
    assert {each.metric_name: each.metric_value for each in data.eval_results} == want
    assert {each.task_type for each in data.eval_results} == {"text-generation"}
    assert {each.dataset_name for each in data.eval_results if "perplexity" in each.metric_name} == {"my text"}
    assert list(entries) == ["quality", "size", "speed"]
    assert sorted(each.value for group in entries.values() for each in group) == sorted(want.values())
    for group in entries.values():
        assert len({(each.dataset_id, each.task_id) for each in group}) == len(group)
        assert all("No dataset of the hub" in each.notes for each in group)


def test_what_was_not_measured_is_not_written(tmp_path: Path) -> None:
    save_pretrained(compact("bert"), tmp_path / "small")
    card, entries = read(tmp_path / "small")
    assert "model-index" not in card.data.to_dict()
    assert entries == {}
    assert not (tmp_path / "small" / ".eval_results").exists()
    save_pretrained(compact("bert"), tmp_path / "timed", speed=MEASURED["speed"])
    card, entries = read(tmp_path / "timed")
    assert list(entries) == ["speed"]
    assert {each.dataset_type for each in card.data.eval_results} == {"rankwise-speed"}


def test_results_are_replaced_with_the_model(tmp_path: Path) -> None:
    save_pretrained(compact("bert"), tmp_path / "small", **MEASURED)
    save_pretrained(compact("bert"), tmp_path / "small", speed=MEASURED["speed"], overwrite=True)
    assert list(read(tmp_path / "small")[1]) == ["speed"]
    (tmp_path / "small" / ".eval_results" / "mine.yaml").write_text("[]")
    with pytest.raises(rw.CheckpointError, match="small also holds .eval_results/mine.yaml"):
        save_pretrained(compact("bert"), tmp_path / "small", overwrite=True)


def test_a_folder_is_no_name_on_the_hub(tmp_path: Path) -> None:
    build("bert").save_pretrained(tmp_path / "dense")
    for base in (str(tmp_path / "dense"), "no such: name", "../dense", "a/b/c"):
        card = Card(compact("bert"), "small", None, {}, {}, base, UNNAMED)
        assert metadata(card).base_model is None
        write_card(tmp_path, card)
        text = (tmp_path / "README.md").read_text()
        assert str(tmp_path) not in text
        assert f"made of {Path(base).name} by rankwise" in text


@example(name="\x85")
@given(name=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30))
@settings(max_examples=25, deadline=None)
def test_any_name_gives_valid_metadata(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("card")
    write_card(folder, Card(compact("llama"), name, None, {name: (1.0, 2.0)}, {}, name, name))
    card, entries = read(folder)
    line = " ".join(name.split())
    assert card.data.model_name == (line or "LlamaForCausalLM")
    small, dense = card.data.eval_results
    assert (small.metric_name, small.dataset_name) == (line or "quality", line or UNNAMED)
    assert small.metric_value == 2.0
    assert dense.metric_value == 1.0
    assert [each.value for each in entries["quality"]] == [2.0, 1.0]
    assert card.text.lstrip().startswith("# ")


@pytest.mark.parametrize("family, served", [("llama", True), ("bert", False), ("t5", False)])
def test_a_decoder_says_how_it_is_served_and_measured(family: str, served: bool, tmp_path: Path) -> None:
    from rankwise.cli.app import COMMANDS
    from rankwise.cli.command import parse

    save_pretrained(compact(family), tmp_path / "my small; model")
    lines = (tmp_path / "my small; model" / "README.md").read_text().splitlines()
    assert ("vllm serve 'my small; model'" in lines) == served
    found = [line for line in lines if line.startswith("rankwise ")]
    assert len(found) == served
    for line in found:
        _, command, *words = shlex.split(line)
        assert parse(COMMANDS[command], words).subject == "my small; model"


def test_compressing_a_folder_writes_what_it_measured(tmp_path: Path) -> None:
    from rankwise.deploy.compress import compress_folder
    from rankwise.hf.loading import PretrainedModel

    build("llama").save_pretrained(tmp_path / "dense")
    made = compress_folder(PretrainedModel(str(tmp_path / "dense")), rw.Budget(removed=0.3), tmp_path / "small")
    card, entries = read(tmp_path / "small")
    values = {each.metric_name: each.metric_value for each in card.data.eval_results}
    assert values["parameters"] == made.exported
    assert values["parameters of the dense model"] == made.dense
    assert [name for name in values if re.search(r"tokens? on ", name)]
    assert "quality" not in entries
