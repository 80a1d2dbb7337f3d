"""A finished toy run, made once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rankwise.cli.app import run
from tests.cli.cli_toys import results, words


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the toy text and its cache are."""
    return tmp_path_factory.mktemp("toys")


@pytest.fixture(scope="session")
def finished(place: Path) -> Path:
    """The folder of a finished run; nobody may change it."""
    folder = place / "finished"
    assert run(["run", "demo", *words(place), "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="session")
def expected(finished: Path) -> list[dict[str, Any]]:
    """What every run of the toy must come to."""
    return results(finished)
