"""A run can be described in a file, and shown before it starts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rankwise.cli.app import COMMANDS, run
from rankwise.cli.command import parse
from rankwise.cli.settings import configured
from rankwise.lab.experiments.presets import PRESETS, preset
from rankwise.lab.tasks.base import Experiment
from tests.cli.cli_toys import cache, refusal, results, words


def asked(*arguments: str) -> Experiment:
    """The experiment that a command line stands for."""
    command = COMMANDS["run"]
    options = parse(command, arguments)
    assert command.experiment is not None
    return configured(command.experiment(options), options)


def written(folder: Path, text: str, suffix: str) -> str:
    path = folder / f"mine.{suffix}"
    path.write_text(text)
    return str(path)


TOML = """
preset = "demo"
compare = ["dense"]
seed = 3

[method]
name = "np-l0"
anneal_steps = 40

[budget]
removed = 0.9

[both]
lr = 2e-3
steps = 200

[model]
layer_norm = false
"""
SAME = [
    *("demo", "--compare", "dense", "--seed", "3", "--method", "np-l0", "--method.anneal_steps", "40"),
    *("--budget.removed", "0.9", "--both.lr", "2e-3", "--both.steps", "200", "--model.layer_norm", "false"),
]


def test_a_file_says_what_the_command_line_says(tmp_path: Path) -> None:
    assert asked("--config", written(tmp_path, TOML, "toml")) == asked(*SAME)
    nested = {"method": {"name": "np-l0", "anneal_steps": 40}, "budget": {"removed": 0.9}, "seed": 3}
    rest = {"compare": ["dense"], "both.lr": 2e-3, "both": {"steps": 200}, "model.layer_norm": False}
    path = written(tmp_path, json.dumps(nested | rest), "json")
    assert asked("demo", "--config", path) == asked(*SAME)


def test_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, TOML, "toml")
    assert asked("--config", path, "--budget.removed", "0.5") == asked(*SAME, "--budget.removed", "0.5")


@pytest.mark.parametrize("name", ["demo", "causal", "sentences", "glue-minilm", *list(PRESETS)[-3:]])
def test_what_a_run_writes_down_describes_it(name: str, tmp_path: Path) -> None:
    plain = json.dumps(preset(name).to_json())
    assert asked("--config", written(tmp_path, plain, "json")) == preset(name)


def test_the_file_of_a_run_repeats_it(finished: Path, place: Path, tmp_path: Path) -> None:
    for source in ("experiment.json", "flop-l0/experiment.json"):
        assert run(["run", "--config", str(finished / source), "--compare", "", "--out", str(tmp_path / source)]) == 0
        assert results(tmp_path / source)[-1] == next(row for row in results(finished) if row["name"] == "flop-l0")


def test_a_record_of_a_run_is_taken_too(finished: Path) -> None:
    assert asked("--config", str(finished / "record.json")) == asked(
        "--config", str(finished / "experiment.json"), "--corpus.cache", "none"
    )


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.json", "{", "must be valid JSON, but is not: "),
        ("a.toml", "x = ", "must be valid TOML, but is not: "),
        ("a.json", "[1]", "must hold settings by name, but holds list instead."),
        ("a.yaml", "x: 1", "`--config` must be a .json or a .toml file, but is "),
        ("a.json", "{}", "must name its preset, but has none."),
        ("a.toml", 'preset = "demmo"', "There is no preset 'demmo'. Did you mean 'demo'?"),
        ("a.toml", 'preset = "demo"\n[budget]\nremoved = "most"', "`budget.removed` must be a number, but is 'most'"),
        ("a.toml", 'preset = "demo"\n[budget]\nremovd = 0.9', "There is no setting `budget.removd` here."),
        ("a.toml", 'preset = "demo"\nseed = 2026-01-01', "`seed` must be a text, a number, true, false or a list"),
        ("a.json", '{"name": "x", "corpus": 3}', "A saved experiment must hold all of its settings"),
        ("a.json", '{"name": "x"}', "A saved experiment must have one of the settings"),
        ("a.json", '{"experiment": {"name": "demo", "corpus": {}, "method": {}}}', "A saved experiment must hold all"),
    ],
)
def test_a_bad_file_is_one_line(
    name: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    line = refusal(capsys, "run", "--config", tmp_path / name, "--dry-run")
    assert message in line
    assert str(tmp_path / name) in line


@pytest.mark.parametrize("kind, name", [("causal", "mine"), ("demo", ["x"])])
def test_a_name_that_nothing_is_known_of_is_refused(
    kind: str, name: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, json.dumps({**preset(kind).to_json(), "name": name}), "json")
    line = refusal(capsys, "run", "--config", path, "--dry-run")
    assert f"`name` must be that of a preset, but is {name!r} instead." in line


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, "run", "--config", tmp_path / "no.toml")
    assert f"must be a file that can be read, but {tmp_path / 'no.toml'}: No such file" in line


def test_two_presets_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    described = written(tmp_path, TOML, "toml")
    whole = written(tmp_path, json.dumps(preset("demo").to_json()), "json")
    for path, message in ((described, "is for the preset demo, but PRESET is causal"), (whole, "PRESET is given too")):
        assert message in refusal(capsys, "run", "causal", "--config", path, "--dry-run")


def files(folder: Path) -> Iterator[tuple[str, int]]:
    return ((str(path), path.stat().st_mtime_ns) for path in sorted(folder.rglob("*")))


@pytest.mark.parametrize(
    "arguments", [["run"], ["run", "causal"], ["train", "demo"], ["sweep", "demo", "--removed", "0.7,0.8"], ["prune"]]
)
def test_a_dry_run_touches_nothing(
    arguments: list[str], finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = [*files(finished), *files(tmp_path)]
    assert run([*arguments, *([str(finished)] if arguments == ["prune"] else []), "--dry-run"]) == 0
    assert [*files(finished), *files(tmp_path)] == before
    assert "would write to runs" in capsys.readouterr().out


def test_a_dry_run_refuses_what_the_sweep_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, "sweep", "enwik8-sru-fac-80", "--dry-run")
    assert "A sweep needs a base to share, but enwik8-sru-fac-80 has none. Choose another preset." in line


def test_a_dry_run_shows_what_will_be_run(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", "demo", *words(place), "--budget.removed", "0.7", "--out", str(tmp_path / "out")]
    assert run([*command, "--dry-run", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["folder"] == str(tmp_path / "out")
    assert shown["preview"]["steps"] == 20
    # and is a description that a run accepts
    path = written(tmp_path, json.dumps(shown), "json")
    assert asked("--config", path) == asked(*command[1:-2])
    assert run([*command, "--dry-run"]) == 0
    text = capsys.readouterr().out.splitlines()
    assert ["budget.removed", "0.7"] in [line.split() for line in text]
    assert not [line for line in text if line.startswith("healing.")]


def test_a_dry_run_counts_every_model_that_the_run_trains(
    finished: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = json.loads((finished / "record.json").read_text())
    assert run(["run", "demo", *words(place), "--dry-run"]) == 0
    shown = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    names = {"base", *(row["name"] for row in record["rows"])}
    number, listed = shown["trains"].removeprefix("trains").split(" models: ")
    assert int(number) == len(names) == 5
    assert set(listed.split(", ")) == names
    logged = [(finished / name / "metrics.jsonl").read_text().splitlines() for name in names]
    steps = sum(max(json.loads(line).get("step", 0) for line in lines) for lines in logged)
    assert f"at most {steps:,} steps" in " ".join(line for line in shown.values())


@pytest.mark.filterwarnings("ignore:.* of the gates had not decided", "ignore:These layers are left as they are")
@pytest.mark.parametrize("method", ["flop-l0", "svd"])
def test_a_dry_run_names_the_models_of_all_sizes_and_counts_their_steps(
    method: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", "demo", *words(place), "--method", method, "--compare", "dense", "--out", str(tmp_path / "out")]
    if method == "svd":
        ramp = command.index("--method.anneal_steps")
        del command[ramp : ramp + 2]
    command += ["--budget.removed", "0.5", "--sizes", "0.2", "--init", "svd", "--training.distill", "0"]
    command += ["--healing.steps", "3", "--healing.batch_size", "4", "--healing.window", "8", "--healing.lr", "1e-3"]
    assert run([*command, "--dry-run"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert run(command) == 0
    record = json.loads((tmp_path / "out/record.json").read_text())
    written = {"base", *(row["name"] for row in record["rows"])}
    trained = {path.parent.name for path in (tmp_path / "out").glob("*/metrics.jsonl")}
    for word, names in (("trains", trained), ("writes", written)):
        found = re.search(rf"{word} (\d+) models: ((?:\S+, )*\S+)", shown)
        # what is written is named only where it is more
        assert found if word == "trains" or names != trained else not found
        if found:
            assert set(found[2].split(", ")) == names and int(found[1]) == len(names)
    logged = [path.read_text().splitlines() for path in (tmp_path / "out").rglob("metrics.jsonl")]
    steps = sum(max(json.loads(line).get("step", 0) for line in lines) for lines in logged)
    assert f"at most {steps:,} steps" in shown


def test_a_sweep_trains_with_every_seed_what_a_run_trains(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def steps(*command: str) -> int:
        assert run([*command, *words(place), "--dry-run"]) == 0
        (found,) = re.findall(r"at most ([\d,]+) steps", capsys.readouterr().out)
        return int(found.replace(",", ""))

    once = steps("run", "demo", "--compare", "dense")
    assert steps("sweep", "demo", "--methods", "flop-l0", "--seeds", "0,1,2") == 3 * once
    # what a run would refuse
    assert run(["sweep", "demo", "--method", "dense", "--compare", "fac", "--removed", "0.5", "--dry-run"]) == 0


def test_a_dry_run_counts_the_teacher_that_pruning_trains(
    place: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for share, names in (("0", "1 model: flop-l0"), ("0.5", "2 models: dense, flop-l0")):
        assert run(["prune", str(finished), *cache(place), "--training.distill", share, "--dry-run"]) == 0
        assert f"trains {names} " in " ".join(capsys.readouterr().out.split()) + " "


def test_a_size_out_of_reach_is_refused_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert "10" in refusal(capsys, "run", "demo", "--budget.params", "10", "--dry-run")
