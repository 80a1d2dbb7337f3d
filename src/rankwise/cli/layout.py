"""Columns of text within a width. Nothing is cut: headers fold, words wrap, and columns without room follow below."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import inf
from unicodedata import east_asian_width

GAPS = (2, 1)
"""Spaces between columns, where there is room for them."""
INDENT = "  "
"""Before the second line of a cell."""
LEAST = 12
"""Columns of words are made no narrower."""
PIECE = re.compile(r"[^ ]*?(?:[/=,](?=\S)|-(?=[A-Za-z])|[A-Za-z_]\.(?=\S)|\.(?=[A-Za-z_])|$| +)")
"""What stays on one line: a word, or a part of a dotted or hyphenated name. Decimals stay whole."""


@dataclass(frozen=True)
class Block:
    """Lines of a table: all of its rows, with some of its columns or all of them."""

    header: tuple[str, ...]
    body: tuple[str, ...]


@dataclass(frozen=True)
class Column:
    """One column, and how it is written."""

    name: str
    cells: tuple[str, ...]
    words: bool
    """Whether it holds words, which stand to the left, and not numbers, which stand to the right."""
    width: int

    def to(self, width: int) -> Column:
        return Column(self.name, self.cells, self.words, width)

    @property
    def folded(self) -> int:
        """The width of its cells and of the longest word of its header."""
        return max(map(size, (*self.cells, *self.name.split(), "")))

    @property
    def least(self) -> int:
        """The narrowest that it can be."""
        if not self.words:
            return self.folded
        pieces = [piece for text in (*self.cells, self.name) for piece in PIECE.findall(text)]
        return min(self.folded, max(LEAST, *(size(INDENT + piece.rstrip()) for piece in pieces)))

    def header(self, height: int) -> list[str]:
        """Its lines, the last one at the bottom."""
        lines = textwrap.wrap(self.name, max(self.width, 1), break_long_words=False, break_on_hyphens=False)
        return [""] * (height - len(lines)) + [self.aligned(line) for line in lines]

    def aligned(self, text: str) -> str:
        space = " " * (self.width - size(text))
        return text + space if self.words else space + text


def laid_out(
    header: Sequence[str], rows: Sequence[Sequence[str]], words: Container[str], width: float = inf
) -> list[Block]:
    """The blocks of a table. Columns in `words` stand to the left and may wrap; the others hold numbers.

    A line is wider than `width` only where a single cell is.
    """
    columns = [
        Column(name, tuple(cells), name in words, max(map(size, (name, *cells))))
        for name, *cells in zip(header, *rows, strict=True)
    ]
    for found in (columns, [column.to(column.folded) for column in columns], _narrowed(columns, width)):
        for gap in GAPS:
            if _total(found, gap) <= width:
                return [_block(found, gap)]
    return [_block(_narrowed(group, width), GAPS[0]) for group in _groups(columns, width)]


def size(text: str) -> int:
    """Places that a text takes on a terminal."""
    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in text)


def _total(columns: Sequence[Column], gap: int) -> int:
    return sum(column.width for column in columns) + gap * (len(columns) - 1)


def _narrowed(columns: Sequence[Column], width: float) -> list[Column]:
    """With the widest columns of words as narrow as they must be."""
    found = [column.to(column.folded) for column in columns]
    while _total(found, GAPS[0]) > width:
        wide = [i for i, column in enumerate(found) if column.width > column.least]
        if not wide:
            break
        widest = max(wide, key=lambda i: found[i].width)
        found[widest] = found[widest].to(found[widest].width - 1)
    return found


def _groups(columns: Sequence[Column], width: float) -> Iterator[list[Column]]:
    """Columns that stand beside each other, behind the first one, which says what a row is."""
    first, *others = (column.to(column.least) for column in columns)
    if first.folded <= width / 2:
        first = first.to(first.folded)
    group = [first]
    for column in others:
        if len(group) > 1 and _total([*group, column], GAPS[0]) > width:
            yield group
            group = [first]
        group.append(column)
    yield group


def _block(columns: Sequence[Column], gap: int) -> Block:
    height = max(len(column.header(0)) for column in columns)
    header = zip(*(column.header(height) for column in columns), strict=True)
    body: list[Sequence[str]] = []
    for row in zip(*(column.cells for column in columns), strict=True):
        cells = [_wrapped(cell, column.width) for cell, column in zip(row, columns, strict=True)]
        body += zip_longest(*cells, fillvalue="")
    lines = [_line(columns, row, gap) for row in (*header, *body)]
    return Block(tuple(lines[:height]), tuple(lines[height:]))


def _line(columns: Sequence[Column], row: Sequence[str], gap: int) -> str:
    return (" " * gap).join(column.aligned(cell) for column, cell in zip(columns, row, strict=True)).rstrip()


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for piece in PIECE.findall(text):
        if lines[-1].strip() and size((lines[-1] + piece).rstrip()) > width:
            lines.append(INDENT)
        lines[-1] += piece
    return [line.rstrip() for line in lines]
