"""The command line in several processes, as a launcher starts them: stopped, killed, refused, and resumed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rankwise.cli.app import run
from rankwise.errors import RankwiseError
from rankwise.lab.experiments.healing import heal_folder
from rankwise.lab.training.ranks import own_ranks
from tests.cli.cli_toys import words

LONG = {"both__steps": "500", "both__checkpoint_every": "50", "both__eval_every": "250", "both__log_every": "10"}


@contextmanager
def launched(*arguments: str, count: int = 2) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes of a launcher that does nothing when one of them dies."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    processes = []
    try:
        for rank in range(count):
            named = {name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
            command = [sys.executable, "-m", "rankwise", *arguments]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            processes.append(subprocess.Popen(command, env={**os.environ, **named}, **pipes))  # type: ignore[call-overload]
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def wait_for(process: subprocess.Popen[str], words: str) -> None:
    assert process.stderr is not None
    assert any(words in line for line in process.stderr), "it ended before"


def ends(processes: list[subprocess.Popen[str]]) -> list[tuple[int, list[str]]]:
    """Exit codes, and what was said of errors."""
    said = [process.communicate(timeout=100)[1] for process in processes]
    lines = [[line for line in text.splitlines() if line.startswith("rankwise: ")] for text in said]
    return [(process.returncode, found) for process, found in zip(processes, lines, strict=True)]


def test_a_run_that_is_stopped_and_killed_goes_on_in_any_number_of_processes(place: Path, tmp_path: Path) -> None:
    arguments = ["train", "demo", *words(place, **LONG), "--out", str(tmp_path / "run")]
    with launched(*arguments) as processes:
        wait_for(processes[0], "step 20/")
        processes[1].send_signal(signal.SIGTERM)
        (first, said), (second, nothing) = ends(processes)
    assert (first, second, nothing) == (143, 143, [])
    assert len(said) == 1 and "Stopped after step" in said[0]
    with launched(*arguments) as processes:
        wait_for(processes[0], "going on after step")
        wait_for(processes[0], "  step ")
        processes[1].kill()
        ((first, said), (killed, _)) = ends(processes)
    assert (first, killed) == (2, -signal.SIGKILL)
    assert len(said) == 1 and "one of them has ended" in said[0]
    assert run(arguments) == 0


def test_a_mistake_is_told_once_and_nothing_is_written(place: Path, tmp_path: Path) -> None:
    with launched("train", "demo", *words(place, both__batch_size="3"), "--out", str(tmp_path / "run")) as processes:
        found = ends(processes)
    assert [code for code, _ in found] == [2, 2]
    ((line,),) = [said for _, said in found if said]
    assert "must be a multiple of 2 processes, but is 3" in line
    assert not (tmp_path / "run").exists()


def test_what_one_process_must_do_is_refused_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RankwiseError, match="Healing must run in one process, but was started in 2"):
        heal_folder("small", "dense", "text", "out")
    with pytest.raises(RankwiseError, match="but RANK, MASTER_ADDR, MASTER_PORT is not set"):
        own_ranks()
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(RankwiseError, match="WORLD_SIZE must be a whole number, as launchers set it, but is 'two'"):
        own_ranks()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(RankwiseError, match="but FSDP was asked for"):
        own_ranks()
