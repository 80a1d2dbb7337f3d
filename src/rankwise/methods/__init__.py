"""The methods by name: the paper's six, and one-shot SVD."""

from __future__ import annotations

import dataclasses

from rankwise.errors import InvalidTypeError, RankwiseError, nearest
from rankwise.methods.agp import Agp
from rankwise.methods.base import Method
from rankwise.methods.dense import Dense
from rankwise.methods.fac import Fac
from rankwise.methods.flop_agp import FlopAgp
from rankwise.methods.flop_l0 import FlopL0
from rankwise.methods.np_l0 import NpL0
from rankwise.methods.svd import Svd

METHODS: dict[str, type[Method]] = {m.name: m for m in (Dense, Fac, NpL0, Agp, FlopAgp, FlopL0, Svd)}


def make_method(name: str, **settings: object) -> Method:
    """The method of that name with these settings."""
    if name not in METHODS:
        names = ", ".join(METHODS)
        raise RankwiseError(f"`method` must be one of {names}, but is {name!r} instead.{nearest(name, METHODS)}")
    cls = METHODS[name]
    known = {field.name for field in dataclasses.fields(cls)}
    for setting in settings:
        if setting not in known:
            takes = ", ".join(sorted(known)) or "none"
            raise InvalidTypeError(f"{name} has no setting `{setting}`.{nearest(setting, known)} It takes: {takes}.")
    missing = [f.name for f in dataclasses.fields(cls) if f.name not in settings and _required(f)]
    if missing:
        raise InvalidTypeError(
            f"{name} needs `{missing[0]}`. Example: Pruner(model, budget, {name!r}, {missing[0]}=1000)."
        )
    return cls(**settings)


def _required(field: dataclasses.Field[object]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
