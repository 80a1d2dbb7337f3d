"""`--dry-run`: what a command would do, shown before it starts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.cli.command import Options
from rankwise.cli.tables import print_table, say

if TYPE_CHECKING:
    from rankwise.core.budget import Budget
    from rankwise.lab.experiments.variants import Variant
    from rankwise.lab.tasks.base import Experiment


def show_plan(command: str, options: Options, folder: Path, grid: Mapping[str, Sequence[Any]] | None = None) -> None:
    """Print what a command would do; `grid` holds the methods, sizes and seeds of a sweep."""
    from rankwise.cli.settings import as_text, settings

    experiment: Experiment = options.experiment
    preview, shown = experiment.size_preview(), experiment.to_json()
    if options.json:
        answer = {
            "command": command,
            "folder": str(folder),
            "preview": dataclasses.asdict(preview),
            "experiment": shown,
        }
        print(json.dumps({**answer, **({} if grid is None else {"grid": grid})}, indent=1))
        return
    say(f"`rankwise {command}` would write to {folder}{', which exists' if folder.exists() else ''}.\n")
    download = f", download {preview.download_megabytes:,} MB" if preview.download_megabytes else ", no download"
    rows = [
        ("reads", f"{preview.corpus}{download}"),
        ("dense model", f"{preview.parameters:,} parameters, {preview.prunable:,} of them prunable"),
    ]
    if experiment.budget is not None and command not in ("train", "sweep"):
        rows.append((experiment.method.name, _size(experiment.budget, preview.exported)))
    rows += [(name, _steps(getattr(experiment, name))) for name in _phases(command, experiment)]
    if grid is not None:
        rows += [(name, ", ".join(map(as_text, values))) for name, values in grid.items()]
    if command != "train":
        rows += _trained(command, experiment, grid)
    print_table(("part", "what it takes"), rows, words=("part", "what it takes"))
    say(f"\n{_assumed(experiment)}\n")
    known = {name: as_text(each.value) for name, each in settings(experiment).items()}
    # a group that is none has no settings
    rows = [(name, text) for name, text in known.items() if text != "..." and not _within_none(name, known)]
    print_table(("setting", "value"), [("method", experiment.method.name), *rows], words=("setting", "value"))


def _assumed(experiment: Any) -> str:
    """What the sizes are those of, before anything is read."""
    words = getattr(experiment.model, "num_words", None)
    if words is not None:
        return f"Sizes are for a vocabulary of {words:,}; that of the text may be another."
    return f"Sizes are those of the preset's own model; `rankwise plan {experiment.model.name}` shows any model's."


def _within_none(name: str, known: Mapping[str, str]) -> bool:
    group = name.rpartition(".")[0]
    return bool(group) and (known.get(group) == "none" or _within_none(group, known))


def _trained(command: str, experiment: Experiment, grid: Mapping[str, Sequence[Any]] | None) -> list[tuple[str, str]]:
    """Every model that a command trains, a sweep with each of its seeds, those of `sizes` that it writes, and what all
    that takes."""
    from rankwise.lab.experiments.cells import Grid
    from rankwise.lab.experiments.pipeline import asked_for, from_base
    from rankwise.lab.experiments.variants import Variant

    if grid is not None:
        _, asked = Grid(experiment, grid["methods"], grid["removed"]).of_seed(experiment.seed)
    else:
        asked = asked_for(experiment) if command == "run" else [Variant(experiment.method.name, experiment)]
    times, variants = 1 if grid is None else len(grid["seeds"]), from_base(experiment, asked)
    has_base, control = command != "prune" and experiment.base is not None, experiment.control()
    whole, alone = (each.size_preview() for each in (control, dataclasses.replace(control, base=None, init="random")))
    previews = [(each, each.experiment.size_preview(), _unhealed(each).size_preview()) for each in variants]

    def total(key: str) -> int:
        """Of the base, and of every variant without it: a further size is healed, and trained where it must be."""
        shared = getattr(whole, key) - getattr(alone, key)
        found = shared * has_base
        for each, preview, unhealed in previews:
            of_one = getattr(preview, key) - shared * (each.experiment.base is not None)
            again = of_one if each.trains_each_size else getattr(preview, key) - getattr(unhealed, key)
            found += of_one + (len(each.models) - 1) * again
        return times * int(found)

    trained = [name for each in variants for name in (each.models if each.trains_each_size else [each.name])]
    written = [name for each in variants for name in each.models]
    rows = [("trains", trained), *([] if trained == written else [("writes", written)])]
    return [
        *((word, _models(["base"] * has_base + names, times)) for word, names in rows),
        ("in all", f"at most {total('steps'):,} steps, {total('tokens') / 1e6:,.1f}M tokens"),
    ]


def _unhealed(variant: Variant) -> Experiment:
    return dataclasses.replace(variant.experiment, healing=None)


def _models(names: Sequence[str], times: int) -> str:
    number = f"{times} x {len(names)}" if times > 1 else len(names)
    return f"{number} model{'s' * (len(names) > 1)}: {', '.join(names)}"


def _size(budget: Budget, exported: int) -> str:
    """The size that is asked for; `exported` is what a fraction removed comes to."""
    if budget.latency_ms is not None:
        return f"as large as {budget.latency_ms:g} ms for an answer allow, which is measured first"
    if budget.megabytes is not None:
        return f"at most {budget.megabytes:g} MB"
    return f"at most {exported if budget.params is None else budget.params:,} parameters"


def _phases(command: str, experiment: Experiment) -> list[str]:
    names = {"train": ("base",), "prune": ("training", "healing")}.get(command, ("base", "training", "healing"))
    return [name for name in names if getattr(experiment, name) is not None]


def _steps(phase: Any) -> str:
    """How long a phase takes, in the words of its own settings."""
    if isinstance(phase.steps, int):
        return f"{phase.steps:,} steps of {phase.batch_size} x {phase.window} tokens"
    most = "" if phase.max_steps is None else f", at most {phase.max_steps:,} steps"
    return f"{phase.epochs:g} times the data in batches of {phase.batch_size}{most}"
