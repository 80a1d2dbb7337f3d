"""What a run shows while it goes on: a live bar on a terminal, plain lines elsewhere. All of it goes to stderr."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from rankwise.cli.command import QUIET
from rankwise.cli.tables import terminal, wrapped
from rankwise.lab.report import MEASURES
from rankwise.lab.training import Watcher

PATIENCE_SECONDS = 5.0
"""The least time between two plain lines about one download."""
COUNT_SECONDS = 15.0
"""The least time between two plain lines about a part that is counted."""


@contextmanager
def watching() -> Iterator[Lines | Bar]:
    """A watcher that shows an experiment while it runs; a silent one where the first of several processes shows it."""
    if QUIET:
        with open(os.devnull, "w") as nowhere:
            yield Lines(nowhere)
        return
    console = terminal(stderr=True)
    if not console.is_interactive:
        yield Lines(sys.stderr)
        return
    with Bar(console) as bar:
        yield bar


class Status:
    """How far a training is, and how well it goes."""

    def __init__(self, step: int, num_steps: int) -> None:
        self.first, self.step, self.num_steps = step, step, num_steps
        self.began = time.monotonic()
        self.last: dict[str, Any] = {}
        """The last value of every metric."""

    def update(self, line: Mapping[str, Any]) -> None:
        self.step = line["step"]
        self.last |= line

    def seconds_left(self) -> float | None:
        """The time that is left at the speed of this process, evaluations included; None before the first step."""
        taken = self.step - self.first
        return (time.monotonic() - self.began) / taken * (self.num_steps - self.step) if taken > 0 else None

    def words(self, line: Mapping[str, Any]) -> str:
        """A line of metrics in words, and the time that is left."""
        found = [f"loss {line['loss']:.3f}"] if "loss" in line else []
        found += _quality(line)
        if "expected_size" in line:
            found.append(f"size {line['expected_size']:,.0f} (target {line['target_size']:,.0f})")
        if "tokens_per_second" in line:
            found.append(f"{line['tokens_per_second']:,.0f} tokens/s")
        left = self.seconds_left()
        if left is not None and self.step < self.num_steps:
            found.append(f"{clock(left)} left")
        return "  ".join(found)


def _quality(line: Mapping[str, Any]) -> Iterator[str]:
    """Bits per character or perplexity, in training and on the validation text."""
    for measure, words in MEASURES.items():
        if measure in line:
            yield f"{line[measure]:.3f} {words}"
        if f"valid_{measure}" in line:
            yield f"valid {line[f'valid_{measure}']:.3f}"


class Lines(Watcher):
    """A plain line for every phase, every report, and now and then for a download."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.status = Status(0, 0)
        self.said = 0.0

    def say(self, text: str) -> None:
        """Print a line."""
        print(text, file=self.stream, flush=True)
        self.said = time.monotonic()

    def phase(self, title: str) -> None:
        self.say(title)

    def read(self, what: str, done: int, total: int | None) -> None:
        if time.monotonic() - self.said >= PATIENCE_SECONDS:
            self.say(f"  {what}: {amount(done, total)}")

    def count(self, done: int, total: int) -> None:
        if time.monotonic() - self.said >= COUNT_SECONDS:
            self.say(f"  {done} of {total}")

    def begin(self, step: int, num_steps: int) -> None:
        self.status = Status(step, num_steps)
        if 0 < step < num_steps:
            self.say(f"  going on after step {step} of {num_steps}")

    def report(self, line: Mapping[str, Any]) -> None:
        self.status.update(line)
        self.say(f"  step {line['step']}/{self.status.num_steps}  {self.status.words(line)}")


class Bar(Watcher):
    """A bar for the phase that runs, with the last metrics below it. Each finished phase leaves a line."""

    def __init__(self, console: Console) -> None:
        texts = [TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[amount]")]
        self.console = console
        self.status: Status | None = None
        self.title = self.below = ""
        self.progress = Progress(texts[0], BarColumn(30), texts[1], console=console)
        self.task = self.progress.add_task("", visible=False, amount="")
        self.live = Live(console=console, get_renderable=self.render, refresh_per_second=5, transient=True)

    def __enter__(self) -> Bar:
        self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._finish_phase()
        self.live.stop()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, markup=False, highlight=False)

    def phase(self, title: str) -> None:
        self._finish_phase()
        self.title, self.began = title, time.monotonic()
        self._show("", 0, None)
        self.progress.update(self.task, description=title, visible=True)

    def read(self, what: str, done: int, total: int | None) -> None:
        self.below = what
        self._show(amount(done, total), done, total)

    def count(self, done: int, total: int) -> None:
        if self.status is None or self.status.num_steps != total:
            self.begin(done, total)
        self.advance(done)

    def begin(self, step: int, num_steps: int) -> None:
        self.status = Status(step, num_steps)
        self.advance(step)

    def advance(self, step: int) -> None:
        if self.status is not None:
            self.status.step = step
            self._show(f"{step}/{self.status.num_steps}", step, self.status.num_steps)

    def report(self, line: Mapping[str, Any]) -> None:
        if self.status is not None:
            self.status.update(line)

    def render(self) -> RenderableType:
        """The bar, and a line below it. Another thread draws it."""
        status = self.status
        below = status.words(status.last) if status else self.below
        lines = phrases(f"  {below}", self.console.width)
        return Group(self.progress.get_renderable(), *([Text(lines)] if below else []))

    def _show(self, text: str, done: int, total: int | None) -> None:
        # `update` would keep a total from before, where there is none now
        self.progress.tasks[0].total = total
        self.progress.update(self.task, completed=done, amount=text)

    def _finish_phase(self) -> None:
        if not self.title:
            return
        words = [self.title, clock(time.monotonic() - self.began)]
        if self.status is not None:
            words.insert(1, f"step {self.status.step}/{self.status.num_steps}")
            words += _quality(self.status.last)
        self.status, self.title, self.below = None, "", ""
        # the bar goes first, or the line would stand above a stale one
        self.progress.update(self.task, visible=False)
        self.live.refresh()
        self.say(phrases("  ".join(words), self.console.width))


def phrases(text: str, width: int) -> str:
    """Phrases with two spaces between them, in lines that break there alone."""
    whole = re.sub(r"(?<! ) (?! )", "\0", text)
    return wrapped(whole, "  ", width).replace("\0", " ")


def amount(done: int, total: int | None) -> str:
    """Bytes in megabytes."""
    return f"{done / 1e6:.1f}" + ("" if total is None else f" of {total / 1e6:.1f}") + " MB"


def clock(seconds: float) -> str:
    """Seconds as hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
