"""`rankwise run`, `train`, `prune` and `sweep`, which train; `presets`: what can be run.

A command that was stopped goes on from there when it is given again.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rankwise.cli.command import QUIET, Argument, Options, UsageError, command
from rankwise.cli.dry_run import show_plan
from rankwise.cli.report import page_of_run, show_table
from rankwise.cli.tables import close, print_table, say
from rankwise.errors import nearest
from rankwise.lab.report import CONTROL, MEASURES, TAUGHT, Table, control_of, gather, row_table, spread, table

if TYPE_CHECKING:
    from rankwise.lab.data.vocabulary import Progress
    from rankwise.lab.experiments.launchers import Launcher
    from rankwise.lab.tasks.base import Data, Experiment

DEMO = "demo"
PRESET = Argument("PRESET", "A name that `rankwise presets` lists.")
CONFIG = Argument(
    "--config FILE",
    "JSON or TOML with the settings: the `experiment.json` or `record.json` of a run, or `preset` and what differs.",
    Path,
)
DRY_RUN = Argument("--dry-run", "Show sizes, steps and settings; read no data, run and write nothing.")
TRACKERS = Argument(
    "--trackers NAMES", "Send metrics to trackers, with commas: tensorboard, wandb, trackio.", tuple[str, ...], ()
)
JSON = Argument("--json", "Print the record as JSON.")


def _out(default: str) -> Argument:
    return Argument("--out FOLDER", f"Where everything is written. Default: {default}.")


def of_preset(options: Options, default: str | None = None) -> Experiment:
    """The experiment that PRESET or `--config` names, before the settings of the command line."""
    from rankwise.cli.settings import read_config
    from rankwise.lab.experiments.presets import preset

    if options.config is not None:
        return read_config(options.config, options.subject)
    if (name := options.subject or default) is None:
        raise UsageError("PRESET or `--config FILE` must be given, but neither is. `rankwise presets` lists the names.")
    return preset(name)


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
    dataclasses.replace(PRESET, help=f"{PRESET.help} Default: {DEMO}."),
    CONFIG,
    _out("runs/PRESET, with GLUE runs/PRESET-TASK"),
    TRACKERS,
    DRY_RUN,
    JSON,
    experiment=partial(of_preset, default=DEMO),
)
def run(options: Options) -> None:
    """Train, prune, compact, evaluate, time and report in one go.

    Ctrl-C stops the run; the same command again goes on from there.

    example: rankwise run demo --budget.removed 0.9 --out runs/smaller
    example: rankwise run --config runs/smaller/experiment.json --out runs/again
    """
    if (folder := _target("run", options)) is None:
        return
    from rankwise.cli.progress import watching
    from rankwise.lab.experiments import pipeline

    with watching() as watcher:
        record = pipeline.run(options.experiment, folder, watcher=watcher, trackers=options.trackers)
    if QUIET:
        return
    page = page_of_run(folder)
    if _show(options, record, table(record)):
        own = _own_row(record, options.experiment.method.name)
        following = "sample" if (folder / own["folder"] / "vocabulary.json").is_file() else "bench"
        close(f"{_result(own, record['rows'])}. {page}", "rankwise", following, str(folder))


@command(PRESET, CONFIG, _out("runs/PRESET"), TRACKERS, DRY_RUN, JSON, experiment=of_preset)
def train(options: Options) -> None:
    """Train the dense model of a preset, to be pruned later.

    Ctrl-C stops it; the same command again goes on from there.

    example: rankwise train demo --out runs/mine
    """
    if (folder := _target("train", options)) is None:
        return
    from rankwise.cli.progress import watching
    from rankwise.lab.experiments import pipeline

    with watching() as watcher:
        row = pipeline.train(options.experiment, folder, watcher=watcher, trackers=options.trackers)
    if QUIET:
        return
    if _show(options, row, row_table(row)):
        close(f"{_result(row)}; it is in {folder / row['folder']}.", "rankwise", "prune", str(folder))


@command(
    Argument("BASE", "The folder that `rankwise train` wrote to.", required=True),
    _out("runs/PRESET-METHOD"),
    TRACKERS,
    DRY_RUN,
    JSON,
    experiment=of_base,
)
def prune(options: Options) -> None:
    """Prune a dense model that was trained before.

    The text of the training is taken from the cache. If it was one of your own and is not in the cache any more, name
    it again by --corpus.name FILE. Ctrl-C stops the command; the same command again goes on from there.

    example: rankwise prune runs/mine --method np-l0 --budget.removed 0.7
    """
    experiment, base = options.experiment, base_folder(options)
    if (folder := _target("prune", options)) is None:
        return
    from rankwise.cli.progress import watching
    from rankwise.lab.experiments import pipeline
    from rankwise.lab.experiments.run_folder import read_fingerprint

    def read(progress: Progress) -> Data:
        data: Data = experiment.read_saved(dict(options.given), read_fingerprint(base), progress)
        return data

    with watching() as watcher:
        row = pipeline.prune(experiment, base, folder, watcher=watcher, trackers=options.trackers, read=read)
    if QUIET:
        return
    # the rows of further sizes are with that of the last one
    found = table(*gather([folder]).values()) if experiment.sizes else row_table(row)
    if _show(options, row, found):
        close(f"{_result(row)}; it is in {folder}.", "rankwise", "report", str(base), str(folder))


@command(
    PRESET,
    CONFIG,
    Argument("--methods NAMES", "Compare these methods: flop-l0,fac. Default: as in the preset.", tuple[str, ...]),
    Argument("--removed FRACTIONS", "Reach these sizes: 0.7,0.8. Default: as in the preset.", tuple[float, ...]),
    Argument("--seeds NUMBERS", "Repeat with these seeds: 0,1,2. Default: as in the preset.", tuple[int, ...]),
    Argument(
        "--launcher NAME",
        "Make every model in a process of its own: on this machine (local), by SLURM or by Ray. See docs/clusters.md.",
        Literal["local", "slurm", "ray"],
    ),
    Argument("--workers NUMBER", "Processes at a time. Default: one per GPU here, all models on a cluster.", int),
    Argument(
        "--launcher-option NAME=VALUE",
        "An option of sbatch (partition=gpu) or of Ray (address, cpus, gpus of a model); may be given several times.",
        several=True,
    ),
    _out("runs/PRESET-sweep, with GLUE runs/PRESET-TASK-sweep"),
    TRACKERS,
    DRY_RUN,
    JSON,
    experiment=of_preset,
)
def sweep(options: Options) -> None:
    """Run many methods, sizes and seeds that share their dense models.

    For language models, a dense control is trained with every seed, and the others are compared with it. Ctrl-C stops
    the sweep; the same command again goes on from there. With --launcher, a model whose process failed or was killed is
    tried once more; if it fails again, it is missing from the table, and the exit code is 1.

    example: rankwise sweep demo --methods flop-l0,fac --removed 0.7,0.8
    example: rankwise sweep demo --seeds 0,1,2 --launcher local --workers 3
    """
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
    launcher = _launcher(options)
    from rankwise.lab.experiments.sweeps import check_grid, failure, sweep

    check_grid(experiment, **grid)
    if (folder := _target("sweep", options, grid)) is None:
        return
    from rankwise.cli.progress import watching

    with watching() as watcher:
        record = sweep(experiment, folder, watcher=watcher, trackers=options.trackers, launcher=launcher, **grid)
    if QUIET:
        return
    page = page_of_run(folder)
    shown = _show(options, record, table(record))
    if "failed" in record:
        raise failure(record["failed"])
    if shown:
        close(f"{_spread_of(record)}. {page}", "rankwise", "report", str(folder), "--open")


def _launcher(options: Options) -> Launcher | None:
    """What `--launcher`, `--workers` and `--launcher-option` ask for."""
    if options.launcher is None:
        if options.workers is not None or options.launcher_option:
            raise UsageError("`--workers` and `--launcher-option` go with `--launcher`. Example: --launcher local.")
        return None
    pairs = [text.partition("=") for text in options.launcher_option or ()]
    for name, _, value in pairs:
        if not name or not value:
            raise UsageError(
                f"`--launcher-option` must be a name and a value, but is {name!r}. Example: partition=gpu."
            )
    from rankwise.lab.experiments.launchers import make_launcher

    return make_launcher(options.launcher, options.workers, {name: value for name, _, value in pairs})


def _target(command: str, options: Options, grid: Mapping[str, Sequence[Any]] | None = None) -> Path | None:
    """The folder that a command writes to; None after `--dry-run`, which shows what would be done there."""
    folder = folder_of(command, options, options.experiment)
    if not options.dry_run:
        return folder
    show_plan(command, options, folder, grid)
    return None


def folder_of(command: str, options: Options, experiment: Experiment) -> Path:
    """Where a command writes: a preset's folder, another for each task of GLUE."""
    if options.out:
        return Path(options.out)
    ends = {"prune": experiment.method.name, "sweep": "sweep"}
    # what was read from a folder may call itself anything, such as a path
    name = re.sub(r"[^\w.-]+", "-", experiment.name)
    return Path("runs", "-".join(filter(None, (name, getattr(experiment, "task", None), ends.get(command)))))


