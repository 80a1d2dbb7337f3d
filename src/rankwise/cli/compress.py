"""`rankwise compress`: a model made smaller without training."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rankwise.cli.command import DTYPE, Argument, Options, command, dtype_of
from rankwise.cli.plan import BUDGET, as_options, sizes_of
from rankwise.cli.tables import close, wrapped
from rankwise.errors import RankwiseError

if TYPE_CHECKING:
    from rankwise.deploy.compress import Listener, Source
    from rankwise.deploy.compressed import Compressed
    from rankwise.deploy.inputs import Calibration
    from rankwise.lab.experiments.healing import Healed

TITLES = {
    "generating": "Generating text",
    "gradients": "Weighing errors by what they cost the loss",
    "ranks": "Sharing out the ranks",
    "factors": "Compressing layer by layer",
    "shares": "Trying shares of neurons and ranks",
    "widths": "Valuing neurons and heads",
    "narrowing": "Narrowing layer by layer",
    "refining": "Training block by block towards the dense model",
}
WINDOW = 256
NO_TEXT = (
    "No text was given, and this model generates none, so its weights were compressed for all inputs alike, which "
    "loses far more: --calibration FILE."
)
OF_MODEL = ("method", "width_share", "layout", "target", "exclude", "ranks", "refine")
"""Options that are settings of `rankwise.compress`."""


@command(
    Argument("MODEL", "A folder of transformers, of a run or of `rankwise.save`; or a name on the hub.", required=True),
    Argument("--out FOLDER", "Where the compressed model is written; it must be new.", required=True),
    *BUDGET,
    Argument(
        "--calibration FILE",
        "A text like those the model is for; generated: a decoder's own, the default; none: plain SVD. Repeatable.",
        default=[],
        several=True,
    ),
    Argument("--measure FILE", "A text of another kind to compare the models on. Repeatable.", Path, [], several=True),
    Argument("--windows N", "Windows of it that are read. Default: 256 on a GPU, otherwise 64.", int),
    Argument("--window N", f"Tokens of a window. Default: {WINDOW}, or all that the model reads.", int),
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
    Argument(
        "--embeddings WHICH",
        "Compress embeddings: yes, no, or auto: those that are large or tied to an output layer. Default: auto.",
        Literal["auto", "yes", "no"],
        "auto",
    ),
    Argument(
        "--ranks HOW",
        "global: by what the outputs lose; even; blend: between them; or auto: the best. Default: auto.",
        Literal["auto", "global", "even", "blend"],
        "auto",
    ),
    Argument(
        "--refine STEPS",
        "Steps by which each block is trained towards the dense one; 0: none. Default: 250 on a GPU or if it is small.",
        int,
    ),
    Argument(
        "--heal STEPS",
        "Then train the whole model for so many steps to answer as the dense one, as `rankwise heal` does. Default: 0.",
        int,
        0,
    ),
    Argument("--exclude NAME", "Leave out layers of this name. Repeatable.", default=[], several=True),
    Argument(
        "--device DEVICE", "cpu, cuda:1; cuda:0,cuda:1: by layer. Default: a GPU on which it fits.", default="auto"
    ),
    Argument(
        "--offload WHERE",
        "disk: blocks are read one at a time, for a model larger than the GPU; none; auto: if it is. Default: auto.",
        Literal["auto", "disk", "none"],
        "auto",
    ),
    DTYPE,
    Argument("--overwrite", "Replace a model that was saved in FOLDER before."),
    Argument("--json", "Print size, quality and speed as JSON."),
)
def compress(options: Options) -> None:
    """Make a model smaller at once, without training.

    Layer by layer and in place, in little more memory than the model itself. Ranks are shared out by what the
    model's outputs lose on the calibration text, of which some windows are kept back: on them the last line
    compares the two models. Where more than a tenth is lost, other ranks are tried too, and the best model is
    kept. Then each block is trained for some steps to give what the dense one gives; a command that was stopped
    goes on from the last block. `from_pretrained` loads the folder after `import rankwise.hf`; a model of a run, or of
    `rankwise.save`, gives a folder for `rankwise.load`; that of a run can be evaluated and sampled from as before.
    With --method width a decoder such as Llama, Mistral, Qwen or Gemma loses whole neurons and heads, equally many
    in every layer: transformers, vLLM and llama.cpp take the folder with nothing of rankwise installed. With
    --method width+svd it loses neurons and heads, and then ranks, in one budget.

    example: rankwise compress my-bert --removed 0.3 --calibration a.txt --out small
    """
    from rankwise.hub import check_name

    # before anything slow is imported
    check_name(options.subject)
    from rankwise.core.budget import Budget
    from rankwise.deploy.compress import compress_folder
    from rankwise.lab.experiments.healing import check_healing, is_unfinished

    sizes = sizes_of(options)
    if len(sizes) != 1:
        said = as_options(sizes) or "none"
        raise RankwiseError(f"`rankwise compress` takes one budget, but got {said}. Example: --removed 0.3.")
    asked = {name: getattr(options, name) for name in OF_MODEL}
    settings: dict[str, Any] = asked | {name: getattr(options, name) for name in ("overwrite", "device", "offload")}
    settings["dtype"] = dtype_of(options)
    settings["embeddings"] = {"auto": None, "yes": True, "no": False}[options.embeddings]
    source = _source(options.subject)
    texts = [Path(name) for name in _named(options) if name != "generated"]
    if "none" in options.calibration and len(options.calibration) > 1:
        raise RankwiseError("`--calibration none` must stand alone, but texts are named too. Leave it out.")
    if options.heal < 0 or options.heal == 1:
        raise RankwiseError(f"`--heal` must be 0 or at least 2 steps, but is {options.heal} instead.")
    if options.heal and not texts and not _generates(options, source):
        raise RankwiseError("`--heal` needs a text, but there is none. Name one with --calibration.")
    settings["calibration"] = _calibration(options, source, texts)
    made, healed = None, None
    asked |= sizes | {name: getattr(options, name) for name in ("windows", "window", "embeddings", "dtype")}
    asked |= {"model": options.subject, "calibration": options.calibration, "measure": list(map(str, options.measure))}
    device: Any = "cpu" if options.device.startswith("cpu") else "auto"
    healing = {"steps": options.heal, "device": device, "generated": _generates(options, source), "about": asked}
    if options.heal and is_unfinished(options.out, asked):
        made = _made_before(options.out)
    else:
        if options.heal:
            # healing would refuse it only after the model is compressed; what compression refuses comes first
            source.read(settings["calibration"])
            check_healing(options.subject, texts, options.out, **healing)
        with _listening() as listener:
            settings |= {"listener": listener, "about": asked if options.heal else None}
            made = compress_folder(source, Budget(**sizes), options.out, **settings)
    if options.heal:
        healed = _heal(options, texts, healing)
    _show(options, made, healed, has_text=settings["calibration"] is not None or bool(options.calibration))


def _made_before(out: str) -> Compressed | None:
    """What a command that was stopped had made; None where that is not known."""
    from rankwise.deploy.compressed import Compressed
    from rankwise.deploy.save import COMPRESSION
    from rankwise.files import read_json

    with suppress(OSError, ValueError, KeyError, TypeError):
        return Compressed.from_json(read_json(Path(out) / COMPRESSION))
    return None


def _show(options: Options, made: Compressed | None, healed: Healed | None, *, has_text: bool) -> None:
    """What was made, in words or as JSON; None: what an earlier command made."""
    if options.json:
        found = {} if made is None else {**dataclasses.asdict(made), "remarks": made.remarks()}
        more = {} if healed is None else {"healed": dataclasses.asdict(healed)}
        print(json.dumps({"folder": options.out, **found, **more}, indent=1))
        return
    if made is not None:
        for line in [*made.remarks(), *([] if has_text else [NO_TEXT])]:
            print(wrapped(line), file=sys.stderr)
        close(f"{'; '.join(_figures(options.out, made))}.", *(() if healed else _following(options, made)))
    if healed is not None:
        print(wrapped(str(healed)))


def _calibration(options: Options, source: Source, texts: list[Path]) -> Calibration | None:
    """The text that is read, if any."""
    import torch

    from rankwise.deploy.inputs import Calibration

    generated = "generated" in options.calibration
    if generated and not source.generates:
        raise RankwiseError(
            "`--calibration generated` needs a decoder of transformers with its tokenizer, but "
            f"{options.subject} is none. Name a text instead."
        )
    if texts or _generates(options, source):
        on_gpu = torch.cuda.is_available() and not options.device.startswith("cpu")
        number = options.windows if options.windows is not None else 256 if on_gpu else 64
        given: dict[str, Any] = {"also": tuple(texts[1:]), "elsewhere": tuple(options.measure), "generated": generated}
        window = source.window(WINDOW) if options.window is None else options.window
        given |= {"num_windows": number, "window": window}
        return Calibration(file=texts[0] if texts else None, **given)
    if options.measure:
        raise RankwiseError("`--measure` goes with a calibration, but there is none. Name a text with --calibration.")
    return None


def _generates(options: Options, source: Source) -> bool:
    """Whether the dense model generates text: where it was asked to, and where nothing is said of texts."""
    return "generated" in options.calibration or (not options.calibration and source.generates)


def _heal(options: Options, texts: list[Path], healing: dict[str, Any]) -> Healed:
    """Train the model that was just written, in its place."""
    from rankwise.cli.progress import watching
    from rankwise.lab.experiments.healing import heal_folder

    with watching() as watcher:
        given: dict[str, Any] = {**healing, "overwrite": True, "watcher": watcher, "say": watcher.say}
        return heal_folder(options.out, options.subject, texts, options.out, **given)


def _named(options: Options) -> list[str]:
    """The texts as they were given."""
    return [name for name in options.calibration if name != "none"]


def _following(options: Options, made: Compressed) -> tuple[str, ...]:
    """The command that is useful next: healing where something was lost, otherwise export."""
    if (named := _named(options)) and options.method == "svd" and made.quality is not None:
        given = [word for name in named for word in ("--text", name)]
        return ("rankwise", "heal", options.out, "--teacher", options.subject, *given, "--out", f"{options.out}-healed")
    return ("rankwise", "export", options.out, "--to", "onnx")


def _source(name: str) -> Source:
    from rankwise.deploy.compress import SavedModel
    from rankwise.lab.experiments.saved_models import open_model, open_own

    own = open_own(Path(name))
    if own is not None:
        return SavedModel(own.model, own.vocabulary, own.beside, lambda: open_model(name), name)
    from rankwise.hf.loading import PretrainedModel

    return PretrainedModel(name)


def _figures(folder: str, made: Compressed) -> Iterator[str]:
    """Size, quality and speed as phrases."""
    size = f"{folder} has {made.exported:,} of {made.dense:,} parameters, {made.removed:.2%} removed"
    yield f"{size} (at most {made.budget:,} were asked for)"
    if made.quality is not None:
        yield str(made.quality)
    times = [
        f"{n} token{'s'[: n - 1]} {dense:.3g} ms dense, {small:.3g} ms small"
        for n, (dense, small) in made.speed.items()
    ]
    if times:
        yield f"{'; '.join(times)} on {made.device}{'' if made.in_turns else ', timed one after the other'}"


@contextmanager
def _listening() -> Iterator[Listener]:
    """Shows progress: a bar on a terminal, plain lines elsewhere."""
    from rankwise.cli.progress import watching
    from rankwise.deploy.compress import Listener

    with watching() as watcher:

        class Shown(Listener):
            what = ""

            def say(self, text: str) -> None:
                watcher.say(text)

            def progress(self, what: str, done: int, total: int) -> None:
                if what != self.what:
                    watcher.phase(TITLES.get(what, what))
                    self.what = what
                watcher.count(done, total)

        yield Shown()
