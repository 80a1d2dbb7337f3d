"""`rankwise report` writes a page, pictures and tables; `run` and `sweep` write theirs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import rankwise as rw
from rankwise.cli import report
from rankwise.cli.app import run
from rankwise.lab.models.transformer_xl import TransformerXL, TransformerXLConfig
from rankwise.lab.report import page as pages
from rankwise.lab.report.found import read
from tests.cli.cli_toys import cache, refusal, words


def test_a_run_ends_with_its_page(finished: Path) -> None:
    html = (finished / "report.html").read_text()
    record = json.loads((finished / "record.json").read_text())
    assert html.startswith("<!doctype html>")
    assert all(f"{row['parameters']:,}" in html for row in record["rows"])


def test_a_page_that_is_there_is_not_made_again(
    place: Path, finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pages, "make_page", None)
    assert run(["run", "demo", *words(place), "--out", str(finished)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"All of it is in {finished}: report.html, record.json" in said


def test_without_its_packages_a_run_still_ends_well(
    place: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(finished, tmp_path / "copy"))
    (copy / "report.html").unlink()
    monkeypatch.setattr(pages, "find_spec", lambda name: None)
    assert run(["run", "demo", *words(place), "--out", str(copy)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "No report.html: A page needs altair and jinja2 and vl_convert" in said
    assert not (copy / "report.html").exists()
    line = refusal(capsys, "report", copy, "-o", tmp_path / "page.html")
    assert "A page needs altair" in line and "pip install" in line


def test_a_page_is_written_where_it_was_asked_for_and_what_is_missing_is_said(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "there" / "page.html"
    capsys.readouterr()
    assert run(["report", str(finished), str(tmp_path / "gone"), "-o", str(file)]) == 0
    told = capsys.readouterr()
    assert told.out == f"The page is in {file}.\n"
    assert told.err.startswith("Not shown: ") and "gone does not exist." in told.err
    assert "gone</code> does not exist." in file.read_text()


@pytest.mark.parametrize("more", [[], ["--watch"]])
def test_the_page_is_opened_in_the_browser(
    more: list[str], finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(report.webbrowser, "open", opened.append)
    monkeypatch.chdir(tmp_path)
    assert run(["report", str(finished), "--open", *more]) == 0
    assert opened == [(tmp_path / "report.html").as_uri()]


def test_figures_are_written_as_pictures_without_a_page(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["report", str(finished), "--svg", "figures", "--png", "figures"]) == 0
    names = {file.name for file in (tmp_path / "figures").iterdir()}
    assert {"quality.svg", "quality.png", "loss.svg", "gates-1.svg", "network.svg"} <= names
    assert not (tmp_path / "report.html").exists()


def test_the_commands_on_a_page_are_those_that_its_model_can_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that no run made has no vocabulary and no data of its own."""
    monkeypatch.chdir(tmp_path)
    config = TransformerXLConfig(num_words=20, width=8, num_heads=2, head_width=4, inner=12, num_layers=1)
    rw.save(TransformerXL(config), "dense")
    assert run(["compress", "dense", "--removed", "0.2", "--out", "small"]) == 0
    assert run(["report", "small", "-o", "page.html"]) == 0
    commands = re.findall(r"rankwise (?:sample|evaluate|bench|export)[^\n<#]*", Path("page.html").read_text())
    assert {command.split()[1] for command in commands} == {"bench", "export"}
    for command in commands:
        short = {"bench": "--repeats 2 --batch 1 --length 8", "export": "--length 8"}[command.split()[1]]
        _, *arguments = shlex.split(f"{command.replace('onnx', 'pt2')} {short}")
        assert run(arguments) == 0, capsys.readouterr().err


def test_mistakes_get_one_line(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = ("-o", tmp_path / "page.html")
    assert "but gone does not exist" in refusal(capsys, "report", tmp_path / "gone", *page)
    assert f"`-o` must be a file, but {tmp_path} is a folder" in refusal(capsys, "report", finished, "-o", tmp_path)
    assert "`--json` prints tables" in refusal(capsys, "report", finished, *page, "--json")
    assert "`-o` needs a value" in refusal(capsys, "report", finished, "-o")
    (tmp_path / "file").write_text("")
    assert "failed" in refusal(capsys, "report", finished, "-o", tmp_path / "file" / "page.html")
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("method", ["flop-l0", "svd"])
def test_models_of_further_sizes_are_rows_and_no_runs_that_go_on(
    method: str, place: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "pruned" / "own"
    sizes = ["--method", method, "--sizes", "0.3", "--training.distill", "0"]
    assert run(["prune", str(finished), *cache(place), *sizes, "--out", str(out)]) == 0
    assert {"own-at-30", "own"} <= {line.partition(" ")[0] for line in capsys.readouterr().out.splitlines()}
    found = read([out.parent])
    assert found.finished and not found.problems
    assert [row["name"] for one in found.runs for row in one.rows] == ["own-at-30", "own"]
    (problem,) = read([out.with_name("own-at-30")]).problems
    assert "whose figures are with its smallest size" in problem.why
    # as it is while the last model is evaluated
    (out / "export.json").unlink()
    assert not any(read([place]).finished for place in (out, out.parent))


def unfinished(finished: Path, folder: Path) -> Path:
    """A run whose last model is still being made."""
    shutil.copytree(finished, folder)
    for name in ("record.json", "fac/record.json", "fac/export.json"):
        (folder / name).unlink()
    return folder


def test_a_page_is_kept_fresh_until_the_run_is_finished(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "WATCH_SECONDS", 0.01)
    copy, file = tmp_path / "copy", tmp_path / "page.html"
    seen: list[str] = []

    def go_on() -> None:
        # the folder is not there at first; then the run goes on, and ends
        time.sleep(0.3)
        unfinished(finished, tmp_path / "hidden").rename(copy)
        while not file.exists():
            time.sleep(0.01)
        seen.append(file.read_text())
        shutil.copy(finished / "record.json", copy / "record.json")

    thread = threading.Thread(target=go_on)
    thread.start()
    assert run(["report", str(copy), "--watch", "-o", str(file)]) == 0
    thread.join()
    assert " data-live>" in seen[0] and "is not finished" in seen[0]
    assert " data-live>" not in file.read_text() and "is not finished" not in file.read_text()
    told = capsys.readouterr()
    assert told.err.startswith("Waiting: ")
    assert told.out == f"The page is in {file}.\n"


def test_ctrl_c_ends_watching_and_leaves_a_page_that_stands_still(finished: Path, tmp_path: Path) -> None:
    copy, file = unfinished(finished, tmp_path / "copy"), tmp_path / "page.html"
    # a program that was started in the background ignores Ctrl-C, and so does what it starts
    begin = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from rankwise.cli import main; "
    words = ["report", str(copy), "--watch", "-o", str(file)]
    command = [sys.executable, "-c", f"{begin}main({words!r})"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not file.exists():
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out == f"The page is in {file}.\n"
    assert " data-live>" not in file.read_text()


def test_a_compressed_folder_of_another_version_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "compression.json").write_text("{}")
    # transformers writes numbers of more than 64 bits
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1000000000000000019884624838656}')
    assert run(["report", str(tmp_path)]) == 2
    assert f"{tmp_path}: holds a compression.json of another version of rankwise" in capsys.readouterr().err
