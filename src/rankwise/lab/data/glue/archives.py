"""Where GLUE is published, and its files on this machine, fetched where they are not there yet.

Checksums are of what is downloaded: the archives have one home.
"""

from __future__ import annotations

from pathlib import Path

from rankwise.errors import DataError
from rankwise.lab.data.download import REMEDY, download
from rankwise.lab.data.fetch import fetch
from rankwise.lab.data.published import Published
from rankwise.lab.data.text import Progress, reason

HOME = "https://dl.fbaipublicfiles.com"
REMEDY_GLUE = "If you have the files, name their folder: `data` of load_glue, --data on the command line."


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
