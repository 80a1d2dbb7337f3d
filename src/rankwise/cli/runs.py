"""`rankwise run`, `train`, `prune` and `sweep`: what trains. The same command again goes on where it was stopped."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.cli.command import Command, Options, Parser, UsageError, listed, number, whole_number
from rankwise.cli.options import configured, refuse_settings
from rankwise.cli.report import show_record
from rankwise.cli.tables import print_table
from rankwise.lab.report.tables import MEASURES, SHARES

if TYPE_CHECKING:
    from rankwise.lab.data.text import Progress
    from rankwise.lab.tasks.base import Data, Experiment

DEMO = "demo"
RUNS = Path("runs")
SETTINGS = """\
Every setting of the preset can be changed: `--SETTING VALUE` or `--SETTING=VALUE`. {how} lists them.
Ctrl-C stops it; the same command again goes on from there."""


def of_preset(options: Options) -> Experiment:
    from rankwise.lab.experiments.presets import preset

    return preset(options.target or DEMO)


def of_base(options: Options) -> Experiment:
    from rankwise.lab.experiments.run_folder import read_experiment

    # beside the base stands the experiment that it was trained for, with its method and its size
    return read_experiment(base_folder(options).parent)


def base_folder(options: Options) -> Path:
    """The folder with the dense model itself, whether it was named or the one it is in."""
    from rankwise.lab.experiments.run_folder import BASE

    folder = Path(options.target)
    return folder if folder.resolve().name == BASE else folder / BASE


def _add_common(parser: Parser, default: str) -> None:
    parser.add_argument("--out", metavar="FOLDER", help=f"where everything is written (default: {default})")
    parser.add_argument("--trackers", type=listed(str), default=[], metavar="NAMES", help="tensorboard, wandb")
    parser.add_argument("--json", action="store_true", help="print the record as JSON")


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
    show_record(record)
    print(f"\nAll of it is in {folder}: record.json, and a folder for each model.")


def _show_row(options: Options, row: Mapping[str, Any], folder: Path) -> None:
    if options.json:
        print(json.dumps(row, indent=1))
        return
    columns = {"": row["name"], "parameters": f"{row['parameters']:,}"}
    for share, words in SHARES.items():
        if share == "removed" or row[share] != row["removed"]:
            columns[words] = f"{row[share]:.1%}"
    for split in ("valid", "test"):
        for measure, words in MEASURES.items():
            if measure in (row[split] or ()):
                columns[f"{split} {words}"] = f"{row[split][measure]:.4f}"
    print_table(list(columns), [list(columns.values())], words=("",))
    print(f"\nThe model is in {folder}.")


def _run_arguments(parser: Parser) -> None:
    parser.add_argument("target", metavar="PRESET", nargs="?", help=f"see `rankwise presets` (default: {DEMO})")
    _add_common(parser, "runs/PRESET, with GLUE runs/PRESET-TASK")


def _train_arguments(parser: Parser) -> None:
    parser.add_argument("target", metavar="PRESET", help="see `rankwise presets`")
    _add_common(parser, "runs/PRESET")


def _prune_arguments(parser: Parser) -> None:
    parser.add_argument("target", metavar="BASE", help="the folder that `rankwise train` wrote to")
    _add_common(parser, "runs/PRESET-METHOD")


def _sweep_arguments(parser: Parser) -> None:
    parser.add_argument("target", metavar="PRESET", help="see `rankwise presets`")
    as_there = "(default: as in the preset)"
    add = parser.add_argument
    add("--methods", type=listed(str), metavar="NAMES", help=f"with commas: flop-l0,fac {as_there}")
    add("--removed", type=listed(number), metavar="FRACTIONS", help=f"with commas: 0.7,0.8 {as_there}")
    add("--seeds", type=listed(whole_number), metavar="NUMBERS", help=f"with commas: 0,1,2 {as_there}")
    _add_common(parser, "runs/PRESET-sweep, with GLUE runs/PRESET-TASK-sweep")


RUN = Command(
    name="run",
    usage="[PRESET] [--out FOLDER] [--SETTING VALUE ...] [--json] [--trackers NAMES]",
    about="Train, prune, compact, evaluate, time and report in one go.",
    details=SETTINGS.format(how="`rankwise run PRESET --help`")
    + "\n\nexample: rankwise run demo --budget.removed 0.9 --both.steps 300 --out runs/smaller",
    arguments=_run_arguments,
    run=run,
    experiment=of_preset,
)
TRAIN = Command(
    name="train",
    usage="PRESET [--out FOLDER] [--SETTING VALUE ...] [--json] [--trackers NAMES]",
    about="Train the dense model of a preset, to be pruned later.",
    details=SETTINGS.format(how="`rankwise train PRESET --help`") + "\n\nexample: rankwise train demo --out runs/mine",
    arguments=_train_arguments,
    run=train,
    experiment=of_preset,
)
PRUNE = Command(
    name="prune",
    usage="BASE [--out FOLDER] [--method NAME] [--SETTING VALUE ...] [--json] [--trackers NAMES]",
    about="Prune a dense model that was trained before.",
    details=SETTINGS.format(how="`rankwise prune BASE --help`")
    + "\nIts text is found as by `rankwise evaluate`: one of your own that the cache does not hold is named again, by\n"
    "--corpus.name FILE." + "\n\nexample: rankwise prune runs/mine --method np-l0 --budget.removed 0.7",
    arguments=_prune_arguments,
    run=prune,
    experiment=of_base,
)
SWEEP = Command(
    name="sweep",
    usage="PRESET [--methods NAMES] [--removed FRACTIONS] [--seeds NUMBERS] [--out FOLDER] [--SETTING VALUE ...]",
    about="Run many methods, sizes and seeds that share their dense models.",
    details=SETTINGS.format(how="`rankwise sweep PRESET --help`")
    + "\nOf language models a dense control is trained with every seed, and the others are compared with it."
    "\n\nexample: rankwise sweep demo --methods flop-l0,fac --removed 0.7,0.8 --seeds 0,1,2",
    arguments=_sweep_arguments,
    run=sweep,
    experiment=of_preset,
)
