"""The structure of a compact model: what each of its layers is, in words that JSON can hold.

It is read from the model alone, which bears no trace of pruning. A layer has a role in the model (its inputs, outputs
and bias), which pruning never changes, and a form (one matrix, two factors, selected inputs), which it may.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rankwise.deploy.fuse import check_not_fused
from rankwise.errors import CheckpointError, InvalidValueError
from rankwise.modules import LowRankHead, PivotLinear, SelectedLinear, embedding, joined, linear, runs_in_order

Find = Callable[[str], nn.Module]
"""The module of that name in the model that is being made."""


@dataclass(frozen=True)
class Role:
    """What a layer does for the model around it."""

    name: str
    size: tuple[int, int]
    bias: bool = False

    def __str__(self) -> str:
        first, second = self.size
        return f"{self.name} {first} -> {second}{' with bias' if self.bias else ''}"


@dataclass(frozen=True, kw_only=True)
class Layer(ABC):
    """One layer of a compact model. Its fields are what is written of it."""

    kind: ClassVar[str]

    @property
    @abstractmethod
    def role(self) -> Role:
        """What the layer does, whatever its form."""

    @abstractmethod
    def build(self, like: Tensor, find: Find) -> nn.Module:
        """A layer of this form whose parameters wait to be filled: they have the device and the mode of `like`."""

    def __str__(self) -> str:
        return f"{self.kind} ({', '.join(f'{name} {value}' for name, value in dataclasses.asdict(self).items())})"


@dataclass(frozen=True, kw_only=True)
class Linear(Layer):
    kind = "linear"
    inputs: int
    outputs: int
    bias: bool

    @property
    def role(self) -> Role:
        return Role("linear", (self.inputs, self.outputs), self.bias)

    def build(self, like: Tensor, find: Find) -> nn.Module:
        return linear(_waiting(like, self.outputs, self.inputs), _bias(like, self.outputs, self.bias))


@dataclass(frozen=True, kw_only=True)
class LowRankLinear(Linear):
    """`rankwise.modules.LowRankLinear` of two stock layers."""

    kind = "low_rank_linear"
    rank: int

    def build(self, like: Tensor, find: Find) -> nn.Module:
        first = linear(_waiting(like, self.rank, self.inputs), None)
        return joined(first, linear(_waiting(like, self.outputs, self.rank), _bias(like, self.outputs, self.bias)))


@dataclass(frozen=True, kw_only=True)
class PivotPair(LowRankLinear):
    """`rankwise.modules.LowRankLinear` whose second layer is a `PivotLinear`."""

    kind = "pivot_linear"

    def build(self, like: Tensor, find: Find) -> nn.Module:
        first = linear(_waiting(like, self.rank, self.inputs), None)
        return joined(first, _pivot(like, self.outputs, self.rank, _bias(like, self.outputs, self.bias)))


@dataclass(frozen=True, kw_only=True)
class Selected(Linear):
    """`rankwise.modules.SelectedLinear`."""

    kind = "selected_linear"
    kept: int

    def build(self, like: Tensor, find: Find) -> nn.Module:
        mask = torch.arange(self.inputs, device=None if like.is_meta else like.device) < self.kept
        return SelectedLinear(_waiting(like, self.outputs, self.kept), mask, _bias(like, self.outputs, self.bias))


@dataclass(frozen=True, kw_only=True)
class Head(Linear):
    """`rankwise.modules.LowRankHead`."""

    kind = "low_rank_head"
    rank: int
    embedding: str | None
    """Name of the embedding it is tied to; None where the head alone holds it."""
    projection: str | None

    def build(self, like: Tensor, find: Find) -> nn.Module:
        words = (
            embedding(_waiting(like, self.outputs, self.rank), None) if self.embedding is None else find(self.embedding)
        )
        projection = self._projection(like) if self.projection is None else find(self.projection)
        if not isinstance(words, nn.Embedding) or not isinstance(projection, nn.Linear | PivotLinear):
            raise CheckpointError(f"{self.embedding} and {self.projection} are {words} and {projection}")
        return LowRankHead(words, projection, _bias(like, self.outputs, self.bias))

    def _projection(self, like: Tensor) -> nn.Module:
        return linear(_waiting(like, self.inputs, self.rank), None)


@dataclass(frozen=True, kw_only=True)
class PivotHead(Head):
    """The same with a `rankwise.modules.PivotLinear` of its own as projection."""

    kind = "pivot_head"

    def _projection(self, like: Tensor) -> nn.Module:
        return _pivot(like, self.inputs, self.rank, None)


@dataclass(frozen=True, kw_only=True)
class Embedding(Layer):
    kind = "embedding"
    words: int
    width: int
    padding_idx: int | None

    @property
    def role(self) -> Role:
        return Role("embedding", (self.words, self.width))

    def build(self, like: Tensor, find: Find) -> nn.Module:
        return embedding(_waiting(like, self.words, self.width), self.padding_idx)


@dataclass(frozen=True, kw_only=True)
class LowRankEmbedding(Embedding):
    """`rankwise.modules.LowRankEmbedding` of two stock layers."""

    kind = "low_rank_embedding"
    rank: int

    def build(self, like: Tensor, find: Find) -> nn.Module:
        words = embedding(_waiting(like, self.words, self.rank), self.padding_idx)
        return joined(words, linear(_waiting(like, self.width, self.rank), None))


@dataclass(frozen=True, kw_only=True)
class PivotEmbedding(LowRankEmbedding):
    """`rankwise.modules.LowRankEmbedding` whose second layer is a `PivotLinear`."""

    kind = "pivot_embedding"

    def build(self, like: Tensor, find: Find) -> nn.Module:
        words = embedding(_waiting(like, self.words, self.rank), self.padding_idx)
        return joined(words, _pivot(like, self.width, self.rank, None))


KINDS: dict[str, type[Layer]] = {
    layer.kind: layer
    for layer in (
        *(Linear, LowRankLinear, PivotPair, Selected, Head, PivotHead),
        *(Embedding, LowRankEmbedding, PivotEmbedding),
    )
}


def _waiting(like: Tensor, *shape: int) -> nn.Parameter:
    """A parameter without memory of its own, to be replaced."""
    return nn.Parameter(torch.empty((), device=like.device).expand(shape), like.requires_grad)


def _pivot(like: Tensor, outputs: int, rank: int, bias: nn.Parameter | None) -> PivotLinear:
    places = torch.arange(outputs, dtype=torch.int32, device=None if like.is_meta else like.device)
    return PivotLinear(_waiting(like, outputs - rank, rank), places, bias)


def _bias(like: Tensor, size: int, wanted: bool) -> nn.Parameter | None:
    return _waiting(like, size) if wanted else None


def walk(model: nn.Module, instead: Mapping[int, nn.Module] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Every module under every name it has, parents first; `instead` names some that stand for others, by identity."""
    stands = instead or {}
    queue = [("", model)]
    while queue:
        name, found = queue.pop()
        module = stands.get(id(found), found)
        yield name, module
        children = [
            (f"{name}.{key}" if name else key, child) for key, child in module._modules.items() if child is not None
        ]
        queue.extend(reversed(children))


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and persistent buffers that `module` itself holds."""
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and name not in module._non_persistent_buffers_set:
            yield name, tensor


def computed_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that `module` itself holds and computes again whenever it is built: they are not saved."""
    for name in sorted(module._non_persistent_buffers_set):
        buffer = module._buffers.get(name)
        if buffer is not None:
            yield name, buffer


