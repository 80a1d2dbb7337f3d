"""The weights of a vLLM layer that holds matrices of several forms, and how they are filled from a folder.

vLLM merges some layers into one (queries, keys and values; gate and up) and hands over their tensors by name, with the
number of the part. A tensor that has no parameter of its own shape is received by an empty one of its name. With tensor
parallelism a device has some of the outputs of a matrix, or some of its inputs: some rows of P, or some columns of Q.

Shapes: I = inputs here, R = rows of all first factors, K = rank of one part, O = its outputs here (padding included).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.deploy.structure import (
    Linear,
    LowRankEmbedding,
    LowRankLinear,
    PivotPair,
    Selected,
)
from rankwise.errors import CheckpointError
from rankwise.serve.grouped import Second

Fill = Callable[[Tensor, Any], None]
"""Takes a tensor of the folder and the number (or letter) of the part that it belongs to."""
LETTERS = {"q": 0, "k": 1, "v": 2}
AGAIN = "Save the model again or download it again."


@dataclass(frozen=True)
class Span:
    """Which of the outputs, inputs or words of a whole matrix are here."""

    start: int
    stop: int
    whole: int

    @property
    def is_whole(self) -> bool:
        return (self.start, self.stop) == (0, self.whole)

    def of(self, tensor: Tensor, dim: int) -> Tensor:
        """The part of `tensor` that is here."""
        return tensor.narrow(dim, self.start, self.stop - self.start)


@dataclass(frozen=True)
class Part:
    """One matrix of the saved model, which may be merged with others into one layer of vLLM."""

    name: str
    """In the folder."""
    form: Linear | None
    """None: one dense matrix, as the model's class builds it."""
    span: Span
    """Of its outputs."""
    outputs: int
    """How many outputs are here, with the padding that vLLM adds to a vocabulary."""

    @property
    def rank(self) -> int | None:
        return self.form.rank if isinstance(self.form, LowRankLinear) else None

    @property
    def rows(self) -> int:
        """Rows of the first factor."""
        return self.outputs if self.rank is None else self.rank

    @property
    def pivot(self) -> bool:
        return isinstance(self.form, PivotPair)


class Missing:
    """The tensors of a model that are not loaded yet."""

    def __init__(self, before: Callable[[], None]) -> None:
        self.names: set[str] = set()
        self.filled = False
        self.before = before
        """Called before the first tensor is taken, when all layers are there."""

    def done(self, name: str) -> None:
        if not self.filled:
            self.before()
            self.filled = True
        self.names.discard(name)

    def check(self) -> None:
        """Refuse a model that was not filled; with dummy weights nothing is."""
        if self.filled and self.names:
            raise CheckpointError(f"The folder must hold {min(self.names)}, but does not. {AGAIN}")


def filled_by(fill: Fill, parameter: nn.Parameter) -> nn.Parameter:
    """The parameter, with the function by which vLLM loads tensors of its name."""

    def weight_loader(_: Tensor, loaded: Tensor, shard: Any = None) -> None:
        fill(loaded, shard)

    vars(parameter)["weight_loader"] = weight_loader
    return parameter


def receiver(fill: Fill, dtype: torch.dtype) -> nn.Parameter:
    """An empty parameter that passes on what is loaded into it."""
    return filled_by(fill, nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False))


def index_of(shard: Any) -> int:
    """The number of a part, by the name that vLLM has for it."""
    number = LETTERS.get(shard, shard) if shard is not None else 0
    assert isinstance(number, int), shard
    return number


def check_shape(loaded: Tensor, shape: tuple[int, ...], name: str) -> None:
    if loaded.shape != shape:
        raise CheckpointError(f"{name} must be {list(shape)} as config.json says, but is {list(loaded.shape)}. {AGAIN}")


def check_order(places: Tensor, size: int, name: str) -> None:
    if places.shape != (size,) or places.sort().values.tolist() != list(range(size)):
        raise CheckpointError(f"{name} must be an order of the layer's outputs. {AGAIN}")


@torch.no_grad()
def copy_rows(target: Tensor, rows: Tensor) -> None:
    """Fill the first rows; those that vLLM pads a vocabulary with are zero."""
    target[: len(rows)].copy_(rows)
    target[len(rows) :].zero_()


