"""Whatever lies in the places that a user names: what can be read is, and the rest is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rankwise.errors import CheckpointError
from rankwise.lab.report.found import read, series_of
from rankwise.lab.report.page import make_page
from rankwise.lab.report.tables import table


def changed(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, **changes}))


@pytest.fixture
def copy(runs: Path, tmp_path: Path) -> Path:
    """A run to damage."""
    return Path(shutil.copytree(runs / "words", tmp_path / "copy"))


def test_a_folder_of_runs_is_all_of_them(runs: Path) -> None:
    found = read([runs])
    assert not found.problems
    assert [(Path(run.title).name, run.seed) for run in found.runs] == [
        ("attention", 0), ("compressed", 0), ("sweep", 0), ("sweep", 1), ("words", 0),
    ]  # fmt: skip
    assert all(run.finished for run in found.runs)


def test_a_place_that_is_given_twice_is_one(runs: Path) -> None:
    assert len(read([runs / "words", runs / "words" / ".." / "words"]).runs) == 1


def test_a_model_of_a_run_can_be_given_alone(runs: Path) -> None:
    (run,) = read([runs / "words" / "flop-l0"]).runs
    assert [row["name"] for row in run.rows] == ["flop-l0"]
    assert run.trainings[0].metrics.curves["loss"][0][-1] == 12


def test_a_run_that_goes_on_shows_what_it_has(copy: Path) -> None:
    (copy / "record.json").unlink()
    shutil.rmtree(copy / "dense")
    (copy / "flop-l0" / "export.json").unlink()
    (copy / "flop-l0" / "record.json").unlink()
    (run,) = read([copy]).runs
    assert not run.finished
    assert [row["name"] for row in run.rows] == ["base"]
    assert {training.name for training in run.trainings} == {"base", "flop-l0"}
    assert "is not finished: " in make_page([copy]).html()


def test_a_sweep_is_not_finished_before_all_of_its_seeds_are(runs: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(runs / "sweep", tmp_path / "copy"))
    (copy / "record.json").unlink()
    shutil.rmtree(copy / "seed-1")
    found = read([copy])
    assert len(found.runs) == 1 and not found.finished
    shutil.copytree(runs / "sweep" / "seed-1", copy / "seed-1")
    found = read([copy])
    assert [run.finished for run in found.runs] == [True, False]
    assert {run.title for run in found.runs} == {"copy"}


DAMAGES = {
    "half a record": lambda run: (run / "record.json").write_text('{"format": "rankwise-exp'),
    "no rows": lambda run: changed(run / "record.json", rows=[]),
    "older rows": lambda run: changed(run / "record.json", rows=[{"name": "flop-l0", "params": 3}]),
    "rows of no kind": lambda run: changed(run / "record.json", rows="none"),
    "a newer version": lambda run: changed(run / "record.json", version=99),
    "another format": lambda run: changed(run / "record.json", format="something-else"),
    "a list": lambda run: (run / "record.json").write_text("[1, 2]"),
    "an empty folder": lambda run: (shutil.rmtree(run), run.mkdir()),
    "no folder": shutil.rmtree,
    "an older compressed folder": lambda run: (
        shutil.rmtree(run), run.mkdir(), (run / "rankwise.json").write_text("{}")
    ),
    "damaged figures": lambda run: (
        shutil.rmtree(run), run.mkdir(),
        (run / "compression.json").write_text('{"format": "rankwise-compressed", "version": 1, "speed": 3}'),
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_named_and_the_rest_still_shows(damage: str, runs: Path, copy: Path) -> None:
    DAMAGES[damage](copy)
    page = make_page([copy, runs / "attention"])
    (problem,) = page.found.problems
    assert problem.place.endswith("copy")
    assert [Path(run.title).name for run in page.found.runs] == ["attention"]
    html = page.html()
    assert "Not shown" in html and "quality" in [figure.name for figure in page.figures]
    # alone it is one line
    with pytest.raises(CheckpointError, match="A report must be of at least one run or compressed model, but copy "):
        make_page([copy])


@pytest.mark.parametrize("value", [3, "odd", [{}]])
def test_no_field_of_a_record_can_stop_a_page(value: object, runs: Path, tmp_path: Path) -> None:
    record = json.loads((runs / "words" / "record.json").read_text())
    needed = ("format", "version", "rows")
    record |= dict.fromkeys([key for key in record if key not in needed], value)
    row = {"name": "flop-l0", "method": "flop-l0", "parameters": 3, "removed": 0.5, "test": {"perplexity": 2.0}}
    record["rows"] = [record["rows"][0], {**dict.fromkeys(record["rows"][1], value), **row}]
    inner = {"budget": value, "method": value, "model": value, "corpus": value}
    for number, experiment in enumerate((value, inner)):
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps({**record, "experiment": experiment}))
        html = make_page([file]).html()
        assert "quality" in html and "flop-l0 makes" in html


@pytest.mark.parametrize("name", ["sweep", "words"])
def test_models_that_failed_are_named(name: str, runs: Path, tmp_path: Path) -> None:
    record = json.loads((runs / name / "record.json").read_text())
    why = {"cell": "seed-1/fac-50", "log": None, "why": "ValueError: it is bad."}
    record["failed"] = [why] if name == "sweep" else ["fac-50"]
    file = tmp_path / f"{name}.json"
    file.write_text(json.dumps(record))
    (problem,) = read([file]).problems
    assert (problem.place, problem.why) in [
        ("sweep.json/seed-1/fac-50", "failed: ValueError: it is bad"), ("words.json/fac-50", "failed")
    ]  # fmt: skip
    assert any(note.startswith("without ") and note.endswith("fac-50: failed") for note in table(record).notes)


def test_damaged_lines_of_metrics_are_named(copy: Path) -> None:
    metrics = copy / "flop-l0" / "metrics.jsonl"
    metrics.write_text("not json\n" + metrics.read_text())
    (problem,) = read([copy]).problems
    assert problem.place == "copy/flop-l0/metrics.jsonl"
    assert "has 1 lines that cannot be read" in problem.why


def test_a_record_without_its_folder_has_tables_but_no_curves(runs: Path, tmp_path: Path) -> None:
    file = Path(shutil.copy(runs / "sweep" / "record.json", tmp_path / "kept.json"))
    page = make_page([file])
    assert {figure.name for figure in page.figures} >= {"quality", "network", "parts"}
    assert "loss" not in {figure.name for figure in page.figures}
    assert not page.html().count("Use it")


@pytest.mark.parametrize(
    "name, series", [("flop-l0-80", "flop-l0"), ("flop-l0", "flop-l0"), ("fac-80-scratch", "fac-scratch"),
                     ("svd-at-37.5", "svd"), ("dense", "dense"), ("np-l0-50", "np-l0")]
)  # fmt: skip
def test_a_series_is_a_name_without_its_size(name: str, series: str) -> None:
    assert series_of(name) == series