def _show(options: Options, content: Mapping[str, Any], found: Table) -> bool:
    """Print a table, or JSON if that is asked for; whether a sentence may follow."""
    if options.json:
        print(json.dumps(content, indent=1))
        return False
    show_table(found)
    return True


def _own_row(record: Mapping[str, Any], method: str) -> Mapping[str, Any]:
    """The row of the run's own method; where that is dense, the first."""
    rows: list[Mapping[str, Any]] = record["rows"]
    return next((row for row in rows if row["name"] == method), rows[0])


def _result(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]] = ()) -> str:
    """The size, quality and speed of a model, against those of the dense ones among `rows`."""
    size = f"{row['parameters']:,}{' non-zero' if row['nonzeros'] else ''} parameters ({row['removed']:.1%} removed)"
    split, measure = _measure(row)
    found = f"{row['name']} has {size} and {row[split][measure]:.4f} {split} {MEASURES[measure]}"
    if (control := control_of(rows, row)) is None:
        return found
    against = f"{control['name']} has {control[split][measure]:.4f}"
    return f"{found}, where {against}, at {row['speedup']:.2f} times the speed of {CONTROL}"


def _spread_of(record: Mapping[str, Any]) -> str:
    """How many models a sweep made, and between which sizes and qualities they are."""
    rows = [row for run in record["runs"] for row in run["rows"]]
    small = [row for row in rows if row["name"] not in (CONTROL, TAUGHT)]
    dense = [row for row in rows if row["name"] == CONTROL] if small else []
    rows = small or rows
    split, measure = _measure(rows[0])
    sizes, values = [row["parameters"] for row in rows], [row[split][measure] for row in rows]
    against = f", where dense has {spread([row[split][measure] for row in dense])}" if dense else ""
    return (
        f"{len(rows)} models have {_range(f'{min(sizes):,}', f'{max(sizes):,}')} parameters and "
        f"{_range(f'{min(values):.4f}', f'{max(values):.4f}')} {split} {MEASURES[measure]}{against}"
    )


