"""Rows of one's own: files are read as they are meant, and every mistake in them is one line, before any training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from rankwise.cli import app
from rankwise.errors import DataError, RankwiseError
from rankwise.lab.data.rows import Columns, read_table
from rankwise.lab.experiments.pipeline import run
from rankwise.lab.tasks.pretrained import PretrainedConfig
from tests.lab.experiments.experiment_toys import Phases
from tests.lab.experiments.glue_toys import encoder
from tests.lab.tasks.task_toys import LABELS, rows_file, sentences

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* of the gates had not decided"),
    pytest.mark.filterwarnings("ignore:These layers are left as they are"),
    pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning"),
]
COLUMNS = Columns(texts=("text",), label="label", regression=False)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_texts_and_labels_are_those_of_the_file(suffix: str, tmp_path: Path) -> None:
    """Commas, quotes and line breaks in a text are part of it; classes are numbered by their names."""
    path = rows_file(tmp_path / f"rows{suffix}", rows=9)
    data, further = read_table(path, COLUMNS, [None, str(rows_file(tmp_path / f"more{suffix}", rows=4))])
    assert data.task.labels == LABELS
    assert [LABELS[int(label)] for label in data.train.labels] == [LABELS[row % 3] for row in range(9)]
    assert all(texts[0].endswith("\n") and '", ' in texts[0] for texts in data.train.texts)
    assert further[0] is None
    assert further[1] is not None and len(further[1]) == 4


def test_the_same_rows_have_the_same_fingerprint_in_any_format(tmp_path: Path) -> None:
    csv, jsonl, other = (rows_file(tmp_path / name) for name in ("a.csv", "b.jsonl", "c.csv"))
    other.write_text(other.read_text().replace("good", "fine"))
    prints = [read_table(path, COLUMNS, [])[0].fingerprint for path in (csv, jsonl)]
    assert prints[0] == prints[1]
    renamed = read_table(other, COLUMNS, [])[0]
    assert renamed.fingerprint == prints[0] or renamed.task.labels != LABELS


def test_classes_that_are_numbers_are_in_order_of_their_value(tmp_path: Path) -> None:
    path = tmp_path / "stars.tsv"
    path.write_text("text\tlabel\n" + "".join(f"a b\t{star}\n" for star in (10, 2, 1, 10)))
    assert read_table(path, COLUMNS, [])[0].task.labels == ("1", "2", "10")


def test_pairs_and_numbers_are_estimated(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    rows = [{"one": f"a {'b ' * (i % 5)}", "two": "c d", "score": i % 5 / 2} for i in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    experiment = sentences(
        tmp_path, data=str(path), text_column="one", second_text_column="two", label_column="score", regression=True
    )
    record = run(experiment, tmp_path / "run")
    assert all(set(row["test"]) == {"spearman", "pearson"} for row in record["rows"])
    model = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/flop-l0/model")
    assert model.config.num_labels == 1


def test_held_out_rows_are_in_no_other_split_and_files_are_taken_as_they_are(tmp_path: Path) -> None:
    splits = sentences(tmp_path, held_out=0.2).read()
    assert splits.valid is not None
    assert [len(part) for part in (splits.train, splits.valid, splits.test)] == [36, 12, 12]
    everything = [*splits.train.texts, *splits.valid.texts, *splits.test.texts]
    whole, _ = read_table(rows_file(tmp_path / "rows.csv"), COLUMNS, [])
    assert sorted(everything) == sorted(whole.train.texts)
    test = str(rows_file(tmp_path / "test.csv", rows=9, seed=1))
    given = sentences(tmp_path, test=test, held_out=0.0).read()
    assert (len(given.train), given.valid, len(given.test)) == (60, None, 9)


def test_an_exported_model_knows_the_names_of_its_labels(tmp_path: Path) -> None:
    run(sentences(tmp_path, healing=None, distillation=None), tmp_path / "run")
    model = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/flop-l0/model")
    assert [model.config.id2label[i] for i in range(3)] == list(LABELS)


BAD: dict[str, tuple[str, str]] = {
    "missing column": ("a,label\nx,1\ny,2\n", "line 2: a row must have the column 'text', but has a, label"),
    "slip in a name": ("texts,label\nx,1\n", "Did you mean 'texts'"),
    "no rows": ("text,label\n", "must hold at least one row, but has none"),
    "empty": ("", "must hold at least one row, but has none"),
    "one class": ("text,label\nx,1\ny,1\n", "must have labels of 2 to 1,000 classes, but has 1. Add rows"),
    "row cut short": ("text,label\nx,1\ny\n", "line 3: a row must have 2 fields, but has 1"),
    "no quotes": ("text,label\nx,1\ny, z,2\n", "line 3: a row must have 2 fields, but has 3"),
    "no label": ("text,label\nx,1\ny,\n", "line 3: a row must have a label, but that is empty"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_wrong_is_one_line_and_nothing_is_trained(name: str, tmp_path: Path) -> None:
    text, message = BAD[name]
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=message) as refused:
        run(sentences(tmp_path, data=str(path)), tmp_path / "run", watcher=(watcher := Phases()))
    assert "\n" not in str(refused.value)
    assert watcher.steps == 0
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"data": None}, "`data` must be a file with rows, but is not given. Example: --data rows.csv"),
        ({"data": "nowhere.csv"}, "nowhere.csv must be a readable file, but: No such file"),
        ({"data": "rows.xlsx"}, r"must end in .csv, .tsv, .jsonl, .ndjson, .json, but is 'rows.xlsx'"),
        ({"held_out": 0.0}, "`held_out` must be above 0 without a file `test`, but is 0"),
        ({"regression": True}, r"line \d: the label must be a finite number, but is 'bad'"),
    ],
)
def test_settings_that_fit_no_rows_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        run(sentences(tmp_path, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_label_that_training_has_not_is_refused_with_its_line(tmp_path: Path) -> None:
    test = rows_file(tmp_path / "test.csv", rows=3)
    test.write_text(test.read_text().replace("neither", "never"))
    with pytest.raises(DataError, match=r"test.csv, line \d+: the label must be one of .*, but is 'never' instead"):
        run(sentences(tmp_path, test=str(test)), tmp_path / "run")


def test_a_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    # as that of most decoders
    unpadded = encoder(tmp_path / "unpadded")
    about = unpadded / "tokenizer_config.json"
    about.write_text(
        json.dumps({key: value for key, value in json.loads(about.read_text()).items() if key != "pad_token"})
    )
    cases = {
        unpadded: "must have a padding token, but has none. Set its `pad_token`",
        encoder(tmp_path / "bare", tokenizer=False): "must come with a tokenizer, but .* does not",
        encoder(tmp_path / "other", labels=2): "must have 3 labels for rows.csv, but has 2",
    }
    for folder, message in cases.items():
        with pytest.raises(RankwiseError, match=message):
            run(sentences(tmp_path, model=PretrainedConfig(name=str(folder))), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_command_line_trains_reports_and_evaluates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = rows_file(tmp_path / "rows.jsonl", columns=("review", "stars"))
    named = ["--data", str(data), "--model.name", str(encoder(tmp_path))]
    columns = ["--text_column", "review", "--label_column", "stars"]
    short = ["--both.max_steps", "3", "--both.min_steps", "1", "--healing", "none", "--calibration_rows", "8"]
    assert app.run(["run", "sentences", *named, *columns, *short, "--budget.removed", "0.2", "--device", "cpu"]) == 0
    assert "accuracy" in capsys.readouterr().out
    place = tmp_path / "runs/sentences"
    row = json.loads((place / "record.json").read_text())["rows"][1]
    # the folder names no file to read: the user does
    assert app.run(["evaluate", str(place), "--split", "test", "--json"]) == app.WRONG
    assert "`data` must be a file with rows" in capsys.readouterr().err
    assert app.run(["evaluate", str(place), "--split", "test", "--json", "--data", str(data)]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == row["test"]["accuracy"]
