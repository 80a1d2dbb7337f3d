"""`rankwise evaluate` and `rankwise sample`: what uses the model that a run exported."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.cli.command import Command, Options, Parser, number, one_of, whole_number
from rankwise.cli.options import configured, refuse_settings
from rankwise.cli.runs import RUNS
from rankwise.cli.tables import say
from rankwise.lab.report.tables import MEASURES

if TYPE_CHECKING:
    from rankwise.lab.data.vocabulary import Vocabulary
    from rankwise.lab.tasks.base import Experiment

CHANGEABLE = ("corpus", "training", "data", "valid", "test", "text", "device")
PROMPT = "The "


def of_model(options: Options) -> Experiment:
    from rankwise.lab.experiments.run_folder import read_experiment

    return read_experiment(Path(options.target))


def evaluate(options: Options) -> None:
    from rankwise.cli.progress import watching
    from rankwise.core.budget import count
    from rankwise.errors import DataError
    from rankwise.lab.experiments.run_folder import find_run

    refuse_settings(options, lambda group: group not in CHANGEABLE, "the model is trained already")
    saved = find_run(Path(options.target))
    experiment = configured(saved.experiment, options).for_saved(saved)
    with watching() as watcher:
        watcher.phase(f"reading {experiment.reads}")
        data = experiment.read_to_evaluate(saved, dict(options.given), options.split, watcher.read)
        watcher.phase(f"evaluating {saved.folder}")
        task = experiment.make_task(data)
        model = task.load(saved.path).eval()
        quality = task.evaluate(model, options.split)
    if quality is None:
        raise DataError(f"There are no {options.split} data: `held_out` is 0. Give --split test.")
    parameters = count(model)
    if options.json:
        answer = {"folder": str(saved.folder), "split": options.split, "parameters": parameters, **quality}
        print(json.dumps(answer, indent=1))
    else:
        figures = ", ".join(f"{quality[name]:.4f} {words}" for name, words in MEASURES.items() if name in quality)
        say(f"{saved.folder}: {parameters:,} parameters, {options.split} {figures}")


def sample(options: Options) -> None:
    from rankwise.lab.experiments.run_folder import load_run
    from rankwise.lab.experiments.sample import sample as draw

    found = load_run(Path(options.target))
    prompt = _beginning(found.vocabulary) if options.prompt is None else options.prompt
    numbers = draw(
        found.model,
        found.vocabulary,
        prompt,
        length=options.length,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
    )
    # the first number is drawn before anything is printed: a wrong prompt gets its line alone
    for place, piece in enumerate(spelled(found.vocabulary, prompt, numbers)):
        print(piece if place else prompt + piece, end="", flush=True)
    print()


def _beginning(vocabulary: Vocabulary) -> str:
    """Where none is given: `PROMPT`, or the most frequent token of a text without its letters."""
    known = vocabulary.numbers
    if vocabulary.kind == "word":
        return PROMPT.strip() if PROMPT.strip().encode() in known else vocabulary.decode([0])
    return PROMPT if all(letter.encode() in known for letter in PROMPT) else vocabulary.decode([0])


def spelled(vocabulary: Vocabulary, prompt: str, numbers: Iterable[int]) -> Iterator[str]:
    """Text that goes on from the prompt, as its numbers come."""
    if vocabulary.kind != "word":
        # a character may be several bytes, and so several numbers
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        yield from (decoder.decode(vocabulary.tokens[number]) for number in numbers)
        yield decoder.decode(b"", final=True)
        return
    last = vocabulary.encode(prompt)[-1:]
    for one in numbers:
        yield vocabulary.decode([*last, one])[len(vocabulary.decode(last)) :]
        last = [one]


def _evaluate_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("target", metavar="FOLDER", help="of a run, or of one of its models")
    add("--split", type=one_of("valid", "test"), default="valid", metavar="SPLIT", help="valid (default) or test")
    add("--json", action="store_true", help="print JSON")


def _sample_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("target", metavar="FOLDER", help="of a run, or of one of its models")
    add("--prompt", metavar="TEXT", help=f"what the text begins with (default: {PROMPT!r}, if it can be written)")
    add("--length", type=whole_number, default=500, metavar="N", help="tokens to draw (default: 500)")
    add("--temperature", type=number, default=0.8, metavar="T", help="0 takes the likeliest (default: 0.8)")
    add("--top-k", type=whole_number, metavar="K", help="draw from the K likeliest tokens only")
    add("--seed", type=whole_number, default=0, metavar="N", help="another number, another text (default: 0)")


EVALUATE = Command(
    name="evaluate",
    usage="FOLDER [--split valid|test] [--corpus.SETTING VALUE ...] [--json]",
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
    usage="FOLDER [--prompt TEXT] [--length N] [--temperature T] [--top-k K] [--seed N]",
    about="Let a model of a run write text.",
    details=f"example: rankwise sample {RUNS}/demo --prompt 'The function ' --temperature 0.7",
    arguments=_sample_arguments,
    run=sample,
)