def layers_of(model: nn.Module) -> dict[str, Layer]:
    """Every layer of `model` that pruning could have made, under every name it has."""
    check_not_fused(model)
    modules = dict(walk(model))
    layers = {name: layer for name, module in modules.items() if (layer := layer_of(module)) is not None}
    wholes = [name for name, layer in layers.items() if isinstance(layer, LowRankLinear | LowRankEmbedding | Head)]
    inside = {f"{whole}.{child}".lstrip(".") for whole in wholes for child in modules[whole]._modules}
    heads = {name for name, layer in layers.items() if isinstance(layer, Head)}

    def outside(part: nn.Embedding | nn.Linear | PivotLinear) -> str | None:
        if isinstance(part, PivotLinear):
            return None
        alike = (name for name, module in modules.items() if module._parameters.get("weight") is part.weight)
        return next((name for name in alike if name.rpartition(".")[0] not in heads), None)

    for name in heads:
        head, layer = modules[name], layers[name]
        assert isinstance(head, LowRankHead)
        assert isinstance(layer, Head)
        words, projection = outside(head.embedding), outside(head.projection)
        layers[name] = dataclasses.replace(layer, embedding=words, projection=projection)
    return {name: layer for name, layer in layers.items() if name not in inside}


def layer_of(module: nn.Module) -> Layer | None:
    """What a module is, if pruning could have made it."""
    if isinstance(module, LowRankHead):
        words, rank = module.embedding.weight.shape
        width, bias = module.projection.out_features, module.bias is not None
        head = PivotHead if isinstance(module.projection, PivotLinear) else Head
        return head(inputs=width, outputs=words, bias=bias, rank=rank, embedding=None, projection=None)
    if isinstance(module, SelectedLinear):
        outputs, kept = module.columns.shape
        return Selected(inputs=module.kept.numel(), outputs=outputs, bias=module.bias is not None, kept=kept)
    # a parametrized or wrapped layer holds other parameters
    if isinstance(module, nn.Linear) and set(module._parameters) == {"weight", "bias"}:
        outputs, inputs = module.weight.shape
        return Linear(inputs=inputs, outputs=outputs, bias=module.bias is not None)
    if isinstance(module, nn.Embedding) and set(module._parameters) == {"weight"}:
        words, width = module.weight.shape
        return Embedding(words=words, width=width, padding_idx=module.padding_idx)
    if runs_in_order(module) and isinstance(module, nn.Sequential) and len(module) == 2:
        if isinstance(module[1], PivotLinear):
            return _pivot_pair_of(layer_of(module[0]), module[1])
        return _pair_of(layer_of(module[0]), layer_of(module[1]))
    return None


