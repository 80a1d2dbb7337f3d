"""Fused layers for inference: layers that read the same input are computed together, in fewer and larger products.

In a decoder those are q, k and v, and gate and up. On a GPU that decodes a few tokens, the time of a low-rank layer is
that of starting two small products; `rankwise.kernels.low_rank` does the first factors of a group in one, and the
second factors in another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from rankwise.errors import RankwiseError
from rankwise.kernels.low_rank import LowRankGroup, Part
from rankwise.lazy import lazy_weight
from rankwise.measure import call_model, evaluating
from rankwise.modules import LowRankLinear, PivotLinear, is_observed
from rankwise.swap import become

Layer: TypeAlias = nn.Linear | LowRankLinear


class LinearGroup(nn.Module):
    """Dense linear layers that read the same input, as one product."""

    def __init__(self, weights: Sequence[Tensor], bias_O: Tensor | None) -> None:
        super().__init__()
        self.outputs = [len(weight) for weight in weights]
        self.weight = nn.Parameter(torch.cat([weight.detach() for weight in weights]), requires_grad=False)
        self.bias = None if bias_O is None else nn.Parameter(bias_O, requires_grad=False)

    def outputs_of(self, x_BI: Tensor) -> tuple[Tensor, ...]:
        """The outputs of each layer."""
        return torch.split(F.linear(x_BI, self.weight, self.bias), self.outputs, -1)


class SharedInput(nn.Module):
    """A group of layers, of which the first that is called with an input computes the outputs of all."""

    def __init__(self, group: LinearGroup | LowRankGroup) -> None:
        super().__init__()
        self.group, self.outputs = group, group.outputs
        self._last: tuple[Tensor, int | None, tuple[Tensor, ...]] | None = None

    def take(self, x_BI: Tensor, index: int) -> Tensor:
        """The output of one layer. What is kept of the last input goes when the last layer has taken its output."""
        # read and written as a whole, so that calls in other threads cannot mix inputs and outputs
        last, version = self._last, _version(x_BI)
        if last is None or last[0] is not x_BI or last[1] != version:
            last = (x_BI, version, self.group.outputs_of(x_BI))
        self._last = None if index == len(self.outputs) - 1 else last
        return last[2][index]


def _version(x: Tensor) -> int | None:
    """How often a tensor was changed in place; unknown in a compiled graph and in inference mode."""
    return None if torch.compiler.is_compiling() or x.is_inference() else x._version


class FusedLayer(nn.Module):
    """One layer of a group."""

    def __init__(self, shared: SharedInput, index: int, in_features: int) -> None:
        super().__init__()
        self.shared, self.index = shared, index
        self.in_features, self.out_features = in_features, shared.outputs[index]

    @property
    def weight(self) -> Tensor:
        """The matrix multiplied out, O x I."""
        like = next(self.shared.parameters())

        def whole() -> Tensor:
            one = torch.eye(self.in_features, dtype=like.dtype, device=like.device)
            y_IO = self.shared.group.outputs_of(one)[self.index]
            return (y_IO if self.bias is None else y_IO - self.bias).t()

        return lazy_weight(whole, (self.out_features, self.in_features), like)

    @property
    def bias(self) -> Tensor | None:
        bias_O = self.shared.group.bias
        return None if bias_O is None else torch.split(bias_O, self.shared.outputs)[self.index]

    def forward(self, x_BI: Tensor) -> Tensor:
        return self.shared.take(x_BI, self.index)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, index={self.index}"


def fuse_layers(model: nn.Module, example: Any = None) -> nn.Module:
    """Fuse the linear layers of `model` that read the same input, in place, for faster inference; returns `model`.

    Low-rank layers become two products per group, dense layers one. Outputs stay the same up to rounding. The model can
    be compiled, captured as a CUDA graph and used by `generate`, but no longer be saved, and none of its parameters
    requires a gradient any more.

    Args:
        example: a batch of input for `model`, which shows the layers that read the same tensor. Default: what a model
            of transformers gives as its `dummy_inputs`.
    """
    if is_fused(model):
        return model
    if example is None:
        example = getattr(model, "dummy_inputs", None)
        if example is None:
            raise RankwiseError(
                "`fuse_layers` needs a batch of input to see which layers read the same tensor, but there is none. "
                "Pass it as `example`."
            )
    for layers in _groups(model, example):
        group = _group(layers)
        if group is not None:
            shared = SharedInput(group)
            fused = [FusedLayer(shared, i, layer.in_features) for i, layer in enumerate(layers)]
            for layer, one in zip(layers, fused, strict=True):
                become(layer, one)
    return model.requires_grad_(False)


def is_fused(model: nn.Module) -> bool:
    """Whether layers of `model` are fused."""
    return any(isinstance(module, SharedInput) for module in model.modules())


def check_not_fused(model: nn.Module) -> None:
    """Refuse to save a model whose layers are fused: its parameters are no longer those of its layers."""
    if is_fused(model):
        raise RankwiseError(
            "A model must not be fused to be saved, but this one went through `fuse_layers`. Save it before, or fuse a "
            "copy of it."
        )


def _groups(model: nn.Module, example: Any) -> list[list[Layer]]:
    """Layers that read the same tensor, in the order in which they are called: dense and low-rank ones apart."""
    calls: list[tuple[Layer, Tensor | None, int | None]] = []

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        # none if it is given by name
        x = args[0] if args else None
        # the tensor is kept, so that no other one gets its id; between two calls it may be changed in place
        calls.append((module, x, None if x is None else _version(x)))  # type: ignore[arg-type]

    layers = list(_fusible(model))
    handles = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        # tensors of inference mode do not say whether they were changed
        with evaluating(model), torch.inference_mode(False), torch.no_grad():
            given = dict(example) if isinstance(example, Mapping) else example
            device = next(model.parameters()).device
            call_model(model, tree_map_only(Tensor, lambda x: x.to(device), given))
    finally:
        for handle in handles:
            handle.remove()
    times = Counter(layer for layer, _, _ in calls)
    groups: dict[tuple[object, ...], list[Layer]] = {}
    for layer, x, version in calls:
        if times[layer] == 1 and x is not None:
            weight = next(layer.parameters())
            key = (id(x), version, isinstance(layer, LowRankLinear), weight.dtype, weight.device)
            groups.setdefault(key, []).append(layer)
    return list(groups.values())


def _fusible(model: nn.Module) -> Iterable[Layer]:
    """Linear layers that nobody observes and that share no weight with another module."""
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside or (type(module) is not nn.Linear and not isinstance(module, LowRankLinear)):
            continue
        inside |= {id(part) for part in module.modules()}
        alone = all(holders[id(parameter)] == 1 for parameter in module.parameters())
        if alone and not any(map(is_observed, module.modules())):
            yield module


def _group(layers: Sequence[Layer]) -> LinearGroup | LowRankGroup | None:
    """The layers as one group; None if a dense layer stays alone."""
    biases = [layer.bias for layer in layers]
    bias_O = None
    if any(bias is not None for bias in biases):
        like = next(layers[0].parameters())
        zeros = [like.new_zeros(layer.out_features) for layer in layers]
        bias_O = torch.cat([zero if bias is None else bias.detach() for bias, zero in zip(biases, zeros, strict=True)])
    if isinstance(layers[0], LowRankLinear):
        return LowRankGroup([part_of(layer) for layer in layers if isinstance(layer, LowRankLinear)], bias_O)
    return LinearGroup([layer.weight for layer in layers], bias_O) if len(layers) > 1 else None


def part_of(layer: LowRankLinear) -> Part:
    """The factors of a layer as a part of a group."""
    first, second = layer.factors
    if isinstance(second, PivotLinear):
        return Part(first.weight, second.coefficients, second.places)
    return Part(first.weight, second.weight)
