"""`rankwise evaluate` and `rankwise sample`: the commands that use the model of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.cli.command import (
    Command,
    Options,
    Parser,
    configured,
    one_of,
    refuse_settings,
)
from rankwise.cli.runs import RUNS
from rankwise.cli.tables import say

if TYPE_CHECKING:
    from rankwise.lab.experiments.arms import AnyExperiment

CHANGEABLE = ("corpus", "training")
PROMPT = "The "


def of_model(options: Options) -> AnyExperiment:
    from rankwise.lab.experiments.folder import read_experiment

    return read_experiment(Path(options.target))


def evaluate(options: Options) -> None:
    from rankwise.cli.progress import watching
    from rankwise.core.budget import count
    from rankwise.lab.experiments.config import Experiment
    from rankwise.lab.experiments.folder import load_run
    from rankwise.lab.experiments.pipeline import quality_of
    from rankwise.lab.experiments.sample import text_for

    refuse_settings(options, lambda group: group not in CHANGEABLE, "the model is trained already")
    found = load_run(Path(options.target))
    experiment = configured(found.experiment, options)
    assert isinstance(experiment, Experiment)
    with watching() as watcher:
        watcher.phase(f"reading {experiment.corpus.name}")
        corpus = text_for(found, experiment.corpus, dict(options.given), options.split, watcher.read)
        watcher.phase(f"evaluating {found.folder}")
        quality = quality_of(found.model, corpus, options.split, experiment.training)
    parameters = count(found.model)
    if options.json:
        answer = {"folder": str(found.folder), "split": options.split, "parameters": parameters, **quality.record()}
        print(json.dumps(answer, indent=1))
    else:
        measure = quality.measure.replace("_", " ")
        say(f"{found.folder}: {parameters:,} parameters, {options.split} {quality.value:.4f} {measure}")


def sample(options: Options) -> None:
    from rankwise.lab.experiments.folder import load_run
    from rankwise.lab.experiments.sample import default_prompt, sample, spelled

    found = load_run(Path(options.target))
    prompt = default_prompt(found.vocabulary, PROMPT) if options.prompt is None else options.prompt
    settings = {name: getattr(options, name) for name in ("length", "temperature", "top_k", "seed")}
    numbers = sample(found.model, found.vocabulary, prompt, **settings)
    # the first token is drawn before anything is printed, so that a wrong prompt gets its error line alone
    for place, piece in enumerate(spelled(found.vocabulary, prompt, numbers)):
        print(piece if place else prompt + piece, end="", flush=True)
    print()


def _evaluate_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("target", metavar="FOLDER", help="The folder of a run, or of one of its models.")
    add("--split", type=one_of("valid", "test"), default="valid", metavar="SPLIT", help="valid, the default, or test.")
    add("--json", action="store_true", help="Print JSON.")


def _sample_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("target", metavar="FOLDER", help="The folder of a run, or of one of its models.")
    add("--prompt", metavar="TEXT", help=f"What the text begins with. Default: {PROMPT!r}, if the model can write it.")
    add("--length", type=int, default=500, metavar="N", help="Tokens to draw. Default: 500.")
    add("--temperature", type=float, default=0.8, metavar="T", help="0 always takes the likeliest token. Default: 0.8.")
    add("--top-k", type=int, metavar="K", help="Draw only from the K likeliest tokens.")
    add("--seed", type=int, default=0, metavar="N", help="Another number gives another text. Default: 0.")


EVALUATE = Command(
    name="evaluate",
    about="Measure how well a model of a run predicts a text.",
    details=f"""\
The text is that of the training, as your cache holds it, or a published one. A folder may come from someone else,
so it chooses no file to open and no place to write: name a text of your own that the cache does not hold by
--corpus.name FILE, a folder with a published one by --corpus.data FOLDER, and another cache by --corpus.cache FOLDER.
Another text is read by the model's vocabulary; valid and test are its last two twentieths, or files of a folder.

example: rankwise evaluate {RUNS}/demo/flop-l0 --split test""",
    arguments=_evaluate_arguments,
    run=evaluate,
    experiment=of_model,
)
SAMPLE = Command(
    name="sample",
    about="Let a model of a run write text.",
    details=f"example: rankwise sample {RUNS}/demo --prompt 'The function ' --temperature 0.7",
    arguments=_sample_arguments,
    run=sample,
)
