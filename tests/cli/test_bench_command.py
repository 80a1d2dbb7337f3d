"""`rankwise bench`: on a run, on one of its models, on saved ones; kept in the record; clear about mistakes."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import rankwise as rw
from rankwise.cli.app import run
from rankwise.deploy.quantize import can_multiply_bfloat16
from rankwise.lab.experiments.saved_models import find_models
from tests.cli.cli_toys import answer, refusal

pytestmark = pytest.mark.filterwarnings("ignore:This processor has no instructions for int8")
PRECISIONS = ["float32", "int8", *(["bfloat16"] if can_multiply_bfloat16() else [])]
QUICK = ["--batch", "1", "--threads", "1", "--repeats", "2", "--length", "5"]


def timed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    return answer(capsys, "bench", *arguments, *QUICK)


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, because its record is written to."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_a_run_is_timed_and_its_record_keeps_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = json.loads((folder / "record.json").read_text())
    found = timed(capsys, str(folder))
    # dense models take as long as each other, so one is timed
    assert [row["model"] for row in found["rows"]] == ["dense", "fac", "flop-l0"] * len(PRECISIONS)
    assert {row["precision"] for row in found["rows"]} == set(PRECISIONS)
    sizes = {row["model"]: row["parameters"] for row in found["rows"]}
    assert sizes == {row["name"]: row["parameters"] for row in before["rows"] if row["name"] != "taught"}
    after = json.loads((folder / "record.json").read_text())
    kept = after.pop("bench")
    assert after == before
    assert (kept["rows"], kept["remarks"]) == (found["rows"], found["remarks"])
    assert {"versions", "hardware", "measured"} <= set(kept)
    # what else reads records still does
    assert run(["report", str(folder)]) == 0


@pytest.mark.parametrize("width", [40, 80])
def test_every_part_of_a_table_names_its_rows_and_remarks_are_folded(
    width: int, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert run(["bench", str(folder), *QUICK, "--batch", "1,2"]) == 0
    parts = capsys.readouterr().out.split("\n\n")
    tables = [part.splitlines() for part in parts if part.startswith("torch, batch")]
    names = [f"{model}, {precision}" for precision in PRECISIONS for model in ("dense", "fac", "flop-l0")]
    assert len(tables) == 2 if width == 80 else len(tables) > 2
    for lines in tables:
        assert [name for line in lines for name in names if line.startswith(f"{name} ")] == names
    # remarks are one paragraph, after all tables
    assert [place for place, part in enumerate(parts) if "faster:" in part or "Slower" in part] in ([], [len(tables)])


def test_figures_that_cannot_be_kept_are_shown_all_the_same(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (folder / "record.json").read_bytes()

    def refuse(*paths: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "replace", refuse)
    assert run(["bench", str(folder), *QUICK]) == 0
    shown = capsys.readouterr()
    assert "flop-l0" in shown.out
    assert "Kept in" not in shown.out
    assert "Not kept in" in shown.err
    assert "Read-only file system" in shown.err
    assert len(timed(capsys, str(folder))["rows"]) == 3 * len(PRECISIONS)
    assert (folder / "record.json").read_bytes() == before


def test_one_model_is_timed_against_the_base_and_a_saved_one_against_its_dense_shape(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [row["model"] for row in timed(capsys, str(folder / "flop-l0"))["rows"]]
    assert names == ["dense", "flop-l0"] * len(PRECISIONS)
    monkeypatch.chdir(folder / "flop-l0")
    assert [row["model"] for row in timed(capsys, ".")["rows"]] == names
    rows = timed(capsys, str(folder / "flop-l0" / "model"))["rows"]
    assert [row["model"] for row in rows] == ["dense, fresh weights", "flop-l0"] * len(PRECISIONS)
    assert rows[0]["parameters"] > rows[1]["parameters"]


def test_a_model_saved_in_half_precision_is_timed_in_float32_as_the_table_says(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    model = folder / "flop-l0" / "model"
    rw.save(rw.load(model).bfloat16(), model, overwrite=True)
    for target in (folder, folder / "flop-l0", model):
        for found in find_models(target).models.values():
            assert {parameter.dtype for parameter in found.parameters()} == {torch.float32}
    # which takes nothing else
    rows = timed(capsys, str(model), "--engines", "onnx")["rows"]
    assert [(row["model"], row["precision"]) for row in rows][1] == ("flop-l0", "float32")


def test_the_table_names_what_was_not_faster(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", str(folder), *QUICK]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("torch, batch 1 x 5, 1 thread ")
    assert f"kept in {folder / 'record.json'}." in " ".join(said.out.split())
    assert said.err.startswith("timing torch, batch 1 x 5, 1 thread")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--engines", "tensorflow"], "An engine must be one of torch, compile"),
        (["--engines", "graph"], "but is 'graph' instead"),
        (["--threads", "0"], "`threads` must be at least 1, but is 0 instead."),
        (["--threads", "few"], "`--threads` must be a whole number or \"all\", but is 'few' instead."),
        (["--batch", "0"], "`batch` must be at least 1, but is 0 instead."),
        (["--length", "0"], "`length` must be at least 1, but is 0 instead."),
    ],
)
def test_a_wrong_setting_is_one_line(
    finished: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(capsys, "bench", finished, *arguments)


def test_a_folder_that_is_no_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, "bench", tmp_path)
    assert f"needs the folder of a run or of a saved model, but {tmp_path} is neither." in line


def test_a_hugging_face_folder_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    from rankwise.hf import save_pretrained

    config = transformers.GPT2Config(vocab_size=17, n_embd=8, n_layer=1, n_head=2, n_positions=16)
    compact = rw.compress(transformers.GPT2LMHeadModel(config), rw.Budget(removed=0.3), embeddings=True)
    save_pretrained(compact, tmp_path / "small")
    rows = timed(capsys, str(tmp_path / "small"))["rows"]
    assert [row["model"] for row in rows] == ["dense, fresh weights", "small"] * len(PRECISIONS)
    assert rows[1]["parameters"] == rw.count(compact) < rows[0]["parameters"]


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """A model of transformers that has positions for 20 tokens."""
    hf = pytest.importorskip("transformers")
    sizes = {"vocab_size": 17, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = hf.BertConfig(**sizes, intermediate_size=8, max_position_embeddings=20)
    hf.BertForMaskedLM(config).save_pretrained(tmp_path / "short")
    return tmp_path / "short"


SHORT = ["--batch", "1", "--threads", "1", "--repeats", "2"]


def test_the_default_length_is_one_that_the_model_takes(short: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", str(short), *SHORT, "--json"]) == 0
    said = capsys.readouterr()
    assert {row["length"] for row in json.loads(said.out)["rows"]} == {20}
    assert said.err.startswith("Sequences have 20 tokens: the model may have no positions for 256.\n")


def test_a_length_is_refused_only_where_the_model_cannot_read_it(
    short: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", str(short), *SHORT, "--length", "20", "--json"]) == 0
    line = refusal(capsys, "bench", short, *SHORT, "--length", "21")
    assert "`length` must be one that the model has positions for, but is 21 instead. 20 tokens are few enough." in line


def test_a_model_that_reads_two_texts_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = pytest.importorskip("transformers")
    config = hf.T5Config(vocab_size=17, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    hf.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    line = refusal(capsys, "bench", tmp_path / "t5", *SHORT)
    assert "models that read one text, but" in line
    assert "holds a T5ForConditionalGeneration, which reads two. Time it by `rankwise export`." in line


def test_a_configuration_of_which_no_fresh_model_can_be_made_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.hf.hf_families import build

    build("bert").save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "initializer_range": -0.98}))
    assert run(["bench", str(tmp_path / "model"), *QUICK]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("rankwise: ")
    assert "that can be made anew, but transformers says: normal expects std >= 0.0, but found std -0.98" in line
