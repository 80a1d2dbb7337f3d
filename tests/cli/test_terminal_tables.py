"""Tables on a terminal: however narrow it is, no figure and no name is cut."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest

from rankwise.cli import tables
from rankwise.report.tables import table

WIDTHS = [20, 40, 72, 80, 100, 140]


def record(num_seeds: int) -> dict[str, object]:
    """That of a run or a sweep, with names and figures that differ in their last characters."""

    def row(name: str, value: float) -> dict[str, object]:
        quality = {"bits_per_character": value}
        timing = {"median": 10 * value, "p20": value, "p80": value}
        sizes = {"parameters": round(1e6 * value), "removed": 0.8, "nonzeros": False, "speedup": value}
        return {"name": name, "method": name, "valid": quality, "test": quality, "milliseconds": timing, **sizes}

    names = ("dense", "flop-l0-80-published", "flop-l0-80-distilled")
    return {
        "runs": [
            {"rows": [row(name, 1.2345 + seed / 7 + place / 1000) for place, name in enumerate(names)]}
            for seed in range(num_seeds)
        ]
    }


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """The lines of a table on a terminal of some width, as the eye sees them."""

    def show(width: int, header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
        tables.print_table(header, rows, words=("",))
        return re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out).splitlines()

    return show


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("num_seeds", [1, 3])
def test_every_cell_is_whole(num_seeds: int, width: int, shown: Callable[..., list[str]]) -> None:
    found = table(record(num_seeds))
    lines = shown(width, found.columns, found.rows)
    for row in found.rows:
        (line,) = (line for line in lines if line.split()[:1] == [row[0]])
        assert " ".join(line.split()) == " ".join(" ".join(row).split())
    words = " ".join(lines).split()
    assert all(word in words for name in found.columns for word in name.split())


def test_a_run_fits_a_terminal_of_80_columns(shown: Callable[..., list[str]]) -> None:
    found = table(record(1))
    lines = shown(80, found.columns, [("flop-l0", *row[1:]) for row in found.rows])
    assert max(map(len, lines)) <= 80
    assert any(set(line) == {"─"} for line in lines)
