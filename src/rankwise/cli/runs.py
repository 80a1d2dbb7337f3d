"""`rankwise run`, `train`, `prune` and `sweep`: the commands that train.

A command that was stopped goes on from there when it is given again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.cli.command import (
    Command,
    Options,
    Parser,
    UsageError,
    configured,
    listed,
    refuse_settings,
)
from rankwise.cli.report import show
from rankwise.lab.report import row_table, table

if TYPE_CHECKING:
    from rankwise.lab.data.vocabulary import Progress
    from rankwise.lab.tasks.base import Data, Experiment

DEMO = "demo"
RUNS = Path("runs")
SETTINGS = """\
Every setting of the preset can be changed: `--SETTING VALUE` or `--SETTING=VALUE`. {how} lists them.
Ctrl-C stops the run; the same command again goes on from there."""


def of_preset(options: Options) -> Experiment:
    from rankwise.lab.experiments.presets import preset

    return preset(options.target or DEMO)


def of_base(options: Options) -> Experiment:
    from rankwise.lab.experiments.run_folder import read_experiment

    # the folder above holds the experiment that the base was trained for, with its method and its size
    return read_experiment(base_folder(options).parent)


def base_folder(options: Options) -> Path:
    """The folder of the dense model, whether it was given itself or the folder above."""
    from rankwise.lab.experiments.run_folder import BASE

    folder = Path(options.target)
    return folder if folder.resolve().name == BASE else folder / BASE


def run(options: Options) -> None:
    from rankwise.cli.progress import watching
    from rankwise.lab.experiments import pipeline

    experiment = configured(of_preset(options), options)
    folder = folder_of("run", options, experiment)
    with watching() as watcher:
        record = pipeline.run(experiment, folder, watcher=watcher, trackers=options.trackers)
    _show(options, record, folder)


def train(options: Options) -> None:
    from rankwise.cli.progress import watching
    from rankwise.lab.experiments import pipeline

    experiment = configured(of_preset(options), options)
    folder = folder_of("train", options, experiment)
    with watching() as watcher:
        row = pipeline.train(experiment, folder, watcher=watcher, trackers=options.trackers)
    _show_row(options, row, folder / row["folder"])


def prune(options: Options) -> None:
    from rankwise.cli.progress import watching
    from rankwise.lab.experiments import pipeline
    from rankwise.lab.experiments.run_folder import read_fingerprint

    refuse_settings(options, lambda group: group in ("model", "base", "both"), "the dense model is trained already")
    experiment = configured(of_base(options), options)
    folder, base, given = folder_of("prune", options, experiment), base_folder(options), dict(options.given)

    def read(progress: Progress) -> Data:
        return experiment.read_saved(given, read_fingerprint(base), progress)

    with watching() as watcher:
        row = pipeline.prune(experiment, base, folder, watcher=watcher, trackers=options.trackers, read=read)
    _show_row(options, row, folder)


def sweep(options: Options) -> None:
    from rankwise.cli.progress import watching
    from rankwise.lab.experiments.sweep import sweep as run_sweep

    experiment = configured(of_preset(options), options)
    folder = folder_of("sweep", options, experiment)
    methods, removed, seeds = _grid(options, experiment)
    with watching() as watcher:
        record = run_sweep(
            experiment,
            folder,
            methods=methods,
            removed=removed,
            seeds=seeds,
            watcher=watcher,
            trackers=options.trackers,
        )
    _show(options, record, folder)


def _grid(options: Options, experiment: Experiment) -> tuple[list[str], list[float], list[int]]:
    """Methods, sizes and seeds; what is not asked for is as in the preset."""
    if experiment.budget is not None and experiment.budget.latency_ms is not None:
        raise UsageError(
            f"The sizes of a sweep are those of `--removed`, but the budget is {experiment.budget.latency_ms:g} ms. "
            f"Leave out --budget.latency_ms, or use `rankwise run {experiment.name} --compare fac,svd`."
        )
    removed = options.removed
    if removed is None:
        if experiment.budget is None or experiment.budget.removed is None:
            raise UsageError(
                f"`--removed` must be given for {experiment.name}, which has none. Example: --removed 0.8."
            )
        removed = [experiment.budget.removed]
    methods = options.methods or list(dict.fromkeys((experiment.method.name, *experiment.compare)))
    return methods, removed, options.seeds or [experiment.seed]


def folder_of(command: str, options: Options, experiment: Experiment) -> Path:
    """Where a command writes: a preset's folder, another for each task of GLUE."""
    if options.out:
        return Path(options.out)
    task = getattr(experiment, "task", None)
    ends = {"prune": experiment.method.name, "sweep": "sweep"}
    # what was read from a folder may call itself anything, such as a path
    name = re.sub(r"[^\w.-]+", "-", experiment.name)
    return RUNS / "-".join(filter(None, (name, task, ends.get(command))))


