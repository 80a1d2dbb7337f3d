"""Freed memory: what lies in a file may go, and nothing else is lost."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rankwise.core.host_memory import release_mapped_pages

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are let go on Linux alone")


def mapped_megabytes() -> float:
    found = re.search(r"RssFile:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def test_a_tensor_in_a_file_no_longer_takes_memory_and_its_neighbours_are_whole(tmp_path: Path) -> None:
    first, second = torch.arange(2**23).float(), torch.randn(999)
    save_file({"first": first, "second": second}, tmp_path / "weights.safetensors")
    read = load_file(tmp_path / "weights.safetensors")
    assert torch.equal(read["first"], first)
    before = mapped_megabytes()
    release_mapped_pages(read["first"])
    assert mapped_megabytes() < before - 30
    assert torch.equal(read["second"], second)
    # it can still be read, from the file
    assert torch.equal(read["first"], first)


def test_other_memory_is_left_alone() -> None:
    weight = torch.randn(2**20)
    want = weight.clone()
    release_mapped_pages(weight)
    release_mapped_pages(weight[:3])
    release_mapped_pages(weight[::2])
    assert torch.equal(weight, want)
