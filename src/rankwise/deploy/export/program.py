"""A model captured by `torch.export`: what all three formats start from.

Inputs and outputs are flat and named. What a model takes as a tuple (`memory` of Transformer-XL) becomes `memory_0`,
`memory_1`, ...; what it gives as one, likewise.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.deploy.export.attention import NothingSeen
from rankwise.deploy.export.fuse import fuse
from rankwise.deploy.export.plain import plain
from rankwise.errors import CheckpointError, InvalidTypeError, first_line
from rankwise.measure import evaluating

Inputs = Mapping[str, Any]
"""What a model is called with: tensors, or tuples of them, by the names of its arguments."""


@dataclass(frozen=True, eq=False)
class Captured:
    """A program, and the names and shapes of what goes in and comes out."""

    program: torch.export.ExportedProgram
    reference: nn.Module
    """The model itself, with flat inputs and outputs."""
    inputs: dict[str, Tensor]
    """The example."""
    expected: dict[str, Tensor]
    """What the model gives for the example as the user wrote it."""
    shapes: dict[str, list[int | str]]
    """Of each input: a number where the size is fixed, else a letter that stands for it."""
    ranges: dict[str, tuple[int, int | None]]
    """The least and the largest size that each letter may stand for."""

    @property
    def outputs(self) -> list[str]:
        """Their names."""
        return list(self.expected)


class Flat(nn.Module):
    """A model that takes named tensors and gives a tuple of tensors."""

    def __init__(self, model: nn.Module, example: Inputs) -> None:
        super().__init__()
        self.model = model
        self.lengths = {name: len(value) for name, value in example.items() if not isinstance(value, Tensor)}

    def forward(self, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        given: dict[str, Any] = dict(inputs)
        for name, length in self.lengths.items():
            given[name] = tuple(given.pop(f"{name}_{i}") for i in range(length))
        return tuple(named_outputs(self.model, self.model(**given)).values())


def flatten(inputs: Inputs) -> dict[str, Tensor]:
    """Inputs by name, tuples taken apart."""
    return _once(_flattened(inputs), "Inputs")


def _flattened(inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, tuple | list) and value and all(isinstance(part, Tensor) for part in value):
            yield from ((f"{name}_{i}", part) for i, part in enumerate(value))
        else:
            raise InvalidTypeError(
                f"`example_inputs` must hold tensors, or tuples of them, by name, but {name!r} is "
                f"{type(value).__name__} instead. Example: {{'input_ids': tokens}}."
            )


def _once(tensors: Iterator[tuple[str, Tensor]], kind: str) -> dict[str, Tensor]:
    """Tensors by name; refuses a name that two of them have."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if name in found:
            raise CheckpointError(
                f"{kind} must differ in their flat names, but two are called {name}: a part of a tuple, and another. "
                "Rename one of them."
            )
        found[name] = tensor
    return found


def capture(model: nn.Module, example_inputs: Inputs) -> Captured:
    """Capture a model with every size of its inputs left open that it leaves open.

    A size of 1 in the example counts as fixed, so give a batch and a length of 2 or more.
    """
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(f"`model` must be a torch.nn.Module, but is a {type(model).__name__} instead.")
    if not isinstance(example_inputs, Mapping) or not example_inputs:
        raise InvalidTypeError(
            f"`example_inputs` must be a dictionary of inputs by name, but is {type(example_inputs).__name__} instead. "
            "Example: {'input_ids': tokens}."
        )
    inputs = flatten(example_inputs)
    flat = Flat(plain(model), example_inputs)
    reference = Flat(model, example_inputs)
    shapes = {name: [_open_or_fixed(size) for size in tensor.shape] for name, tensor in inputs.items()}
    with quiet(), torch.no_grad(), evaluating(model):
        expected = named_outputs(model, model(**example_inputs))
        try:
            with _sizes_of_one(), NothingSeen():
                program = torch.export.export(flat, (inputs,), dynamic_shapes=(shapes,), strict=False)
        except Exception as error:
            raise CheckpointError(
                f"The model must be one that `torch.export` can capture, but it says: {first_line(error)}"
            ) from error
        fuse(program)
    return Captured(program, reference, inputs, expected, *_open_sizes(program, inputs))


def _open_or_fixed(size: int) -> Any:
    """A graph captured with a size of 1 may hold for no other, where engines repeat what has that size."""
    return torch.export.Dim.STATIC if size == 1 else torch.export.Dim.AUTO


def _open_sizes(
    program: torch.export.ExportedProgram, inputs: dict[str, Tensor]
) -> tuple[dict[str, list[int | str]], dict[str, tuple[int, int | None]]]:
    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    letters: dict[str, str] = {}
    shapes: dict[str, list[int | str]] = {}
    for name, placeholder in zip(inputs, program.graph_signature.user_inputs, strict=True):
        # a size that the model fixes is a number by now, or a symbol that says one
        sizes = [str(size) for size in values[str(placeholder)].shape]
        shapes[name] = [int(s) if s.isdigit() else letters.setdefault(s, f"n{len(letters)}") for s in sizes]
    bounds = {str(symbol): bound for symbol, bound in program.range_constraints.items()}
    ranges = {letter: _range(bounds.get(symbol)) for symbol, letter in letters.items()}
    return shapes, ranges


def _range(bounds: Any) -> tuple[int, int | None]:
    if bounds is None:
        return 1, None
    upper = str(bounds.upper)
    return max(int(bounds.lower), 1), int(upper) if upper.isdigit() else None


@contextlib.contextmanager
def _sizes_of_one() -> Iterator[None]:
    """Let a program that is captured with a batch of two hold for one, where it does."""
    from torch.fx.experimental import _config

    if hasattr(_config, "backed_size_oblivious"):
        with _config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
            yield
    else:
        yield


def named_outputs(model: nn.Module, outputs: Any) -> dict[str, Tensor]:
    """What a model gave, by name, tuples taken apart."""
    return _once(_named(model, outputs), "Outputs")


def _named(model: nn.Module, outputs: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(outputs, Tensor):
        yield "output", outputs
        return
    if isinstance(outputs, Mapping):
        parts = list(outputs.items())
    else:
        names = getattr(model, "output_names", [f"output_{i}" for i in range(len(outputs))])
        parts = list(zip(names, outputs, strict=True))
    for name, value in parts:
        if isinstance(value, Tensor):
            yield str(name), value
        elif isinstance(value, tuple | list):
            yield from ((f"{name}_{i}", part) for i, part in enumerate(value) if isinstance(part, Tensor))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep exporters' words about themselves from the user."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
