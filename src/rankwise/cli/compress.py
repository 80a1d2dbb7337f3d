"""`rankwise compress`: a model made smaller without training."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rankwise.cli.command import Argument, Options, command
from rankwise.cli.plan import BUDGET, as_options, sizes_of
from rankwise.errors import RankwiseError

if TYPE_CHECKING:
    from rankwise.deploy.compress import Compressed, Listener, Source

TITLES = {
    "gradients": "Weighing errors by what they cost the loss",
    "ranks": "Sharing out the ranks",
    "factors": "Compressing layer by layer",
    "shares": "Trying shares of neurons and ranks",
    "widths": "Valuing neurons and heads",
    "narrowing": "Narrowing layer by layer",
}
PATIENCE_SECONDS = 15.0
"""Seconds between two plain lines on the same part of the work."""


@command(
    Argument("MODEL", "A folder of transformers, of a run or of `rankwise.save`; or a name on the hub.", required=True),
    Argument("--out FOLDER", "Where the compressed model is written; it must be new.", required=True),
    *BUDGET,
    Argument("--calibration FILE", "A text like those the model is for; without it plain SVD.", Path),
    Argument("--windows N", "Windows of it that are read. Default: 64.", int, 64),
    Argument("--window N", "Tokens of a window. Default: 256.", int, 256),
    Argument(
        "--method METHOD",
        "svd, low rank; width: fewer neurons and heads, for any tool that loads the family; width+svd. Default: svd.",
        Literal["svd", "width", "width+svd"],
        "svd",
    ),
    Argument("--width-share S", "With width+svd, the share that neurons and heads give. Default: the best.", float),
    Argument(
        "--layout LAYOUT",
        "pair, or pivot: smaller, and slower on GPUs and in ONNX Runtime. Default: pair.",
        Literal["pair", "pivot"],
    ),
    Argument(
        "--target WHERE",
        "Where it will run: cuda, cpu, onnx, openvino; or size, the smallest file, in pivots. Default: the device.",
        Literal["cuda", "cpu", "onnx", "openvino", "size"],
    ),
    Argument("--embeddings", "Compress embeddings too, and output layers tied to them."),
    Argument("--exclude NAME", "Leave out layers of this name. Repeatable.", default=[], several=True),
    Argument("--device DEVICE", "Such as cpu or cuda:1. Default: a GPU on which it fits.", default="auto"),
    Argument(
        "--dtype DTYPE",
        "float32, bfloat16, float16 or auto, that of the folder. Default: auto.",
        Literal["auto", "float32", "bfloat16", "float16"],
        "auto",
    ),
    Argument("--overwrite", "Replace a model that was saved in FOLDER before."),
    Argument("--json", "Print size, quality and speed as JSON."),
)
def compress(options: Options) -> None:
    """Make a model smaller at once, without training.

    Layer by layer and in place, in little more memory than the model itself. Ranks are shared out by what the
    model's outputs lose; with --calibration outputs are measured on that text, of which some windows are kept
    back: on them the last line compares the two models. Where much is lost, even ranks are tried too, and the
    better model is kept. `from_pretrained` loads the folder after `import rankwise.hf`; a model of a run, or of
    `rankwise.save`, gives a folder for `rankwise.load`; that of a run can be evaluated and sampled from as before.
    With --method width a decoder such as Llama, Mistral, Qwen or Gemma loses whole neurons and heads, equally many
    in every layer: transformers, vLLM, llama.cpp and MLX load the folder with nothing of rankwise installed. With
    --method width+svd it loses neurons and heads, and then ranks, in one budget.

    example: rankwise compress my-bert --removed 0.3 --calibration a.txt --out small
    """
    from rankwise.hub import check_name

    # before anything slow is imported
    check_name(options.subject)
    import torch

    from rankwise.core.budget import Budget
    from rankwise.deploy.compress import compress_folder
    from rankwise.deploy.inputs import Calibration

    sizes = sizes_of(options)
    if len(sizes) != 1:
        said = as_options(sizes) or "none"
        raise RankwiseError(f"`rankwise compress` takes one budget, but got {said}. Example: --removed 0.3.")
    names = ("method", "width_share", "layout", "target", "embeddings", "exclude", "overwrite", "device")
    settings: dict[str, Any] = {name: getattr(options, name) for name in names}
    settings["dtype"] = None if options.dtype == "auto" else getattr(torch, options.dtype)
    if options.calibration is not None:
        settings["calibration"] = Calibration(
            file=options.calibration, num_windows=options.windows, window=options.window
        )
    source = _source(options.subject)
    with _listening() as listener:
        made = compress_folder(source, Budget(**sizes), options.out, **settings, listener=listener)
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
    from rankwise.hf.loading import PretrainedModel

    return PretrainedModel(name)


def _figures(made: Compressed) -> Iterator[str]:
    """Size, quality and speed as phrases."""
    size = f"{made.exported:,} of {made.dense:,} parameters, {made.removed:.2%} removed"
    yield f"{size} (at most {made.budget:,} were asked for)"
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
    from rankwise.cli.progress import Lines, watching
    from rankwise.deploy.compress import Listener

    with watching() as watcher:

        class Shown(Listener):
            what = ""

            def say(self, text: str) -> None:
                watcher.say(text)

            def progress(self, what: str, done: int, total: int) -> None:
                if what != self.what:
                    watcher.phase(TITLES.get(what, what))
                    watcher.begin(0, total)
                    self.what = what
                watcher.advance(done)
                if isinstance(watcher, Lines) and time.monotonic() - watcher.said > PATIENCE_SECONDS:
                    watcher.say(f"  {done} of {total}")

        yield Shown()
