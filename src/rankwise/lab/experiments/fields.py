"""Experiments as text: settings by dotted name, values from strings and from JSON. Every mistake is one line.

override(experiment, {"training.lr": "1e-3", "budget.removed": "0.9", "method": "np-l0"})
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from rankwise.core.budget import UNITS, Budget
from rankwise.deploy.architectures import REGISTERED, describe_config, from_description
from rankwise.errors import InvalidValueError, RankwiseError, nearest
from rankwise.lab.experiments.arms import AnyExperiment
from rankwise.lab.experiments.config import Experiment
from rankwise.methods import METHODS, make_method
from rankwise.methods.base import Method

BOTH = "both"
"""`both.lr` stands for `base.lr` and `training.lr`."""
STEPS = "training.steps"
_HIDDEN = {"name", "model.num_words"} | {
    f"{phase}.{name}" for phase in ("base", "training") for name in ("seed", "dense_steps", "restart_schedule")
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


def settings(experiment: AnyExperiment) -> dict[str, Setting]:
    """Every setting of the experiment by its dotted name."""
    return {setting.name: setting for setting in _settings("", experiment) if setting.name not in _HIDDEN}


def override(experiment: AnyExperiment, texts: Mapping[str, str]) -> AnyExperiment:
    """The experiment with some settings changed; `texts` maps dotted names to values as they are typed."""
    texts = dict(_expand_both(texts, experiment))
    if "method" in texts:
        if STEPS in texts:
            # a method that gains a ramp takes its length from the number of steps
            experiment = override(experiment, {STEPS: texts.pop(STEPS)})
        experiment = _swap_method(experiment, texts.pop("method"), texts)
    changed: AnyExperiment = _rebuild(experiment, type(experiment), _tree(texts, experiment))
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


def parse_value(hint: Any, text: str, name: str) -> Any:
    """The value of type `hint` that a text stands for; `name` is what errors call it."""
    kinds = [kind for kind in _members(hint) if not dataclasses.is_dataclass(kind)]
    if type(None) in kinds and text.lower() == "none":
        return None
    kinds = [kind for kind in kinds if kind is not type(None)]
    if not kinds:
        raise RankwiseError(
            f"`{name}` must be none, or be set one by one, but is {text!r} instead. Example: --{name} none."
        )
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    if words:
        if text not in words:
            known = ", ".join(map(str, words))
            raise RankwiseError(f"`{name}` must be one of {known}, but is {text!r} instead.{nearest(text, words)}")
        return text
    if get_origin(kinds[0]) is tuple:
        return tuple(parse_value(get_args(kinds[0])[0], part, name) for part in text.split(",") if part)
    for kind in kinds:
        try:
            return _SCALARS[kind][1](text)
        except ValueError:
            continue
    rule = " or ".join(_SCALARS[kind][0] for kind in kinds)
    raise RankwiseError(f"`{name}` must be {rule}, but is {text!r} instead.")


def to_json(experiment: AnyExperiment) -> dict[str, Any]:
    """All settings of an experiment, for JSON."""
    plain: dict[str, Any] = _to_plain(experiment)
    return plain


def from_json(plain: Mapping[str, Any]) -> AnyExperiment:
    """The experiment that `to_json` described."""
    kind: type[AnyExperiment] = Experiment
    if "task" in plain:
        from rankwise.lab.experiments.glue.config import GlueExperiment

        kind = GlueExperiment
    try:
        experiment: AnyExperiment = _from_plain(kind, plain)
        return experiment
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RankwiseError(f"A saved experiment must hold the settings of one, but {error}.") from error


def _to_plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return as_text(value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    if any(type(value) is known.config for known in REGISTERED.values()):
        return describe_config(value)
    plain = {field.name: _to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return {"name": value.name, **plain} if isinstance(value, Method) else plain


def _from_plain(hint: Any, plain: Any) -> Any:
    """The value of type `hint` that `_to_plain` described."""
    kinds = _members(hint)
    if torch.dtype in kinds and plain is not None:
        return _dtype(plain)
    if not isinstance(plain, Mapping):
        return plain
    if "architecture" in plain:
        return from_description(plain)
    kind: Any = next(filter(dataclasses.is_dataclass, kinds))
    if kind is Method:
        return make_method(**plain)
    hints = get_type_hints(kind)
    return kind(**{name: _from_plain(hints[name], value) for name, value in plain.items()})


def _settings(prefix: str, config: Any) -> Iterator[Setting]:
    """The settings of a dataclass; `config` is one, or its type where the experiment has none."""
    kind = config if isinstance(config, type) else type(config)
    hints, texts = get_type_hints(kind), descriptions(kind)
    for field in dataclasses.fields(kind):
        value = None if isinstance(config, type) else getattr(config, field.name)
        hint, name = hints[field.name], prefix + field.name
        groups = [member for member in _members(hint) if dataclasses.is_dataclass(member)]
        if not groups or type(None) in _members(hint):
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


def _expand_both(texts: Mapping[str, str], experiment: AnyExperiment) -> Iterator[tuple[str, str]]:
    for name, text in texts.items():
        group, _, rest = name.partition(".")
        if group != BOTH or not rest:
            yield name, text
            continue
        if experiment.base is not None:
            yield f"base.{rest}", text
        yield f"training.{rest}", text


def _tree(texts: Mapping[str, str], experiment: AnyExperiment) -> dict[str, Any]:
    """The parsed values as nested dictionaries, one for each group."""
    known = settings(experiment)
    tree: dict[str, Any] = {}
    for name, text in texts.items():
        if name not in known:
            raise _unknown(name, texts, experiment)
        *parents, last = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                group = ".".join(parents)
                raise RankwiseError(f"`{name}` cannot be set where `{group}` is none. Leave one of them out.")
        node[last] = parse_value(known[name].hint, text, name)
    return tree


def _unknown(name: str, texts: Mapping[str, str], experiment: AnyExperiment) -> RankwiseError:
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


def _swap_method(experiment: AnyExperiment, name: str, texts: Mapping[str, str]) -> AnyExperiment:
    if name == "dense" or name not in METHODS or experiment.budget is not None:
        return experiment.with_method(name)
    sizes = {setting: text for setting, text in texts.items() if setting.startswith("budget.")}
    if not sizes:
        raise RankwiseError(f"{name} needs a size, but {experiment.name} is dense. Example: --budget.removed 0.8.")
    return experiment.with_method(name, _rebuild(None, Budget, _tree(sizes, experiment)["budget"]))


def _rebuild(config: Any, hint: Any, tree: Mapping[str, Any], prefix: str = "") -> Any:
    """The config, or a new one of type `hint` where there is none, with the values of `tree` in their places."""
    kind: Any = next(filter(dataclasses.is_dataclass, _members(hint))) if config is None else type(config)
    hints, changes = get_type_hints(kind), dict(tree)
    for key, value in tree.items():
        if isinstance(value, Mapping):
            changes[key] = _rebuild(getattr(config, key, None), hints[key], value, f"{prefix}{key}.")
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


def _members(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _bool(text: str) -> bool:
    known = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in known:
        raise ValueError
    return known[text.lower()]


def _dtype(text: str) -> torch.dtype:
    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidValueError(f"{text!r} is not a dtype of torch")
    return dtype


_SCALARS: dict[Any, tuple[str, Callable[[str], Any]]] = {
    bool: ("true or false", _bool),
    int: ("a whole number", int),
    float: ("a number", float),
    str: ("a text", str),
    torch.dtype: ("a dtype of torch", _dtype),
}
"""How errors name a type, and how it is read from text."""
