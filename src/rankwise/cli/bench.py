"""`rankwise bench`: how fast the models of a folder are on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rankwise.cli.command import Command, Options, Parser, UsageError, listed, one_of
from rankwise.cli.runs import RUNS
from rankwise.cli.tables import print_table, say

COLUMNS = ("engine", "batch", "on", "model", "precision", "parameters", "ms", "20% to 80%", "speed")


def bench(options: Options) -> None:
    from rankwise.deploy.bench import BenchConfig, remarks
    from rankwise.deploy.bench import bench as measure
    from rankwise.lab.experiments.bench import LENGTH, find_models, keep

    found = find_models(Path(options.target))
    config = BenchConfig(
        length=found.length if options.length is None else options.length,
        batches=tuple(options.batch),
        threads=tuple(options.threads),
        engines=tuple(options.engines),
        repeats=options.repeats,
        device=options.device,
    )
    found.check_length(config.length)
    if options.length is None and found.length == found.longest:
        print(f"Sequences have {found.length} tokens: the model may have no positions for {LENGTH}.", file=sys.stderr)
    tell = partial(print, "timing", file=sys.stderr)
    rows = measure(found.models, config, found.tokens, tell=tell)
    lines = remarks(rows)
    kept = keep(found, rows, lines, options.device)
    if options.json:
        print(json.dumps({"rows": rows, "remarks": lines}, indent=1))
        return
    print_table(COLUMNS, [_cells(row) for row in rows], words=("engine", "model", "precision"))
    for line in lines:
        say(line)
    say(f"\nSequences of {config.length} tokens; medians of {config.repeats} calls; speed: against the first model.")
    if kept is not None:
        print(f"Kept in {kept}.")


def _cells(row: Mapping[str, Any]) -> Sequence[str]:
    from rankwise.deploy.bench import place

    spent = row["milliseconds"]
    return (
        row["engine"],
        str(row["batch"]),
        place(row),
        row["model"],
        row["precision"],
        f"{row['parameters']:,}",
        f"{spent['median']:.2f}",
        f"{spent['p20']:.2f} to {spent['p80']:.2f}",
        f"{row['speed']:.2f}x",
    )


def _threads(text: str) -> int | str:
    """Read a number, or "all"."""
    if text != "all" and not text.removeprefix("-").isdecimal():
        raise UsageError(f'must be whole numbers or "all", but has {text!r} instead.')
    return text if text == "all" else int(text)


def _arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("target", metavar="FOLDER", help="The folder of a run, of one of its models, or of a saved model.")
    add("--batch", type=listed(int), default=[1, 16], metavar="NUMBERS", help="Batch sizes with commas. Default: 1,16.")
    add(
        "--threads",
        type=listed(_threads),
        default=[1, "all"],
        metavar="NUMBERS",
        help="Threads. Default: 1,all.",
    )
    add(
        "--length",
        type=int,
        metavar="N",
        help="Tokens of a sequence. Default: as in training, or 256 at most.",
    )
    add("--engines", type=listed(str), default=["torch"], metavar="NAMES", help="Engines with commas. Default: torch.")
    add("--repeats", type=int, default=15, metavar="N", help="Calls of each model. Default: 15.")
    add("--device", type=one_of("cpu", "cuda"), default="cpu", metavar="DEVICE", help="cpu or cuda. Default: cpu.")
    add("--json", action="store_true", help="Print JSON.")


BENCH = Command(
    name="bench",
    about="Time the dense, the compact and the int8 models of a folder on this machine.",
    details=f"""\
Models take turns, so that a busy moment of the machine slows them all. A compact model that is not faster gets a line
that says so. The record of a run keeps the figures. Engines: torch, compile (torch.compile), graph (a CUDA graph),
onnx, openvino.

example: rankwise bench {RUNS}/demo --batch 1 --threads 1""",
    arguments=_arguments,
    run=bench,
)
