"""Tables and sentences that fit the terminal, or 80 columns where there is none."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

GAPS = (2, 1)
"""Spaces between columns: two where there is room for them."""
INDENT = "  "
"""Before the second line of a cell."""
LEAST = 12
"""Columns of words are made no narrower."""
PIECE = re.compile(r"[^ ]*?(?:[/=,](?=\S)|-(?=[A-Za-z])|[A-Za-z_]\.(?=\S)|\.(?=[A-Za-z_])|$| +)")
"""What stays on one line: a word, or a part of a dotted or hyphenated name. Decimals stay whole."""


def terminal(*, stderr: bool = False) -> Console:
    """The console of a stream. Only on a terminal is it interactive and in colour."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    # left to itself, rich takes a file for a terminal where FORCE_COLOR is set
    return Console(file=stream, force_terminal=stream.isatty(), width=columns(), highlight=False, markup=False)


def columns() -> int:
    """The number of columns that a line may have."""
    return shutil.get_terminal_size().columns


def say(text: str) -> None:
    """Print a sentence. Words that are longer than a line, such as paths, stay whole."""
    print(wrapped(text))


def close(result: str, *command: str) -> None:
    """End with the result as a sentence, and the command that is useful next, if any, which stays on one line."""
    following = f" Next: {shlex.join(command)}".replace(" ", "\0").replace("\0", " ", 1) if command else ""
    print(wrapped(f"\n{result}{following}").replace("\0", " "))


def wrapped(text: str, indent: str = "", width: int | None = None) -> str:
    """A text in lines that fit; all lines of a paragraph but the first begin with `indent`."""
    wrapper = textwrap.TextWrapper(
        width or columns(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join("\n".join(wrapper.wrap(line)) for line in text.split("\n"))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], words: Container[str]) -> None:
    """Print a table, with a rule below its header on a terminal.

    Columns in `words` stand to the left and may wrap; the others hold numbers and stand to the right. No cell is ever
    cut: columns without room follow in a table of their own below, behind the first column.
    """
    console = terminal()
    for place, table in enumerate(tables(header, rows, words, console.width, rule=console.is_interactive)):
        if place:
            console.print()
        with console.capture() as drawn:
            console.print(table, crop=False)
        print(*(line.rstrip() for line in drawn.get().splitlines()), sep="\n", file=console.file)


def tables(
    header: Sequence[str], rows: Sequence[Sequence[str]], words: Container[str], width: int, *, rule: bool = False
) -> Iterator[Table]:
    """The table, or several with some of its columns each. They are wider than `width` only where a single cell is."""
    found = [Column.of(name, cells, words=name in words) for name, *cells in zip(header, *rows, strict=True)]
    # headers are folded before words are wrapped
    for narrowest in ("folded", "least"):
        for gap in GAPS:
            layout = _narrowed(found, width, gap, narrowest)
            if _total(layout, gap) <= width:
                yield _drawn(layout, gap, rule)
                return
    first, *others = (replace(column, width=column.least) for column in found)
    # the first column says what a row is, and stands in every table
    group = [replace(first, width=first.folded) if first.folded <= width / 2 else first]
    for column in others:
        if len(group) > 1 and _total([*group, column], GAPS[0]) > width:
            yield _drawn(_narrowed(group, width, GAPS[0], "least"), GAPS[0], rule)
            del group[1:]
        group.append(column)
    yield _drawn(_narrowed(group, width, GAPS[0], "least"), GAPS[0], rule)


@dataclass(frozen=True)
class Column:
    """A column of a table, and how wide it is written."""

    name: str
    cells: Sequence[str]
    words: bool
    """Whether it holds words, and not numbers."""
    width: int
    folded: int
    """The width at which only the header is folded."""
    least: int
    """The narrowest that it can be."""

    @classmethod
    def of(cls, name: str, cells: Sequence[str], *, words: bool) -> Column:
        from rich.cells import cell_len

        folded = max(map(cell_len, (*cells, *name.split(), "")))
        pieces = [INDENT + piece.rstrip() for text in (*cells, name) for piece in PIECE.findall(text)]
        least = min(folded, max(LEAST, *map(cell_len, pieces))) if words else folded
        return cls(name, cells, words, max(folded, cell_len(name)), folded, least)


def _total(columns: Sequence[Column], gap: int) -> int:
    return sum(column.width for column in columns) + gap * (len(columns) - 1)


def _narrowed(columns: Sequence[Column], width: int, gap: int, narrowest: str) -> list[Column]:
    """The columns, the widest ones made narrower until all fit; no column gets narrower than its `narrowest` says."""
    found = list(columns)
    while _total(found, gap) > width:
        wide = [i for i, column in enumerate(found) if column.width > getattr(column, narrowest)]
        if not wide:
            break
        widest = max(wide, key=lambda i: found[i].width)
        found[widest] = replace(found[widest], width=found[widest].width - 1)
    return found


def _drawn(columns: Sequence[Column], gap: int, rule: bool) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    # between columns, a box has one space of its own
    padding, style = ((0, gap - 1, 0, 0), "bold") if rule else ((0, gap, 0, 0), "")
    box = SIMPLE_HEAD if rule else None
    table = Table(box=box, show_edge=False, pad_edge=False, padding=padding, header_style=style)
    table.width = _total(columns, gap)
    for column in columns:
        table.add_column(Text(column.name), justify="left" if column.words else "right", width=column.width)
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*(_cell(text, column.width) for text, column in zip(row, columns, strict=True)))
    return table


def _cell(text: str, width: int) -> Text:
    """A cell whose lines break between words and inside dotted names, but never inside a number."""
    from rich.cells import cell_len
    from rich.text import Text

    lines = [""]
    for piece in PIECE.findall(text):
        if lines[-1].strip() and cell_len((lines[-1] + piece).rstrip()) > width:
            lines.append(INDENT)
        lines[-1] += piece
    return Text("\n".join(line.rstrip() for line in lines), no_wrap=True)
