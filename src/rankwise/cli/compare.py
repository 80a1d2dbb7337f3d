"""`rankwise compare`: two models answer the same prompt, on a local page or once in the terminal."""

from __future__ import annotations

import json
import sys
import textwrap
import unicodedata
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.cli.command import DTYPE, Argument, Options, UsageError, command, dtype_of
from rankwise.cli.compare_server import LONGEST_ANSWER, PageServer, check_request
from rankwise.cli.tables import columns, print_table, say

if TYPE_CHECKING:
    from rankwise.lab.experiments.compare import Comparison

PORTS = 65_535
NAMES = ("dense", "small")


@command(
    Argument(
        "MODEL",
        "DENSE and SMALL, folders of runs or of transformers; or one run with both.",
        required=True,
        several=True,
    ),
    Argument("--prompt TEXT", "Answer this once here, without a page."),
    Argument("--length N", f"Draw so many tokens, at most {LONGEST_ANSWER:,}. Default: 200.", int, 200),
    Argument("--temperature T", "Lower is more cautious; 0 always takes the likeliest. Default: 0.8.", float, 0.8),
    Argument("--seed N", "Another number gives other answers. Default: 0.", int, 0),
    Argument("--device DEVICE", "Such as cpu or cuda:1. Default: a GPU on which a model fits."),
    DTYPE,
    Argument("--port N", "Serve the page at this port. Default: a free one.", int),
    Argument("--open", "Open the page in the browser."),
    Argument("--json", "With --prompt: print JSON."),
)
def compare(options: Options) -> None:
    """Let a dense and a compressed model answer side by side, with size, speed and loss.

    Serves a page at 127.0.0.1 until Ctrl-C. It can only be reached from this machine, by the address that is printed.
    Answers appear as they are written. Each is shaded by its loss under the other model: what the other one would
    hardly have written is dark. Losses are nats per token; for models of different vocabularies they are bits per byte,
    because their tokens cannot be compared. The models answer one after the other; `rankwise bench` times with more
    care.

    Of a single run, the model of its own method is compared with its dense control or, without one, with its base.

    example: rankwise compare runs/demo --open

    example: rankwise compare my-llama my-llama-small --prompt 'The capital is'
    """
    _check(options)
    if options.prompt is not None:
        _answer_here(_load(options), options)
        return
    with PageServer(options.port or 0) as server:
        server.comparison = _load(options)
        server.settings = _settings(options)
        try:
            print(f"The page is at {server.address}\nCtrl-C stops it.", flush=True)
            if options.open:
                webbrowser.open(server.address)
            server.serve_forever()
        except KeyboardInterrupt:
            server.stop()
            print("\nStopped.")


def _settings(options: Options) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("length", "temperature", "seed")}


def _check(options: Options) -> None:
    """Refuse what can be refused before models are loaded."""
    from rankwise.lab.experiments.sample import check_drawing

    if len(options.subject) > 2:
        raise UsageError(f"`rankwise compare` takes two models, but got {len(options.subject)}. Leave the others out.")
    if options.prompt is None:
        if options.json:
            raise UsageError("`--json` must go with `--prompt`, but stands alone. Leave it out.")
    elif options.open or options.port is not None:
        given = "--open" if options.open else "--port"
        raise UsageError(f"`{given}` is for the page, but `--prompt` answers without one. Leave one out.")
    if options.port is not None and not 1 <= options.port <= PORTS:
        raise UsageError(f"`--port` must be from 1 to {PORTS}, but is {options.port} instead.")
    check_drawing(**_settings(options))
    check_request(options.prompt or "", options.length)


def _load(options: Options) -> Comparison:
    from rankwise.lab.experiments.compare import Comparison, find_pair, open_answering

    sources = options.subject if len(options.subject) == 2 else map(str, find_pair(Path(options.subject[0])))
    models = []
    for role, source in zip(NAMES, sources, strict=True):
        print(f"Loading {source}", file=sys.stderr)
        models.append(
            open_answering(source, f"{role}: {source}", device=options.device or "auto", dtype=dtype_of(options))
        )
    return Comparison(*models)


def _answer_here(comparison: Comparison, options: Options) -> None:
    found: list[dict[str, Any]] = comparison.about()["models"]
    for event in comparison.answers(options.prompt, **_settings(options)):
        if event["kind"] != "text":
            found[event["model"]][event["kind"]] = {
                name: value for name, value in event.items() if name not in ("kind", "model")
            }
    if options.json:
        print(json.dumps({"prompt": options.prompt, **_settings(options), "unit": comparison.unit, "models": found}))
        return
    for row in found:
        print(f"{row['name']}\n")
        for line in printable(options.prompt + row["answer"]["text"]).split("\n"):
            print("\n".join(textwrap.wrap(line, columns(), break_on_hyphens=False)))
        print()
    cells = []
    for name, row in zip(NAMES, found, strict=True):
        answer = row["answer"]
        size = (f"{row['parameters']:,}", f"{row['bytes'] / 1e6:.2f}")
        losses = (_figure(row["prompt"]["mean"], ".4f"), _figure(answer["mean"], ".4f"))
        cells.append((name, *size, str(answer["tokens"]), _figure(answer["speed"], ",.1f"), *losses))
    header = (
        "",
        "parameters",
        "megabytes",
        "tokens",
        "tokens per second",
        "loss of the prompt",
        "loss under the other",
    )
    print_table(header, cells, words=("",))
    for row in found:
        if row["answer"]["note"]:
            say(row["answer"]["note"])
    say(f"\nLosses are in {comparison.unit}: of the prompt under each model, and of its answer under the other one.")


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def printable(text: str) -> str:
    """A text without what would steer a terminal."""
    return "".join(
        letter if letter in "\n\t" or unicodedata.category(letter) not in ("Cc", "Cf") else ascii(letter)[1:-1]
        for letter in text
    )
