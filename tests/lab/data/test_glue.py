"""GLUE: rows as the files have them, metrics as their definitions say, and every bad row with its place."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.errors import DataError
from rankwise.lab.data import glue
from rankwise.lab.data.download import Published, fetch
from rankwise.lab.data.glue import TASKS, load_glue, read_rows, task_named
from rankwise.lab.data.rows import accuracy, f1, matthews, pearson, ranks, score, spearman

BITS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=30)
NUMBERS = st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=2, max_size=20)


def arrays(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    found = np.array(pairs)
    return found[:, 0], found[:, 1]


@given(BITS)
def test_classification_metrics_are_their_definitions(pairs: list[tuple[int, int]]) -> None:
    answers, labels = arrays(pairs)
    tp, fp, fn, tn = (pairs.count(pair) for pair in ((1, 1), (1, 0), (0, 1), (0, 0)))
    assert accuracy(answers, labels) == pytest.approx((tp + tn) / len(pairs))
    precision, recall = tp / (tp + fp) if tp else 0.0, tp / (tp + fn) if tp else 0.0
    assert f1(answers, labels) == pytest.approx(2 * precision * recall / (precision + recall) if tp else 0.0)
    # phi: the correlation of two binary variables
    constant = len(set(answers.tolist())) == 1 or len(set(labels.tolist())) == 1
    assert matthews(answers, labels) == pytest.approx(0.0 if constant else np.corrcoef(answers, labels)[0, 1])


@given(NUMBERS)
def test_correlations_are_their_definitions(pairs: list[tuple[int, int]]) -> None:
    x, y = arrays(pairs)
    if len(set(x.tolist())) == 1 or len(set(y.tolist())) == 1:
        assert pearson(x, y) == spearman(x, y) == 0.0
        return
    assert pearson(x, y) == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-12)
    # by hand: the mean of the places that a value takes in the sorted list
    by_hand = [[np.mean([i + 1 for i, v in enumerate(sorted(z)) if v == value]) for value in z] for z in (x, y)]
    assert ranks(x).tolist() == by_hand[0]
    assert spearman(x, y) == pytest.approx(np.corrcoef(*by_hand)[0, 1], abs=1e-12)
    assert spearman(x, y) == pytest.approx(spearman(x**3, np.exp(y)), abs=1e-12)


def test_metrics_agree_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=50).round(1), draw.normal(size=50).round(1)
    assert pearson(x, y) == pytest.approx(stats.pearsonr(x, y).statistic)
    assert spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic)


def test_a_score_takes_the_likeliest_class_or_the_number_itself() -> None:
    logits = np.array([[0.1, 0.2], [3.0, -1.0], [0.0, 5.0], [1.0, 0.0]])
    found = score(TASKS["mrpc"], logits, np.array([1, 0, 0, 0]))
    assert found == {"f1": pytest.approx(2 / 3), "accuracy": 0.75}
    numbers = score(TASKS["stsb"], np.array([[1.0], [2.0], [4.0]]), np.array([0.0, 1.0, 9.0]))
    assert numbers["spearman"] == pytest.approx(1.0)
    assert 0 < numbers["pearson"] < 1


def write(folder: Path, task: str, rows: list[str], name: str = "train.tsv", header: bool = True) -> Path:
    found = TASKS[task]
    path = folder / found.title / name
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = ["\t".join((*found.texts, "extra", found.label))] if header else []
    path.write_text("\n".join([*columns, *rows]) + "\n", encoding="utf-8")
    return path


def row(task: str, label: str | None = None) -> str:
    found = TASKS[task]
    text = [f'a "quoted text {i}' for i in range(len(found.texts))]
    return "\t".join((*text, "x", label or (found.labels[-1] if found.labels else "2.5")))


@pytest.mark.parametrize("task", [name for name in TASKS if not TASKS[name].columns])
def test_every_task_is_read_by_the_same_code(task: str, tmp_path: Path) -> None:
    found = TASKS[task]
    write(tmp_path, task, [row(task)] * 3)
    write(tmp_path, task, [row(task)], found.dev)
    data = load_glue(task, data=tmp_path)
    assert (len(data.train), len(data.dev), data.title) == (3, 1, found.title)
    assert data.train.texts[0] == tuple(f'a "quoted text {i}' for i in range(len(found.texts)))
    assert data.train.labels[0] == (2.5 if found.is_regression else len(found.labels) - 1)


def test_cola_has_no_header(tmp_path: Path) -> None:
    rows = ["gj04\t0\t*\tThey drank the pub.", "gj04\t1\t\tThe pub was dry."]
    write(tmp_path, "cola", rows, header=False)
    write(tmp_path, "cola", rows, "dev.tsv", header=False)
    data = load_glue("CoLA", data=tmp_path)
    assert data.train.texts == (("They drank the pub.",), ("The pub was dry.",))
    assert data.train.labels == (0, 1)


def test_a_part_of_a_training_set_is_called_so(tmp_path: Path) -> None:
    write(tmp_path, "qnli", [row("qnli")] * 1200, "train_1200.tsv")
    write(tmp_path, "qnli", [row("qnli")], "dev.tsv")
    assert load_glue("qnli", data=tmp_path).title == "QNLI (1,200 training rows)"


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = write(tmp_path, "mrpc", [row("mrpc")])
    plain = read_rows(path, TASKS["mrpc"])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_rows(path, TASKS["mrpc"]).texts == plain.texts


def test_rows_decide_the_fingerprint(tmp_path: Path) -> None:
    write(tmp_path, "rte", [row("rte")], "dev.tsv")
    prints = []
    for rows in ([row("rte")], [row("rte")], [row("rte", "entailment")]):
        write(tmp_path, "rte", rows)
        prints.append(load_glue("rte", data=tmp_path).fingerprint)
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize(
    "task, bad, message",
    [
        ("mrpc", "one\ttwo\t1", "line 3: a row must have 4 fields, but has 3"),
        ("mrpc", row("mrpc", "2"), "line 3: the label must be one of 0, 1, but is '2'"),
        ("stsb", row("stsb", "5.1"), "line 3: the label must be a number of 0 to 5, but is '5.1'"),
        ("stsb", row("stsb", "high"), "line 3: the label must be a number of 0 to 5, but is 'high'"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(task: str, bad: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, task, [row(task), bad])
    with pytest.raises(DataError, match=f"train.tsv, {message}"):
        read_rows(path, TASKS[task])


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="`task` must be one of cola, .*, but is 'mrpcc' instead. Did you mean 'mrpc'"):
        task_named("mrpcc")
    with pytest.raises(DataError, match="`data` must hold train.tsv, but .* does not"):
        load_glue("mrpc", data=tmp_path)
    write(tmp_path, "mrpc", [row("mrpc")])
    with pytest.raises(DataError, match="`data` must hold dev.tsv"):
        load_glue("mrpc", data=tmp_path)
    path = write(tmp_path, "sst2", [row("mrpc")])
    path.write_text("text\tlabel\n")
    with pytest.raises(DataError, match="line 1: the columns of SST-2 must include 'sentence', but are text, label"):
        read_rows(path, TASKS["sst2"])
    path.write_bytes(b"sentence\tlabel\n\xff\t1\n")
    with pytest.raises(DataError, match="line 2: must be UTF-8"):
        read_rows(path, TASKS["sst2"])


def test_mrpc_is_split_by_the_published_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String"
    rows = [f"{i % 2}\t{i}\t{i + 100}\tleft {i}\tright {i}" for i in range(6)]
    contents = {"msr_paraphrase_train.txt": [header, *rows], "mrpc_dev_ids.tsv": ["2\t102", "5\t105"]}

    def download(url: str, path: Path, **more: object) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\r\n".join([*contents[path.name], ""]), encoding="utf-8", newline="")

    monkeypatch.setattr(glue, "download", download)
    data = load_glue("mrpc", cache=tmp_path)
    assert [texts[0] for texts in data.dev.texts] == ["left 2", "left 5"]
    assert [texts[1] for texts in data.train.texts] == ["right 0", "right 1", "right 3", "right 4"]
    assert sorted(path.name for path in (tmp_path / "downloads/glue/MRPC").iterdir()) == ["dev.tsv", "train.tsv"]


def test_an_archive_is_unpacked_without_checksums_of_its_files(tmp_path: Path) -> None:
    published = Published(urls=("http://127.0.0.1:9/RTE.zip",), megabytes=1, files={"train.tsv": "", "dev.tsv": ""})
    with zipfile.ZipFile(tmp_path / "RTE.zip", "w") as packed:
        for name in published.files:
            packed.writestr(f"RTE/{name}", f"content of {name}")
    fetch(published, tmp_path)
    assert (tmp_path / "dev.tsv").read_text() == "content of dev.tsv"


def test_every_task_has_a_home() -> None:
    assert {task.title for task in TASKS.values()} == {*glue.ARCHIVES, "MRPC"}
    assert all(len(found.digest or "") == len("sha256:") + 64 for found in glue.ARCHIVES.values())


def test_the_real_files_have_the_published_rows(tmp_path: Path) -> None:
    named = os.environ.get("RANKWISE_DATA")
    packed = Path(__file__).resolve().parents[4] / "shared" / "data"
    if named is None:
        if not (packed / "glue.tar.xz").is_file() or not shutil.which("xz"):
            pytest.skip(f"no real data: set RANKWISE_DATA to its folder, or put it into {packed}")
        subprocess.run(["tar", "-xJf", packed / "glue.tar.xz", "-C", tmp_path], check=True, timeout=60)
    folder = (Path(named) if named else tmp_path) / "glue"
    rows = {"sst2": (67_349, 872), "mrpc": (3_668, 408), "stsb": (5_749, 1_500), "qnli": (2_000, 5_463)}
    for task, numbers in rows.items():
        data = load_glue(task, data=folder)
        assert (len(data.train), len(data.dev)) == numbers
        assert all(math.isfinite(label) for label in data.train.labels)