def _range(least: str, most: str) -> str:
    return least if least == most else f"{least} to {most}"


def _measure(row: Mapping[str, Any]) -> tuple[str, str]:
    """The split and the measure that a sentence tells."""
    split = "test" if row["test"] else "valid"
    return split, next(measure for measure in MEASURES if measure in row[split])


@command(
    Argument("FILTER", "Show only names that contain all of these.", default=(), several=True),
    Argument("--json", "Print JSON."),
)
def presets(options: Options) -> None:
    """List the presets, their sizes and what they need.

    Sizes are in parameters: those of the dense model, and those of the exported one. `--json` has the tokens too, and
    `rankwise run NAME --dry-run` every setting. Downloads are kept for the next run.

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
    # what the rows of a table have in common is said once
    groups: dict[str, list[tuple[str, str]]] = {}
    for entry in listed:
        sizes, megabytes = (
            [f"{entry[key] / 1e6:.3g}M" for key in ("parameters", "exported")],
            entry["download_megabytes"],
        )
        figures, download = " to ".join(sizes), f"download {megabytes} MB" if megabytes else "no download"
        if entry["table"]:
            title = f"{entry['table']} table, {entry['about']}: corpus {entry['corpus']}, {download}"
            figures += f", {entry['steps']:,} steps"
        else:
            title, figures = "Not in the paper", f"{entry['about']}: {figures}, {download}"
        groups.setdefault(title, []).append((entry["name"], figures))
    for title, rows in groups.items():
        say(f"{title}\n")
        print_table(("preset", "parameters"), rows, words=("preset", "parameters"))
        print()
    say(f"{len(found)} of {len(PRESETS)} presets. `rankwise run NAME --help` shows the settings of one.")
