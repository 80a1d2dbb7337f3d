"""A compressed folder keeps what a report says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rankwise as rw
from rankwise.cli.app import run
from rankwise.deploy.compress import SavedModel, compress_folder
from rankwise.lab.models.transformer_xl import TransformerXL, TransformerXLConfig

CONFIG = TransformerXLConfig(num_words=20, width=16, num_heads=2, head_width=8, inner=32, num_layers=2)


@pytest.mark.parametrize("layout", ["pair", "pivot"])
def test_ranks_and_sizes_are_those_of_the_saved_model(layout: str, tmp_path: Path) -> None:
    dense = TransformerXL(CONFIG)
    before = rw.count(dense)
    source = SavedModel(dense, None, {}, lambda: rw.load(tmp_path / "small"))
    settings: Any = {"device": "cpu", "layout": layout, "embeddings": False}
    made = compress_folder(source, rw.Budget(removed=0.3), tmp_path / "small", **settings)
    record = json.loads((tmp_path / "small" / "compression.json").read_text())
    layers = json.loads((tmp_path / "small" / "rankwise.json").read_text())["layers"]
    assert (record["dense"], record["exported"], record["budget"]) == (before, made.exported, made.budget)
    for name, (outputs, inputs, kept, of) in record["ranks"].items():
        assert (outputs, inputs) == (layers[name]["outputs"], layers[name]["inputs"])
        assert of == min(outputs, inputs)
        assert kept == layers[name].get("rank", of)
        whole, left = record["matrices"][name]
        assert whole == outputs * inputs
        per_rank = outputs + inputs - (kept if layout == "pivot" else 0)
        assert left == (kept * per_rank if "rank" in layers[name] else whole)
    gone = sum(whole - left for whole, left in record["matrices"].values())
    assert before - gone == made.exported


def test_report_prints_size_and_speed_of_a_compressed_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    source = SavedModel(TransformerXL(CONFIG), None, {}, lambda: rw.load(tmp_path / "small"))
    made = compress_folder(source, rw.Budget(removed=0.3), tmp_path / "small", device="cpu")
    assert run(["report", str(tmp_path / "small")]) == 0
    title, dense, small = capsys.readouterr().out.splitlines()
    assert (f"{made.dense:,}" in dense, f"{made.exported:,}" in small) == (True, True)
    assert f"{made.removed:.1%}" in small
    assert "valid" not in title


def test_a_folder_with_its_record_can_be_replaced_and_loaded(tmp_path: Path) -> None:
    for _ in range(2):
        source = SavedModel(TransformerXL(CONFIG), None, {}, lambda: rw.load(tmp_path / "small"))
        made = compress_folder(source, rw.Budget(removed=0.3), tmp_path / "small", device="cpu", overwrite=True)
        assert rw.count(rw.load(tmp_path / "small")) == made.exported
