"""`rankwise run`, `train`, `prune` and `sweep`, which train; `presets`: what can be run.

A command that was stopped goes on from there when it is given again.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.cli.command import Argument, Options, UsageError, command
from rankwise.cli.report import page_of_run, show_table
from rankwise.cli.tables import print_table, say
from rankwise.errors import nearest
from rankwise.lab.report import Table, row_table, table

if TYPE_CHECKING:
    from rankwise.lab.data.vocabulary import Progress
    from rankwise.lab.tasks.base import Data, Experiment

DEMO = "demo"
PRESET = Argument("PRESET", "A name that `rankwise presets` lists.", required=True)
TRACKERS = Argument("--trackers NAMES", "Trackers, with commas: tensorboard, wandb, trackio.", tuple[str, ...], ())
JSON = Argument("--json", "Print the record as JSON.")


def _out(default: str) -> Argument:
    return Argument("--out FOLDER", f"Where everything is written. Default: {default}.")


def of_preset(options: Options) -> Experiment:
    from rankwise.lab.experiments.presets import preset

    return preset(options.subject or DEMO)


def of_base(options: Options) -> Experiment:
    from rankwise.lab.experiments.run_folder import read_experiment

    refuse_settings(options, lambda group: group in ("model", "base", "both"), "the dense model is trained already")
    # the folder above holds the experiment that the base was trained for, with its method and its size
    return read_experiment(base_folder(options).parent)


def base_folder(options: Options) -> Path:
    """The folder of the dense model, whether it was given itself or the folder above."""
    from rankwise.lab.experiments.run_folder import BASE

    folder = Path(options.subject)
    return folder if folder.resolve().name == BASE else folder / BASE


def refuse_settings(options: Options, refused: Callable[[str], bool], why: str) -> None:
    """Refuse settings of groups that the command has no use for."""
    for name, _ in options.given:
        if refused(name.partition(".")[0]):
            raise UsageError(f"`--{name}` cannot be set here, because {why}. Leave it out.")


@command(
    dataclasses.replace(PRESET, help=f"{PRESET.help} Default: {DEMO}.", required=False),
    _out("runs/PRESET, with GLUE runs/PRESET-TASK"),
    TRACKERS,
    JSON,
    experiment=of_preset,
)
def run(options: Options) -> None:
    """Train, prune, compact, evaluate, time and report in one go.

    Ctrl-C stops the run; the same command again goes on from there.

    example: rankwise run demo --budget.removed 0.9 --out runs/smaller
    """
    from rankwise.cli.progress import watching
    from rankwise.lab.experiments import pipeline

    folder = folder_of("run", options, options.experiment)
    with watching() as watcher:
        record = pipeline.run(options.experiment, folder, watcher=watcher, trackers=options.trackers)
    _show(options, record, table(record), page_of_run(folder))


@command(PRESET, _out("runs/PRESET"), TRACKERS, JSON, experiment=of_preset)
def train(options: Options) -> None:
    """Train the dense model of a preset, to be pruned later.

    Ctrl-C stops it; the same command again goes on from there.

    example: rankwise train demo --out runs/mine
    """
    from rankwise.cli.progress import watching
    from rankwise.lab.experiments import pipeline

    folder = folder_of("train", options, options.experiment)
    with watching() as watcher:
        row = pipeline.train(options.experiment, folder, watcher=watcher, trackers=options.trackers)
    _show(options, row, row_table(row), f"The model is in {folder / row['folder']}.")


@command(
    Argument("BASE", "The folder that `rankwise train` wrote to.", required=True),
    _out("runs/PRESET-METHOD"),
    TRACKERS,
    JSON,
    experiment=of_base,
)
def prune(options: Options) -> None:
    """Prune a dense model that was trained before.

    Its text is found as by `rankwise evaluate`: name a text of your own that the cache does not hold again, by
    --corpus.name FILE. Ctrl-C stops it; the same command again goes on from there.

    example: rankwise prune runs/mine --method np-l0 --budget.removed 0.7
    """
    from rankwise.cli.progress import watching
    from rankwise.lab.experiments import pipeline
    from rankwise.lab.experiments.run_folder import read_fingerprint

    experiment, base = options.experiment, base_folder(options)
    folder = folder_of("prune", options, experiment)

    def read(progress: Progress) -> Data:
        data: Data = experiment.read_saved(dict(options.given), read_fingerprint(base), progress)
        return data

    with watching() as watcher:
        row = pipeline.prune(experiment, base, folder, watcher=watcher, trackers=options.trackers, read=read)
    _show(options, row, row_table(row), f"The model is in {folder}.")


@command(
    PRESET,
    Argument("--methods NAMES", "Methods with commas: flop-l0,fac. Default: as in the preset.", tuple[str, ...]),
    Argument("--removed FRACTIONS", "Sizes with commas: 0.7,0.8. Default: as in the preset.", tuple[float, ...]),
    Argument("--seeds NUMBERS", "Seeds with commas: 0,1,2. Default: as in the preset.", tuple[int, ...]),
    _out("runs/PRESET-sweep, with GLUE runs/PRESET-TASK-sweep"),
    TRACKERS,
    JSON,
    experiment=of_preset,
)
def sweep(options: Options) -> None:
    """Run many methods, sizes and seeds that share their dense models.

    With every seed of a language model, a dense control is trained that the others are compared with. Ctrl-C stops
    the sweep; the same command again goes on from there.

    example: rankwise sweep demo --methods flop-l0,fac --removed 0.7,0.8
    """
    from rankwise.cli.progress import watching
    from rankwise.lab.experiments.pipeline import sweep

    experiment = options.experiment
    if experiment.budget is not None and experiment.budget.latency_ms is not None:
        raise UsageError(
            f"The sizes of a sweep are those of `--removed`, but the budget is {experiment.budget.latency_ms:g} ms. "
            f"Leave out --budget.latency_ms, or use `rankwise run {experiment.name} --compare fac,svd`."
        )
    removed = options.removed
    if removed is None and (experiment.budget is None or experiment.budget.removed is None):
        raise UsageError(f"`--removed` must be given for {experiment.name}, which has none. Example: --removed 0.8.")
    grid = {
        "methods": tuple(dict.fromkeys((experiment.method.name, *experiment.compare))),
        "removed": (experiment.budget.removed,) if removed is None else removed,
        "seeds": (experiment.seed,),
    }
    grid |= {name: getattr(options, name) for name in grid if getattr(options, name) is not None}
    folder = folder_of("sweep", options, experiment)
    with watching() as watcher:
        record = sweep(experiment, folder, watcher=watcher, trackers=options.trackers, **grid)
    _show(options, record, table(record), page_of_run(folder))


def folder_of(command: str, options: Options, experiment: Experiment) -> Path:
    """Where a command writes: a preset's folder, another for each task of GLUE."""
    if options.out:
        return Path(options.out)
    ends = {"prune": experiment.method.name, "sweep": "sweep"}
    # what was read from a folder may call itself anything, such as a path
    name = re.sub(r"[^\w.-]+", "-", experiment.name)
    return Path("runs", "-".join(filter(None, (name, getattr(experiment, "task", None), ends.get(command)))))


