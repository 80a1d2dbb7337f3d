"""`rankwise run glue-...`: every method runs to its table; a mistake is one line, and nothing is written."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rankwise.cli import app
from tests.cli.cli_toys import refusal
from tests.lab.experiments import glue_toys


@pytest.mark.filterwarnings("ignore:.* of the gates had not decided")
@pytest.mark.parametrize("method", ["svd", "flop-l0", "flop-agp", "fac", "np-l0", "agp"])
def test_every_method_runs_to_its_table(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--data", str(glue_toys.mrpc(tmp_path / "data")), "--model.name", str(glue_toys.encoder(tmp_path))]
    short = [
        f"--{phase}.{setting}"
        for phase in ("base", "training", "healing")
        for setting in ("max_steps=3", "log_every=1")
    ]
    steps = [word for option in short for word in option.split("=")]
    words = ["run", "glue-minilm", "--task", "mrpc", *files, *steps, "--method", method, "--budget.removed", "0.2"]
    assert app.run([*words, "--out", str(tmp_path / "run")]) == 0
    assert method in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ["run", "glue-roberta", "--task", "mrcp"],
            "`task` must be one of .* but is 'mrcp' instead. Did",
        ),
        (["run", "glue-minilm", "--sizes", "0.9"], "`sizes` must be fractions that are removed on the way to"),
        (
            ["run", "glue-minilm", "--model.name", "{here}"],
            "`model.name` must be .* is a folder without a model",
        ),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert re.search(message, refusal(capsys, *(word.format(here=tmp_path) for word in words)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning")
def test_a_task_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {
        "task": "MRPC", "data": glue_toys.mrpc(tmp_path / "data"), "model.name": glue_toys.encoder(tmp_path),
        "model.max_length": 32, "both.max_steps": 2, "both.min_steps": 1, "healing": "none", "calibration_rows": 8,
        "device": "cpu",
    }  # fmt: skip
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    assert app.run(["run", "glue-minilm", *words]) == 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["glue-minilm-mrpc"]


def test_the_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["presets", "glue"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in ("glue-roberta", "125M to 81M", "glue-mpnet", "109M to 71.2M", "glue-minilm"))


def test_a_dry_run_downloads_no_model_that_is_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = ["--data", str(glue_toys.mrpc(tmp_path / "data")), "--model.name", str(glue_toys.encoder(tmp_path))]
    found = []
    for given in (here, here[:2]):
        assert app.run(["run", "glue-minilm", *given, "--dry-run", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["preview"]["download_megabytes"])
    assert found[0] == 0 < found[1]
