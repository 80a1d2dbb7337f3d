"""Runs on several processes: the first rank goes through a run as a single process does, and the others follow it.

The others take part in the trainings alone: before each one, the first rank tells them which it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from rankwise.errors import DataError
from rankwise.lab.experiments.variants import Context
from rankwise.lab.tasks.base import Data
from rankwise.lab.training import Watcher
from rankwise.lab.training.ranks import FirstRankError, Ranks, own_ranks

P = ParamSpec("P")
R = TypeVar("R")


def led(function: Callable[P, R]) -> Callable[P, R]:
    """A function that all ranks call: the first does it, the others follow, and all get what it returns."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        ranks = own_ranks()
        if ranks.count == 1 or ranks.is_led:
            return function(*args, **kwargs)
        with ranks.together():
            if not ranks.is_first:
                found: R = _follow(ranks, kwargs.get("read"))
            else:
                found = function(*args, **kwargs)
                ranks.tell((None, found))
        return found

    return call


def _follow(ranks: Ranks, read: Any) -> Any:
    """Take part in every training that the first rank tells of; what it has found in the end."""
    data: Data | None = None
    while True:
        part, *told = ranks.hear()
        if part is None:
            return told[0]
        experiment, folder, phase = told
        fingerprint = part.of["corpus"]
        if data is None or data.fingerprint != fingerprint:
            data = (read or experiment.read)(Watcher().read)
        if data.fingerprint != fingerprint:
            raise DataError(
                f"All processes of a run must read the same data, but process {ranks.rank} reads others than the "
                f"first: {experiment.reads}. Give every machine the same files."
            )
        task = experiment.make_task(data)
        part = replace(part, task=task, context=Context(data, folder, Watcher(), ()))
        model = task.start(part.base) if phase.model is None else task.load(phase.model)
        try:
            part.fit(phase, model)
        except FirstRankError:
            # it may know what to do, and tells
            continue
