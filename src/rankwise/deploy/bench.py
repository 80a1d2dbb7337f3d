"""Timing dense, compact and int8 models against each other: every engine, batch and number of threads, or a GPU.

All models of a case take turns, so a slow spell of the machine meets them all. A new engine is one entry in `ENGINES`.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from rankwise.core.budget import count
from rankwise.deploy.export import Format, onnx, openvino
from rankwise.deploy.quantize import bfloat16, can_multiply_bfloat16, int8
from rankwise.errors import RankwiseError, install_extra, nearest
from rankwise.kernels.int8 import can_multiply_bytes
from rankwise.measure import SLOWER, slower_than_dense, time_together
from rankwise.swap import copied

ALL = "all"
FAST = 2.0
"""Milliseconds of a call, below which overhead decides."""
Variants: TypeAlias = dict[tuple[str, str], nn.Module]
"""Models by name and precision."""
Call: TypeAlias = Callable[[], object]
"""The model on the example inputs, once."""


@dataclass(frozen=True)
class Engine:
    """One way to run a model."""

    devices: tuple[str, ...]
    """Where it runs."""
    missing: Callable[[], str | None]
    """What must be installed first, as a sentence; None where nothing is missing."""
    prepare: Callable[[nn.Module, tuple[Tensor, ...]], Call]
    """From a model in evaluation mode and example inputs to a call. May take a while, and may raise."""


def engine(name: str, device: str = "cpu") -> Engine:
    """The engine of that name, if it can run here, on that kind of device."""
    able = [other for other, entry in ENGINES.items() if device in entry.devices]
    if name not in able:
        raise RankwiseError(
            f"An engine must be one of {', '.join(able)} for {device!r}, but is {name!r} instead.{nearest(name, able)}"
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


def _exported(format: Format) -> Engine:
    def missing() -> str | None:
        absent = [name for name in format.packages if find_spec(name) is None]
        return f"it needs {' and '.join(absent)}. {install_extra('export')}" if absent else None

    def prepare(model: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
        given = dict(zip(inspect.signature(model.forward).parameters, inputs, strict=False))
        with tempfile.TemporaryDirectory() as folder:
            format.export(model, given, Path(folder) / format.name)
            run = format.load(Path(folder) / format.name)
        return lambda: run(**given)

    return Engine(("cpu",), missing, prepare)


ENGINES: dict[str, Engine] = {
    "torch": Engine(("cpu", "cuda"), lambda: None, _plain),
    "compile": Engine(("cpu", "cuda"), _compiler_missing, _compiled),
    "graph": Engine(("cuda",), lambda: None, _graph),
    "onnx": _exported(onnx),
    "openvino": _exported(openvino),
}


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Which cases are timed."""

    length: int
    """Tokens of a sequence."""
    batches: tuple[int, ...] = (1, 16)
    """Sequences at once."""
    threads: tuple[int | str, ...] = (1, ALL)
    """Threads of torch; "all" is one per core."""
    engines: tuple[str, ...] = ("torch",)
    repeats: int = 15
    device: str = "cpu"
    """"cpu", or "cuda", where threads do not matter."""

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise RankwiseError(f'`device` must be "cpu" or "cuda", but is {self.device!r} instead.')
        if self.device == "cuda" and not torch.cuda.is_available():
            raise RankwiseError('`device` must be "cpu" where torch finds no GPU, but is "cuda" instead.')
        numbers = {"length": (self.length,), "batch": self.batches, "threads": self.counts, "repeats": (self.repeats,)}
        for name, values in numbers.items():
            least = 2 if name == "repeats" else 1
            if min(values) < least:
                raise RankwiseError(f"`{name}` must be at least {least}, but is {min(values)} instead.")
        for name in self.engines:
            engine(name, self.device)

    @property
    def counts(self) -> tuple[int, ...]:
        """`threads` as numbers, each once; on a GPU as many as there are."""
        if self.device == "cuda":
            return (torch.get_num_threads(),)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        for value in self.threads:
            if isinstance(value, str) and value != ALL:
                raise RankwiseError(f'`threads` must be numbers or "{ALL}", but one is {value!r} instead.')
        return tuple(dict.fromkeys(cores if isinstance(value, str) else value for value in self.threads))


def bench(
    models: Mapping[str, nn.Module],
    config: BenchConfig,
    make_tokens: Callable[[int, int], Tensor],
    *,
    tell: Callable[[str], None] = lambda case: None,
) -> list[dict[str, Any]]:
    """A row for every model and case; speeds are against the first model in float32, with the same engine.

    Args:
        models: on the CPU; the first is the dense one.
        make_tokens: from batch and length to tokens.
        tell: called with every case before it is timed.
    """
    plain, more = _variants(models, config)
    rows: list[dict[str, Any]] = []
    for name, batch, threads in product(config.engines, config.batches, config.counts):
        case = {"engine": name, "batch": batch, "length": config.length, "device": config.device, "threads": threads}
        tell(words(case))
        tokens_BT = make_tokens(batch, config.length).to(config.device)
        # other engines quantize by themselves
        run = plain | more if name == "torch" else plain
        with _threads(threads):
            prepare = engine(name, config.device).prepare
            calls = {" ".join(key): prepare(model, (tokens_BT,)) for key, model in run.items()}
            timings = time_together(calls, repeats=config.repeats, device=tokens_BT.device)
        first = next(iter(timings.values()))
        for (model, precision), timing in zip(run, timings.values(), strict=True):
            row = {"model": model, "precision": precision, "parameters": count(models[model]), **case}
            rows.append({**row, "milliseconds": asdict(timing), "speed": first.median / timing.median})
    return rows


