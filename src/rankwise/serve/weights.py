"""The weights of a vLLM layer that holds matrices of several forms, and how they are filled from a folder.

vLLM merges some layers into one (queries, keys and values; gate and up) and hands over their tensors by name, with the
number of the part. A tensor that has no parameter of its own shape is received by an empty one of its name.

Shapes: I = inputs, R = rows of all first factors, K = rank of one part, O = its outputs (padded ones included).
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
    PivotEmbedding,
    PivotPair,
    Selected,
    is_order,
)
from rankwise.errors import CheckpointError
from rankwise.serve.grouped import Second

Fill = Callable[[Tensor, Any], None]
"""Takes a tensor of the folder and the number (or letter) of the part that it belongs to."""
LETTERS = {"q": 0, "k": 1, "v": 2}
AGAIN = "Save the model again or download it again."


@dataclass(frozen=True)
class Part:
    """One matrix of the saved model, which may be merged with others into one layer of vLLM."""

    name: str
    """In the folder."""
    outputs: int
    """With the padding that vLLM adds to a vocabulary."""
    form: Linear | None
    """None: one dense matrix, as the model's class builds it."""

    @property
    def rank(self) -> int | None:
        return self.form.rank if isinstance(self.form, LowRankLinear) else None

    @property
    def rows(self) -> int:
        """Rows of the first factor."""
        return self.outputs if self.rank is None else self.rank


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


