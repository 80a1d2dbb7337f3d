"""Texts for the arena, of several kinds: to calibrate with, to choose settings by, and to test on.

    python benchmarks/arena_texts.py DATA OUT

DATA holds `wikitext-2`, `enwik8` and `glue` as they unpack. OUT gets a file for each text:

| text | what it is | for |
|---|---|---|
| train, valid, test | WikiText-2 | calibration, choice, test |
| prose | articles of enwik8 without their markup, case and punctuation kept | calibration |
| sentences | SST-2, STS-B and QNLI: reviews, captions, headlines, questions | calibration |
| code | the standard library's sources without their docstrings | calibration |
| docstrings | the standard library's docstrings | choice |
| news | MRPC's development sentences | choice |
| other | Python's `pydoc` topics | test |

Docstrings are close to the topics of `pydoc`, so no model is calibrated with them. Code is of the same field, though
not of the same kind: what it brings on `other` is not what a text of any other kind would bring.
"""

from __future__ import annotations

import ast
import csv
import html
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from rankwise.lab.data.sources import _END, _MARKUP, _TEXT, _docstrings, _parsed, _sources, _topics

MOST = 3_000_000
"""Characters of a text for calibration."""
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def prose(path: Path) -> Iterator[str]:
    """Paragraphs of articles; the last tenth of enwik8, which is held out elsewhere, is not read."""
    for match in _TEXT.finditer(path.read_bytes()[:20_000_000] + _END):
        article = html.unescape(html.unescape(match[1].decode("utf-8", "replace")))
        if article[:9].lower() == "#redirect":
            continue
        for pattern, left in _MARKUP:
            article = pattern.sub(left, article)
        lines = (" ".join(line.replace("'''", "").replace("''", "").split()) for line in article.split("\n"))
        yield "\n".join(line for line in lines if len(line) > 80 and line[0] not in "*#:=|!{[") + "\n"


def column(path: Path, *names: str) -> Iterator[str]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            yield " ".join((row[name] or "").strip() for name in names) + "\n"


def code(path: Path) -> str:
    """A source without its docstrings."""
    tree = _parsed(path)
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            lines[first.lineno - 1 : first.end_lineno] = [""] * ((first.end_lineno or first.lineno) - first.lineno + 1)
    return "".join(lines)


def at_most(parts: Iterator[str], most: int) -> str:
    found: list[str] = []
    total = 0
    for part in parts:
        found.append(part)
        total += len(part)
        if total >= most:
            break
    return "".join(found)


def main() -> None:
    data, out = map(Path, sys.argv[1:])
    out.mkdir(parents=True, exist_ok=True)
    library, glue = Path(sysconfig.get_path("stdlib")), data / "glue"
    topics = _topics(library)
    texts = {name: (data / f"wikitext-2/{name}.txt").read_text(encoding="utf-8") for name in ("train", "valid", "test")}
    texts |= {
        "prose": at_most(prose(data / "enwik8/enwik8"), MOST),
        "sentences": at_most(column(glue / "SST-2/train.tsv", "sentence"), MOST // 3)
        + at_most(column(glue / "STS-B/train.tsv", "sentence1", "sentence2"), MOST // 3)
        + at_most(column(glue / "QNLI/train_2000.tsv", "question", "sentence"), MOST // 3),
        "code": at_most((code(path) for path in _sources(library)), MOST),
        "docstrings": "\n\n".join(_docstrings(library).values()),
        "news": at_most(column(glue / "MRPC/dev.tsv", "#1 String", "#2 String"), MOST),
        "other": "\n".join(topics[name] for name in sorted(topics)),
    }
    for name, text in texts.items():
        (out / f"{name}.txt").write_text(text, encoding="utf-8")
        print(f"{name}: {len(text):,} characters")


if __name__ == "__main__":
    main()
