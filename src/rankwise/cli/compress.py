"""`rankwise compress`: a model made smaller without training."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.cli.command import Command, Options, Parser, one_of
from rankwise.errors import RankwiseError

if TYPE_CHECKING:
    from rankwise.deploy.compress import Compressed, Listener, Source

DTYPES = ("float32", "bfloat16", "float16")
TITLES = {
    "gradients": "Weighing errors by what they cost the loss",
    "ranks": "Sharing out the ranks",
    "factors": "Compressing layer by layer",
    "widths": "Valuing neurons and heads",
    "narrowing": "Narrowing layer by layer",
}
PATIENCE_SECONDS = 15.0
"""Seconds between two plain lines on the same part of the work."""


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        help="a folder of transformers, of a run or of `rankwise.save`; or a name on the hub",
    )
    add("--out", metavar="FOLDER", required=True, help="where the compressed model is written; it must be new")
    add("--removed", type=float, metavar="FRACTION", help="budget: fraction of the parameters to remove")
    add("--params", type=int, metavar="N", help="budget: parameters of the compressed model")
    add("--megabytes", type=float, metavar="N", help="budget: 10^6 bytes of saved tensors")
    add("--latency-ms", type=float, metavar="N", help="budget: milliseconds for 1 x 128 tokens, timed on this machine")
    add("--calibration", type=Path, metavar="FILE", help="a text like those the model is for; without it plain SVD")
    add("--windows", type=int, default=64, metavar="N", help="windows of it that are read (default: 64)")
    add("--window", type=int, default=256, metavar="N", help="tokens of a window (default: 256)")
    add(
        "--method",
        type=one_of("svd", "width"),
        default="svd",
        metavar="METHOD",
        help="svd, low rank; or width: fewer neurons and heads, for any tool that loads the family (default: svd)",
    )
    add(
        "--layout",
        type=one_of("pair", "pivot"),
        metavar="LAYOUT",
        help="pair, or pivot: smaller, and slower on GPUs and in ONNX Runtime (default: pair)",
    )
    add(
        "--target",
        type=one_of("cuda", "cpu", "size"),
        metavar="WHERE",
        help="where it will run, cuda or cpu, or size: the smallest file, in the pivot layout (default: the device)",
    )
    add("--embeddings", action="store_true", help="compress embeddings too, and output layers tied to them")
    add("--exclude", action="append", default=[], metavar="NAME", help="leave out layers of this name; repeatable")
    add("--device", default="auto", metavar="DEVICE", help="such as cpu or cuda:1 (default: a GPU on which it fits)")
    add(
        "--dtype",
        type=one_of("auto", *DTYPES),
        default="auto",
        metavar="DTYPE",
        help=f"{', '.join(DTYPES)} or auto, that of the folder (default: auto)",
    )
    add("--overwrite", action="store_true", help="replace a model that was saved in FOLDER before")
    add("--json", action="store_true", help="print size, quality and speed as JSON")


def compress(options: Options) -> None:
    from rankwise.hub import check_name

    # before anything slow is imported
    check_name(options.model)
    import torch

    from rankwise.core.budget import Budget
    from rankwise.deploy.calibration import Calibration
    from rankwise.deploy.compress import compress_folder

    sizes = {name: getattr(options, name) for name in ("removed", "params", "megabytes", "latency_ms")}
    given = {name: value for name, value in sizes.items() if value is not None}
    if len(given) != 1:
        said = " and ".join(f"--{name.replace('_', '-')}" for name in given) or "none"
        raise RankwiseError(f"`rankwise compress` takes one budget, but got {said}. Example: --removed 0.3.")
    names = ("method", "layout", "target", "embeddings", "exclude", "overwrite", "device")
    settings: dict[str, Any] = {name: getattr(options, name) for name in names}
    settings["dtype"] = None if options.dtype == "auto" else getattr(torch, options.dtype)
    if options.calibration is not None:
        settings["calibration"] = Calibration(
            file=options.calibration, num_windows=options.windows, window=options.window
        )
    source = _source(options.model)
    with _listening() as listener:
        made = compress_folder(source, Budget(**given), options.out, **settings, listener=listener)
    if options.json:
        print(json.dumps({"folder": options.out, **dataclasses.asdict(made), "remarks": made.remarks()}, indent=1))
    else:
        for line in made.remarks():
            print(line, file=sys.stderr)
        print(f"{options.out}: {'; '.join(_figures(made))}")


def _source(name: str) -> Source:
    from rankwise.deploy.compress import SavedModel
    from rankwise.lab.experiments.saved_models import open_model, open_own

    own = open_own(Path(name))
    if own is not None:
        return SavedModel(own.model, own.vocabulary, own.beside, lambda: open_model(name))
    from rankwise.hf.compress import PretrainedModel

    return PretrainedModel(name)


def _figures(made: Compressed) -> Iterator[str]:
    """Size, quality and speed as phrases."""
    yield (
        f"{made.exported:,} of {made.dense:,} parameters, {made.removed:.2%} removed "
        f"(at most {made.budget:,} were asked for)"
    )
    if made.quality is not None:
        yield str(made.quality)
    times = [
        f"{n} token{'s'[: n - 1]} {dense:.3g} ms dense, {small:.3g} ms small"
        for n, (dense, small) in made.speed.items()
    ]
    if times:
        yield f"{'; '.join(times)} on {made.device}"


@contextmanager
def _listening() -> Iterator[Listener]:
    """Shows progress: a bar on a terminal, plain lines elsewhere."""
    from rankwise.cli.progress import Bar, watching
    from rankwise.deploy.compress import Listener

    with watching() as watcher:

        class Shown(Listener):
            what, said = "", 0.0

            def say(self, text: str) -> None:
                if isinstance(watcher, Bar):
                    watcher.console.print(text, markup=False, highlight=False)
                else:
                    print(text, file=sys.stderr, flush=True)

            def progress(self, what: str, done: int, total: int) -> None:
                if what != self.what:
                    watcher.phase(TITLES.get(what, what))
                    watcher.begin(0, total)
                    self.what, self.said = what, time.monotonic()
                watcher.advance(done)
                if not isinstance(watcher, Bar) and time.monotonic() - self.said > PATIENCE_SECONDS:
                    self.say(f"  {done} of {total}")
                    self.said = time.monotonic()

        yield Shown()


COMPRESS = Command(
    name="compress",
    about="Make a model smaller at once, without training.",
    details="""\
Layer by layer and in place, in little more memory than the model itself. Ranks are shared out by what the
model's outputs lose; with --calibration outputs are measured on that text, of which some windows are kept
back: on them the last line compares the two models. Where much is lost, even ranks are tried too, and the
better model is kept. `from_pretrained` loads the folder after `import rankwise.hf`; a model of a run, or of
`rankwise.save`, gives a folder for `rankwise.load`; that of a run can be evaluated and sampled from as before.
With --method width a decoder such as Llama, Mistral, Qwen or Gemma loses whole neurons and heads, equally many in
every layer: transformers, vLLM, llama.cpp and MLX load the folder with nothing of rankwise installed.

example: rankwise compress my-model --removed 0.3 --calibration text.txt --out my-model-small""",
    arguments=add_arguments,
    run=compress,
)
