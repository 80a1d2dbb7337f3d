"""What a run shows while it goes on: a live block on a terminal, plain lines elsewhere. All of it on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from rankwise.cli.tables import terminal
from rankwise.lab.report.tables import MEASURES
from rankwise.lab.training import Watcher

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

PATIENCE_SECONDS = 5.0
"""Between two plain lines on one and the same download."""
NOTHING: tuple[str, int, int | None] = ("", 0, None)
"""Is being read."""


@contextmanager
def watching() -> Iterator[Watcher]:
    """A watcher for as long as an experiment runs."""
    console = terminal(stderr=True)
    if console is None:
        yield Lines(sys.stderr)
        return
    block = Block(console)
    with block:
        yield block


class Figures:
    """How far a training is, and how well it goes."""

    def __init__(self, step: int, num_steps: int) -> None:
        self.first, self.step, self.num_steps = step, step, num_steps
        self.began = time.monotonic()
        self.last: dict[str, Any] = {}
        """The last of every figure."""

    def update(self, line: Mapping[str, Any]) -> None:
        self.step = line["step"]
        self.last |= line

    def seconds_left(self) -> float | None:
        """As long as the steps so far took, evaluations included; None before the first."""
        taken = self.step - self.first
        return (time.monotonic() - self.began) / taken * (self.num_steps - self.step) if taken > 0 else None

    def words(self, line: Mapping[str, Any]) -> str:
        """A line of metrics, or the last of every figure, and the time that is left."""
        left = self.seconds_left()
        ending = [f"{clock(left)} left"] if left is not None and self.step < self.num_steps else []
        return "  ".join([*_training(line), *_quality(line), *_size_and_speed(line), *ending])


def _training(line: Mapping[str, Any]) -> Iterator[str]:
    if "loss" in line:
        yield f"loss {line['loss']:.3f}"


def _quality(line: Mapping[str, Any]) -> Iterator[str]:
    """Bits per character or perplexity, in training and on the validation text."""
    for measure, words in MEASURES.items():
        if measure in line:
            yield f"{line[measure]:.3f} {words}"
        if f"valid_{measure}" in line:
            yield f"valid {line[f'valid_{measure}']:.3f}"


def _size_and_speed(line: Mapping[str, Any]) -> Iterator[str]:
    if "expected_size" in line:
        yield f"size {line['expected_size']:,.0f} (target {line['target_size']:,.0f})"
    if "tokens_per_second" in line:
        yield f"{line['tokens_per_second']:,.0f} tokens/s"


class Lines(Watcher):
    """One line for every event that is worth one."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.figures: Figures | None = None
        self.said = 0.0

    def phase(self, title: str) -> None:
        self._say(title)
        self.said = time.monotonic()

    def read(self, what: str, done: int, total: int | None) -> None:
        if time.monotonic() - self.said >= PATIENCE_SECONDS:
            self._say(f"  {what}: {amount(done, total)}")
            self.said = time.monotonic()

    def begin(self, step: int, num_steps: int) -> None:
        self.figures = Figures(step, num_steps)
        if 0 < step < num_steps:
            self._say(f"  going on after step {step} of {num_steps}")

    def report(self, line: Mapping[str, Any]) -> None:
        assert self.figures is not None
        self.figures.update(line)
        self._say(f"  step {line['step']}/{self.figures.num_steps}  {self.figures.words(line)}")

    def _say(self, text: str) -> None:
        print(text, file=self.stream, flush=True)


class Block(Watcher):
    """One block that is drawn anew a few times a second; each phase leaves a line behind."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live
        from rich.spinner import Spinner

        self.console = console
        self.title = ""
        self.began = time.monotonic()
        self.figures: Figures | None = None
        self.reading = NOTHING
        self.spinner = Spinner("line")
        self.live = Live(console=console, get_renderable=self.render, refresh_per_second=5, transient=True)

    def __enter__(self) -> Block:
        self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leave_line()
        self.live.stop()

    def phase(self, title: str) -> None:
        self._leave_line()
        self.title, self.began = title, time.monotonic()

    def read(self, what: str, done: int, total: int | None) -> None:
        self.reading = what, done, total

    def begin(self, step: int, num_steps: int) -> None:
        self.figures = Figures(step, num_steps)

    def advance(self, step: int) -> None:
        if self.figures is not None:
            self.figures.step = step

    def report(self, line: Mapping[str, Any]) -> None:
        if self.figures is not None:
            self.figures.update(line)

    def _leave_line(self) -> None:
        """What remains of a phase when another begins."""
        title, figures, took = self.title, self.figures, clock(time.monotonic() - self.began)
        self.title, self.figures, self.reading = "", None, NOTHING
        # first the block goes, or the line would stand above a stale one
        self.live.refresh()
        if figures is not None:
            words = [title, f"step {figures.step}/{figures.num_steps}", took, *_quality(figures.last)]
            self.console.print("  ".join(words), markup=False, highlight=False)
        elif title:
            self.console.print(f"{title}  {took}", markup=False, highlight=False)

    def render(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        # another thread draws: what it needs is read once
        figures, (what, done, total) = self.figures, self.reading
        below, beside = what, amount(done, total)
        if figures is not None:
            done, total, below = figures.step, figures.num_steps, figures.words(figures.last)
            beside = f"{done}/{total}"
        elif not total:
            self.spinner.update(text=Text("  ".join(filter(None, [self.title, what, beside if what else ""]))))
            return self.spinner if self.title else Text()
        row = Table.grid(padding=(0, 1))
        row.add_row(Text(self.title), ProgressBar(total=total, completed=done, width=30), Text(beside))
        return Group(row, Text(f"  {below}"))


def amount(done: int, total: int | None) -> str:
    """Bytes, in megabytes."""
    return f"{done / 1e6:.1f}" + ("" if total is None else f" of {total / 1e6:.1f}") + " MB"


def clock(seconds: float) -> str:
    """Seconds as hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