def copy_rows(target: Tensor, loaded: Tensor, name: str) -> None:
    """Fill the first rows; those that vLLM pads a vocabulary with are zero."""
    if loaded.shape[1:] != target.shape[1:] or loaded.shape[0] > target.shape[0]:
        raise CheckpointError(
            f"{name} must be {list(target.shape)} as config.json says, but is {list(loaded.shape)}. {AGAIN}"
        )
    target[: loaded.shape[0]].copy_(loaded)
    target[loaded.shape[0] :].zero_()


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
        """P multiplied out, O x K."""
        assert self.weight is not None
        if self.places is None:
            return self.weight
        one = torch.eye(self.rows, dtype=self.weight.dtype, device=self.weight.device)
        return torch.cat([one, self.weight]).index_select(0, self.places)

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of its tensors in a folder."""
        if self.weight is None:
            return ()
        return ("weight",) if self.places is None else ("coefficients", "places")

    @torch.no_grad()
    def fill(self, key: str, loaded: Tensor, name: str) -> None:
        assert self.weight is not None
        if key != "places":
            copy_rows(self.weight, loaded, name)
            return
        assert self.places is not None
        if loaded.dim() != 1 or len(loaded) > len(self.places) or not is_order(loaded):
            raise CheckpointError(f"{name} must be an order of the layer's outputs. {AGAIN}")
        self.places[: len(loaded)].copy_(loaded)


class GroupedWeights:
    """The weights of one vLLM layer: first factors of all its parts in one matrix, second ones part by part."""

    def __init__(
        self, layer: nn.Module, parts: Sequence[Part], inputs: int, dtype: torch.dtype, missing: Missing
    ) -> None:
        self.layer, self.parts, self.inputs, self.missing = layer, parts, inputs, missing
        self.columns: dict[int, Tensor] = {}
        self.kept: dict[int, Tensor] = {}
        # the names "0" and "1" are those of the factors in a folder
        first, second = nn.Module(), nn.Module()
        rows = sum(part.rows for part in parts)
        stacked = nn.Parameter(torch.zeros(rows, inputs, dtype=dtype), requires_grad=False)
        first.weight = filled_by(lambda loaded, shard: self._fill_first("0.weight", loaded, shard), stacked)
        self.factors = nn.ModuleList(
            SecondFactor(part.rank, part.outputs, isinstance(part.form, PivotPair), dtype) for part in parts
        )
        for key, kind in (("weight", dtype), ("coefficients", dtype), ("places", torch.int32), ("bias", dtype)):
            second.register_parameter(key, receiver(self._filler(key), kind))
        layer.add_module("0", first)
        layer.add_module("1", second)
        layer.add_module("second", self.factors)
        if any(part.rank is None for part in parts):
            layer.register_parameter("weight", receiver(self._fill_whole, dtype))
        if any(isinstance(part.form, Selected) for part in parts):
            layer.register_parameter("kept", receiver(self._fill_kept, torch.bool))
        self._wait()

    def _wait(self) -> None:
        for part, factor in zip(self.parts, self._second_factors(), strict=True):
            keys = ["weight"] if part.rank is None else ["0.weight", *(f"1.{key}" for key in factor.keys)]
            if isinstance(part.form, Selected):
                keys.append("kept")
            if part.form is not None and part.form.bias and part.rank is not None:
                keys.append("1.bias")
            self.missing.names |= {f"{part.name}.{key}" for key in keys}

    def _second_factors(self) -> list[SecondFactor]:
        return [factor for factor in self.factors if isinstance(factor, SecondFactor)]

    @property
    def first(self) -> Tensor:
        """All first factors, R x I."""
        found = self.layer.get_submodule("0").weight
        assert isinstance(found, Tensor)
        return found

    @torch.no_grad()
    def _fill_first(self, key: str, loaded: Tensor, shard: Any) -> None:
        index = index_of(shard)
        start = sum(part.rows for part in self.parts[:index])
        part = self.parts[index]
        copy_rows(self.first.narrow(0, start, part.rows), loaded, f"{part.name}.{key}")
        self.missing.done(f"{part.name}.{key}")

    def _fill_whole(self, loaded: Tensor, shard: Any) -> None:
        index = index_of(shard)
        if isinstance(self.parts[index].form, Selected):
            self.columns[index] = loaded.detach().clone()
            self._spread(index, shard)
        else:
            self._fill_first("weight", loaded, shard)

    def _fill_kept(self, loaded: Tensor, shard: Any) -> None:
        index = index_of(shard)
        self.kept[index] = loaded.detach().clone()
        self._spread(index, shard)

    def _spread(self, index: int, shard: Any) -> None:
        """Write a matrix that reads some of its inputs as a dense one, once both of its tensors are here."""
        if index not in self.columns or index not in self.kept:
            return
        name = self.parts[index].name
        columns, kept = self.columns.pop(index), self.kept.pop(index)
        if kept.shape != (self.inputs,) or int(kept.sum()) != columns.shape[1]:
            raise CheckpointError(f"{name} must keep {columns.shape[1]} of {self.inputs} inputs, but does not. {AGAIN}")
        whole = columns.new_zeros(columns.shape[0], self.inputs)
        whole[:, kept.bool().to(columns.device)] = columns
        self.missing.done(f"{name}.kept")
        self._fill_first("weight", whole, shard)

    def _filler(self, key: str) -> Fill:
        def fill(loaded: Tensor, shard: Any) -> None:
            part = self.parts[index_of(shard)]
            if key == "bias":
                bias: Any = self.layer.bias
                bias.weight_loader(bias, loaded, *(() if shard is None else (shard,)))
            else:
                self._second_factors()[index_of(shard)].fill(key, loaded, f"{part.name}.1.{key}")
            self.missing.done(f"{part.name}.1.{key}")

        return fill


class WordWeights:
    """A table of narrow words and the matrix that widens them, under given names in a layer of vLLM."""

    def __init__(
        self,
        layer: nn.Module,
        name: str,
        form: LowRankEmbedding,
        padded: int,
        dtype: torch.dtype,
        missing: Missing,
        children: tuple[str, str] = ("0", "1"),
    ) -> None:
        self.missing = missing
        first, second = nn.Module(), nn.Module()
        self.table = nn.Parameter(torch.zeros(padded, form.rank, dtype=dtype), requires_grad=False)
        self.factor = SecondFactor(form.rank, form.width, isinstance(form, PivotEmbedding), dtype)
        words = f"{name}.{children[0]}.weight"

        @torch.no_grad()
        def fill_words(loaded: Tensor, shard: Any) -> None:
            copy_rows(self.table, loaded, words)
            self.missing.done(words)

        first.weight = filled_by(fill_words, self.table)
        for key in self.factor.keys:
            wide = f"{name}.{children[1]}.{key}"
            kind = torch.int32 if key == "places" else dtype
            second.register_parameter(key, receiver(self._filler(key, wide), kind))
            self.missing.names.add(wide)
        self.missing.names.add(words)
        layer.add_module(children[0], first)
        layer.add_module(children[1], second)
        layer.add_module("second", self.factor)

    def _filler(self, key: str, name: str) -> Fill:
        def fill(loaded: Tensor, shard: Any) -> None:
            self.factor.fill(key, loaded, name)
            self.missing.done(name)

        return fill
