"""`rankwise report`: tables and a page of what was run."""

from __future__ import annotations

import json
import sys
import time
import webbrowser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rankwise.cli.command import Argument, Options, UsageError, command
from rankwise.cli.tables import print_table, say
from rankwise.errors import CheckpointError, RankwiseError
from rankwise.lab.report import RECORD, Table, gather, table

PAGE = "report.html"
"""The name of a page."""
WATCH_SECONDS = 5
"""How often a run is looked at, and how often its page loads itself again."""
WATCHED = ("metrics.jsonl", RECORD, "export.json")
"""Files that grow, or appear, while a run goes on."""
FORMS = ("png", "svg")


@command(
    Argument("FOLDER", "Of a run, a sweep, a compressed or pruned model, or records.", required=True, several=True),
    Argument("-o FILE", f"Write a page with figures, one HTML file. Default with --open or --watch: {PAGE}."),
    Argument("--open", "Open the page in the browser."),
    Argument("--watch", "Keep the page fresh while a run goes on, until it is finished or Ctrl-C."),
    Argument("--png FOLDER", "Write every figure as a PNG file.", Path),
    Argument("--svg FOLDER", "Write every figure as an SVG file.", Path),
    Argument("--json", "Print a list of the records as JSON."),
    Argument("--markdown", "Print tables for a Markdown file."),
)
def report(options: Options) -> None:
    """Show what runs, sweeps and compressed models came to: tables, or a page with figures.

    The page is one file that opens without a network: quality against size, the rank kept in each layer, gates, sizes,
    loss and speed over training, tables, and how to use the result. A run that is damaged, or not finished, is named on
    the page, and the rest still shows. Without -o tables of finished runs and compressed models are printed. Models
    that `rankwise prune` wrote, or that a run did, are rows of one table: give the folder of each. Files that hold
    records, or folders of them, work too.

    example: rankwise report runs/demo -o report.html --open

    example: rankwise report runs/mine/base runs/mine-70 runs/mine-np --markdown
    """
    if options.json and options.markdown:
        raise UsageError("`--json` and `--markdown` exclude each other, but both were given. Leave one out.")
    wants_page = options.o or options.open or options.watch or options.png or options.svg
    if wants_page and (options.json or options.markdown):
        given = "--json" if options.json else "--markdown"
        raise UsageError(f"`{given}` prints tables, but a page or figures were asked for too. Leave one out.")
    paths = [Path(folder) for folder in options.subject]
    if wants_page:
        _write(paths, options)
        return
    records = gather(paths)
    if options.json:
        print(json.dumps(list(records.values()), indent=1))
        return
    for place, (title, record) in enumerate(records.items()):
        if len(records) > 1:
            print(f"{'' if place == 0 else chr(10)}{title}\n")
        if options.markdown:
            print(table(record).markdown())
        else:
            show_table(table(record))


def show_table(found: Table) -> None:
    """Print a table of runs, and its notes."""
    print_table(found.columns, found.rows, words=("",))
    for note in found.notes:
        say(note)


def page_of_run(folder: Path) -> str:
    """Write the page of a finished run into its folder, unless it is there; gives a line about what lies there."""
    from rankwise.lab.report.page import make_page, missing_packages, write_page

    page, record = folder / PAGE, folder / RECORD
    why = missing_packages()
    try:
        if why is None and (not page.exists() or page.stat().st_mtime < record.stat().st_mtime):
            write_page(make_page([folder]), page)
    except RankwiseError as error:
        why = str(error)
    if why is not None:
        return f"All of it is in {folder}: record.json, and a folder for each model. No {PAGE}: {why}"
    return f"All of it is in {folder}: {PAGE}, record.json, and a folder for each model."


def _write(paths: Sequence[Path], options: Options) -> None:
    """Write the page and the pictures that were asked for."""
    from rankwise.lab.report.page import make_page, missing_packages, write_page

    file = Path(options.o or PAGE)
    if file.is_dir():
        raise UsageError(f"`-o` must be a file, but {file} is a folder. Example: -o {file / PAGE}.")
    if (missing := missing_packages()) is not None:
        raise RankwiseError(missing)
    is_open = options.watch and _watch(paths, file, open_it=options.open)
    page = make_page(paths)
    for problem in page.found.problems:
        print(f"Not shown: {problem.place} {problem.why}.", file=sys.stderr)
    for form in FORMS:
        if (folder := getattr(options, form)) is not None:
            _save(folder, pictures := page.pictures(form))
            print(f"{len(pictures)} figures are in {folder}.")
    if options.o or options.open or options.watch:
        write_page(page, file)
        print(f"The page is in {file}.")
    if options.open and not is_open:
        webbrowser.open(file.resolve().as_uri())


def _save(folder: Path, pictures: Mapping[str, bytes]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in pictures.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise CheckpointError(f"Figures must be written to {folder}, but that failed: {error}.") from error


def _watch(paths: Sequence[Path], file: Path, *, open_it: bool) -> bool:
    """Write the page whenever a run has written something, until all runs are finished or Ctrl-C is pressed.

    Returns whether the page was opened: a run that is finished already writes nothing.
    """
    from rankwise.lab.report.page import make_page, write_page

    seen: object = None
    told = is_open = False
    try:
        while True:
            now = list(_stamps(paths))
            if now != seen:
                seen = now
                try:
                    page = make_page(paths)
                    if page.found.finished:
                        return is_open
                    write_page(page, file, reload_seconds=WATCH_SECONDS)
                    print(f"{time.strftime('%H:%M:%S')} {file}: {page.status()}", file=sys.stderr)
                    if open_it and not is_open:
                        webbrowser.open(file.resolve().as_uri())
                        is_open = True
                except CheckpointError as error:
                    if not told:
                        print(f"Waiting: {error}", file=sys.stderr)
                    told = True
            time.sleep(WATCH_SECONDS)
    except KeyboardInterrupt:
        # the page is written once more, without loading itself again
        print(file=sys.stderr)
        return is_open


def _stamps(paths: Sequence[Path]) -> Iterator[tuple[str, int, float]]:
    """What tells whether anything was written since."""
    for path in paths:
        for name in WATCHED:
            for found in sorted(path.rglob(name)):
                # a run may replace a file just now
                with suppress(FileNotFoundError):
                    status = found.stat()
                    yield str(found), status.st_size, status.st_mtime
