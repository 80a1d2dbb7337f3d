"""benchmarks/torture.py: a short form of each row, and the table of docs/reliability.md."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzz
import pytest
import torture
from children import Outcome, in_child, share_out

from rankwise.errors import RankwiseError

ROOT = Path(__file__).parents[2]
SHORT = {"kills": 10, "saves": 0, "disk": 10, "fuzz": 150, "flips": 60, "memory": 200}
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def test_every_row_has_a_short_form() -> None:
    # that of sweeps, whose processes take longest to start, is tests/cli/test_launched_sweeps.py
    assert SHORT.keys() == torture.ROWS.keys() - {"sweep"}


# a child of a process with threads warns; that of the tests has one where the rows compute
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("name", SHORT)
def test_what_is_promised_holds(name: str) -> None:
    row = torture.torture(name, SHORT[name])
    assert row.bad == []
    assert name == "memory" or row.tried >= max(SHORT[name], 50 if name == "saves" else 1)


def outcome_of(read: Callable[[Path], Any], folder: Path) -> str | None:
    """What is wrong with a case that is read so."""
    (folder / "toy").mkdir()
    (folder / "toy" / "a.json").write_text('{"a": 1}')
    return fuzz.run_case(1, {"toy": fuzz.Subject(folder / "toy", ("a.json",), read)}, folder)[1]


def test_a_promise_that_does_not_hold_is_told(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        raise KeyError("a")

    assert outcome_of(fail, tmp_path) == "KeyError: 'a'"


@pytest.mark.parametrize("number_slow, wrong", [(1, False), (2, True)])
def test_a_case_counts_as_slow_when_it_is_slow_again(
    number_slow: int, wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that another process was in the way of is not."""
    limits = [-1.0] * number_slow + [1_000.0] * 2
    read = lambda path: monkeypatch.setattr(fuzz, "CPU_SECONDS", limits.pop(0))  # noqa: E731
    assert (outcome_of(read, tmp_path) is not None) == wrong


def test_an_error_of_memory_is_no_clear_one(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        raise RankwiseError("MODEL must be a folder that transformers can load, but is not: MemoryError")

    assert str(outcome_of(fail, tmp_path)).startswith("no memory: ")


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


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("workers", [1, 3])
def test_cases_are_shared_out_each_once_and_a_child_that_dies_is_a_bad_one(workers: int, tmp_path: Path) -> None:
    def run(case: int, folder: Path) -> Outcome:
        assert list(folder.iterdir()) == [folder / "outcomes"]
        print(f"I am {case}.", flush=True)
        if case in (13, 17):
            os.kill(os.getpid(), signal.SIGKILL)
        return str(case), "odd" if case == 18 else None, {"counted": 1}

    row = torture.Row("toy", "toy")
    for outcome in share_out(run, range(10, 20), tmp_path, workers, chunk=4, seconds=60):
        row.note(*outcome)
    assert (row.tried, row.more) == (10, {"counted": 8})
    assert sorted(row.bad) == [f"{case}: the process ended with -9: I am {case}.\n" for case in (13, 17)] + ["18: odd"]
    assert list(share_out(run, range(3), tmp_path, workers, chunk=1, seconds=0)) == []


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_children_are_ended_when_nobody_asks_for_outcomes_any_more(tmp_path: Path) -> None:
    def run(case: int, folder: Path) -> Outcome:
        (tmp_path / str(case)).write_text(str(os.getpid()))
        while case:
            time.sleep(1)
        return str(case), None, {}

    outcomes = share_out(run, range(3), tmp_path, 3, chunk=1, seconds=60)
    assert next(outcomes) == ["0", None, {}]
    while not all((tmp_path / str(case)).exists() and (tmp_path / str(case)).read_text() for case in range(3)):
        time.sleep(0.01)
    outcomes.close()
    for case in (1, 2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / str(case)).read_text()), 0)


def test_a_row_is_added_to_one_of_other_cases() -> None:
    before = {"tried": 3, "bad": ["a"], "seconds": 5, "seed": 1, "more": {"kills": 2}, "date": "then"}
    row = {"tried": 4, "bad": [], "seconds": 6, "seed": 2, "more": {"kills": 1, "without": "x"}, "date": "now"}
    made = torture.added(before, row)
    counts = {"tried": 7, "bad": ["a"], "seconds": 11, "seed": 1}
    assert made == {**counts, "more": {"kills": 3, "without": "x"}, "date": "now"}


def test_the_page_shows_the_record() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    shown = page.split("<!-- torture -->\n")[1].split("\n<!-- /torture -->")[0]
    assert shown.strip() == torture.table(json.loads((ROOT / "results" / "torture.json").read_text()))


def test_a_child_whose_words_find_no_room_ends_as_it_would() -> None:
    def speak() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4, resource.RLIM_INFINITY))
        sys.stdout.write("more than four letters")

    assert in_child(speak)[0] == 0
