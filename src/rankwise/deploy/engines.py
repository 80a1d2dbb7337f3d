"""What can run a model, by name. A new engine is one entry in `ENGINES`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from rankwise.errors import RankwiseError, nearest

Call: TypeAlias = Callable[[], object]
"""The model on the example inputs, once."""


@dataclass(frozen=True)
class Engine:
    """One way to run a model."""

    about: str
    missing: Callable[[], str | None]
    """What must be installed first, as a sentence; None where nothing is missing."""
    prepare: Callable[[nn.Module, tuple[Tensor, ...]], Call]
    """From a model in evaluation mode and example inputs to a call. May take a while, and may raise."""


def engine(name: str) -> Engine:
    """The engine of that name, if it can run here."""
    if name not in ENGINES:
        raise RankwiseError(
            f"An engine must be one of {', '.join(ENGINES)}, but is {name!r} instead.{nearest(name, ENGINES)}"
        )
    if missing := ENGINES[name].missing():
        raise RankwiseError(f"The engine {name!r} cannot run here: {missing}")
    return ENGINES[name]


def _plain(model: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
    @torch.inference_mode()
    def call() -> object:
        return model(*inputs)

    return call


def _compiled(model: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
    compiled = torch.compile(model, dynamic=False)

    # inference mode and the compiler's guards do not go together in all versions of torch
    @torch.no_grad()
    def call() -> object:
        return compiled(*inputs)

    call()
    return call


def _compiler_missing() -> str | None:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "cl"]
    if any(map(shutil.which, names)):
        return None
    return f"torch.compile needs a C++ compiler ({' or '.join(names)}). Install one, or name it in CXX."


ENGINES: dict[str, Engine] = {
    "torch": Engine("PyTorch as it is", lambda: None, _plain),
    "compile": Engine("torch.compile", _compiler_missing, _compiled),
}
