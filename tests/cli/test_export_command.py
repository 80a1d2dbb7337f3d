"""`rankwise export`: a table and a folder, or one line and nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import rankwise as rw
from rankwise.cli.app import run
from rankwise.lab.models.sru import SRUConfig, SRULanguageModel
from rankwise.lab.models.transformer_xl import TransformerXL, TransformerXLConfig
from tests.cli.cli_toys import refusal


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """A dense and a compact model of ours."""
    torch.manual_seed(0)
    dense = SRULanguageModel(SRUConfig(num_words=20, embedding_width=8, width=12, num_layers=1))
    rw.save(dense, tmp_path / "dense")
    rw.save(rw.compress(dense, rw.Budget(removed=0.4)), tmp_path / "small")
    return tmp_path


def words(folders: Path, *more: str) -> list[str]:
    return ["export", str(folders / "small"), "--length", "3", "--out", str(folders / "out"), *more]


def test_both_models_are_exported_and_timed(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words(folders, "--to", "pt2", "--dense", str(folders / "dense"), "--json")) == 0
    said = capsys.readouterr()
    unrolled = "(1 recurrent layers of 3 steps each, unrolled: may take minutes)"
    steps = ("capturing", "writing for pt2", "comparing")
    assert said.err.splitlines() == [f"{name} {unrolled}: {step}" for name in ("dense", "model") for step in steps]
    answer = json.loads(said.out)
    rows = {row["name"]: row for row in answer["models"]}
    assert rows["model"]["parameters"] < rows["dense"]["parameters"]
    assert all(row["difference"] < 1e-4 and row["milliseconds"] > 0 for row in rows.values())
    assert {path.name for path in (folders / "out").iterdir()} == {"model.pt2", "export.json"}
    assert {path.name for path in folders.iterdir()} == {"dense", "small", "out"}


def test_the_folder_that_one_stands_in_gives_its_name(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folders / "small")
    assert run(["export", ".", "--to", "pt2", "--length", "3"]) == 0
    assert (folders / "small" / "small-pt2" / "model.pt2").is_file()


WRONG = {
    "no format": ([], "`rankwise export` needs --to"),
    "an unknown format": (["--to", "tflite"], "`--to` must be one of onnx, openvino, pt2, but is 'tflite'"),
    "int8 of pt2": (["--to", "pt2", "--int8"], "`int8` goes with onnx and openvino, but the format is pt2"),
    "no dense model": (["--to", "pt2", "--dense", "nowhere"], "FOLDER must be a folder .* there is no nowhere"),
    "no batch": (["--to", "pt2", "--batch", "0"], "`batch` must be a whole number of at least 1, but is 0"),
    "a folder that is there": (["--to", "pt2", "--out", "."], "must be new, but .* exists"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_is_one_line_and_writes_nothing(
    case: str, folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more, message = WRONG[case]
    assert re.search(message, refusal(capsys, *words(folders, *more)))
    assert {path.name for path in folders.iterdir()} == {"dense", "small"}


def test_a_folder_of_a_newer_version_is_one_line(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folders / "small" / "rankwise.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 99}))
    assert "must be version 2 at most, but is version 99" in refusal(capsys, *words(folders, "--to", "pt2"))
    assert not (folders / "out").exists()


def test_a_folder_without_a_model_is_refused(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, "export", folders, "--to", "pt2")
    assert "must hold a model of a run, of `rankwise.save` or of transformers" in line


def test_a_model_that_is_slower_than_dense_gets_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, inner in (("narrow", 8), ("wide", 100_000)):
        config = TransformerXLConfig(num_words=20, width=8, num_heads=1, head_width=8, inner=inner, num_layers=1)
        rw.save(TransformerXL(config), tmp_path / name)
    folders = [str(tmp_path / "wide"), "--dense", str(tmp_path / "narrow"), "--out", str(tmp_path / "out")]
    assert run(["export", *folders, "--to", "pt2", "--length", "16"]) == 0
    # ten thousand times the products are slower on any machine
    assert "\nThe model in pt2 is slower than dense of the same precision (0." in capsys.readouterr().out


def test_without_the_dense_model_a_line_says_how_to_compare(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words(folders, "--to", "pt2")) == 0
    assert "Give the dense model by --dense FOLDER to see whether this one is faster in pt2." in capsys.readouterr().out
