"""`rankwise report`: the tables of finished runs, from their records. Also how other commands show one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankwise.cli.command import Command, Options, Parser, UsageError
from rankwise.cli.tables import print_table, say
from rankwise.lab.report.gather import gather
from rankwise.lab.report.tables import table


def show_record(record: Mapping[str, Any]) -> None:
    """Print the table of a record."""
    found = table(record)
    print_table(found.columns, found.rows, words=("",))
    for note in found.notes:
        say(note)


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "folders", metavar="FOLDER", nargs="+", help="of a run, a sweep or a pruned model, or of records"
    )
    parser.add_argument("--json", action="store_true", help="print a list of the records as JSON")
    parser.add_argument("--markdown", action="store_true", help="print tables for a Markdown file")


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
            show_record(record)


REPORT = Command(
    name="report",
    usage="FOLDER ... [--json | --markdown]",
    about="Show the tables of finished runs and sweeps again.",
    details="Models that `rankwise prune` wrote, or that a run did, are rows of one table: give the folder of each.\n"
    "Files that hold records, or folders of them, work too.\n\n"
    "example: rankwise report runs/demo --markdown\n"
    "example: rankwise report runs/mine/base runs/mine-70 runs/mine-np",
    arguments=add_arguments,
    run=report,
)
