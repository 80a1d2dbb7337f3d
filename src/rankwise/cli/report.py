"""`rankwise report` and `rankwise presets`: tables of what was run, and of what can be run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankwise.cli.command import Command, Options, Parser, UsageError
from rankwise.cli.tables import print_table, say
from rankwise.errors import nearest
from rankwise.lab.report import Table, gather, table


def show(found: Table) -> None:
    """Print a table of runs."""
    print_table(found.columns, found.rows, words=("",))
    for note in found.notes:
        say(note)


def report(options: Options) -> None:
    if options.json and options.markdown:
        raise UsageError("`--json` and `--markdown` exclude each other, but both were given. Leave one out.")
    records = gather([Path(folder) for folder in options.folders])
    if options.json:
        print(json.dumps(list(records.values()), indent=1))
        return
    for place, (title, record) in enumerate(records.items()):
        if len(records) > 1:
            print(f"{'' if place == 0 else chr(10)}{title}\n")
        if options.markdown:
            print(table(record).markdown())
        else:
            show(table(record))


def presets(options: Options) -> None:
    from rankwise.lab.experiments.outline import outline
    from rankwise.lab.experiments.presets import PRESETS as KNOWN

    found = [one for name, one in KNOWN.items() if all(part in name for part in options.filters)]
    if not found:
        words = " ".join(options.filters)
        raise UsageError(f"No preset has {words!r} in its name.{nearest(words, KNOWN)} `rankwise presets` lists all.")
    entries = [
        {"name": one.name, "table": one.table, "about": one.about, **dataclasses.asdict(outline(one.make()))}
        for one in found
    ]
    if options.json:
        print(json.dumps(entries, indent=1))
        return
    # what many presets have in common is said once
    groups: dict[str, list[list[str]]] = {}
    for entry in entries:
        numbers = [f"{entry[name]:,}" for name in ("parameters", "exported", "steps")]
        groups.setdefault(_title(entry), []).append([entry["name"], *numbers, f"{entry['tokens'] / 1e6:,.1f}M"])
    for title, rows in groups.items():
        say(f"{title}\n")
        print_table(("preset", "parameters", "exported", "steps", "tokens"), rows, words=("preset",))
        print()
    say(f"{len(found)} of {len(KNOWN)} presets. `rankwise run NAME --help` shows the settings of one.")


def _title(entry: Mapping[str, Any]) -> str:
    megabytes, title = entry["download_megabytes"], entry["about"]
    title = f"{entry['table']} table, {title}" if entry["table"] else title
    return f"{title}. Corpus {entry['corpus']}, download {f'{megabytes} MB' if megabytes else 'none'}."


def _report_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "folders",
        metavar="FOLDER",
        nargs="+",
        help="The folder of a run, of a sweep, of a pruned model or of records.",
    )
    add("--json", action="store_true", help="Print a list of the records as JSON.")
    add("--markdown", action="store_true", help="Print tables for a Markdown file.")


def _presets_arguments(parser: Parser) -> None:
    parser.add_argument("filters", metavar="FILTER", nargs="*", help="Show only names that contain all of these.")
    parser.add_argument("--json", action="store_true", help="Print JSON.")


REPORT = Command(
    name="report",
    about="Show the tables of finished runs and sweeps again.",
    details="""\
Models that `rankwise prune` wrote, or that a run did, are rows of one table: give the folder of each. Files that hold
records, or folders of them, work too.

example: rankwise report runs/demo --markdown
example: rankwise report runs/mine/base runs/mine-70 runs/mine-np""",
    arguments=_report_arguments,
    run=report,
)
PRESETS = Command(
    name="presets",
    about="List the presets, their sizes and what they need.",
    details="""\
Sizes are in parameters: those of the dense model, and those of the exported one. Downloads are kept for the next run.

example: rankwise presets enwik8 short""",
    arguments=_presets_arguments,
    run=presets,
)
