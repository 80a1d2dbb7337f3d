"""Settings on the command line: every one can be set and is shown; a wrong one gets one line with what was meant."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from rankwise.cli.app import COMMANDS, run
from rankwise.cli.command import parse
from rankwise.cli.settings import as_text, configured, settings
from rankwise.lab.experiments.presets import preset
from tests.cli.cli_toys import refusal, words

MISSING = next(name for name in ("wandb", "clearml", "swanlab", "dvclive", "aim") if find_spec(name) is None)
"""A tracker that nobody has installed here."""


def test_settings_are_told_from_options_and_arguments() -> None:
    line = ["demo", "--a.b", "1", "--out", "x", "--c=-2", "--d.e", "-3", "--json", "--f", "--g="]
    options = parse(COMMANDS["run"], line)
    assert (options.subject, options.out, options.json, options.trackers) == ("demo", "x", True, ())
    assert options.given == [("a.b", "1"), ("c", "-2"), ("d.e", "-3"), ("f", None), ("g", "")]
    options = parse(COMMANDS["run"], ["--a", "1", "--", "--b"])
    assert (options.subject, options.given) == ("--b", [("a", "1")])


def test_options_can_be_repeated_and_written_with_an_equals_sign() -> None:
    options = parse(COMMANDS["plan"], ["--exclude", "a", "m", "--exclude=b", "--removed=-1"])
    assert (options.subject, options.exclude, options.removed, options.include) == ("m", ["a", "b"], -1.0, None)
    assert parse(COMMANDS["plan"], ["m"]).exclude == []


@pytest.mark.parametrize("name", ["demo", "wikitext-103-sru-flop-l0-50", "enwik8-transformer-xl-agp-80-short"])
def test_every_setting_as_it_is_shown_can_be_given_and_changes_nothing(name: str) -> None:
    experiment = preset(name)
    shown = {s.name: as_text(s.value) for s in settings(experiment).values()}
    # a group that is there is shown as "..."; one that is not cannot have settings
    none = [group for group, text in shown.items() if text == "none"]
    given = {
        setting: "" if text == '""' else text
        for setting, text in shown.items()
        if text != "..." and not any(setting.startswith(f"{group}.") for group in none)
    }
    line = ["run", name, *(f"--{setting}={text}" for setting, text in given.items())]
    options = parse(COMMANDS["run"], line[1:])
    assert len(options.given) == len(given) > 20
    assert configured(preset(name), options) == experiment


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["bogus"], "There is no command `bogus`."),
        (["sampel"], "There is no command `sampel`. Did you mean 'sample'?"),
        (["--verson"], "There is no option `--verson`. Did you mean '--version'?"),
        (["run", "dmeo"], "There is no preset 'dmeo'. Did you mean 'demo'?"),
        (["run", "demo", "more"], "`rankwise run` takes no further argument, but got 'more'."),
        (["run", "demo", "--ouut", "x"], "There is no option `--ouut` here. Did you mean '--out'?"),
        (["run", "--jsn"], "There is no option `--jsn` here. Did you mean '--json'?"),
        (
            ["run", "demo", "--clip", "1"],
            "There is no option `--clip` here. Did you mean --base.clip or --training.clip or --healing.clip?",
        ),
        (
            ["run", "demo", "--training.lrr", "1"],
            "There is no setting `training.lrr` here. Did you mean 'training.lr'?",
        ),
        (["run", "demo", "--training.lr"], "`--training.lr` needs a value, but has none. Example: --training.lr 0.0"),
        (
            ["run", "demo", "--both.steps", "--json"],
            "`--both.steps` needs a value, but has none. Example: --both.steps ",
        ),
        (["run", "demo", "--training.lr", "fast"], "`training.lr` must be a number, but is 'fast' instead."),
        (["run", "demo", "--training.lr=-1"], "`lr` must be positive and finite, but is -1.0 instead."),
        (["run", "demo", "--model.layer_norm", "maybe"], "`model.layer_norm` must be true or false, but is 'maybe'"),
        (["run", "demo", "--method", "flip-l0"], "but is 'flip-l0' instead. Did you mean 'flop-l0'?"),
        (["run", "demo", "--budget.removed", "80"], "but is 80.0 instead. Did you mean removed=0.8?"),
        (["run", "demo", "--out"], "`--out` needs a value."),
        (["run", "demo", "--json=yes"], "`--json` takes no value, but has 'yes'."),
        (["export", "nowhere"], "`rankwise export` needs --to FORMAT. See `rankwise export --help`."),
        (["sample", "-x"], "There is no option `-x` here."),
        (["train"], "PRESET or `--config FILE` must be given, but neither is."),
        (["prune", "nowhere"], "A run's folder must hold experiment.json, but nowhere does not."),
        (
            ["prune", "nowhere", "--model.width", "3"],
            "`--model.width` cannot be set here, because the dense model is trained",
        ),
        (["evaluate", "nowhere"], "There is nothing at nowhere. Give the folder of a run or of transformers"),
        (["evaluate", "nowhere", "--split", "train"], "`--split` must be one of valid, test, but is 'train' instead."),
        (["evaluate", "nowhere", "--budget.removed", "1"], "`--budget.removed` cannot be set here, because the model"),
        (["sample", "nowhere", "--length", "long"], "`--length` must be a whole number, but is 'long' instead."),
        (["sample", "nowhere", "--topk", "3"], "There is no option `--topk` here. Did you mean '--top-k'?"),
        (["sweep", "demo", "--removed", "0.8,x"], "`--removed` must be a number, but is 'x' instead."),
        (["sweep", "demo", "--seeds", ","], "`--seeds` must be a list with commas, but is ',' instead."),
        (["sweep", "enwik8-sru-dense"], "`--removed` must be given for enwik8-sru-dense, which has none."),
        (
            ["sweep", "demo", "--removed", "0.5,0.8", "--budget.latency_ms", "1.2"],
            "The sizes of a sweep are those of `--removed`, but the budget is 1.2 ms. Leave out --budget.latency_ms",
        ),
        (["sweep", "demo", "--budget.latency_ms", "1.2"], "but the budget is 1.2 ms. Leave out --budget.latency_ms"),
        (
            ["run", "demo", "--method", "dense", "--compare", "fac"],
            "`compare` must be empty with the method dense, which has no size, but is fac instead. Example: --method f",
        ),
        (
            ["run", "demo", "--trackers", "tensorbord"],
            "A tracker must be one of tensorboard, wandb, trackio, but is 'tensorbord' instead.",
        ),
        (
            ["train", "demo", "--trackers", MISSING],
            f"The tracker {MISSING} needs its package, which is not installed. Install it: pip install {MISSING}.",
        ),
        (["report", "nowhere"], "A finished run must hold record.json, but nowhere does not."),
        (["report"], "`rankwise report` needs FOLDER."),
        (["presets", "enwik9"], "No preset has 'enwik9' in its name."),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_gets_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refusal(capsys, *arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_other_settings_in_the_same_folder_is_refused(
    place: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (finished / "record.json").read_bytes()
    assert run(["run", "demo", *words(place, training__lr="0.1"), "--out", str(finished)]) == 2
    assert "`lr` was 0.004 and is now 0.1. Restore it, or choose another folder." in capsys.readouterr().err
    assert (finished / "record.json").read_bytes() == before


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("-h", "--help"):
        assert run([name, word]) == 0
        assert f"example: rankwise {name} " in capsys.readouterr().out
    assert run(["--help"]) == 0
    assert f"\n  {name} " in capsys.readouterr().out


def test_the_help_of_a_preset_shows_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "--help"]) == 0
    general = capsys.readouterr().out
    assert "`rankwise run PRESET --help` lists them" in " ".join(general.split())
    assert run(["run", "demo", "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(general)
    about = " ".join(shown.split())
    for setting in settings(preset("demo")).values():
        assert f"--{setting.name} {as_text(setting.value)} {' '.join(setting.about.split())}" in about
    assert run(["run", "demo", "--method", "np-l0", "--training.lr", "0.5", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--method np-l0" in shown
    assert "--training.lr 0.5" in shown


def test_the_help_of_a_base_shows_its_settings(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["prune", str(finished), "--help"]) == 0
    assert "--model.width 12 " in capsys.readouterr().out


def test_a_wrong_method_of_a_sweep_gets_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, "sweep", "demo", "--methods", "fca", "--out", str(tmp_path / "sweep"))
    assert "but is 'fca' instead. Did you mean 'fac'?" in line
