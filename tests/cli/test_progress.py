"""What a run shows: lines in a log, one live bar on a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from rich.console import Console

from rankwise.cli import progress, tables
from rankwise.cli.progress import Bar, Lines, Status, clock
from rankwise.lab.training import Watcher

LINE = {"loss": 1.5, "bits_per_character": 2.164, "lr": 1e-3, "tokens_per_second": 12345.6, "seconds": 1.0}
SIZES = {"target_size": 500_000.0, "expected_size": 612_345.6}
SHOWN = "size 612,346 (target 500,000)  12,346 tokens/s"
VALID = {"valid_loss": 1.25, "valid_bits_per_character": 1.803, "is_best": True}


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The clock of the progress; its one item is the time."""
    time = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: time[0])
    return time


def play(watcher: Watcher, now: list[float]) -> None:
    """A run of one phase."""
    watcher.phase("reading enwik8")
    watcher.read("downloading enwik8", 1_000_000, 36_000_000)
    now[0] += 7
    watcher.read("downloading enwik8", 20_500_000, 36_000_000)
    watcher.phase("pruning with flop-l0")
    watcher.begin(0, 400)
    watcher.advance(50)
    now[0] += 10
    watcher.report({"step": 100, **LINE, **SIZES})
    now[0] += 10
    watcher.report({"step": 200, "seconds": 2.0, **VALID})
    watcher.end()
    watcher.phase("timing")


def test_a_log_has_a_line_for_every_report(now: list[float]) -> None:
    stream = io.StringIO()
    play(Lines(stream), now)
    assert stream.getvalue().splitlines() == [
        "reading enwik8",
        "  downloading enwik8: 20.5 of 36.0 MB",
        "pruning with flop-l0",
        f"  step 100/400  loss 1.500  2.164 bits per character  {SHOWN}  0:30 left",
        "  step 200/400  valid 1.803  0:20 left",
        "timing",
    ]


def test_a_run_that_goes_on_says_where(now: list[float]) -> None:
    stream = io.StringIO()
    lines = Lines(stream)
    for step in (0, 30, 40):
        lines.begin(step, 40)
    assert stream.getvalue() == "  going on after step 30 of 40\n"


def test_a_part_that_is_counted_shows_how_far_it_is(now: list[float]) -> None:
    stream = io.StringIO()
    lines, bar = Lines(stream), Bar(Console(file=io.StringIO(), force_terminal=True, width=120))
    for watcher in (lines, bar):
        watcher.phase("generating text")
        for done in (0, 64, 128):
            watcher.count(done, 320)
            now[0] += 10
    # now and then in a log
    assert stream.getvalue().splitlines() == ["generating text", "  128 of 320"]
    assert "128/320" in shown(bar) and "0:45 left" in shown(bar)


def test_time_left_counts_only_what_this_process_did(now: list[float]) -> None:
    status = Status(300, 400)
    assert status.seconds_left() is None
    now[0] += 5
    status.step = 310
    assert status.seconds_left() == pytest.approx(45)
    assert clock(45) == "0:45"
    assert clock(3 * 3600 + 62) == "3:01:02"


def test_a_terminal_has_one_bar_and_a_line_for_every_phase(now: list[float]) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    bar = Bar(console)
    with bar:
        play(bar, now)
        assert shown(bar).startswith("timing")
        assert "reading" not in shown(bar)
    assert isinstance(console.file, io.StringIO)
    written = console.file.getvalue()
    assert "reading enwik8  0:07" in written
    assert "pruning with flop-l0  step 200/400  0:20  2.164 bits per character  valid 1.803" in written


def test_the_bar_shows_the_last_of_every_metric(now: list[float]) -> None:
    bar = Bar(Console(file=io.StringIO(), force_terminal=True, width=120))
    bar.phase("pruning with [flop]")
    bar.read("preparing", 5_000_000, 10_000_000)
    assert "5.0 of 10.0 MB" in shown(bar)
    bar.read("reading", 7_000_000, None)
    assert "7.0 MB\n  reading" in shown(bar)
    assert bar.progress.tasks[0].total is None
    bar.begin(0, 400)
    now[0] += 10
    bar.report({"step": 100, **LINE, **SIZES})
    bar.report({"step": 100, **VALID})
    bar.advance(200)
    text = shown(bar)
    assert "pruning with [flop]" in text
    assert "200/400" in text
    assert f"2.164 bits per character  valid 1.803  {SHOWN}  0:10 left" in text


def shown(bar: Bar) -> str:
    console = Console(file=io.StringIO(), width=150)
    console.print(bar.render())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().strip()


def test_only_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    with progress.watching() as watcher:
        assert isinstance(watcher, Lines)
    monkeypatch.setattr(progress, "terminal", lambda **_: Console(file=io.StringIO(), force_terminal=True))
    with progress.watching() as watcher:
        assert isinstance(watcher, Bar)
        assert watcher.live.is_started
    assert not watcher.live.is_started


def test_colours_are_not_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert not tables.terminal().is_terminal
    assert tables.terminal().color_system is None
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert tables.terminal().is_interactive
    monkeypatch.setenv("TERM", "dumb")
    assert not tables.terminal().is_interactive


def test_a_table_is_drawn_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    header, rows = ("name", "size"), [("[a]", "1,000"), ("b", "2")]
    tables.print_table(header, rows, words=("name",))
    assert capsys.readouterr().out.splitlines() == ["name   size", "[a]   1,000", "b         2"]
    console = Console(file=io.StringIO(), force_terminal=True, width=60)
    monkeypatch.setattr(tables, "terminal", lambda: console)
    tables.print_table(header, rows, words=("name",))
    assert isinstance(console.file, io.StringIO)
    drawn = console.file.getvalue()
    assert "[a]" in drawn
    assert "─" in drawn
