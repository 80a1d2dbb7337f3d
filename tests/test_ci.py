"""The workflow tests what the package claims: the oldest and the newest Python and torch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CLAIMS = (ROOT / "pyproject.toml").read_text()


def pinned(path: str, package: str) -> str:
    found = re.search(rf"^{package}==(\S+)", (ROOT / path).read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def lower_bound(package: str) -> str:
    found = re.search(rf'"{package}>=([\d.]+)"', CLAIMS)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_the_oldest_versions_are_the_lower_bounds(package: str) -> None:
    assert pinned("constraints-oldest.txt", package) == f"{lower_bound(package)}.0"


def test_the_workflow_runs_both_ends() -> None:
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["check"]
    newest, oldest = job["strategy"]["matrix"]["include"]
    assert f'requires-python = ">={oldest["python"]}"' in CLAIMS
    for row in (newest, oldest):
        assert pinned(row["constraints"], "torch").startswith(f"{row['torch']}.")
    assert job["steps"][-1]["run"] == ".ci/run"


@pytest.mark.parametrize("tool", ["pytest", "pytest-xdist"])
def test_both_ends_run_the_same_pytest(tool: str) -> None:
    assert pinned("constraints-oldest.txt", tool) == pinned("constraints.txt", tool)
