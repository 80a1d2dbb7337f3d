"""Processes that train together, on this machine and over gloo.

They are forked from a server that has imported what tests need, because importing takes longer than the steps.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from filelock import FileLock

TIMEOUT = timedelta(seconds=180)
"""A rank that waits longer for another gives up."""
PRELOAD = ["torch.distributed.fsdp", "torch.distributed.checkpoint", "rankwise", "tests.models"]

Worker = Callable[..., Any]
"""Called with the rank, the number of ranks, a folder and more; what it returns is saved as tensors."""


def run_ranks(worker: Worker, count: int, folder: Path, *args: Any, preload: tuple[str, ...] = ()) -> list[Any]:
    """What each of `count` ranks returns; a failure of one comes with its traceback."""
    folder.mkdir(exist_ok=True)
    multiprocessing.set_forkserver_preload([*PRELOAD, *preload])
    mp.start_processes(_rank, (worker, count, str(folder), args), nprocs=count, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(count)]


def run_ranks_once(
    factory: pytest.TempPathFactory, name: str, worker: Worker, count: int, *args: Any, preload: tuple[str, ...] = ()
) -> tuple[list[Any], Path]:
    """`run_ranks` in a folder of that name, which is also returned; once for all workers of pytest-xdist."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"ranks-{name}"
    with FileLock(f"{folder}.lock"):
        if not (folder / "done").exists():
            run_ranks(worker, count, folder, *args, preload=preload)
            (folder / "done").touch()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(count)], folder


def _rank(rank: int, worker: Worker, count: int, folder: str, args: tuple[Any, ...]) -> None:
    join(rank, count, folder)
    try:
        torch.save(worker(rank, count, Path(folder), *args), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def join(rank: int, count: int, folder: str) -> None:
    """Become one of `count` ranks."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = f"file://{folder}/store"
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=count, timeout=TIMEOUT)
