"""Experiments as text: settings by dotted name, values from strings and from JSON, every mistake in one line.

override(experiment, {"training.lr": "1e-3", "budget.removed": "0.9", "method": "np-l0"})
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from rankwise.core.budget import GOALS, Budget
from rankwise.errors import RankwiseError, nearest
from rankwise.lab.tasks.base import Experiment, from_json
from rankwise.methods import METHODS

__all__ = ["from_json", "override", "parse", "settings", "to_json"]

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
    """With dots: `training.lr`."""
    hint: Any
    value: Any
    about: str
    """The first paragraph of its description."""


def settings(experiment: Experiment) -> dict[str, Setting]:
    """Every setting by its name."""
    found = (setting for setting in _settings("", experiment) if setting.name not in _HIDDEN)
    return {setting.name: setting for setting in found}


def override(experiment: Experiment, texts: Mapping[str, str]) -> Experiment:
    """The experiment with some settings changed."""
    texts = dict(_both(texts, experiment))
    if "method" in texts:
        if STEPS in texts:
            # a ramp that a method gains is a share of them
            experiment = override(experiment, {STEPS: texts.pop(STEPS)})
        experiment = _swap_method(experiment, texts.pop("method"), texts)
    changed: Experiment = _changed(experiment, type(experiment), _tree(texts, experiment))
    return changed


def parse(hint: Any, text: str, name: str) -> Any:
    """The value that a text stands for."""
    choices = _choices(hint)
    if type(None) in choices and text.lower() == "none":
        return None
    kinds = [kind for kind in choices if kind is not type(None) and not dataclasses.is_dataclass(kind)]
    if not kinds:
        raise RankwiseError(
            f"`{name}` is a group of settings, or none, but is {text!r} instead. Example: --{name} none."
        )
    words = [word for kind in kinds for word in get_args(kind) if get_origin(kind) is Literal]
    if words:
        if text in words:
            return text
        raise RankwiseError(
            f"`{name}` must be one of {', '.join(map(str, words))}, but is {text!r} instead.{nearest(text, words)}"
        )
    for kind in kinds:
        try:
            return _value(kind, text, name)
        except ValueError:
            continue
    raise RankwiseError(f"`{name}` must be {' or '.join(map(_in_words, kinds))}, but is {text!r} instead.")


def to_json(experiment: Experiment) -> dict[str, Any]:
    """All settings, for JSON."""
    return experiment.to_json()


def _settings(prefix: str, config: Any) -> Iterator[Setting]:
    """Those of a config, given as a dataclass or as its type where there is none yet."""
    kind = config if isinstance(config, type) else type(config)
    hints, texts = get_type_hints(kind), descriptions(kind)
    for field in dataclasses.fields(kind):
        value = None if isinstance(config, type) else getattr(config, field.name)
        hint, name = hints[field.name], prefix + field.name
        groups = [choice for choice in _choices(hint) if dataclasses.is_dataclass(choice)]
        if not groups or type(None) in _choices(hint):
            yield Setting(name, hint, value, texts.get(field.name, ""))
        if groups:
            yield from _settings(f"{name}.", groups[0] if value is None else value)


@cache
def descriptions(kind: type) -> dict[str, str]:
    """The texts under the fields of a dataclass and of its bases, each as one line."""
    texts: dict[str, str] = {}
    for cls in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(cls):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                assert isinstance(field.target, ast.Name)
                texts[field.target.id] = " ".join(str(text.value.value).split())
    return texts


def _both(texts: Mapping[str, str], experiment: Experiment) -> Iterator[tuple[str, str]]:
    for name, text in texts.items():
        first, _, rest = name.partition(".")
        if first != BOTH or not rest:
            yield name, text
            continue
        if experiment.base is not None:
            yield f"base.{rest}", text
        yield f"training.{rest}", text


def _tree(texts: Mapping[str, str], experiment: Experiment) -> dict[str, Any]:
    """The values by group and name."""
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
                raise RankwiseError(
                    f"`{name}` cannot be set where `{'.'.join(parents)}` is none. Leave one of them out."
                )
        node[last] = parse(known[name].hint, text, name)
    return tree


def _unknown(name: str, texts: Mapping[str, str], experiment: Experiment) -> RankwiseError:
    """A slip, or a setting that a compared method has and the method has not."""
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
    return experiment.with_method(name, _changed(None, Budget, _tree(sizes, experiment)["budget"]))


def _changed(config: Any, hint: Any, tree: Mapping[str, Any]) -> Any:
    """The config with the values of `tree` in their places, or what is wrong with them in one line."""
    try:
        return _rebuild(config, hint, tree)
    except (ValueError, TypeError) as error:
        raise RankwiseError(str(error)) from error


def _rebuild(config: Any, hint: Any, tree: Mapping[str, Any]) -> Any:
    """The config with the values of `tree` in their places."""
    kind: Any = next(filter(dataclasses.is_dataclass, _choices(hint))) if config is None else type(config)
    hints = get_type_hints(kind)
    changes = {
        name: _rebuild(getattr(config, name, None), hints[name], value) if isinstance(value, Mapping) else value
        for name, value in tree.items()
    }
    if kind is Budget and any(changes.get(name) is not None for name in GOALS):
        # a size that is asked for takes the place of another
        changes = dict.fromkeys(GOALS) | ({} if "removed" in changes else {"of": "model"}) | changes
    return kind(**changes) if config is None else dataclasses.replace(config, **changes)


def _choices(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _value(kind: Any, text: str, name: str) -> Any:
    if kind is bool:
        if text.lower() not in ("true", "false", "yes", "no", "1", "0"):
            raise ValueError
        return text.lower() in ("true", "yes", "1")
    if kind is torch.dtype:
        dtype = getattr(torch, text, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError
        return dtype
    if get_origin(kind) is tuple:
        return tuple(parse(get_args(kind)[0], part, name) for part in text.split(",") if part)
    assert kind in (int, float, str), f"no rule for {kind}"
    return kind(text)


def _in_words(kind: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", torch.dtype: "a dtype of torch"}
    return names.get(kind, str(kind))