def multiplied_out(coefficients: Tensor, places: Tensor) -> Tensor:
    """The second factor of a pivot pair as one matrix, O x K."""
    one = torch.eye(coefficients.shape[1], dtype=coefficients.dtype, device=coefficients.device)
    return torch.cat([one, coefficients]).index_select(0, places)


class SecondFactor(nn.Module):
    """The second factor of one part: P, or the coefficients and places of a pivot pair; nothing for a dense matrix."""

    def __init__(self, rank: int | None, outputs: int, pivot: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.rows = outputs if rank is None else rank
        self.weight: nn.Parameter | None = None
        self.places: nn.Parameter | None = None
        if rank is not None:
            size = outputs - rank if pivot else outputs
            self.weight = nn.Parameter(torch.zeros(size, rank, dtype=dtype), requires_grad=False)
        if pivot:
            self.places = nn.Parameter(torch.arange(outputs, dtype=torch.int32), requires_grad=False)

    @property
    def value(self) -> Second:
        return Second(self.rows, self.weight, self.places)

    @property
    def matrix(self) -> Tensor:
        """P as one matrix, O x K."""
        assert self.weight is not None
        return self.weight if self.places is None else multiplied_out(self.weight, self.places)

    def fill(self, tensors: dict[str, Tensor], span: Span, name: str) -> bool:
        """Take P or both tensors of a pivot layer, whole as they were saved; False where one is still to come."""
        assert self.weight is not None
        if "weight" in tensors:
            check_shape(tensors["weight"], (span.whole, self.rows), f"{name}.weight")
            copy_rows(self.weight, span.of(tensors["weight"], 0))
            return True
        if len(tensors) < 2:
            return False
        coefficients, places = tensors["coefficients"], tensors["places"]
        check_shape(coefficients, (span.whole - self.rows, self.rows), f"{name}.coefficients")
        check_order(places, span.whole, f"{name}.places")
        if self.places is None:
            copy_rows(self.weight, multiplied_out(coefficients, span.of(places, 0)))
        else:
            copy_rows(self.weight, coefficients)
            self.places.data[: len(places)].copy_(places)
        return True


class GroupedWeights:
    """The weights of one vLLM layer: first factors of all its parts in one matrix, second ones part by part."""

    def __init__(
        self, layer: nn.Module, parts: Sequence[Part], inputs: Span, dtype: torch.dtype, missing: Missing
    ) -> None:
        self.layer, self.parts, self.inputs, self.missing = layer, parts, inputs, missing
        self.arrived: dict[int, dict[str, Tensor]] = {index: {} for index in range(len(parts))}
        """Tensors that wait for another one of their part."""
        self.first = nn.Parameter(
            torch.zeros(sum(part.rows for part in parts), inputs.stop - inputs.start, dtype=dtype), requires_grad=False
        )
        self.factors = [
            SecondFactor(part.rank, part.outputs, part.pivot and part.span.is_whole, dtype) for part in parts
        ]
        first, second = nn.Module(), nn.Module()
        first.weight = filled_by(self._fill_first, self.first)
        for key, kind in (("weight", dtype), ("coefficients", dtype), ("places", torch.int32)):
            second.register_parameter(key, receiver(self._second_filler(key), kind))
        second.register_parameter("bias", receiver(self._fill_bias, dtype))
        # the names "0" and "1" are those of the factors in a folder
        layer.add_module("0", first)
        layer.add_module("1", second)
        layer.add_module("second", nn.ModuleList(self.factors))
        if any(part.rank is None for part in parts):
            layer.register_parameter("weight", receiver(self._dense_filler("weight"), dtype))
        if any(isinstance(part.form, Selected) for part in parts):
            layer.register_parameter("kept", receiver(self._dense_filler("kept"), torch.bool))
        for part in parts:
            missing.names |= {f"{part.name}.{key}" for key in _keys_of(part)}

    def _take(self, rows: Tensor, index: int) -> None:
        """Copy the rows of one part into the matrix of all first factors."""
        start = sum(part.rows for part in self.parts[:index])
        copy_rows(self.first.data.narrow(0, start, self.parts[index].rows), self.inputs.of(rows, 1))

    def _fill_first(self, loaded: Tensor, shard: Any) -> None:
        index = index_of(shard)
        part = self.parts[index]
        check_shape(loaded, (part.rows, self.inputs.whole), f"{part.name}.0.weight")
        self._take(loaded, index)
        self.missing.done(f"{part.name}.0.weight")

    def _second_filler(self, key: str) -> Fill:
        def fill(loaded: Tensor, shard: Any) -> None:
            index = index_of(shard)
            part = self.parts[index]
            self.arrived[index][key] = loaded
            if self.factors[index].fill(self.arrived[index], part.span, f"{part.name}.1"):
                self.arrived[index] = {}
            self.missing.done(f"{part.name}.1.{key}")

        return fill

    def _dense_filler(self, key: str) -> Fill:
        def fill(loaded: Tensor, shard: Any) -> None:
            index = index_of(shard)
            part, arrived = self.parts[index], self.arrived[index]
            arrived[key] = loaded
            if not isinstance(part.form, Selected):
                check_shape(loaded, (part.span.whole, self.inputs.whole), f"{part.name}.weight")
                self._take(part.span.of(loaded, 0), index)
                self.arrived[index] = {}
            elif len(arrived) == 2:
                check_shape(arrived["weight"], (part.span.whole, part.form.kept), f"{part.name}.weight")
                check_shape(arrived["kept"], (self.inputs.whole,), f"{part.name}.kept")
                self._take(part.span.of(spread(arrived["weight"], arrived["kept"], part.name), 0), index)
                self.arrived[index] = {}
            self.missing.done(f"{part.name}.{key}")

        return fill

    def _fill_bias(self, loaded: Tensor, shard: Any) -> None:
        bias: Any = self.layer.bias
        bias.weight_loader(bias, loaded, *(() if shard is None else (shard,)))
        self.missing.done(f"{self.parts[index_of(shard)].name}.1.bias")


def _keys_of(part: Part) -> list[str]:
    """The tensors that a folder holds of a part."""
    if part.rank is None:
        return ["weight", "kept"] if isinstance(part.form, Selected) else ["weight"]
    bias = ["1.bias"] if part.form is not None and part.form.bias else []
    return ["0.weight", *(("1.coefficients", "1.places") if part.pivot else ("1.weight",)), *bias]


def spread(columns: Tensor, kept: Tensor, name: str) -> Tensor:
    """A matrix that reads some of its inputs as a dense one, with zeros for the others."""
    if int(kept.sum()) != columns.shape[1]:
        raise CheckpointError(f"{name} must keep {columns.shape[1]} inputs, but keeps {int(kept.sum())}. {AGAIN}")
    whole = columns.new_zeros(columns.shape[0], len(kept))
    whole[:, kept.bool()] = columns
    return whole


class WordWeights:
    """A table of narrow words and the matrix that widens them, under given names in a layer of vLLM."""

    def __init__(
        self,
        layer: nn.Module,
        name: str,
        form: LowRankEmbedding,
        words: Span,
        padded: int,
        dtype: torch.dtype,
        missing: Missing,
        children: tuple[str, str] = ("0", "1"),
    ) -> None:
        self.table = nn.Parameter(torch.zeros(padded, form.rank, dtype=dtype), requires_grad=False)
        self.factor = SecondFactor(form.rank, form.width, form.pivot, dtype)
        arrived: dict[str, Tensor] = {}

        def fill_table(loaded: Tensor, shard: Any) -> None:
            check_shape(loaded, (words.whole, form.rank), f"{name}.{children[0]}.weight")
            copy_rows(self.table.data, words.of(loaded, 0))
            missing.done(f"{name}.{children[0]}.weight")

        def filler(key: str) -> Fill:
            def fill(loaded: Tensor, shard: Any) -> None:
                arrived[key] = loaded
                if self.factor.fill(arrived, Span(0, form.width, form.width), f"{name}.{children[1]}"):
                    arrived.clear()
                missing.done(f"{name}.{children[1]}.{key}")

            return fill

        first, second = nn.Module(), nn.Module()
        first.weight = filled_by(fill_table, self.table)
        keys = ("coefficients", "places") if form.pivot else ("weight",)
        for key in keys:
            second.register_parameter(key, receiver(filler(key), torch.int32 if key == "places" else dtype))
        missing.names |= {f"{name}.{children[0]}.weight", *(f"{name}.{children[1]}.{key}" for key in keys)}
        layer.add_module(children[0], first)
        layer.add_module(children[1], second)
        layer.add_module("second", self.factor)
