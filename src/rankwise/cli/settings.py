"""Experiments as text: settings by dotted name, values from strings, files of both. Every mistake is one line.

override(experiment, {"training.lr": "1e-3", "budget.removed": "0.9", "method": "np-l0"})
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_type_hints

from rankwise.cli.command import Options, UsageError, entries, members, no_such_option, parse_value
from rankwise.cli.tables import wrapped
from rankwise.core.budget import UNITS, Budget
from rankwise.errors import RankwiseError, nearest
from rankwise.files import read_json
from rankwise.lab.experiments.presets import preset
from rankwise.lab.experiments.run_folder import experiment_from
from rankwise.lab.tasks.base import Experiment
from rankwise.lab.training.config import check_seed
from rankwise.methods import METHODS

BOTH = "both"
"""`both.lr` stands for `base.lr` and `training.lr`."""
STEPS = "training.steps"
_HIDDEN = {"name", "model.num_words"} | {
    f"{phase}.{name}"
    for phase in ("base", "training", "healing")
    for name in ("seed", "dense_steps", "restart_schedule")
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One value of an experiment that can be set."""

    name: str
    """The dotted name, such as `training.lr`."""
    hint: Any
    """The type of the field."""
    value: Any
    about: str
    """The docstring under the field, as one line."""


def settings(experiment: Experiment) -> dict[str, Setting]:
    """Every setting of the experiment by its dotted name."""
    return {setting.name: setting for setting in _settings("", experiment) if setting.name not in _HIDDEN}


def configured(experiment: Experiment, options: Options) -> Experiment:
    """The experiment with the settings that were given on the command line."""
    known = settings(experiment)
    for name, text in options.given:
        if "." not in name and name not in known and name != "method":
            # a setting without its group is the likeliest mistake
            full = [f"--{setting}" for setting in known if setting.rpartition(".")[2] == name]
            if full:
                raise UsageError(f"There is no option `--{name}` here. Did you mean {' or '.join(full)}?")
            raise no_such_option(f"--{name}", [*options.known, *(f"--{setting}" for setting in known), "--method"])
        if text is None:
            like = known.get(name.replace(f"{BOTH}.", "training.", 1) if name.startswith(f"{BOTH}.") else name)
            example = "VALUE" if like is None else as_text(like.value)
            raise UsageError(f"`--{name}` needs a value, but has none. Example: --{name} {example}.")
    changed = override(experiment, dict(options.given))
    check_seed(changed.seed)
    return changed


def settings_help(experiment: Experiment) -> str:
    """The settings of an experiment and their values, for the help of a command."""
    title = f"settings of {experiment.name} and their values; --{BOTH}.NAME sets --base.NAME and --training.NAME:"
    lines = [(f"--method {experiment.method.name}", "How it is pruned; see `rankwise plan --help`.")]
    lines += [(f"--{each.name} {as_text(each.value)}", each.about) for each in settings(experiment).values()]
    return "\n".join([wrapped(title), *entries(lines, 36)])


def override(experiment: Experiment, texts: Mapping[str, str]) -> Experiment:
    """The experiment with some settings changed; `texts` maps dotted names to values as they are typed."""
    phases = ("training",) if experiment.base is None else ("base", "training")
    changes: dict[str, str] = {}
    for name, text in texts.items():
        group, _, rest = name.partition(".")
        changes |= {f"{phase}.{rest}": text for phase in phases} if group == BOTH and rest else {name: text}
    if "method" in changes:
        if STEPS in changes:
            # a method that gains a ramp takes its length from the number of steps
            experiment = override(experiment, {STEPS: changes.pop(STEPS)})
        experiment = _swap_method(experiment, changes.pop("method"), changes)
    changed: Experiment = _rebuild(experiment, type(experiment), _values(changes, experiment))
    return changed


def as_text(value: Any) -> str:
    """A value as it is written on the command line; "..." for a group of settings."""
    if dataclasses.is_dataclass(value):
        return "..."
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(as_text, value)) or '""'
    return str(value).removeprefix("torch.")


