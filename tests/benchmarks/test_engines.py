"""benchmarks/engines.py: the table follows from the record, and docs/deploy.md shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import engines
import pytest

ROOT = Path(__file__).parents[2]


def part(engine: str, *rows: tuple[float, float, str | None]) -> dict[str, Any]:
    """The small model's milliseconds where dense takes 10, by the share removed, and the line that is printed."""
    case = {"batch": 1, "length": 1, "dense_ms": 10.0}
    found = [{"removed": share, "small_ms": ms, "line": line, **case} for share, ms, line in rows]
    about = {"settings": {"threads": 2, "repeats": 5}, "hardware": {"device": "cpu", "processor": "a processor"}}
    return {"engine": engine, "model": "decoder", "rows": found, "versions": {"torch": "2"}, **about}


def test_what_is_slower_is_marked_and_what_no_line_tells_stands_out() -> None:
    record = {
        "parts": [
            part("onnx", (0.2, 10.2, None), (0.5, 5.0, None)),
            part("torch", (0.2, 20.0, "it is slower"), (0.5, 20.0, None)),
        ]
    }
    table = engines.table(record)
    assert [row[0] for row in table.rows] == ["PyTorch, CPU, float32", "ONNX Runtime, float32"]
    assert [row[-2:] for row in table.rows] == [("0.50x †", "0.50x SILENT"), ("0.98x", "2.00x")]
    assert table.notes == ("a processor, CPU, 2 threads; torch 2; medians of 5 rounds.",)


def test_every_engine_has_a_name_and_a_target() -> None:
    assert engines.WORDS_FOR.keys() == engines.ENGINES.keys()


def test_the_page_shows_the_record() -> None:
    page, file = (ROOT / "docs/deploy.md").read_text(), ROOT / "results/engines.json"
    if not file.exists():
        assert page == engines.shown(page, "Not measured yet.")
        pytest.skip("the engines are not measured yet")
    record = json.loads(file.read_text())
    assert page == engines.shown(page, engines.table(record).markdown())
    assert not any(engines.is_silent(row) for each in record["parts"] for row in each["rows"])
    assert not any(each["settings"]["toy"] for each in record["parts"])
