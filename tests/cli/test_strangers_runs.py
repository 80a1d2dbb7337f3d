"""A run that somebody else made: whatever its files say, no command opens a file or writes anywhere for it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rankwise.cli.app import run
from tests.cli.cli_toys import cache, words

OPENED: list[str] | None = None


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if OPENED is not None and event in ("open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "shutil.rmtree"):
        OPENED.append(os.path.abspath(arguments[0]) if isinstance(arguments[0], str | Path) else "")


# it stays for the life of the process, and does nothing outside of these tests
sys.addaudithook(_note)


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A folder that the stranger would like to have read, swept and written to; nothing of it may be touched."""
    global OPENED
    folder = tmp_path / "victim"
    old = folder / ".notes-2024.abcdefgh"
    old.mkdir(parents=True)
    (old / "thesis.txt").write_text("years of work")
    os.utime(old, (0, 0))
    shutil.copytree(folder / old.name, folder / ".text-0123456789abcdef.00000000")
    os.utime(folder / ".text-0123456789abcdef.00000000", (0, 0))
    (folder / "secret.txt").write_text("abcdefgh" * 400)
    before = state(folder)
    OPENED = []
    yield folder
    opened, OPENED = OPENED, None
    assert state(folder) == before
    assert [path for path in opened if path.startswith(str(folder))] == []


def state(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.fixture
def stranger(finished: Path, victim: Path, tmp_path: Path) -> Path:
    """A finished run whose files name the victim wherever a path can stand."""
    folder = tmp_path / "stranger"
    shutil.copytree(finished, folder)
    places = {"name": str(victim / "secret.txt"), "data": str(victim), "cache": str(victim)}
    for file in folder.rglob("experiment.json"):
        content = json.loads(file.read_text())
        content["corpus"] |= places
        content["corpus"].pop("fingerprint", None)
        content["name"] = str(victim / "run")
        file.write_text(json.dumps(content))
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKWISE_CACHE", str(tmp_path / "own"))


@pytest.mark.parametrize("command", ["evaluate {}", "evaluate {}/fac", "prune {}", "prune {}/base"])
def test_a_text_that_only_the_run_names_is_not_opened(
    command: str, stranger: Path, victim: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command.format(stranger).split()
    assert run([*arguments, *(["--out", str(tmp_path / "out")] if arguments[0] == "prune" else [])]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "a saved run chooses no file to open, but `corpus.name` is not given." in said
    assert f"This run was trained on '{victim / 'secret.txt'}': add --corpus.name FILE" in said
    assert not (tmp_path / "out").exists()


def test_a_text_that_the_user_names_is_read_and_prepared_in_the_user_s_own_cache(
    stranger: Path, place: Path, tmp_path: Path
) -> None:
    for command in (["evaluate", str(stranger)], ["prune", str(stranger), "--out", str(tmp_path / "out")]):
        assert run([*command, "--corpus.name", str(place / "text.txt")]) == 0
        assert any((tmp_path / "own").rglob("train.npy"))
        shutil.rmtree(tmp_path / "own")


@pytest.mark.parametrize(
    "command",
    [
        "sample {}",
        "report {}",
        "bench {} --repeats 2 --batch 1 --threads 1 --length 8",
        "compress {} --removed 0.1 --out small",
        "evaluate {} --help",
        "prune {} --help",
    ],
)
def test_no_command_touches_what_the_run_names(
    command: str, stranger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(command.format(stranger).split()) == 0


def test_what_is_pruned_goes_to_runs_however_the_run_calls_itself(
    stranger: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    assert run(["prune", str(stranger), "--corpus.name", str(place / "text.txt"), *cache(place)]) == 0
    assert {path.name for path in tmp_path.iterdir()} - before == {"runs"}
    assert [path.name for path in Path("runs").iterdir() if (path / "model").is_dir()]


def test_a_row_that_lies_elsewhere_is_made_again(finished: Path, stranger: Path, place: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(finished / "fac", elsewhere)
    # a run goes on in the folder; what was exported there says it is elsewhere
    (stranger / "record.json").unlink()
    file = stranger / "fac" / "export.json"
    content = json.loads(file.read_text())
    content["rows"][0]["folder"] = str(elsewhere)
    file.write_text(json.dumps(content))
    assert run(["run", "demo", *words(place), "--out", str(stranger)]) == 0
    rows = json.loads((stranger / "record.json").read_text())["rows"]
    assert {row["folder"] for row in rows} <= {path.name for path in stranger.iterdir()}


def test_one_s_own_run_finds_its_text_in_the_cache_even_where_the_file_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    # the user's own cache: nothing names it
    assert run(["train", "demo", *words(tmp_path)[:-2], "--out", out]) == 0
    (tmp_path / "text.txt").unlink()
    capsys.readouterr()
    row = json.loads((tmp_path / "out/base/export.json").read_text())["rows"][0]
    assert run(["evaluate", f"{out}/base", "--split", "test", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(row["test"]["loss"], rel=1e-6)
    assert run(["prune", out, "--out", str(tmp_path / "small")]) == 0
