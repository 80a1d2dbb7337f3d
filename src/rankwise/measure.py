"""Calling models and timing them: models that are compared take turns, so that all meet the same load."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import nn

from rankwise.errors import InvalidTypeError, InvalidValueError, first_line

TOLERATED = 1.03
"""A compact model is called slower above this multiple of the dense model's time."""
SLOWER = "is slower than dense of the same precision"


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call."""

    median: float
    p20: float
    p80: float
    repeats: int


def time_together(
    calls: Mapping[str, Callable[[], object]], *, repeats: int, device: torch.device | None = None
) -> dict[str, Timing]:
    """Time some calls against each other, one of each in turn."""
    if repeats < 2:
        raise InvalidValueError(f"`repeats` must be at least 2, but is {repeats} instead.")

    def milliseconds(call: Callable[[], object]) -> float:
        began = time.perf_counter()
        call()
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
        return 1000 * (time.perf_counter() - began)

    for call in calls.values():
        # the first calls allocate, and may compile
        milliseconds(call)
        milliseconds(call)
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            found[name].append(milliseconds(call))
    return {name: _timing(times) for name, times in found.items()}


def _timing(times: list[float]) -> Timing:
    low, _, _, high = statistics.quantiles(times, n=5, method="inclusive")
    return Timing(median=statistics.median(times), p20=low, p80=high, repeats=len(times))


def slower_than_dense(
    what: str,
    milliseconds: float,
    dense_milliseconds: float,
    *,
    where: str = "",
    reason: str = "",
) -> str | None:
    """A line about a model that is slower than the dense one of the same precision by more than `TOLERATED`, else None.

    Args:
        what: the model, and its precision where there are several.
        milliseconds: of the model.
        dense_milliseconds: of the dense model in the same precision and the same place, timed in turns with it.
        where: engine, batch, threads.
        reason: where it is known.
    """
    if milliseconds <= TOLERATED * dense_milliseconds:
        return None
    return (
        f"{what} {SLOWER} ({dense_milliseconds / milliseconds:.2f}x"
        f"{f'; {where}' if where else ''}): {milliseconds:.2f} against {dense_milliseconds:.2f} ms"
        f"{f' ({reason})' if reason else ''}."
    )


def call_model(model: nn.Module, batch: Any) -> Any:
    """What a model returns for a batch: a tensor, a tuple of positional arguments or a mapping of keyword arguments."""
    if isinstance(batch, Mapping):
        return model(**batch)
    inputs = batch if isinstance(batch, tuple | list) else (batch,)
    try:
        return model(*inputs)
    except TypeError as error:
        try:
            signature(model.forward).bind(*inputs)
        except TypeError:
            raise InvalidTypeError(
                "A batch must hold the inputs of the model alone, without labels, but the model does not take "
                f"{len(inputs)} of them: {first_line(error)}."
            ) from error
        raise


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode; afterwards every module is in the mode it had."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
