"""Every command, end to end, on a toy."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankwise.cli.app import run
from rankwise.cli.runs import _spread_of
from rankwise.lab.data.windows import Evaluation
from rankwise.lab.experiments.presets import PRESETS
from rankwise.lab.experiments.run_folder import load_run
from rankwise.lab.tasks.language import LanguageModel, evaluate
from tests.cli.cli_toys import LETTERS, answer, cache, lasting, refusal, results, words

NAMES = ["dense", "taught", "flop-l0", "fac"]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is room, a row is a line; how tables fit is tested in test_terminal_tables.py."""
    monkeypatch.setenv("COLUMNS", "300")


def lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert run(arguments) == 0
    return capsys.readouterr().out.splitlines()


def test_run_prints_a_row_for_every_model_and_says_where_they_are(
    place: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = lines(capsys, "run", "demo", *words(place), "--out", str(finished))
    assert [line.split()[0] for line in found[1:5]] == NAMES
    assert found[0].split()[0] == "parameters"
    assert str(finished) in found[-1]
    for name in NAMES:
        assert (finished / name / "model").is_dir()


def test_a_finished_run_prints_the_same_again_and_computes_nothing(
    place: Path, finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = lines(capsys, "run", "demo", *words(place), "--out", str(finished))
    monkeypatch.setattr("rankwise.lab.experiments.variants.fit", None)
    monkeypatch.setattr("rankwise.lab.experiments.pipeline.time_together", None)
    assert lines(capsys, "run", "demo", *words(place), "--out", str(finished)) == first


def test_the_record_as_json_is_that_of_the_folder(
    place: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = answer(capsys, "run", "demo", *words(place), "--out", str(finished))
    assert record == json.loads((finished / "record.json").read_text())
    assert [row["name"] for row in record["rows"]] == NAMES


def test_settings_reach_the_run(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"both__lr": "1e-3", "compare": "", "method": "np-l0", "budget__removed": "0.3", "seed": "3"}
    changes["training__distill"] = "0"
    record = answer(capsys, "run", "demo", *words(place, **changes), "--out", str(tmp_path / "run"))
    experiment = record["experiment"]
    assert (experiment["base"]["lr"], experiment["training"]["lr"]) == (1e-3, 1e-3)
    assert (experiment["method"]["name"], experiment["method"]["anneal_steps"]) == ("np-l0", 3)
    assert (experiment["budget"]["removed"], experiment["compare"], record["seed"]) == (0.3, [], 3)
    assert [row["name"] for row in record["rows"]] == ["base", "np-l0"]
    assert record["rows"][1]["removed_of_prunable"] >= 0.3


def test_a_run_goes_to_runs_by_default_and_tells_its_steps(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # no preset is the demo
    assert run(["run", *words(place, compare="", training__distill="0")]) == 0
    assert (tmp_path / "runs" / "demo" / "record.json").is_file()
    told = capsys.readouterr().err.splitlines()
    titles = [line for line in told if not line.startswith(" ")]
    assert titles[1:] == [
        "training the dense model",
        "evaluating base",
        "pruning with flop-l0",
        "evaluating flop-l0",
        "timing",
    ]
    steps = [line for line in told if line.startswith("  step ")]
    assert [line.split()[1] for line in steps] == ["5/10", "10/10"] * 2
    figures = r"loss \d\.\d+  \d\.\d+ bits per character  valid \d\.\d+"
    assert re.fullmatch(rf"  step 5/10  {figures}  [\d,]+ tokens/s  \d+:\d\d left", steps[0])
    assert re.fullmatch(rf"  step 10/10  {figures}  size \d+ \(target \d+\)  [\d,]+ tokens/s", steps[3])


def test_a_base_is_trained_once_and_pruned_by_any_method(
    place: Path, tmp_path: Path, expected: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "mine"
    row = answer(capsys, "train", "demo", *words(place), "--out", str(base))
    assert (base / "base" / "model").is_dir()
    assert row["method"] == "dense"
    pruned = answer(capsys, "prune", str(base), *cache(place), "--out", str(tmp_path / "pruned" / "flop-l0"))
    # the same as in one go
    assert [lasting(pruned)] == [row for row in expected if row["name"] == "flop-l0"]
    arguments = ["--method", "np-l0", "--budget.removed=0.5", "--out", str(tmp_path / "pruned" / "np")]
    found = lines(capsys, "prune", str(base / "base"), *cache(place), *arguments)
    assert "parameters" in found[0]
    assert found[-1] == f"Next: rankwise report {base / 'base'} {tmp_path / 'pruned' / 'np'}"


def test_evaluate_finds_what_the_run_found(
    place: Path, finished: Path, expected: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    for row in expected:
        for split in ("valid", "test"):
            got = answer(capsys, "evaluate", str(finished / row["name"]), *cache(place), "--split", split)
            assert got["parameters"] == row["parameters"]
            assert got["loss"] == pytest.approx(row[split]["loss"], rel=1e-6)
    (line,) = lines(capsys, "evaluate", str(finished), *cache(place), "--device", "cpu")
    value = next(row for row in expected if row["name"] == "flop-l0")["valid"]["bits_per_character"]
    assert line.endswith(f"parameters, valid {value:.4f} bits per character")


def test_evaluate_reads_another_text_by_the_vocabulary_of_the_run(
    place: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # fewer letters, in another order of frequency; what the split does not hold does not matter
    letters = "x" + "abcabbb" * 300
    (tmp_path / "other.txt").write_text(letters)
    model = load_run(finished)
    for split, part in (("valid", letters[-210:-105]), ("test", letters[-105:])):
        arguments = ("evaluate", str(finished), "--corpus.name", str(tmp_path / "other.txt"), "--split", split)
        found = answer(capsys, *arguments, *cache(place))
        text = Evaluation(np.array(model.vocabulary.encode(part)), unroll=8)
        expected = evaluate(LanguageModel(model.model), text, "character")
        assert found["loss"] == pytest.approx(expected.loss, rel=1e-6)


def test_evaluate_knows_the_words_of_the_run_whatever_else_the_other_text_holds(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "words.txt").write_text("one two three four five six seven eight\n" * 40)
    own = ("--corpus.name", str(tmp_path / "words.txt"), "--corpus.unit", "word", "--corpus.min_count", "2")
    assert run(["train", "demo", *words(place), *own, "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    losses, base = [], str(tmp_path / "run/base")
    for name, before in (("a", "one two three four\n"), ("b", "nothing of that\n")):
        (tmp_path / name).mkdir()
        for split, text in (("train", before), ("valid", "one two three four\n"), ("test", "eight\n")):
            (tmp_path / name / f"{split}.txt").write_text(text * 20)
        found = answer(capsys, "evaluate", base, *cache(place), "--corpus.name", str(tmp_path / name))
        losses.append(found["loss"])
    assert losses[0] == losses[1]
    # a published text is split by rules of its own, and not by those of the run's
    assert run(["evaluate", base, *cache(place), "--corpus.name", "pydoc"]) == 2
    assert "must be read in words, as the model does, but is read in characters." in capsys.readouterr().err


def test_evaluate_names_a_character_that_the_run_does_not_know(
    place: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.txt").write_text("ab c " * 500 + "z")
    assert run(["evaluate", str(finished / "base"), "--text", str(tmp_path / "other.txt")]) == 2
    assert "`--text` is for folders of transformers, but" in (told := capsys.readouterr().err)
    assert "Name the text by --corpus.name FILE." in told
    other = ["evaluate", str(finished), *cache(place), "--corpus.name", str(tmp_path / "other.txt")]
    assert run([*other, "--split", "test"]) == 2
    assert "must be written in the 8 characters of the corpus, but has " in capsys.readouterr().err
    assert run([*other, "--corpus.unit", "word"]) == 2
    assert "must be read in characters, as the model does, but is read in words." in capsys.readouterr().err


def test_a_seed_beyond_64_bits_is_one_line(
    place: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    huge, out = str(10**23), str(tmp_path / "out")
    for arguments in (
        ["run", "demo", *words(place), "--seed", huge, "--out", out],
        ["train", "demo", *words(place), "--seed", huge, "--out", out],
        ["sweep", "demo", *words(place), "--seeds", f"0,{huge}", "--out", out],
        ["sample", str(finished), "--prompt", "abc", "--seed", huge],
    ):
        line = refusal(capsys, *arguments)
        assert re.search(rf"`seed` must be a whole number .*, but is {huge} instead", line)
    assert not (tmp_path / "out").exists()


def test_sample_goes_on_from_the_prompt(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["sample", str(finished), "--prompt", "abc", "--length", "40"]
    (text,) = lines(capsys, *arguments, "--seed", "1")
    assert text.startswith("abc")
    assert len(text) == 43
    assert set(text) <= set(LETTERS)
    assert lines(capsys, *arguments, "--seed", "1") == [text]
    assert lines(capsys, *arguments, "--seed", "2") != [text]
    likeliest = lines(capsys, *arguments, "--temperature", "0")
    assert lines(capsys, *arguments, "--top-k", "1") == likeliest


def test_sample_begins_with_what_the_text_has(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (text,) = lines(capsys, "sample", str(finished), "--length", "5")
    assert len(text) == 6
    assert set(text) <= set(LETTERS)


def test_a_model_that_is_gone_comes_back_by_the_command_that_sample_names(
    place: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(folder / "flop-l0" / "model")
    draw = ["sample", str(folder), "--prompt", "abc", "--length", "5"]
    assert run(draw) == 2
    assert "Run the same command again to go on." in capsys.readouterr().err
    assert run(["run", "demo", *words(place), "--out", str(folder)]) == 0
    assert run(draw) == 0


def test_another_kind_of_run_in_the_same_folder_is_one_line(
    place: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (finished / "record.json").read_bytes()
    for command in (["sweep", "demo", *words(place)], ["prune", str(finished)]):
        line = refusal(capsys, *command, "--out", finished)
        assert f'in {finished} `format` was "rankwise-experiment" and is now' in line
    assert (finished / "record.json").read_bytes() == before


def test_the_end_of_a_sweep_says_one_number_where_all_models_have_it() -> None:
    row = {"name": "fac", "parameters": 22_002, "test": {"bits_per_character": 2.0}}
    controls = [{**row, "name": name} for name in ("dense", "taught")]
    said = _spread_of({"runs": [{"rows": [*controls, row, {**row, "test": {"bits_per_character": 3.0}}]}]})
    assert said.startswith("2 models have 22,002 parameters and 2.0000 to 3.0000 test ")


def test_the_last_sentence_of_a_run_compares_with_what_its_table_does(
    place: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = json.loads((finished / "record.json").read_text())
    taught, own = ({row["name"]: row for row in record["rows"]}[name] for name in ("taught", "flop-l0"))
    said = " ".join(" ".join(lines(capsys, "run", "demo", *words(place), "--out", str(finished))).split())
    assert (
        f"{own['test']['bits_per_character']:.4f} test bits per character, where taught has "
        f"{taught['test']['bits_per_character']:.4f}, at {own['speedup']:.2f} times the speed of dense."
    ) in said


def test_a_sweep_of_the_dense_model_over_seeds_ends_with_its_spread(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    grid = ("--methods", "dense", "--seeds", "0,1")
    said = " ".join(" ".join(lines(capsys, "sweep", "demo", *words(place), *grid, "--out", str(folder))).split())
    rows = [run_["rows"] for run_ in json.loads((folder / "record.json").read_text())["runs"]]
    least, most = sorted(row["test"]["bits_per_character"] for (row,) in rows)
    size = rows[0][0]["parameters"]
    assert f"2 models have {size:,} parameters and {least:.4f} to {most:.4f} test bits per character. All of it" in said


def test_sweep_runs_the_grid_and_report_shows_it_again(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    arguments = ["sweep", "demo", *words(place), "--out", str(folder)]
    grid = ["--methods", "flop-l0,fac", "--removed", "0.4,0.6", "--seeds", "0,1"]
    found = lines(capsys, *arguments, *grid)
    arms = ["dense", "taught", "flop-l0-40", "flop-l0-60", "fac-40", "fac-60"]
    assert [line.split()[0] for line in found[1:7]] == arms
    record = json.loads((folder / "record.json").read_text())
    assert [run_["seed"] for run_ in record["runs"]] == [0, 1]
    # the control, not the base, is what others are compared with
    assert [run_["rows"][0]["folder"] for run_ in record["runs"]] == ["dense", "dense"]
    again = lines(capsys, *arguments, *grid)
    assert again == found
    # without the closing sentence
    assert lines(capsys, "report", str(folder)) == found[: found.index("")]
    # what needs one model says which there are, the bases too
    number = len([0, 1]) * len(["base", *arms])
    for command in ("bench", "evaluate", "sample", "export --to pt2", "compress --removed 0.2 --out small"):
        name, *rest = command.split()
        line = refusal(capsys, name, folder, *rest)
        assert f"{folder} holds the {number} of a sweep. Give the folder of one: {folder / 'seed-0' / 'base'}, " in line
    line = refusal(capsys, "sample", folder / "seed-1")
    assert f"Give the folder of one: {folder / 'seed-1' / 'base'}, " in line
    assert run(["sample", str(folder / "seed-1" / "fac-40"), "--prompt", "abc", "--length", "3"]) == 0


def test_report_takes_several_folders_and_writes_markdown(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = lines(capsys, "report", str(finished), "--markdown")
    assert [line.split()[1] for line in found[2:6]] == NAMES
    assert all(line.startswith("|") and line.endswith("|") for line in found[:6])
    assert answer(capsys, "report", str(finished)) == [json.loads((finished / "record.json").read_text())]
    assert "exclude each other" in refusal(capsys, "report", finished, "--json", "--markdown")


def test_the_record_of_a_run_as_a_file_is_shown_as_its_folder_is(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = lines(capsys, "report", str(finished))
    assert lines(capsys, "report", str(finished / "record.json")) == shown
    # under a name of its own too, and by its folder
    for name in ("mine.json", "enwik8-sru-10min.json"):
        (tmp_path / name).write_bytes((finished / "record.json").read_bytes())
        assert lines(capsys, "report", str(tmp_path / name)) == shown
    assert lines(capsys, "report", str(tmp_path)).count(shown[0]) == 2


def test_models_that_were_pruned_one_by_one_are_rows_of_one_table(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [answer(capsys, "train", "demo", *words(place), "--out", "mine")]
    for name, method in (("mine-60", "flop-l0"), ("mine-np", "np-l0"), ("other/mine-np", "np-l0")):
        arguments = ("--method", method, "--budget.removed", "0.6", "--out", name)
        rows.append(answer(capsys, "prune", "mine", *arguments, *cache(place)))
    _, *found = lines(capsys, "report", "mine-60", "mine-np", "mine/base")
    assert [line.split()[:2] for line in found] == [[row["name"], f"{row['parameters']:,}"] for row in rows[:3]]
    assert all(f" {row['test']['bits_per_character']:.4f}" in line for line, row in zip(found, rows, strict=False))
    # one name, two models
    _, *found = lines(capsys, "report", "mine-np", "other/mine-np")
    assert [line.split()[0] for line in found] == ["mine-np", "other/mine-np"]
    (record,) = answer(capsys, "report", "mine-60", "mine-np")
    assert record["rows"] == rows[1:3]


def test_models_that_read_other_texts_are_not_put_into_one_table(
    place: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(LETTERS * 400)
    assert run(["train", "demo", *words(tmp_path), "--out", str(tmp_path / "mine")]) == 0
    capsys.readouterr()
    line = refusal(capsys, "report", finished / "fac", tmp_path / "mine" / "base")
    assert "Models in one table must have read the same text, but" in line


@pytest.mark.parametrize("what", ["a model", "nothing", "a strange record", "an unfinished run"])
def test_what_holds_no_record_is_one_line(
    what: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finished / "fac" / "model" if what == "a model" else tmp_path
    if what == "a strange record":
        (tmp_path / "strange.json").write_text("{}")
    if what == "an unfinished run":
        (tmp_path / "record.json").write_text((finished / "fac" / "record.json").read_text())
    assert "Give a folder that `rankwise run`, `sweep` or `prune` wrote to" in refusal(capsys, "report", folder)


def test_presets_lists_sizes_and_needs(capsys: pytest.CaptureFixture[str]) -> None:
    (demo,) = answer(capsys, "presets", "demo")
    assert demo["download_megabytes"] == 0
    assert demo["exported"] < demo["parameters"]
    found = lines(capsys, "presets", "transformer-xl", "short")
    names = [name for name in PRESETS if "transformer-xl" in name and "short" in name]
    assert re.fullmatch(r"Transformer-XL table, .*: corpus enwik8, download \d+ MB", found[0])
    assert [line.split()[0] for line in found[3:-2]] == names
    assert found[-1].startswith(f"{len(names)} of {len(PRESETS)} presets.")


def test_the_rows_of_a_run_do_not_depend_on_where_it_is(
    place: Path, tmp_path: Path, expected: list[dict[str, Any]]
) -> None:
    assert run(["run", "demo", *words(place), "--out", str(tmp_path / "again")]) == 0
    assert results(tmp_path / "again") == expected
