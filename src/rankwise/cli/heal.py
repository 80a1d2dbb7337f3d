"""`rankwise heal`: a compressed model learns from the dense one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

from rankwise.cli.command import Argument, Options, command

SETTINGS = ("steps", "lr", "batch_size", "window", "valid", "accumulate", "device", "seed", "overwrite")


@command(
    Argument("FOLDER", "What `rankwise compress` wrote, or the model of a run.", required=True),
    Argument(
        "--text FILE",
        "A text like those the model is for; generated: the dense model's own, of a decoder. Repeatable.",
        required=True,
        several=True,
    ),
    Argument("--teacher MODEL", "The dense model that FOLDER was made from: a folder, or a hub name.", required=True),
    Argument("--out FOLDER", "Where the healed model is written; it must be new.", required=True),
    Argument("--steps N", "Steps of training, after those that choose a rate. Default: 300.", int, 300),
    Argument("--lr RATE", "The learning rate. Default: the best in short trials.", float),
    Argument("--batch-size N", "Windows in a step. Default: 16.", int, 16),
    Argument("--window N", "Tokens of a window. Default: 512; encoders 256; as in its run.", int),
    Argument("--valid FILE", "A text to hold out. Default: the end of each text. Repeatable.", Path, [], several=True),
    Argument("--checkpointing", "Less memory, more time: compute activations twice. Default: from 1B parameters on."),
    Argument("--accumulate N", "Parts of a batch, for less memory. Default: by the vocabulary.", int),
    Argument(
        "--device DEVICE", "auto or cpu. Default: auto, a GPU where there is one.", Literal["auto", "cpu"], "auto"
    ),
    Argument("--seed N", "The seed of dropout and of the order of windows. Default: 0.", int, 0),
    Argument("--overwrite", "Replace a model that was saved in the folder of --out before."),
    Argument("--json", "Print what was gained as JSON."),
)
def heal(options: Options) -> None:
    """Train a compressed model to answer as the dense one does.

    All weights are trained, in bfloat16 on a GPU; layers and size stay as they are. No labels are needed, so any text
    like those the model is for will do. Its end is held out: there three learning rates or more are tried for a
    quarter of the steps each, and there the last line compares the dense model, the compressed one and the healed one.

    Ctrl-C stops it; the same command again goes on from there.

    example: rankwise heal small --text a.txt --teacher my-model --out healed
    """
    from rankwise.cli.progress import watching
    from rankwise.lab.experiments.healing import heal_folder

    settings: dict[str, Any] = {name: getattr(options, name) for name in SETTINGS}
    # a switch that is left out leaves the choice to the size of the model
    settings["checkpointing"] = options.checkpointing or None
    texts = [name for name in options.text if name != "generated"]
    settings["generated"] = "generated" in options.text
    with watching() as watcher:
        healed = heal_folder(
            options.subject, options.teacher, texts, options.out, **settings, watcher=watcher, say=watcher.say
        )
    print(json.dumps({**dataclasses.asdict(healed)}, indent=1) if options.json else healed)
