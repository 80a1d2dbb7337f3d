"""`rankwise run glue-...`: a mistake is one line and exit code 2, and nothing is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rankwise.cli import app


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
        (["train", "glue-minilm"], "`rankwise train` is for language models, but glue-minilm fine-tunes an encoder"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert app.run([word.format(here=tmp_path) for word in words]) == app.WRONG
    said = capsys.readouterr().err.strip()
    assert re.search(message, said)
    assert "\n" not in said
    assert list(tmp_path.iterdir()) == []


def test_the_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["presets", "glue"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in ("glue-roberta", "124,647,170", "glue-mpnet", "109,488,002", "glue-minilm"))
