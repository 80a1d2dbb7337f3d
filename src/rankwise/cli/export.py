"""`rankwise export`: a model in the format of another engine, compared with the model, and timed."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.cli.command import Command, Options, Parser, one_of
from rankwise.cli.tables import print_table, say

if TYPE_CHECKING:
    from torch import nn

    from rankwise.deploy.export import Exported, Runner

FORMATS = ("onnx", "openvino", "pt2")
REPEATS = 10


def export(options: Options) -> None:
    from rankwise.core.budget import count
    from rankwise.deploy.inputs import example_inputs
    from rankwise.lab.experiments.saved_models import open_folder
    from rankwise.measure import time_together

    models = {"model": open_folder(Path(options.folder)).float()}
    if options.dense is not None:
        models["dense"] = open_folder(Path(options.dense)).float()
    target = Path(options.out or f"{Path(options.folder).resolve().name}-{options.to}{'-int8' if options.int8 else ''}")
    rows: list[dict[str, Any]] = []
    runners: dict[str, Runner] = {}
    with tempfile.TemporaryDirectory() as scratch:
        # the dense one first, and elsewhere: what is wrong with it must leave nothing behind
        for name in reversed(models):
            model = models[name]
            inputs = example_inputs(model, options.batch, options.length)
            place = target if name == "model" else Path(scratch) / name
            made, runners[name] = _exported(model, inputs, place, options)
            rows.append({"name": name, "parameters": count(model), "bytes": made.bytes, "difference": made.difference})
            rows[-1]["shapes"] = made.shapes
        calls = {name: lambda run=run: run(**inputs) for name, run in runners.items()}
        times = time_together(calls, repeats=REPEATS)
    for row in rows:
        timing = times[row["name"]]
        row |= {"milliseconds": timing.median, "p20": timing.p20, "p80": timing.p80}
    _show(options, rows, target)


def _exported(model: nn.Module, inputs: dict[str, Any], place: Path, options: Options) -> tuple[Exported, Runner]:
    from rankwise.deploy.export import FORMATS

    made = FORMATS[options.to].export(model, inputs, place, int8=options.int8)
    return made, FORMATS[options.to].load(place)


def _show(options: Options, rows: list[dict[str, Any]], target: Path) -> None:
    from rankwise.measure import slower_than_dense

    dense = next((row["milliseconds"] for row in rows if row["name"] == "dense"), None)
    what = f"The model in {options.to}{' with int8' if options.int8 else ''}"
    line = None if dense is None else slower_than_dense(what, rows[-1]["milliseconds"], dense)
    if options.json:
        answer = {"folder": str(target), "format": options.to, "int8": options.int8}
        answer |= {"batch": options.batch, "length": options.length, "models": rows}
        print(json.dumps({**answer, "remarks": [] if line is None else [line]}, indent=1))
        return
    header = ["", "parameters", "megabytes", "difference to torch", "ms", "p20 to p80", "times faster"]
    cells = [
        [
            row["name"],
            f"{row['parameters']:,}",
            f"{row['bytes'] / 1e6:.2f}",
            f"{row['difference']:.1e}",
            f"{row['milliseconds']:.2f}",
            f"{row['p20']:.2f} to {row['p80']:.2f}",
            f"{dense / row['milliseconds']:.2f}" if dense is not None else "",
        ]
        for row in rows
    ]
    print_table(header, cells, words=("",))
    sizes = "; ".join(f"{name} {' x '.join(map(str, shape))}" for name, shape in rows[-1]["shapes"].items())
    if line is not None:
        say(line)
    say(f"\nTimed on {options.batch} x {options.length} tokens. Inputs: {sizes} (n0, n1, ...: any size).")
    print(f"The model is in {target}.")


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="of a run, of `rankwise.save` or of transformers' `save_pretrained`")
    add("--to", type=one_of(*FORMATS), required=True, metavar="FORMAT", help=", ".join(FORMATS))
    add("--int8", action="store_true", help="matrices of 8 bits (onnx and openvino)")
    add("--out", metavar="FOLDER", help="a new folder (default: FOLDER-FORMAT, here)")
    add("--dense", metavar="FOLDER", help="the dense model, to be timed on the same engine")
    add("--batch", type=int, default=2, metavar="N", help="of the example (default: 2; 1 fixes the batch)")
    add("--length", type=int, default=128, metavar="N", help="tokens of the example (default: 128)")
    add("--json", action="store_true", help="print JSON")


EXPORT = Command(
    name="export",
    about="Write a model for ONNX Runtime, OpenVINO or torch.export, and time it there.",
    details="""\
Its outputs are compared with the model's first; where they differ, nothing is written.

example: rankwise export my-bert-small --to onnx --dense my-bert""",
    arguments=add_arguments,
    run=export,
)