def _pivot_pair_of(first: Layer | None, second: PivotLinear) -> Layer | None:
    rank, outputs, bias = second.in_features, second.out_features, second.bias is not None
    if type(first) is Linear and not first.bias and first.outputs == rank:
        return PivotPair(inputs=first.inputs, outputs=outputs, bias=bias, rank=rank)
    if type(first) is Embedding and not bias and first.width == rank:
        return PivotEmbedding(words=first.words, width=outputs, padding_idx=first.padding_idx, rank=rank)
    return None


def _pair_of(first: Layer | None, second: Layer | None) -> Layer | None:
    if type(second) is not Linear:
        return None
    if type(first) is Linear and not first.bias and first.outputs == second.inputs:
        return LowRankLinear(inputs=first.inputs, outputs=second.outputs, bias=second.bias, rank=second.inputs)
    if type(first) is Embedding and not second.bias and first.width == second.inputs:
        rank, padding_idx = second.inputs, first.padding_idx
        return LowRankEmbedding(words=first.words, width=second.outputs, padding_idx=padding_idx, rank=rank)
    return None


def role_of(module: nn.Module) -> Role | None:
    """What a module does for the model around it, if pruning could have changed its form."""
    layer = layer_of(module)
    if layer is not None:
        return layer.role
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        inputs, outputs = module.weight.shape  # type: ignore[misc]
        return Role("linear", (inputs, outputs), True)
    return None


def to_json(layer: Layer) -> dict[str, Any]:
    """A layer as JSON holds it."""
    return {"kind": layer.kind, **dataclasses.asdict(layer)}


def from_json(entry: Any) -> Layer:
    """The layer that `to_json` wrote; refuses anything else."""
    values = dict(entry) if isinstance(entry, dict) else {}
    kind = KINDS.get(str(values.pop("kind", None)))
    if kind is None:
        raise CheckpointError(f"a layer must be one of {', '.join(KINDS)}, but is {entry!r}")
    types = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    if values.keys() != types.keys() or not all(_is(value, types[name]) for name, value in values.items()):
        raise CheckpointError(f"a {kind.kind} must have {', '.join(types)}, but is {entry!r}")
    return kind(**values)


def _is(value: object, type_name: str) -> bool:
    if type_name.endswith("| None") and value is None:
        return True
    if type_name.startswith("int"):
        return type(value) is int and value >= 0
    return type(value) is {"bool": bool, "str | None": str}[type_name]


def is_order(places: Tensor) -> bool:
    """Whether a tensor holds the numbers 0 to n - 1, each once: what `PivotLinear` needs to read its outputs by."""
    if places.dtype is not torch.int32:
        return False
    return torch.equal(places.sort().values, torch.arange(len(places), dtype=torch.int32, device=places.device))


def floating_dtype(name: object) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InvalidValueError(f"a dtype must be a floating one of torch, but is {name!r}")
    return dtype
