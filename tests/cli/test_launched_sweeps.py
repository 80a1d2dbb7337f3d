"""`rankwise sweep --launcher local`, for real: workers are killed, fail and lose their parent; results are the same."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from rankwise.cli.app import run
from rankwise.lab.training.records import LOCK
from tests.cli.cli_toys import refusal, results, words

GRID = ["--methods", "fac", "--removed", "0.5", "--training.distill", "0"]
PARTS = ("base", "dense", "fac-50")
STARTED = re.compile(r"in process (\d+) on ")


def process_of(log: Path) -> int:
    """The process that writes a log, once it has begun."""
    until = time.monotonic() + 120
    while not (found := STARTED.findall(log.read_text() if log.exists() else "")):
        assert time.monotonic() < until, f"no process writes to {log}"
        time.sleep(0.01)
    return int(found[-1])


def times_started(logs: Path) -> dict[str, int]:
    return {name: len(STARTED.findall((logs / f"{name}.log").read_text())) for name in PARTS}


def test_killed_and_failed_workers_are_replaced_and_the_results_are_those_of_one_process(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder, arguments = tmp_path / "launched", ["sweep", "demo", *words(place), *GRID, "--out"]
    logs, launched = folder / "workers" / "seed-0", [*arguments, str(folder), "--launcher", "local", "--workers", "3"]
    (folder / "seed-0" / "dense").mkdir(parents=True)
    # nothing can be made in a folder that is a file
    (folder / "seed-0" / "fac-50").touch()
    # the first process of this cell waits here until it is killed
    lock = FileLock(folder / "seed-0" / "dense" / LOCK, thread_local=False)
    lock.acquire()

    def kill() -> None:
        os.kill(process_of(logs / "dense.log"), signal.SIGKILL)
        lock.release()

    killer = threading.Thread(target=kill)
    killer.start()
    assert run(launched) == 1
    killer.join()
    told, errors = capsys.readouterr()
    assert "dense" in told
    assert "without seed-0/fac-50: failed" in told
    assert errors.splitlines()[-1].startswith("rankwise: 1 cell of the sweep failed. seed-0/fac-50: FileExistsError: ")
    assert f"(log: {logs / 'fac-50.log'})" in errors
    assert times_started(logs) == {"base": 1, "dense": 2, "fac-50": 2}
    (folder / "seed-0" / "fac-50").unlink()
    assert run(launched) == 0
    assert times_started(logs) == {"base": 1, "dense": 2, "fac-50": 3}
    # of another number of threads, sums are rounded otherwise
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert run([*arguments, str(tmp_path / "at-once")]) == 0
    finally:
        torch.set_num_threads(threads)
    assert results(folder / "seed-0") == results(tmp_path / "at-once" / "seed-0")


def test_a_process_whose_parent_is_gone_stops_as_by_sigterm() -> None:
    wait = "from rankwise.lab.experiments.cells import end_with_parent as f; import time; f(); print(flush=True); "
    with subprocess.Popen(
        [sys.executable, "-c", f"{wait} time.sleep(600)"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"\n"
        assert process.poll() is None
        process.communicate()
    assert process.returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    "options, told",
    [
        (["--launcher", "slrum"], "`--launcher` must be one of local, slurm, ray, but is 'slrum' instead."),
        (["--launcher", "local", "--workers", "0"], "`workers` must be at least 1, but is 0 instead."),
        (["--workers", "2"], "`--workers` and `--launcher-option` go with `--launcher`."),
        (["--launcher", "slurm", "--launcher-option", "gpu"], "must be a name and a value, but is 'gpu'."),
        (["--launcher", "local", "--launcher-option", "mem=8G"], "options of the launcher local must be empty"),
    ],
)
def test_bad_options_get_one_line_and_write_nothing(
    options: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in refusal(capsys, "sweep", "demo", *options, "--out", tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists()


@pytest.mark.skipif(find_spec("submitit") is None, reason="submitit is not installed")
def test_a_slurm_that_is_not_there_is_refused_before_anything_is_written(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    arguments = ["sweep", "demo", *words(place), *GRID, "--launcher", "slurm", "--out", str(tmp_path / "sweep")]
    assert run(arguments) == 2
    assert "there is no `sbatch` here" in capsys.readouterr().err
    assert not (tmp_path / "sweep").exists()