def _settings(prefix: str, config: Any) -> Iterator[Setting]:
    """The settings of a dataclass; `config` is one, or its type where the experiment has none."""
    kind = config if isinstance(config, type) else type(config)
    hints, texts = get_type_hints(kind), descriptions(kind)
    for field in dataclasses.fields(kind):
        value = None if isinstance(config, type) else getattr(config, field.name)
        hint, name = hints[field.name], prefix + field.name
        groups = [member for member in members(hint) if dataclasses.is_dataclass(member)]
        if not groups or NoneType in members(hint):
            yield Setting(name, hint, value, texts.get(field.name, ""))
        if groups:
            yield from _settings(f"{name}.", groups[0] if value is None else value)


@cache
def descriptions(kind: type) -> dict[str, str]:
    """The docstrings under the fields of a dataclass and of its bases, each as one line."""
    texts: dict[str, str] = {}
    for cls in filter(dataclasses.is_dataclass, reversed(kind.__mro__)):
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                texts[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return texts


def _values(texts: Mapping[str, str], experiment: Experiment) -> dict[str, Any]:
    """What the texts stand for."""
    known = settings(experiment)
    for name in texts:
        if name not in known:
            raise _unknown(name, texts, experiment)
        group = name.rpartition(".")[0]
        if group in texts:
            raise RankwiseError(f"`{name}` cannot be set where `{group}` is none. Leave one of them out.")
    return {name: parse_value(known[name].hint, text, name) for name, text in texts.items()}


def _unknown(name: str, texts: Mapping[str, str], experiment: Experiment) -> RankwiseError:
    """The error for a misspelt setting, or for one that only a compared method has."""
    if not name.startswith("method."):
        return RankwiseError(f"There is no setting `{name}` here.{nearest(name, [*settings(experiment), 'method'])}")
    own, setting = experiment.method.name, name.removeprefix("method.")
    has = {method: [field.name for field in dataclasses.fields(kind)] for method, kind in METHODS.items()}
    compared = texts["compare"].split(",") if "compare" in texts else experiment.compare
    for other in compared:
        if setting in has.get(other, ()):
            return RankwiseError(
                f"`{name}` must be a setting of {own}, but is one of {other}, which is only compared. "
                f"Leave it out, or turn them round: --method {other} --compare {own}."
            )
    remedy = nearest(setting, has[own]) or " Leave it out."
    return RankwiseError(f"There is no setting `{name}` here, with {own}.{remedy}")


def _swap_method(experiment: Experiment, name: str, texts: Mapping[str, str]) -> Experiment:
    if name == "dense" or name not in METHODS or experiment.budget is not None:
        return experiment.with_method(name)
    sizes = {setting: text for setting, text in texts.items() if setting.startswith("budget.")}
    if not sizes:
        raise RankwiseError(f"{name} needs a size, but {experiment.name} is dense. Example: --budget.removed 0.8.")
    values = {setting.removeprefix("budget."): value for setting, value in _values(sizes, experiment).items()}
    return experiment.with_method(name, _rebuild(None, Budget, values))


def _rebuild(config: Any, hint: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """The config, or a new one of type `hint` where there is none, with the values by dotted name in their places."""
    kind: Any = next(filter(dataclasses.is_dataclass, members(hint))) if config is None else type(config)
    changes: dict[str, Any] = {name: value for name, value in values.items() if "." not in name}
    for group in dict.fromkeys(name.partition(".")[0] for name in values if "." in name):
        inner = {name.removeprefix(f"{group}."): v for name, v in values.items() if name.startswith(f"{group}.")}
        changes[group] = _rebuild(getattr(config, group, None), get_type_hints(kind)[group], inner, f"{prefix}{group}.")
    if kind is Budget and any(changes.get(goal) is not None for goal in UNITS):
        # a size that is asked for takes the place of another
        changes = dict.fromkeys(UNITS) | ({} if "removed" in changes else {"of": "model"}) | changes
    if config is not None:
        return dataclasses.replace(config, **changes)
    for field in dataclasses.fields(kind):
        if field.name not in changes and field.default is field.default_factory is dataclasses.MISSING:
            group, name = prefix.rstrip("."), field.name
            raise RankwiseError(f"`{group}` is none, so it needs `{name}` too, but has none. Add --{prefix}{name}.")
    return kind(**changes)


def read_config(path: Path, name: str | None) -> Experiment:
    """The experiment that a file describes; `name`: the preset that is named on the command line."""
    content = _parsed(path)
    # a record holds the experiment under a key, as what `--dry-run --json` prints does
    whole = content.get("experiment", content)
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
    try:
        experiment = experiment_from(plain)
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
