"""`rankwise presets`: what can be run, how large it is and what it needs."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from rankwise.cli.command import Command, Options, Parser, UsageError
from rankwise.cli.tables import print_table, say
from rankwise.errors import nearest

if TYPE_CHECKING:
    from rankwise.lab.experiments.presets import Preset

HEADER = ("preset", "parameters", "exported", "steps", "tokens")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("filters", metavar="FILTER", nargs="*", help="show only names that contain all of these")
    parser.add_argument("--json", action="store_true", help="print JSON")


def presets(options: Options) -> None:
    from rankwise.lab.experiments.presets import PRESETS as KNOWN

    found = [one for name, one in KNOWN.items() if all(part in name for part in options.filters)]
    if not found:
        words = " ".join(options.filters)
        raise UsageError(f"No preset has {words!r} in its name.{nearest(words, KNOWN)} `rankwise presets` lists all.")
    entries = [_entry(one) for one in found]
    if options.json:
        print(json.dumps(entries, indent=1))
        return
    # what many presets have in common is said once
    groups: dict[str, list[list[str]]] = {}
    for entry in entries:
        groups.setdefault(_group(entry), []).append(_cells(entry))
    for title, rows in groups.items():
        say(f"{title}\n")
        print_table(HEADER, rows, words=("preset",))
        print()
    say(f"{len(found)} of {len(KNOWN)} presets. `rankwise run NAME --help` shows the settings of one.")


def _entry(one: Preset) -> dict[str, Any]:
    return {"name": one.name, "table": one.table, "about": one.about, **dataclasses.asdict(one.make().size_preview())}


def _group(entry: dict[str, Any]) -> str:
    megabytes, table = entry["download_megabytes"], entry["table"]
    title = f"{table} table, {entry['about']}" if table else entry["about"]
    return f"{title}. Corpus {entry['corpus']}, download {f'{megabytes} MB' if megabytes else 'none'}."


def _cells(entry: dict[str, Any]) -> list[str]:
    numbers = [f"{entry[name]:,}" for name in ("parameters", "exported", "steps")]
    return [entry["name"], *numbers, f"{entry['tokens'] / 1e6:,.1f}M"]


PRESETS = Command(
    name="presets",
    usage="[FILTER ...] [--json]",
    about="List the presets, their sizes and what they need.",
    details="""\
Sizes are in parameters: of the dense model, and of the exported one. Downloads are kept for the next run.

example: rankwise presets enwik8 short""",
    arguments=add_arguments,
    run=presets,
)
