"""Cells in processes of their own: each is finished once, whatever is killed, fails or is stopped."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rankwise.errors import InvalidValueError, MissingPackageError
from rankwise.lab.experiments.cells import PLAN, WORKERS, Cell, Scheduler
from rankwise.lab.experiments.launchers import Job, Local, make_launcher
from rankwise.lab.experiments.sweeps import failure
from rankwise.lab.training import Interrupted, Watcher
from tests.lab.experiments.toy_cell import __file__ as toy_cell

GRID = [Cell(seed, "base") for seed in (0, 1, 2)] + [
    Cell(seed, name, ("base",)) for seed in (0, 1, 2) for name in ("dense", "fac-50", "svd-50")
]


class Toy(Local):
    """Starts toy processes; `on_start` is called with each."""

    pause = 0.005

    def __init__(self, workers: int, on_start: Callable[[str, Job], None] = lambda title, job: None) -> None:
        super().__init__(workers)
        self.started: list[str] = []
        self.jobs: list[Job] = []
        self.on_start = on_start

    def start(self, command: Sequence[str], log: Path, worker: int, title: str) -> Job:
        assert sum(not job.is_over() for job in self.jobs) < (self.workers or 0), "more processes than workers"
        # without site-packages, which take longer to find than everything else
        job = super().start([sys.executable, "-IS", toy_cell, *command[3:]], log, worker, title)
        self.started.append(title)
        self.jobs.append(job)
        self.on_start(title, job)
        return job


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / WORKERS).mkdir()
    (tmp_path / WORKERS / PLAN).write_text("{}")
    return tmp_path


def run(folder: Path, cells: Sequence[Cell], launcher: Toy) -> Scheduler:
    scheduler = Scheduler(launcher, folder, Watcher())
    scheduler.run(cells)
    return scheduler


def times(folder: Path, word: str) -> dict[str, int]:
    """How often the process of each cell said a word."""
    return {cell.title: cell.log(folder).read_text().splitlines().count(word) for cell in GRID}


def test_of_twelve_cells_over_three_workers_with_one_killed_all_are_made_and_none_twice(folder: Path) -> None:
    killed: list[str] = []

    def kill(title: str, job: Job) -> None:
        if title == "seed-1/dense" and not killed:
            job.stop(at_once=True)
            killed.append(title)

    found = run(folder, GRID, launcher := Toy(3, kill))
    assert (found.finished, found.failed) == ({cell.title for cell in GRID}, {})
    assert killed == ["seed-1/dense"]
    assert set(times(folder, "finished").values()) == {1}
    # the killed one is the only one that was started again, and no variant was started before its base
    assert sorted(launcher.started) == sorted([*(cell.title for cell in GRID), *killed])
    for cell in GRID:
        assert all(launcher.started.index(f"seed-{cell.seed}/{name}") < launcher.started.index(cell.title)
                   for name in cell.after)  # fmt: skip


def test_a_cell_that_fails_twice_is_told_of_with_those_that_need_it_and_the_others_are_made(folder: Path) -> None:
    cells = [Cell(0, "bad-base"), Cell(0, "fac", ("bad-base",)), Cell(1, "base"), Cell(1, "fac", ("base",))]
    found = run(folder, cells, launcher := Toy(2))
    assert found.finished == {"seed-1/base", "seed-1/fac"}
    assert found.failed == {
        "seed-0/bad-base": "ValueError: it is bad",
        "seed-0/fac": "it needs seed-0/bad-base, which failed",
    }
    assert launcher.started.count("seed-0/bad-base") == 2
    assert found.tries == {"seed-0/bad-base": 2, "seed-1/base": 1, "seed-1/fac": 1}


def test_a_message_names_the_logs_that_there_are() -> None:
    started = {"cell": "seed-0/base", "log": "base.log", "why": "ValueError: it is bad."}
    waiting = {"cell": "seed-0/fac", "log": None, "why": "it needs seed-0/base, which failed"}
    told = "seed-0/base: ValueError: it is bad (log: base.log); seed-0/fac: it needs seed-0/base, which failed. The"
    assert told in str(failure([started, waiting]))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_processes_and_the_same_again_makes_what_is_left(folder: Path, number: int) -> None:
    cells = [Cell(0, "base"), *(Cell(0, f"slow-{letter}", ("base",)) for letter in "abc")]
    launcher = Toy(2, lambda title, job: os.kill(os.getpid(), number) if title == "seed-0/slow-b" else None)
    with pytest.raises(Interrupted, match="3 cells to do; run the same again") as stopped:
        run(folder, cells, launcher)
    assert stopped.value.signal == number
    assert all(job.is_over() for job in launcher.jobs)
    (folder / "hurry").touch()
    found = run(folder, cells, again := Toy(3))
    assert found.finished == {cell.title for cell in cells}
    assert sorted(again.started) == ["seed-0/slow-a", "seed-0/slow-b", "seed-0/slow-c"]


def test_another_plan_starts_finished_cells_again(folder: Path) -> None:
    run(folder, GRID[:1], Toy(1))
    (folder / WORKERS / PLAN).write_text('{"methods": []}')
    # more workers than cells are no mistake
    run(folder, GRID[:1], launcher := Toy(4))
    assert launcher.started == ["seed-0/base"]


@pytest.mark.parametrize(
    "gpus, workers, shared",
    [
        ("0,1,2,3", 2, ["0,2", "1,3"]),
        ("4,5", 2, ["4", "5"]),
        ("GPU-a,GPU-b", 3, ["GPU-a", "GPU-b", "GPU-a"]),
        ("", 2, ["", ""]),
    ],
)
def test_gpus_are_shared_out(monkeypatch: pytest.MonkeyPatch, gpus: str, workers: int, shared: list[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    launcher = Local(workers)
    launcher.at_a_time = workers
    environments = [launcher.environment(worker) for worker in range(workers)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in environments] == shared
    threads = sum(int(each["OMP_NUM_THREADS"]) for each in environments)
    assert threads <= max(workers, os.cpu_count() or 1)


def test_by_default_each_gpu_has_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus, workers in (("0,1,2", 3), ("", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        assert Local().workers == workers


@pytest.mark.parametrize(
    "arguments, told",
    [
        (("slrum",), "`launcher` must be one of local, slurm, ray, but is 'slrum' instead. Did you mean 'slurm'?"),
        (("local", 0), "`workers` must be at least 1, but is 0 instead."),
        (("local", 1, {"partition": "gpu"}), "options of the launcher local must be empty, but one is 'partition'"),
        (("ray", 1, {"cpu": "2"}), "must be of address, cpus, gpus, but one is 'cpu'. Did you mean 'cpus'"),
    ],
)
def test_bad_launchers_are_refused(arguments: Any, told: str) -> None:
    with pytest.raises(InvalidValueError) as refused:
        make_launcher(*arguments)
    assert told in str(refused.value)


@pytest.mark.parametrize("name, package", [("slurm", "submitit"), ("ray", "ray")])
def test_a_launcher_that_is_not_installed_says_how_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=f"needs {package}, but it is not installed.*pip install"):
        make_launcher(name).open(tmp_path)
