"""`rankwise heal` on the command line: what it prints, and a stop after which the same command goes on."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from rankwise.cli import progress
from rankwise.cli.app import run
from rankwise.lab.training import Interrupted
from tests.lab.experiments.healing_toys import make_place


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("models"))


def words(place: Path, out: Path, *more: object) -> list[str]:
    given = [
        "heal",
        place / "decoder-small",
        "--text",
        place / "text.txt",
        "--teacher",
        place / "decoder",
        "--out",
        out,
    ]
    return [str(word) for word in (*given, "--batch-size", 4, "--window", 12, "--steps", 20, "--device", "cpu", *more)]


def test_the_last_line_tells_what_was_gained_and_what_to_do_next(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "healed"
    assert run(words(place, out)) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(f"{out}: perplexity ")
    assert shown.out.count("\n") == 1
    assert " dense, " in shown.out and " before, " in shown.out and " after (" in shown.out
    found = re.search(r"960 tokens in 20 steps at a rate of (\S+), the best of (0.0003, 0.001.*?); ", shown.out)
    assert found and found[1] in found[2].split(", ")
    command = shown.out.partition("Next: ")[2].split()
    assert command == ["rankwise", "bench", str(out)]
    assert " left" in shown.err and "valid " in shown.err
    assert run([*command[1:], "--batch", "1", "--length", "8", "--repeats", "2"]) == 0
    # there is a model now
    assert run(words(place, out)) == 2
    assert "exists. Choose another name, or pass overwrite=True (--overwrite)" in capsys.readouterr().err


def test_ctrl_c_leaves_what_the_same_command_goes_on_with(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "healed"

    class Impatient(progress.Lines):
        def advance(self, step: int) -> None:
            if step == 7:
                raise Interrupted(f"Stopped after step {step} of 20; run the same again to go on from there.")

    with monkeypatch.context() as patch:
        patch.setattr(progress, "Lines", Impatient)
        assert run(words(place, out, "--lr", 1e-3)) == 130
    assert "run the same again to go on" in capsys.readouterr().err
    assert not out.exists()
    assert run(words(place, out, "--lr", 1e-3, "--json")) == 0
    shown = capsys.readouterr()
    assert "going on after step 7 of 20" in shown.err
    found: dict[str, Any] = json.loads(shown.out)
    assert found["steps"] == 20 and found["after"] < found["before"]


def test_what_is_missing_is_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["heal", str(place / "decoder-small")]) == 2
    assert "`rankwise heal` needs --text FILE, --teacher MODEL, --out FOLDER" in capsys.readouterr().err


def test_a_file_may_be_called_generated(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "generated").write_text((place / "text.txt").read_text())
    for text, own in (("./generated", False), ("generated", True)):
        given = words(place, tmp_path / f"healed-{own}", "--lr", 1e-3)
        given[given.index("--text") + 1] = text
        assert run(given) == 0
        card = (tmp_path / f"healed-{own}/README.md").read_text()
        assert ("windows of the dense model's own" in card) == own


def test_a_command_that_was_stopped_once_its_model_was_saved_ends_well(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the place of the compressed model."""
    small = Path(shutil.copytree(place / "decoder-small", tmp_path / "small"))
    given = words(place, small, "--lr", 1e-3, "--overwrite")
    given[1] = str(small)
    stock = os.replace

    def replace(source: object, target: object) -> None:
        if str(source).endswith("small.healing"):
            raise KeyboardInterrupt
        stock(source, target)  # type: ignore[call-overload]

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        assert run(given) == 130
    capsys.readouterr()
    assert run(given) == 0
    shown = capsys.readouterr()
    assert f"The healing of {small} was finished before; what was left of it is removed." in shown.err
    assert shown.out.startswith(f"{small}: perplexity ")
    assert [path.name for path in tmp_path.iterdir()] == ["small"]
