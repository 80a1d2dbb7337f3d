"""How much memory is free, by what the system says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rankwise.deploy import devices

CPU = torch.device("cpu")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of a machine of which 8 MiB are free."""
    (tmp_path / "meminfo").write_text("MemTotal: 16384 kB\nMemAvailable: 8192 kB\n")
    monkeypatch.setattr(devices, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(devices, "CONTAINER", tmp_path)
    return tmp_path


def limits(folder: Path, most: str, used: int, **stat: int) -> None:
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text("".join(f"{name} {size}\n" for name, size in stat.items()))


def test_free_memory_is_that_of_the_machine_or_of_the_container(system: Path) -> None:
    assert devices.free_memory(CPU) == 8 << 20
    limits(system, "max", 3 << 20, anon=3 << 20)
    assert devices.free_memory(CPU) == 8 << 20
    limits(system, str(6 << 20), 5 << 20, anon=5 << 20, active_file=0, inactive_file=0)
    assert devices.free_memory(CPU) == 1 << 20


def test_files_that_were_read_take_no_memory_from_a_container(system: Path) -> None:
    """The kernel keeps copies of files as long as nobody needs the memory: a large model has been read from one."""
    limits(system, str(6 << 20), 6 << 20, anon=1 << 20, active_file=2 << 20, inactive_file=3 << 20)
    assert devices.free_memory(CPU) == 5 << 20
