"""benchmarks/glue.py: cells are run once and kept one by one, and FAC is the paper's row with even ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rankwise.errors import RankwiseError

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]
import glue  # noqa: E402

from tests.lab.experiments import glue_toys  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.* of the gates had not decided")


@pytest.fixture
def toy(tmp_path: Path) -> list[str]:
    """How the command is given a tiny encoder and a tiny task."""
    model, data = glue_toys.encoder(tmp_path, family="mpnet"), glue_toys.mrpc(tmp_path / "data")
    files = [str(tmp_path / "out.json"), "--model", str(model), "--data", str(data), "--work", str(tmp_path / "work")]
    return [*files, "--tasks", "mrpc", "--scale", "0.002", "--device", "cpu", "--precision", "no"]


def read(tmp_path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((tmp_path / "out.json").read_text())["rows"]
    return rows


def test_rows_are_added_and_those_that_stand_are_left_alone(toy: list[str], tmp_path: Path) -> None:
    glue.main([*toy, "--rows", "dense,fac-35"])
    before = read(tmp_path)
    assert [row["row"] for row in before] == ["dense", "fac-35"]
    glue.main([*toy, "--rows", "dense,fac-35,paper-35"])
    after = read(tmp_path)
    assert after[:2] == before
    dense, fac, paper = (row["parameters"] for row in after)
    assert 0.65 * dense >= fac > 0.6 * dense
    assert 0.65 * dense >= paper > 0.6 * dense


def test_a_record_of_other_settings_is_refused(toy: list[str], tmp_path: Path) -> None:
    glue.main([*toy, "--rows", "dense"])
    before = read(tmp_path)
    with pytest.raises(RankwiseError, match="same settings"):
        glue.main([*toy, "--rows", "fac-35", "--held-out", "0.1"])
    assert read(tmp_path) == before


def test_fac_is_the_paper_s_row_with_even_ranks() -> None:
    preset = glue.glue("glue-mpnet")
    fac, paper = (glue.recipe(preset, name, 0.35) for name in ("fac", "paper"))
    assert (fac.method.name, paper.method.name) == ("fac", "flop-l0")
    assert replace(fac, method=paper.method) == paper
