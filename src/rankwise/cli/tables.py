"""Tables: drawn on a terminal where rich is installed, plain columns elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


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
    """Print a table. Columns in `words` stand to the left; the others hold numbers, which stand to the right."""
    console = terminal()
    if console is None:
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        for row in (header, *rows):
            cells = [
                cell.ljust(width) if name in words else cell.rjust(width)
                for name, cell, width in zip(header, row, widths, strict=True)
            ]
            print("  ".join(cells).rstrip())
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for name in header:
        table.add_column(name, justify="left" if name in words else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
