"""Versions, commit and hardware: what a record keeps of where it was made."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from rankwise.version import VERSION


def surroundings(device: torch.device) -> dict[str, Any]:
    """Versions, commit and hardware: what a record keeps of where it was made."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "versions": {"python": platform.python_version(), "rankwise": VERSION, **_versions()},
        "commit": _commit(),
        "hardware": {
            "device": gpu or device.type,
            "processor": _processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "system": platform.platform(),
        },
    }


def _versions() -> dict[str, str]:
    packages = ("torch", "numpy", "safetensors", "transformers")
    return {name: version(name) for name in packages if find_spec(name) is not None}


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of this source, with a "+" where files were changed since; None outside its repository.

    `RANKWISE_COMMIT` comes first: a copy may have lost its history, or have an older one.
    """
    if said := os.environ.get("RANKWISE_COMMIT"):
        return said
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # an installed copy may lie inside some other project's repository
    if git("ls-files", "--error-unmatch", "errors.py") is None:
        return None
    commit = git("rev-parse", "HEAD")
    return f"{commit}+" if commit and git("status", "--porcelain", "--", ".") else commit