def _show(options: Options, record: Mapping[str, Any], folder: Path) -> None:
    if options.json:
        print(json.dumps(record, indent=1))
        return
    show(table(record))
    print(f"\nAll of it is in {folder}: record.json, and a folder for each model.")


def _show_row(options: Options, row: Mapping[str, Any], folder: Path) -> None:
    if options.json:
        print(json.dumps(row, indent=1))
        return
    show(row_table(row))
    print(f"\nThe model is in {folder}.")


def _arguments(
    metavar: str, about: str, out: str, *, nargs: str = "", sweeps: bool = False
) -> Callable[[Parser], None]:
    """The arguments of a command that trains; `out` says where it writes by default."""

    def add_arguments(parser: Parser) -> None:
        add = parser.add_argument
        add("target", metavar=metavar, nargs=nargs, help=about)
        if sweeps:
            preset = "Default: as in the preset."
            add("--methods", type=listed(str), metavar="NAMES", help=f"Methods with commas: flop-l0,fac. {preset}")
            add("--removed", type=listed(float), metavar="FRACTIONS", help=f"Sizes with commas: 0.7,0.8. {preset}")
            add("--seeds", type=listed(int), metavar="NUMBERS", help=f"Seeds with commas: 0,1,2. {preset}")
        add("--out", metavar="FOLDER", help=f"Where everything is written. Default: {out}.")
        trackers = "Trackers, with commas: tensorboard, wandb."
        add("--trackers", type=listed(str), default=[], metavar="NAMES", help=trackers)
        add("--json", action="store_true", help="Print the record as JSON.")

    return add_arguments


RUN = Command(
    name="run",
    about="Train, prune, compact, evaluate, time and report in one go.",
    details=SETTINGS.format(how="`rankwise run PRESET --help`")
    + "\n\nexample: rankwise run demo --budget.removed 0.9 --both.steps 300 --out runs/smaller",
    arguments=_arguments(
        "PRESET",
        f"A name that `rankwise presets` lists. Default: {DEMO}.",
        "runs/PRESET, with GLUE runs/PRESET-TASK",
        nargs="?",
    ),
    run=run,
    experiment=of_preset,
)
TRAIN = Command(
    name="train",
    about="Train the dense model of a preset, to be pruned later.",
    details=SETTINGS.format(how="`rankwise train PRESET --help`") + "\n\nexample: rankwise train demo --out runs/mine",
    arguments=_arguments("PRESET", "A name that `rankwise presets` lists.", "runs/PRESET"),
    run=train,
    experiment=of_preset,
)
PRUNE = Command(
    name="prune",
    about="Prune a dense model that was trained before.",
    details=SETTINGS.format(how="`rankwise prune BASE --help`")
    + "\nIts text is found as by `rankwise evaluate`: name a text of your own that the cache does not hold again, by "
    "--corpus.name FILE.\n\nexample: rankwise prune runs/mine --method np-l0 --budget.removed 0.7",
    arguments=_arguments("BASE", "The folder that `rankwise train` wrote to.", "runs/PRESET-METHOD"),
    run=prune,
    experiment=of_base,
)
SWEEP = Command(
    name="sweep",
    about="Run many methods, sizes and seeds that share their dense models.",
    details=SETTINGS.format(how="`rankwise sweep PRESET --help`")
    + "\nWith every seed of a language model, a dense control is trained that the others are compared with."
    "\n\nexample: rankwise sweep demo --methods flop-l0,fac --removed 0.7,0.8 --seeds 0,1,2",
    arguments=_arguments(
        "PRESET",
        "A name that `rankwise presets` lists.",
        "runs/PRESET-sweep, with GLUE runs/PRESET-TASK-sweep",
        sweeps=True,
    ),
    run=sweep,
    experiment=of_preset,
)
