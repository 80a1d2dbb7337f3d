"""Ctrl-C, for real, in every phase: one line, exit code 130, and the same command again ends as if nothing had been."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from rankwise.cli.app import STOPPED, run
from tests.cli.cli_toys import __file__ as impatient
from tests.cli.cli_toys import python, results, words

STEP = "Stopped after step {} of 10; run the same again to go on from there."
MOMENTS = {
    "read": STOPPED,
    "training the dense model": STOPPED,
    "training the dense model, report": STEP.format(5),
    "training the dense model, report x 2": STOPPED,
    "evaluating base": STOPPED,
    "training the dense model on, report": STEP.format(5),
    "training the dense model on with a teacher, report": STEP.format(5),
    "pruning with flop-l0": STOPPED,
    "pruning with flop-l0, report": STEP.format(5),
    "evaluating flop-l0": STOPPED,
    "timing": STOPPED,
}


def stopped(moments: list[str], arguments: list[str]) -> list[str]:
    """What is said each time that a command is stopped, before it is run to its end."""
    done = python(impatient, json.dumps(moments), *arguments)
    *told, codes = done.stderr.splitlines()
    assert json.loads(codes) == [130] * len(moments) + [0], done.stderr
    assert "Traceback" not in done.stderr
    return [line.removeprefix("rankwise: ") for line in told if line.startswith("rankwise: ")]


def test_a_run_that_is_stopped_in_every_phase_ends_as_if_nothing_had_been(
    tmp_path: Path, expected: list[dict[str, Any]]
) -> None:
    arguments = ["run", "demo", *words(tmp_path), "--out", str(tmp_path / "run")]
    assert stopped(list(MOMENTS), arguments) == list(MOMENTS.values())
    assert results(tmp_path / "run") == expected


def test_so_does_a_sweep(place: Path, tmp_path: Path) -> None:
    grid = ["--methods", "fac", "--removed", "0.5", "--seeds", "0,1"]
    arguments = ["sweep", "demo", *words(place), *grid, "--out"]
    moments = ["pruning with fac-50, report", "seed 1", "pruning with fac-50, report"]
    said = stopped(moments, [*arguments, str(tmp_path / "stopped")])
    assert said == [STEP.format(5), STOPPED, STEP.format(5)]
    assert run([*arguments, str(tmp_path / "at-once")]) == 0
    for seed in (0, 1):
        assert results(tmp_path / "stopped" / f"seed-{seed}") == results(tmp_path / "at-once" / f"seed-{seed}")


def test_ctrl_c_from_outside(place: Path, tmp_path: Path) -> None:
    arguments = ["run", "demo", *words(place, both__steps="100000"), "--out", str(tmp_path / "run")]
    with subprocess.Popen(
        [sys.executable, "-m", "rankwise", *arguments], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("  step 20/"):
                process.send_signal(signal.SIGINT)
                break
        *_, last = process.stderr.read().splitlines()
        assert process.wait(60) == 130
    assert last.startswith("rankwise: Stopped after step ")
    assert last.endswith(" of 100000; run the same again to go on from there.")
    assert list((tmp_path / "run" / "base" / "checkpoints").iterdir())
