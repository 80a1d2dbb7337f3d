"""Tables: drawn on a terminal where rich is installed, plain columns elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDE = 10_000
"""Columns of a terminal on which everything fits."""


def terminal(*, stderr: bool = False) -> Console | None:
    """The terminal that a person looks at; None where the stream goes elsewhere, or without rich."""
    if not (sys.stderr if stderr else sys.stdout).isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(stderr=stderr, highlight=False)
    return None if console.is_dumb_terminal or not console.is_terminal else console


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], words: Container[str]) -> None:
    """Print a table. Columns in `words` stand to the left; the others hold numbers, which stand to the right.

    No cell is ever cut: on a narrow terminal headers are folded, and where that is not enough, columns are plain.
    """
    console = terminal()
    if console is not None:
        for fold in (False, True):
            table = _drawn(header, rows, words, fold=fold)
            if console.measure(table, options=console.options.update(width=WIDE)).maximum <= console.width:
                console.print(table)
                return
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        cells = [
            cell.ljust(width) if name in words else cell.rjust(width)
            for name, cell, width in zip(header, row, widths, strict=True)
        ]
        print("  ".join(cells).rstrip())


def _drawn(header: Sequence[str], rows: Sequence[Sequence[str]], words: Container[str], *, fold: bool) -> Table:
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for name, *cells in zip(header, *rows, strict=True):
        needed = [*cells, *name.split()] if fold else [*cells, name]
        table.add_column(
            Text(name), justify="left" if name in words else "right", width=max(map(cell_len, needed), default=0)
        )
    for row in rows:
        table.add_row(*map(Text, row))
    return table
