"""`rankwise report`: the tables of finished runs, from their records. Also how other commands show one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankwise.cli.command import Command, Options, Parser, UsageError
from rankwise.cli.tables import print_table, say
from rankwise.report.figures import figures_of
from rankwise.report.gather import gather
from rankwise.report.page import page
from rankwise.report.tables import table


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
    parser.add_argument("--figures", metavar="FOLDER", help="write the figures of a folder of records there, as SVG")


def report(options: Options) -> None:
    if options.json and options.markdown:
        raise UsageError("`--json` and `--markdown` exclude each other, but both were given. Leave one out.")
    results, records = gather([Path(folder) for folder in options.folders])
    if results:
        report_results(options, results | records)
        return
    if options.figures:
        raise UsageError("`--figures` goes with a folder of records, such as results, but was given with a run.")
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


def report_results(options: Options, found: Mapping[str, Any]) -> None:
    """The page of a folder of records, and its figures."""
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print(page(found))
    if options.figures:
        folder = Path(options.figures)
        folder.mkdir(parents=True, exist_ok=True)
        for figure in figures_of(found):
            (folder / f"{figure.name}.svg").write_text(figure.svg, encoding="utf-8")


REPORT = Command(
    name="report",
    usage="FOLDER ... [--json | --markdown] [--figures FOLDER]",
    about="Show the tables of finished runs and sweeps again.",
    details="Models that `rankwise prune` wrote, or that a run did, are rows of one table: give the folder of each.\n"
    "Given a folder of records, or files of it, it prints their page, the paper's figures beside them.\n\n"
    "example: rankwise report runs/demo --markdown\n"
    "example: rankwise report runs/mine/base runs/mine-70 runs/mine-np\n"
    "example: rankwise report results benchmarks/results.csv --markdown --figures docs/figures",
    arguments=add_arguments,
    run=report,
)
