"""What is around the commands: errors, warnings, pipes, missing packages, and how quickly help is there."""

from __future__ import annotations

import ast
import errno
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import rankwise
from rankwise.cli.app import COMMANDS, run
from rankwise.errors import CheckpointError
from rankwise.lab.data.windows import Windows
from rankwise.version import VERSION
from tests.cli.cli_toys import python, words

PLAIN = ("ValueError", "TypeError", "ImportError", "OSError")
PIPELINE = "rankwise.lab.experiments.pipeline.run"


def failing(error: BaseException) -> object:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_nothing_is_an_invitation(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    assert "rankwise COMMAND --help" in capsys.readouterr().out
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"rankwise {VERSION}\n"


@pytest.mark.parametrize(
    "error, code, line",
    [
        (CheckpointError("no such\nluck"), 2, "rankwise: no such luck"),
        (OSError(errno.ENOSPC, "No space left on device", "runs/x"), 1, "rankwise: runs/x: No space left on device"),
        (OSError("odd"), 1, "rankwise: odd"),
        (KeyboardInterrupt(), 130, "rankwise: Stopped; run the same command again to go on."),
        (KeyboardInterrupt("after step 3"), 130, "rankwise: after step 3"),
    ],
)
def test_an_error_is_one_line(
    error: BaseException,
    code: int,
    line: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PIPELINE, failing(error))
    assert run(["run", "--out", str(tmp_path)]) == code
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [line]
    assert captured.out == ""


@pytest.mark.parametrize("error", [ValueError("a slip of ours"), TypeError("a slip of ours"), RuntimeError("a slip")])
def test_a_bug_keeps_its_traceback(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PIPELINE, failing(error))
    with pytest.raises(type(error), match="a slip"):
        run(["run", "--out", str(tmp_path)])


def test_a_refusal_of_our_own_is_no_bug(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PIPELINE, lambda *_, **__: Windows([], batch=0, unroll=1, seed=0))
    assert run(["run", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "rankwise: `batch` and `unroll` must be positive, but are 0 and 1 instead.\n"


def test_what_src_raises_for_users_to_read_is_of_a_type_of_our_own() -> None:
    """By its type an error is told from a bug, which keeps its traceback."""
    plain = []
    for path in Path(rankwise.__file__).parent.rglob("*.py"):
        raised = [node.exc for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Raise)]
        calls = [exc.func for exc in raised if isinstance(exc, ast.Call) and isinstance(exc.func, ast.Name)]
        plain += [f"{path}:{call.lineno}" for call in calls if call.id in PLAIN]
    assert plain == []


def test_a_slip_of_python_in_our_code_is_a_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PIPELINE, lambda *_, **__: Windows(None, batch=1, unroll=1, seed=0))
    with pytest.raises(TypeError, match="NoneType"):
        run(["run", "--out", str(tmp_path)])


def test_a_warning_is_one_line(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        arguments = words(place, method="flop-agp", method__anneal_steps="1000", compare="")
        assert run(["run", "demo", *arguments, "--out", str(tmp_path / "run")]) == 0
    found = [line for line in capsys.readouterr().err.splitlines() if "warning" in line.lower()]
    begun, exported = found
    assert begun.startswith("rankwise: warning: pruning has only 10 steps")
    assert exported.startswith("rankwise: warning: ")
    assert "for which the gates have not learned yet" in exported


def test_a_disk_that_is_full_is_one_line_and_the_run_can_go_on(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["run", "demo", *words(place, compare=""), "--out", str(tmp_path / "run")]
    with monkeypatch.context() as full:
        full.setattr(
            "rankwise.lab.training.records.write_json", failing(OSError(errno.ENOSPC, "No space left on device"))
        )
        assert run(arguments) == 2
    found = [line for line in capsys.readouterr().err.splitlines() if line.startswith("rankwise:")]
    assert len(found) == 1
    assert "No space left on device" in found[0]
    assert run(arguments) == 0


@pytest.mark.parametrize("end", ["stdout", "stderr"])
def test_a_reader_that_goes_away_gets_no_traceback(end: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    arguments = ["--help"] if end == "stdout" else ["bogus"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | {end: writer}
    done = subprocess.run([sys.executable, "-m", "rankwise", *arguments], **pipes, text=True, check=False)
    os.close(writer)
    assert done.returncode == 141
    assert not done.stderr
    assert not done.stdout


def test_help_and_report_come_without_torch(finished: Path) -> None:
    lines = [["--help"], *([name, "--help"] for name in COMMANDS), ["report", str(finished)]]
    code = f"""
import sys
from rankwise.cli.app import run
for line in {lines}:
    assert run(line) == 0
    assert not {{"torch", "numpy", "accelerate"}} & set(sys.modules), line
"""
    done = python("-W", "error", "-c", code)
    assert done.stderr == ""
    assert done.returncode == 0


def test_it_works_without_what_is_optional(place: Path, tmp_path: Path) -> None:
    code = f"""
import importlib.util
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, *more):
        missing = name.split(".")[0] in ("tensorboard", "matplotlib")
        return None if missing else self.finder.find_spec(name, *more)

sys.meta_path[:] = map(Without, sys.meta_path)
assert importlib.util.find_spec("tensorboard") is None
from rankwise.cli import main
main(["run", "demo", *{words(place, compare="", training__distill="0")}, "--out", {str(tmp_path / "run")!r}])
"""
    done = python("-c", code, env={**os.environ, "COLUMNS": "300"})
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[:3]] == ["parameters", "base", "flop-l0"]
    assert "  step 10/10  loss " in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
