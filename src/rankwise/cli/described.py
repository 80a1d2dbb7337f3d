"""A run described in a file (`--config`), and shown before it starts (`--dry-run`)."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.cli.command import Argument, Options, UsageError
from rankwise.cli.tables import print_table, say
from rankwise.errors import RankwiseError
from rankwise.files import read_json

if TYPE_CHECKING:
    from rankwise.core.budget import Budget
    from rankwise.lab.tasks.base import Experiment

CONFIG = Argument(
    "--config FILE",
    "JSON or TOML with the settings: the `experiment.json` or `record.json` of a run, or `preset` and what differs.",
    Path,
)
DRY_RUN = Argument("--dry-run", "Show sizes, steps and settings; read no data, run and write nothing.")
SAVED = "experiment"
"""The key of the whole experiment in a record of a run, and in what `--dry-run --json` prints."""


def experiment_of(options: Options, default: str | None) -> Experiment:
    """The experiment that PRESET or `--config` names, before the settings of the command line."""
    from rankwise.lab.experiments.presets import preset

    if options.config is not None:
        return _read(options.config, options.subject)
    name = options.subject or default
    if name is None:
        raise UsageError("PRESET or `--config FILE` must be given, but neither is. `rankwise presets` lists the names.")
    return preset(name)


def _read(path: Path, name: str | None) -> Experiment:
    from rankwise.cli.settings import override
    from rankwise.lab.experiments.presets import preset

    content = _parsed(path)
    whole = content.get(SAVED, content)
    if isinstance(whole, Mapping) and "name" in whole:
        if name is not None:
            raise UsageError(
                f"{path} holds a whole experiment ({whole['name']}), but PRESET is given too ({name}). Leave it out."
            )
        return _saved(path, whole)
    described = content.pop("preset", name)
    if not isinstance(described, str):
        raise UsageError(f'{path} must name its preset, but has none. Add `"preset": "demo"`, or give PRESET too.')
    if name not in (None, described):
        raise UsageError(f"{path} is for the preset {described}, but PRESET is {name}. Leave one of them out.")
    try:
        return override(preset(described), dict(_texts("", content)))
    except RankwiseError as error:
        raise UsageError(f"{path}: {error}") from None


def _parsed(path: Path) -> dict[str, Any]:
    """The object that a file of JSON or TOML holds."""
    if path.suffix not in (".json", ".toml"):
        raise UsageError(f"`--config` must be a .json or a .toml file, but is {str(path)!r} instead.")
    try:
        content = read_json(path) if path.suffix == ".json" else _toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"`--config` must be a file that can be read, but {path}: {error.strerror}.") from None
    except ValueError as error:
        raise UsageError(f"{path} must be valid {path.suffix[1:].upper()}, but is not: {error}.") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path} must hold settings by name, but holds {type(content).__name__} instead.")
    return content


def _toml(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    found: dict[str, Any] = tomllib.loads(text)
    return found


def _saved(path: Path, plain: Mapping[str, Any]) -> Experiment:
    """The experiment that a run wrote down."""
    from rankwise.lab.experiments.run_folder import FINGERPRINT
    from rankwise.lab.tasks.base import from_json

    plain = dict(plain)
    if isinstance(corpus := plain.get("corpus"), dict):
        plain["corpus"] = {name: value for name, value in corpus.items() if name != FINGERPRINT}
    try:
        experiment = from_json(plain)
    except RankwiseError as error:
        raise UsageError(f"{path}: {error}") from None
    # a model of transformers is known by the name of its preset
    known = getattr(experiment, "known_models", None)
    if not isinstance(experiment.name, str) or (known is not None and experiment.name not in known):
        raise UsageError(f"{path}: `name` must be that of a preset, but is {experiment.name!r} instead.")
    return experiment


def _texts(prefix: str, content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Settings by dotted name, as they are written on the command line."""
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            for inner, text in _texts(f"{name}.", value):
                # the name of a method is the setting `method` itself
                yield "method" if inner == "method.name" else inner, text
        elif isinstance(value, list):
            yield name, ",".join(_text(name, each) for each in value)
        else:
            yield name, _text(name, value)


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if not isinstance(value, int | float | str):
        raise UsageError(f"`{name}` must be a text, a number, true, false or a list of them, but is {value!r} instead.")
    return str(value)


def show_plan(command: str, options: Options, folder: Path, grid: Mapping[str, Sequence[Any]] | None = None) -> None:
    """Print what a command would do; `grid` holds the methods, sizes and seeds of a sweep."""
    from rankwise.cli.settings import as_text, settings

    experiment: Experiment = options.experiment
    preview, shown = experiment.size_preview(), experiment.to_json()
    if options.json:
        answer = {"command": command, "folder": str(folder), "preview": dataclasses.asdict(preview), SAVED: shown}
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
    if command in ("run", "sweep"):
        rows += _trained(experiment, grid)
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


def _trained(experiment: Experiment, grid: Mapping[str, Sequence[Any]] | None) -> list[tuple[str, str]]:
    """Every model that a run, or a sweep with each of its seeds, trains, and what that takes in all."""
    from rankwise.lab.experiments.pipeline import asked_for, from_base
    from rankwise.lab.experiments.sweeps import Grid

    times, asked = 1, asked_for(experiment)
    if grid is not None:
        times = len(grid["seeds"])
        _, asked = Grid(experiment, grid["methods"], grid["removed"]).of_seed(experiment.seed)
    variants, has_base = from_base(experiment, asked), experiment.base is not None
    control = experiment.control()
    whole, alone = (each.size_preview() for each in (control, dataclasses.replace(control, base=None, init="random")))
    previews = [(each.experiment.base is not None, each.experiment.size_preview()) for each in variants]

    def total(key: str) -> int:
        """Of the base, and of every variant without it."""
        shared = getattr(whole, key) - getattr(alone, key)
        of_variants = sum(getattr(each, key) - shared * from_it for from_it, each in previews)
        return times * int(of_variants + shared * has_base)

    names = [*["base"] * has_base, *(each.name for each in variants)]
    number = f"{times} x {len(names)}" if times > 1 else len(names)
    return [
        ("trains", f"{number} model{'s' * (len(names) > 1)}: {', '.join(names)}"),
        ("in all", f"at most {total('steps'):,} steps, {total('tokens') / 1e6:,.1f}M tokens"),
    ]


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