def _show(options: Options, content: Mapping[str, Any], found: Table, where: str) -> None:
    if options.json:
        print(json.dumps(content, indent=1))
        return
    show_table(found)
    print(f"\n{where}")


@command(
    Argument("FILTER", "Show only names that contain all of these.", default=(), several=True),
    Argument("--json", "Print JSON."),
)
def presets(options: Options) -> None:
    """List the presets, their sizes and what they need.

    Sizes are in parameters: those of the dense model, and those of the exported one. Downloads are kept for the next
    run.

    example: rankwise presets enwik8 short
    """
    from rankwise.lab.experiments.presets import PRESETS

    found = [one for name, one in PRESETS.items() if all(part in name for part in options.subject)]
    if not found:
        words = " ".join(options.subject)
        raise UsageError(f"No preset has {words!r} in its name.{nearest(words, PRESETS)} `rankwise presets` lists all.")
    listed = [
        {"name": one.name, "table": one.table, "about": one.about, **dataclasses.asdict(one.make().size_preview())}
        for one in found
    ]
    if options.json:
        print(json.dumps(listed, indent=1))
        return
    # what many presets have in common is said once
    groups: dict[str, list[list[str]]] = {}
    for entry in listed:
        table, megabytes = f"{entry['table']} table, " if entry["table"] else "", entry["download_megabytes"]
        title = f"{table}{entry['about']}. Corpus {entry['corpus']}, download "
        title += f"{megabytes} MB." if megabytes else "none."
        numbers = [f"{entry[name]:,}" for name in ("parameters", "exported", "steps")]
        groups.setdefault(title, []).append([entry["name"], *numbers, f"{entry['tokens'] / 1e6:,.1f}M"])
    for title, rows in groups.items():
        say(f"{title}\n")
        print_table(("preset", "parameters", "exported", "steps", "tokens"), rows, words=("preset",))
        print()
    say(f"{len(found)} of {len(PRESETS)} presets. `rankwise run NAME --help` shows the settings of one.")
