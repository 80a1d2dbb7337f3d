"""What can run a model, by name. A new engine is one entry in `ENGINES`."""

from __future__ import annotations

import inspect
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn

from rankwise.errors import RankwiseError, install_extra, nearest

Call: TypeAlias = Callable[[], object]
"""The model on the example inputs, once."""


@dataclass(frozen=True)
class Engine:
    """One way to run a model."""

    about: str
    devices: tuple[str, ...]
    """Where it runs."""
    missing: Callable[[], str | None]
    """What must be installed first, as a sentence; None where nothing is missing."""
    prepare: Callable[[nn.Module, tuple[Tensor, ...]], Call]
    """From a model in evaluation mode and example inputs to a call. May take a while, and may raise."""


def engine(name: str, device: str = "cpu") -> Engine:
    """The engine of that name, if it can run here, on that kind of device."""
    if name not in ENGINES:
        raise RankwiseError(
            f"An engine must be one of {', '.join(ENGINES)}, but is {name!r} instead.{nearest(name, ENGINES)}"
        )
    if device not in ENGINES[name].devices:
        able = [other for other, entry in ENGINES.items() if device in entry.devices]
        raise RankwiseError(
            f"An engine for {device!r} must be one of {', '.join(able)}, but is {name!r} instead, which runs on "
            f"{' and '.join(map(repr, ENGINES[name].devices))} alone."
        )
    if missing := ENGINES[name].missing():
        raise RankwiseError(f"The engine {name!r} cannot run here: {missing}")
    return ENGINES[name]


def _plain(model: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
    @torch.inference_mode()
    def call() -> object:
        return model(*inputs)

    return call


def _graph(model: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
    call, graph = _plain(model, inputs), torch.cuda.CUDAGraph()
    # what is made in the first calls cannot be made while a graph is captured, and they need a stream of their own
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    try:
        with torch.cuda.graph(graph):
            found = call()
    except RuntimeError as error:
        raise RankwiseError(
            f"A model must leave the host out of its work to be captured as a graph, but {type(model).__name__} does "
            f"not: {error}. Time it with the engine torch."
        ) from error

    def replay() -> object:
        graph.replay()
        return found

    return replay


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


def _exported(format: str) -> Callable[[nn.Module, tuple[Tensor, ...]], Call]:
    def prepare(model: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
        engine = import_module(f"rankwise.deploy.export.{format}")
        names = list(inspect.signature(model.forward).parameters)
        given = dict(zip(names, inputs, strict=False))
        with tempfile.TemporaryDirectory() as folder:
            engine.export(model, given, Path(folder) / format)
            run = engine.load(Path(folder) / format)

        def call() -> object:
            return run(**given)

        return call

    return prepare


def _packages_missing(*names: str) -> Callable[[], str | None]:
    def missing() -> str | None:
        absent = [name for name in names if find_spec(name) is None]
        if not absent:
            return None
        return f"it needs {' and '.join(absent)}. {install_extra('export')}"

    return missing


ENGINES: dict[str, Engine] = {
    "torch": Engine("PyTorch as it is", ("cpu", "cuda"), lambda: None, _plain),
    "compile": Engine("torch.compile", ("cpu", "cuda"), _compiler_missing, _compiled),
    "graph": Engine("PyTorch as a CUDA graph", ("cuda",), lambda: None, _graph),
    "onnx": Engine("ONNX Runtime", ("cpu",), _packages_missing("onnx", "onnxscript", "onnxruntime"), _exported("onnx")),
    "openvino": Engine("OpenVINO", ("cpu",), _packages_missing("openvino"), _exported("openvino")),
}
