"""`rankwise sample`, `bench` and `export`: commands that use a saved model."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rankwise.cli.command import Argument, Options, command
from rankwise.cli.tables import close, print_table, say
from rankwise.errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn

    from rankwise.deploy.export.check import Runner
    from rankwise.lab.experiments.saved_models import TimedModels

MODEL = Argument("FOLDER", "The folder of a run, or of one of its models.", required=True)
JSON = Argument("--json", "Print JSON.")
PROMPT = "The "
REPEATS = 10
"""How often an exported model is timed."""


@command(
    MODEL,
    Argument("--prompt TEXT", f"What the text begins with. Default: {PROMPT!r}, if the model can write it."),
    Argument("--length N", "Draw so many tokens. Default: 500.", int, 500),
    Argument(
        "--temperature T", "Lower is more cautious; 0 always takes the likeliest token. Default: 0.8.", float, 0.8
    ),
    Argument("--top-k K", "Draw only from the K likeliest tokens.", int),
    Argument("--seed N", "Another number gives another text. Default: 0.", int, 0),
)
def sample(options: Options) -> None:
    """Let a model of a run write text.

    example: rankwise sample runs/demo --prompt 'The function ' --temperature 0.7
    """
    from rankwise.lab.experiments.run_folder import load_run
    from rankwise.lab.experiments.sample import default_prompt, sample, spelled

    found = load_run(Path(options.subject))
    prompt = default_prompt(found.vocabulary, PROMPT) if options.prompt is None else options.prompt
    settings = {name: getattr(options, name) for name in ("length", "temperature", "top_k", "seed")}
    numbers = sample(found.model, found.vocabulary, prompt, **settings)
    # the first token is drawn before anything is printed, so that a wrong prompt gets its error line alone
    for place, piece in enumerate(spelled(found.vocabulary, prompt, numbers)):
        print(piece if place else prompt + piece, end="", flush=True)
    print()


@command(
    Argument("FOLDER", "The folder of a run, of one of its models, or of a saved model.", required=True),
    Argument("--batch NUMBERS", "Time these batch sizes. Default: 1,16.", tuple[int, ...], (1, 16)),
    Argument(
        "--threads NUMBERS", "Time with so many threads. Default: 1,all.", tuple[int | Literal["all"], ...], (1, "all")
    ),
    Argument("--length N", "Time sequences of so many tokens. Default: as in training, or 256 at most.", int),
    Argument("--engines NAMES", "Time in these engines. Default: torch.", tuple[str, ...], ("torch",)),
    Argument("--repeats N", "Call each model so often. Default: 15.", int, 15),
    Argument("--device DEVICE", "Time on cpu or cuda. Default: cpu.", Literal["cpu", "cuda"], "cpu"),
    JSON,
)
def bench(options: Options) -> None:
    """Time the dense and the compact models of a folder on this machine, in int8 too.

    Models take turns, so that a busy moment of the machine slows them all. A sentence names what is
    not faster than it should be. The record of a run keeps the figures. Engines: torch, compile (torch.compile), graph
    (a CUDA graph), onnx, openvino.

    example: rankwise bench runs/demo --batch 1 --threads 1
    """
    from rankwise.deploy.bench import BenchConfig, bench, place, remarks, summary, words
    from rankwise.lab.experiments.saved_models import LENGTH, find_models

    found = find_models(Path(options.subject))
    config = BenchConfig(
        length=found.length if options.length is None else options.length,
        batches=options.batch,
        threads=options.threads,
        engines=options.engines,
        repeats=options.repeats,
        device=options.device,
    )
    found.check_length(config.length)
    if options.length is None and found.length == found.longest:
        print(f"Sequences have {found.length} tokens: the model may have no positions for {LENGTH}.", file=sys.stderr)
    rows = bench(found.models, config, found.tokens, tell=partial(print, "timing", file=sys.stderr))
    lines = remarks(rows)
    if options.json:
        print(json.dumps({"rows": rows, "remarks": lines}, indent=1))
        _keep(found, rows, lines, options.device)
        return
    for case, timed in groupby(rows, words):
        cells = []
        for row in timed:
            spent, name = row["milliseconds"], f"{row['model']}, {row['precision']}"
            times = (f"{spent['median']:.2f}", f"{spent['p20']:.2f} to {spent['p80']:.2f}", f"{row['speed']:.2f}x")
            cells.append((name, f"{row['parameters']:,}", *times))
        # the first column says what a row is, and stands in every part of a table that is too wide
        print_table((case, "parameters", "ms", "20% to 80%", "speed"), cells, words=(case,))
        print()
    if lines:
        say(f"{summary(rows)} `--json` prints a line and the reason for each.")
    say(f"Sequences of {config.length} tokens; medians of {config.repeats} calls; speed: against the first model.")
    kept = f"; the figures are kept in {found.record}" if _keep(found, rows, lines, options.device) else ""
    close(f"{_fastest(rows, place)}{kept}.", "rankwise", "export", options.subject, "--to", "onnx")


def _fastest(rows: list[dict[str, Any]], place: Callable[[dict[str, Any]], str]) -> str:
    """The fastest model against the first, in the case that was timed first."""
    first = rows[0]
    alike = [row for row in rows if all(row[name] == first[name] for name in ("engine", "batch", "precision"))]
    last = max((row for row in alike if place(row) == place(first)), key=lambda row: row["speed"])
    took = f"{last['model']} takes {last['milliseconds']['median']:.2f} ms"
    case = f"{first['engine']}, batch {first['batch']}, {place(first)}, {first['precision']}"
    if last["model"] == first["model"]:
        return f"{took} ({case})"
    against = f"{first['model']} takes {first['milliseconds']['median']:.2f}"
    return f"{took} where {against}, {last['speed']:.2f} times its speed ({case})"


def _keep(found: TimedModels, rows: list[dict[str, Any]], lines: list[str], device: str) -> bool:
    """Whether the record of the run keeps the figures, which are shown in any case; says why not, where it should."""
    try:
        found.keep(rows, lines, device)
    except CheckpointError as error:
        print(f"Not kept in {found.record}: {error}", file=sys.stderr)
        return False
    return found.record is not None


@command(
    Argument("FOLDER", "The folder of a run, of `rankwise.save` or of transformers' `save_pretrained`.", required=True),
    Argument("--to FORMAT", "Write for onnx, openvino or pt2.", Literal["onnx", "openvino", "pt2"], required=True),
    Argument("--int8", "Store matrices in 8 bits (onnx and openvino)."),
    Argument("--out FOLDER", "Write into this new folder. Default: FOLDER-FORMAT, here."),
    Argument("--dense FOLDER", "Time this dense model on the same engine."),
    Argument("--batch N", "Texts of the example; with 1 the batch size is fixed. Default: 2.", int, 2),
    Argument("--length N", "Tokens of each text. Default: 128.", int, 128),
    JSON,
)
def export(options: Options) -> None:
    """Write a model for ONNX Runtime, OpenVINO or torch.export, and time it there.

    Its outputs are compared with the model's first; where they differ, nothing is written.

    example: rankwise export my-bert-small --to onnx --dense my-bert
    """
    from rankwise.core.budget import count
    from rankwise.deploy.export import FORMATS
    from rankwise.deploy.inputs import example_inputs
    from rankwise.lab.experiments.saved_models import open_folder
    from rankwise.measure import time_together

    models = {"model": open_folder(Path(options.subject)).float()}
    if options.dense is not None:
        models["dense"] = open_folder(Path(options.dense)).float()
    name = Path(options.subject).resolve().name
    target = Path(options.out or f"{name}-{options.to}{'-int8' if options.int8 else ''}")
    rows: list[dict[str, Any]] = []
    runners: dict[str, Runner] = {}
    with tempfile.TemporaryDirectory() as scratch:
        # the dense one first, and elsewhere: what is wrong with it must leave nothing behind
        for name in reversed(models):
            model, place = models[name], target if name == "model" else Path(scratch) / name
            inputs = example_inputs(model, options.batch, options.length)
            tell = partial(print, f"{name}{_unrolled(model, options)}:", file=sys.stderr)
            made = FORMATS[options.to].export(model, inputs, place, int8=options.int8, tell=tell)
            runners[name] = FORMATS[options.to].load(place)
            rows.append({"name": name, "parameters": count(model), "bytes": made.bytes})
            rows[-1] |= {"difference": made.difference, "shapes": made.shapes, "settings": made.settings}
        calls = {name: lambda run=run: run(**inputs) for name, run in runners.items()}
        times = time_together(calls, repeats=REPEATS)
    for row in rows:
        timing = times[row["name"]]
        row |= {"milliseconds": timing.median, "p20": timing.p20, "p80": timing.p80}
    _show_exported(options, rows, target)


def _unrolled(model: nn.Module, options: Options) -> str:
    """What makes an export slow, where something does."""
    from rankwise.deploy.export import FORMATS
    from rankwise.lab.models.sru import SRULayer

    layers = sum(isinstance(module, SRULayer) for module in model.modules())
    if not layers or options.length == 1 or FORMATS[options.to].has_loops():
        return ""
    return f" ({layers} recurrent layers of {options.length} steps each, unrolled: may take minutes)"


def _show_exported(options: Options, rows: list[dict[str, Any]], target: Path) -> None:
    from rankwise.measure import slower_than_dense

    dense = next((row["milliseconds"] for row in rows if row["name"] == "dense"), None)
    what = f"The model in {options.to}{' with int8' if options.int8 else ''}"
    line = None if dense is None else slower_than_dense(what, rows[-1]["milliseconds"], dense)
    if options.json:
        answer = {"folder": str(target), "format": options.to, "int8": options.int8}
        answer |= {"batch": options.batch, "length": options.length, "models": rows}
        print(json.dumps({**answer, "remarks": [] if line is None else [line]}, indent=1))
        return
    cells = []
    for row in rows:
        size = (f"{row['parameters']:,}", f"{row['bytes'] / 1e6:.2f}", f"{row['difference']:.1e}")
        times = (f"{row['milliseconds']:.2f}", f"{row['p20']:.2f} to {row['p80']:.2f}")
        cells.append((row["name"], *size, *times, "" if dense is None else f"{dense / row['milliseconds']:.2f}"))
    header = ("", "parameters", "megabytes", "difference to torch", "ms", "p20 to p80", "times faster")
    print_table(header, cells, words=("",))
    sizes = "; ".join(f"{name} {' x '.join(map(str, shape))}" for name, shape in rows[-1]["shapes"].items())
    if line is not None:
        say(line)
    elif dense is None:
        say(f"Give the dense model by --dense FOLDER to see whether this one is faster in {options.to}.")
    say(f"\nTimed on {options.batch} x {options.length} tokens. Inputs: {sizes} (n0, n1, ...: any size).")
    own = rows[-1]
    if own["settings"]:
        settings = ", ".join(f"{name}={value}" for name, value in own["settings"].items())
        say(f"In a session of your own, compile it with {settings}.")
    speed = "" if dense is None else f", at {dense / own['milliseconds']:.2f} times the speed of dense"
    result = f"{target} holds the model in {own['bytes'] / 1e6:.2f} MB, {own['milliseconds']:.2f} ms a call{speed}."
    engine = "compile" if options.to == "pt2" else options.to
    close(result, "rankwise", "bench", options.subject, "--engines", f"torch,{engine}")
