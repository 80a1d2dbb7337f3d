"""benchmarks/torture.py: a short form of each row, and the table of docs/reliability.md."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import fuzz
import pytest
import torture

ROOT = Path(__file__).parents[2]
SHORT = {"kills": 10, "saves": 0, "disk": 10, "fuzz": 150, "flips": 60, "memory": 200}
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def test_every_row_has_a_short_form() -> None:
    assert SHORT.keys() == torture.ROWS.keys()


# a child of a process with threads warns; that of the tests has one where the rows compute
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("name", SHORT)
def test_what_is_promised_holds(name: str) -> None:
    row = torture.torture(name, SHORT[name])
    assert row.bad == []
    assert name == "memory" or row.tried >= max(SHORT[name], 50 if name == "saves" else 1)


def test_a_promise_that_does_not_hold_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.json").write_text('{"a": 1}')

    def fail(path: Path) -> None:
        raise KeyError("a")

    subjects = {"toy": fuzz.Subject(tmp_path / "folder", ("a.json",), fail)}
    (tmp_path / "scratch").mkdir()
    assert [fuzz.run_case(n, subjects, tmp_path / "scratch")[1] for n in range(3)] == ["KeyError: 'a'"] * 3


def test_a_case_is_a_number(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.json").write_text(json.dumps({"a": [1, 2, {"b": "c"}], "d": None}))
    for number in range(30):
        told = []
        for copy in ("one", "other"):
            place = tmp_path / copy / str(number)
            place.mkdir(parents=True)
            (place / "a.json").write_bytes((tmp_path / "folder" / "a.json").read_bytes())
            subject = fuzz.Subject(place, ("a.json",), lambda path: None)
            told.append(fuzz.change(random.Random(number), subject, place))
        assert told[0] == told[1]


def test_the_page_shows_the_record() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    shown = page.split("<!-- torture -->\n")[1].split("\n<!-- /torture -->")[0]
    assert shown.strip() == torture.table(json.loads((ROOT / "results" / "torture.json").read_text()))
