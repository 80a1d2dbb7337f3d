"""SLURM (its commands played by small scripts) and Ray (its local cluster) run cells, stop them, queue them again."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from rankwise.errors import RankwiseError
from rankwise.lab.experiments.cells import PLAN, WORKERS, Cell, Scheduler
from rankwise.lab.experiments.launchers import Job, Ray, Slurm
from rankwise.lab.training import Interrupted, Watcher
from tests.lab.experiments import fake_slurm
from tests.lab.experiments.toy_cell import __file__ as toy_cell

OF_CELL = slice(3, None)
"""The words of a cell's command after `python -m MODULE`."""
# not `importorskip`: imported in any other way than ours, it takes over the logging of this process
needs_submitit = pytest.mark.skipif(find_spec("submitit") is None, reason="submitit is not installed")


def toy(command: Sequence[str]) -> list[str]:
    return [sys.executable, "-IS", toy_cell, *command[OF_CELL]]


class ToySlurm(Slurm):
    pause, patience = 0.05, 0.25

    def start(self, command: Sequence[str], log: Path, worker: int, title: str) -> Job:
        return super().start(toy(command), log, worker, title)


class OnThisMachine(ToySlurm):
    cluster = "local"


class ToyRay(Ray):
    patience = 0.5

    def start(self, command: Sequence[str], log: Path, worker: int, title: str) -> Job:
        return super().start(toy(command), log, worker, title)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / WORKERS).mkdir()
    (tmp_path / WORKERS / PLAN).write_text("{}")
    return tmp_path


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the jobs of a SLURM."""
    monkeypatch.setenv("PATH", f"{fake_slurm.install(tmp_path)}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(tmp_path / "slurm"))
    (tmp_path / "slurm").mkdir()
    return tmp_path / "slurm"


def wait_until(what: Callable[[], object]) -> None:
    until = time.monotonic() + 60
    while not what():
        assert time.monotonic() < until, "nothing happened for 60 s"
        time.sleep(0.01)


def wait_for(path: Path) -> None:
    """Wait until something was written to a file."""
    wait_until(lambda: path.exists() and path.read_text())


@needs_submitit
def test_submitit_does_not_set_up_the_logging_of_this_process(folder: Path) -> None:
    OnThisMachine().open(folder)
    assert not logging.getLogger("submitit").handlers


@needs_submitit
def test_submitit_runs_what_can_be_run_and_leaves_no_pickle(folder: Path) -> None:
    launcher = OnThisMachine(2)
    launcher.open(folder / WORKERS)
    scheduler = Scheduler(launcher, folder, Watcher())
    scheduler.run([Cell(0, "base"), Cell(0, "bad", ("base",))])
    assert (scheduler.finished, scheduler.failed) == ({"seed-0/base"}, {"seed-0/bad": "ValueError: it is bad"})
    assert not list(folder.rglob("*.pkl"))


@needs_submitit
def test_a_job_of_slurm_has_its_options_and_goes_on_after_it_was_queued_again(folder: Path, slurm: Path) -> None:
    launcher, cell = ToySlurm(options={"partition": "gpu", "gpus-per-node": "1", "mem": "8G"}), Cell(0, "slow")
    launcher.open(folder / WORKERS)
    command = ["", "", "", str(folder), "0", "slow"]
    job = launcher.start(command, cell.log(folder), 0, cell.title)
    text = (slurm / "100.sh").read_text()
    for line in ("partition=gpu", "gpus-per-node=1", "mem=8G", "job-name=rankwise-seed-0-slow", "time=60"):
        assert f"#SBATCH --{line}\n" in text
    wait_for(cell.log(folder))
    group = int((slurm / "100.pid").read_text())
    # as SLURM does when the time is over: to all processes of the job
    os.killpg(group, signal.SIGUSR2)

    def is_queued_again() -> bool:
        assert not job.is_over()
        return int((slurm / "100.pid").read_text() or group) != group

    wait_until(is_queued_again)
    (folder / "hurry").touch()
    wait_until(job.is_over)
    assert cell.log(folder).read_text().split() == ["started", "stopped", "started", "finished"]
    assert cell.is_finished(folder)


@needs_submitit
def test_ctrl_c_cancels_the_jobs_of_slurm(folder: Path, slurm: Path) -> None:
    class Impatient(ToySlurm):
        def start(self, command: Sequence[str], log: Path, worker: int, title: str) -> Job:
            job = super().start(command, log, worker, title)
            wait_for(log)
            os.kill(os.getpid(), signal.SIGINT)
            return job

    launcher = Impatient()
    launcher.open(folder / WORKERS)
    with pytest.raises(Interrupted, match="1 cells to do"):
        Scheduler(launcher, folder, Watcher()).run([Cell(0, "slow")])
    assert (folder / WORKERS / "seed-0" / "slow.log").read_text().split() == ["started", "stopped"]


@needs_submitit
def test_what_sbatch_refuses_is_one_line(folder: Path, slurm: Path) -> None:
    (folder / "bin" / "sbatch").write_text(
        "#!/bin/sh\necho 'sbatch: error: invalid partition specified: gpo' >&2; exit 1"
    )
    launcher = ToySlurm(options={"partition": "gpo"})
    launcher.open(folder / WORKERS)
    with pytest.raises(RankwiseError, match="sbatch refused the job seed-0/base: .*invalid partition specified: gpo"):
        Scheduler(launcher, folder, Watcher()).run([Cell(0, "base")])


@pytest.mark.filterwarnings("ignore")
def test_ray_runs_what_can_be_run(folder: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
    launcher = ToyRay(2)
    launcher.open(folder / WORKERS)
    try:
        scheduler = Scheduler(launcher, folder, Watcher())
        scheduler.run([Cell(0, "base"), Cell(0, "bad", ("base",))])
        assert (scheduler.finished, scheduler.failed) == ({"seed-0/base"}, {"seed-0/bad": "ValueError: it is bad"})
        # a process that is stopped can save first
        cell = Cell(0, "slow")
        job = launcher.start(["", "", "", str(folder), "0", "slow"], cell.log(folder), 0, cell.title)
        wait_for(cell.log(folder))
        job.stop()
        wait_until(job.is_over)
        assert cell.log(folder).read_text().split() == ["started", "stopped"]
    finally:
        launcher.close()
