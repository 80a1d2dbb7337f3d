"""GLUE: its nine tasks as one table, read from files on this machine or from the published archives.

The files are tab-separated without quoting. Checksums are of what is downloaded, because the archives have one home.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rankwise.errors import DataError, nearest
from rankwise.files import cache_folder, reason
from rankwise.lab.data.download import REMEDY, Published, download, fetch
from rankwise.lab.data.rows import Dataset, Row, Rows, Task, by_column, numbered
from rankwise.lab.data.vocabulary import Progress, unreadable

HOME = "https://dl.fbaipublicfiles.com"
REMEDY_GLUE = "If you have the files, name their folder: `data` of load_glue, --data on the command line."
BINARY, ENTAILMENT = ("0", "1"), ("entailment", "not_entailment")
PAIR = ("sentence1", "sentence2")


def _task(title: str, train_rows: int, texts: tuple[str, ...] = ("sentence",), **other: Any) -> Task:
    usual = {"label": "label", "labels": BINARY, "metrics": ("accuracy",)}
    name = title.lower().replace("-", "")
    return Task(name=name, title=title, train_rows=train_rows, texts=texts, **{**usual, **other})


_TASKS = (
    _task("CoLA", 8_551, metrics=("matthews",), columns=("source", "label", "mark", "sentence")),
    _task("SST-2", 67_349),
    _task("MRPC", 3_668, ("#1 String", "#2 String"), label="Quality", metrics=("f1", "accuracy")),
    _task("STS-B", 5_749, PAIR, label="score", labels=(), metrics=("spearman", "pearson")),
    _task("QQP", 363_846, ("question1", "question2"), label="is_duplicate", metrics=("f1", "accuracy")),
    _task(
        "MNLI", 392_702, PAIR, label="gold_label", labels=("entailment", "neutral", "contradiction"),
        dev="dev_matched.tsv",
    ),
    _task("QNLI", 104_743, ("question", "sentence"), labels=ENTAILMENT),
    _task("RTE", 2_490, PAIR, labels=ENTAILMENT),
    _task("WNLI", 635, PAIR),
)  # fmt: skip
TASKS = {task.name: task for task in _TASKS}


def task_named(name: str) -> Task:
    """The task of that name, as "sst2" or as "SST-2"."""
    plain = name.lower().replace("-", "")
    if plain not in TASKS:
        raise DataError(f"`task` must be one of {', '.join(TASKS)}, but is {name!r} instead.{nearest(plain, TASKS)}")
    return TASKS[plain]


def _archive(name: str, kilobytes: int, digest: str, dev: str = "dev.tsv") -> Published:
    files = {"train.tsv": "", dev: ""}
    url = f"{HOME}/glue/data/{name}.zip"
    return Published(urls=(url,), megabytes=max(1, kilobytes // 1000), files=files, digest=f"sha256:{digest}")


ARCHIVES = {
    "CoLA": _archive("CoLA", 377, "f212fcd832b8f7b435fb991f101abf89f96b933ab400603bf198960dfc32cbff"),
    "SST-2": _archive("SST-2", 7_439, "d67e16fb55739c1b32cdce9877596db1c127dc322d93c082281f64057c16deaa"),
    "STS-B": _archive("STS-B", 803, "e60a6393de5a8b5b9bac5020a1554b54e3691f9d600b775bd131e613ac179c85"),
    "QQP": _archive("QQP-clean", 41_696, "40e7c862c04eb26ee04b67fd900e76c45c6ba8e6d8fab4f8f1f8072a1a3fbae0"),
    "MNLI": _archive(
        "MNLI", 312_784, "e7c1d896d26ed6caf700110645df426cc2d8ebf02a5ab743d5a5c68ac1c83633", "dev_matched.tsv"
    ),
    "QNLI": _archive("QNLIv2", 10_628, "e634e78627a29adaecd4f955359b22bf5e70f2cbd93b493f2d624138a0c0e5f5"),
    "RTE": _archive("RTE", 697, "6bf86de103ecd335f3441bd43574d23fef87ecc695977a63b82d5efb206556ee"),
    "WNLI": _archive("WNLI", 29, "ae0e8e4d16f4d46d4a0a566ec7ecceccfd3fbfaa4a7a4b4e02848c0f2561ac46"),
}
MRPC = {
    f"{HOME}/senteval/senteval_data/msr_paraphrase_train.txt": (
        "sha256:60a9b09084528f0673eedee2b69cb941920f0b8cd0eeccefc464a98768457f89"
    ),
    f"{HOME}/glue/data/mrpc_dev_ids.tsv": "sha256:971d7767d81b997fd9060ade0ec23c4fc31cbb226a55d1bd4a1bac474eb81dc7",
}
"""The rows of MRPC, and the pairs of numbers of those that are its development set: the licence lets no one pack it."""


def fetch_task(title: str, folder: Path, progress: Progress | None = None) -> None:
    """Fill `folder` with the training and development file of a task."""
    try:
        if title == "MRPC":
            _fetch_mrpc(folder, progress)
        else:
            fetch(ARCHIVES[title], folder, progress)
    except DataError as error:
        raise DataError(str(error).replace(REMEDY, REMEDY_GLUE)) from error


def _fetch_mrpc(folder: Path, progress: Progress | None) -> None:
    if all((folder / name).is_file() for name in ("train.tsv", "dev.tsv")):
        return
    rows, numbers = (folder / url.rpartition("/")[2] for url in MRPC)
    for (url, digest), path in zip(MRPC.items(), (rows, numbers), strict=True):
        if not path.is_file():
            download(url, path, digest=digest, progress=progress)
    try:
        header, *lines = rows.read_text(encoding="utf-8-sig").rstrip("\n").split("\n")
        dev = {tuple(line.split("\t")) for line in numbers.read_text(encoding="utf-8").split("\n")}
        parts: dict[str, list[str]] = {"train.tsv": [header], "dev.tsv": [header]}
        for line in lines:
            parts["dev.tsv" if tuple(line.split("\t")[1:3]) in dev else "train.tsv"].append(line)
        for name, content in parts.items():
            unfinished = folder / f".{name}"
            unfinished.write_text("\n".join([*content, ""]), encoding="utf-8")
            unfinished.replace(folder / name)
        for path in (rows, numbers):
            path.unlink()
    except OSError as error:
        raise DataError(f"MRPC must be written to {folder}, but that failed: {reason(error)}.") from error


def load_glue(
    task: str,
    *,
    data: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Dataset:
    """A task of GLUE.

    Its files are taken from the folder `data` if one is given (`data`/MRPC/train.tsv, or `data`/train.tsv), and
    downloaded into `cache` otherwise. A part of a training set is called what it is: of train_2000.tsv comes
    "QNLI (2,000 training rows)".
    """
    known = task_named(task)
    if data is None:
        folder = (Path(cache) if cache is not None else cache_folder()) / "downloads" / "glue" / known.title
        fetch_task(known.title, folder, progress)
    else:
        folder = Path(data)
        folder = folder / known.title if (folder / known.title).is_dir() else folder
    train_file = _train_file(folder)
    train, dev = read_rows(train_file, known), read_rows(_present(folder / known.dev), known)
    digest = hashlib.sha256()
    for part in (train, dev):
        for texts, label in zip(part.texts, part.labels, strict=True):
            digest.update("\t".join((*texts, f"{label:g}\n")).encode())
    title = known.title if train_file.name == "train.tsv" else f"{known.title} ({len(train):,} training rows)"
    return Dataset(task=known, title=title, train=train, dev=dev, fingerprint=digest.hexdigest())


def read_rows(path: Path, task: Task) -> Rows:
    """The rows of one file."""
    lines = _lines(path)
    header = task.columns or next((fields for _, fields in lines), ())
    wanted = (*task.texts, task.label)
    missing = [name for name in wanted if name not in header]
    if missing:
        raise DataError(
            f"{path}, line 1: the columns of {task.title} must include {missing[0]!r}, but are {', '.join(header)}."
        )
    table: list[Row] = []
    for number, row in by_column(path, header, lines):
        *texts, label = (row[name] for name in wanted)
        table.append((number, tuple(texts), label))
    return numbered(path, table, task.labels, task.limits)


def _lines(path: Path) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Number and fields of each line; a byte-order mark at the start is left out."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                yield number, tuple(text.split("\t"))
    except OSError as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line {number}: must be UTF-8, but is not: {error}.") from None


def _train_file(folder: Path) -> Path:
    if (folder / "train.tsv").is_file():
        return folder / "train.tsv"
    parts = sorted(folder.glob("train_*.tsv"))
    if len(parts) > 1:
        names = ", ".join(part.name for part in parts)
        raise DataError(f"{folder} must hold one training file, but has {names}. Call the one you mean train.tsv.")
    return parts[0] if parts else _present(folder / "train.tsv")


def _present(path: Path) -> Path:
    if not path.is_file():
        raise DataError(
            f"`data` must hold {path.name}, but {path.parent} does not. Add it, or leave `data` out to download it."
        )
    return path
