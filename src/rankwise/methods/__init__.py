"""The methods by name: the paper's six, one-shot SVD, and whole neurons and heads. To add one: README.md."""

from __future__ import annotations

import dataclasses
from typing import Any

from rankwise.errors import InvalidTypeError, RankwiseError, nearest
from rankwise.methods.base import Method
from rankwise.methods.paper import Agp, Dense, Fac, FlopAgp, FlopL0, NpL0
from rankwise.methods.representations import Factorized
from rankwise.methods.svd import Svd
from rankwise.methods.width import Width, WidthL0

METHODS: dict[str, type[Method]] = {m.name: m for m in (Dense, Fac, NpL0, Agp, FlopAgp, FlopL0, Svd, Width, WidthL0)}


def make_method(name: str, **settings: object) -> Method:
    """The method of that name with these settings."""
    if not isinstance(name, str) or name not in METHODS:
        names = ", ".join(METHODS)
        raise RankwiseError(f"`method` must be one of {names}, but is {name!r} instead.{nearest(str(name), METHODS)}")
    fields = {field.name: field for field in dataclasses.fields(METHODS[name])}
    for setting in settings:
        if setting not in fields:
            takes = ", ".join(sorted(fields)) or "none"
            raise InvalidTypeError(f"{name} has no setting `{setting}`.{nearest(setting, fields)} It takes: {takes}.")
    for field in fields.values():
        is_required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if is_required and field.name not in settings:
            raise InvalidTypeError(
                f"{name} needs `{field.name}`. Example: Pruner(model, budget, {name!r}, {field.name}=1000)."
            )
    return METHODS[name](**settings)


def like(method: Method, name: str, **otherwise: Any) -> Method:
    """The method of that name, with the settings of `method` that it has too, or else those of `otherwise`."""
    if name not in METHODS:
        return make_method(name)
    if METHODS[name] is type(method):
        return method
    names = {field.name for field in dataclasses.fields(METHODS[name])}
    given = {key: value for key, value in otherwise.items() if key in names}
    shared = {key: getattr(method, key) for key in names if hasattr(method, key)}
    return make_method(name, **given | shared)


def resolve_method(method: str | Method, layout: str, settings: dict[str, Any]) -> Method:
    """The method with its settings; one that is given by name has this layout unless `layout` is set."""
    if isinstance(method, Method):
        if settings:
            raise InvalidTypeError(f"Settings go into the method object, but got {', '.join(settings)} beside it.")
        return method
    if isinstance(method, str) and issubclass(METHODS.get(method, Method), Factorized):
        settings = {"layout": layout, **settings}
    return make_method(method, **settings)