def _variants(models: Mapping[str, nn.Module], config: BenchConfig) -> tuple[Variants, Variants]:
    """The models that every engine runs, and those that only torch runs: on a GPU all run both precisions."""
    if config.device == "cuda":
        plain: Variants = {(name, "float32"): copied(model).cuda().eval() for name, model in models.items()}
        return plain | {(name, "bfloat16"): Autocast(model) for (name, _), model in plain.items()}, {}
    tokens = min(config.batches) * config.length
    more: Variants = {(name, "int8"): int8(model, tokens=tokens) for name, model in models.items()}
    if can_multiply_bfloat16():
        more |= {(name, "bfloat16"): bfloat16(model, tokens=tokens) for name, model in models.items()}
    return {(name, "float32"): model.eval() for name, model in models.items()}, more


class Autocast(nn.Module):
    """A model on a GPU under autocast to bfloat16, as it is trained."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> object:
        with torch.autocast("cuda", torch.bfloat16):
            return self.model(*inputs)


def remarks(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for every model that is not faster than it should be, and why, where that is known.

    A compact model should be faster than the dense one of the same precision, and a precision faster than float32.
    """
    return [line for row, before in _compared(rows) if (line := _remark(row, before)) is not None]


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """What `remarks` has line by line, in one sentence for those that are slower than dense and one for the others."""
    found: dict[str, dict[str, list[float]]] = {}
    for row, before in _compared(rows):
        line = _remark(row, before)
        if line is not None:
            pair = f"{row['model']} in {row['precision']} than {before['model']} in {before['precision']}"
            ratio = before["milliseconds"]["median"] / row["milliseconds"]["median"]
            kind = "Slower than dense of the same precision" if SLOWER in line else "Not clearly faster"
            found.setdefault(kind, {}).setdefault(pair, []).append(ratio)
    num_cases = len({words(row) for row in rows})
    return " ".join(
        f"{kind}: "
        + "; ".join(f"{pair} ({len(r)} of {num_cases} cases, {min(r):.2f}x at worst)" for pair, r in pairs.items())
        + "."
        for kind, pairs in sorted(found.items(), reverse=True)
    )


def _compared(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Each row with each of those of its case that it should be faster than."""
    for row in rows:
        case = [other for other in rows if words(other) == words(row)]
        yield from ((row, before) for before in _befores(row, case))


def _remark(row: Mapping[str, Any], before: Mapping[str, Any]) -> str | None:
    ours, theirs = row["milliseconds"], before["milliseconds"]
    what, reason = f"{row['model']} in {row['precision']}", _reason(row, before)
    slower = slower_than_dense(what, ours["median"], theirs["median"], where=words(row), reason=reason)
    if slower is not None and row["precision"] == before["precision"]:
        return slower
    # faster even if one was lucky and the other was not
    if ours["p80"] < theirs["p20"]:
        return None
    faster = "not clearly faster" if ours["median"] < theirs["median"] else "NOT faster"
    return (
        f"{what} is {faster} than {before['model']} in {before['precision']} "
        f"({words(row)}): {ours['median']:.2f} against {theirs['median']:.2f} ms"
        f"{f' ({reason})' if reason else ''}."
    )


def _befores(row: Mapping[str, Any], case: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The rows that a row should be faster than: the dense model of its precision, and on a CPU itself in float32.

    On a GPU every model can run in bfloat16, and only the dense one is compared with itself.
    """
    if row is case[0]:
        return
    dense = next(other for other in case if other["precision"] == row["precision"])
    if row is not dense:
        yield dense
    if row["precision"] != "float32" and (row["device"] == "cpu" or row is dense):
        yield next(other for other in case if other["model"] == row["model"] and other["precision"] == "float32")


def _reason(row: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    if row["precision"] == "int8" and not can_multiply_bytes():
        return "this processor has no instructions for int8"
    if row["precision"] == before["precision"] and row["parameters"] >= before["parameters"]:
        return "its matrices are no smaller"
    if before["milliseconds"]["median"] < FAST:
        return "calls as short as this are mostly overhead"
    if row["milliseconds"]["median"] < before["milliseconds"]["median"]:
        return "the spread is larger than the difference; repeat it on a quiet machine"
    return ""


def words(case: Mapping[str, Any]) -> str:
    """A case in words."""
    return f"{case['engine']}, batch {case['batch']} x {case['length']}, {place(case)}"


def place(case: Mapping[str, Any]) -> str:
    """Where a case is timed."""
    return f"{case['threads']} thread{'s' * (case['threads'] > 1)}" if case["device"] == "cpu" else case["device"]


@contextlib.contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
