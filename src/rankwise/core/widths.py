"""Widths: the neurons of a feed-forward block and the heads of an attention block, which are pruned as a whole.

A component is a group of input features of the last matrix of a block, together with the outputs of the layers that
feed it: a neuron is a column of `down_proj` and a row each of `gate_proj` and `up_proj`; a key-value head and the query
heads that read it are columns of `o_proj` and rows of `q_proj`, `k_proj` and `v_proj`. The gate multiplies the input
features. An export leaves out the rest, so that all layers are plain and of one smaller shape.

Shapes: O = outputs, I = inputs, R = components.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rankwise.core.budget import CostCurve
from rankwise.core.exports import DenseExport, Export
from rankwise.core.gates import Gate
from rankwise.core.matrices import InputGatedMatrix
from rankwise.core.plan import Site
from rankwise.core.sharding import full_tensor
from rankwise.modules import linear


@dataclass(frozen=True)
class Feeder:
    """A linear layer whose outputs, of which each component has some, become the inputs of a block's last matrix."""

    name: str
    outputs: int
    """Outputs that belong to one component."""
    params: int
    """Parameters of one output: its row, and its bias if there is one."""


class FeedingLayer(NamedTuple):
    """A feeder as a module."""

    module: nn.Linear
    outputs: int


@dataclass(frozen=True, kw_only=True)
class WidthSite(Site):
    """The last matrix of a block, whose input features are pruned with the layers that feed it."""

    width: str
    """What the components are, such as "neurons". All layers keep the same number of them."""
    num_components: int
    feeders: tuple[Feeder, ...]
    counts: tuple[int, ...] = ()
    """The only numbers of components that the model's configuration accepts; empty for all."""

    @property
    def per_component(self) -> int:
        """Parameters of one component."""
        fed = sum(feeder.outputs * feeder.params for feeder in self.feeders)
        return self.shape[0] * (self.shape[1] // self.num_components) + fed

    @property
    def params(self) -> int:
        return self.num_components * self.per_component

    def feeding(self, model: nn.Module) -> tuple[FeedingLayer, ...]:
        """The feeders as modules of `model`."""
        found = []
        for feeder in self.feeders:
            module = model.get_submodule(feeder.name)
            assert isinstance(module, nn.Linear)
            found.append(FeedingLayer(module, feeder.outputs))
        return tuple(found)


def features(components: Tensor, size: int) -> Tensor:
    """The indices of features, `size` of which in a row make up a component."""
    if size == 1:
        return components
    return (components.unsqueeze(1) * size + torch.arange(size, device=components.device)).flatten()


def narrowed(layer: FeedingLayer, components: Tensor) -> nn.Module:
    """A linear layer with the outputs of `components` alone."""
    module, rows = layer.module, features(components, layer.outputs)

    def kept(parameter: Tensor) -> nn.Parameter:
        return nn.Parameter(parameter.detach().index_select(0, rows), parameter.requires_grad)

    # the stub forgets that bias may be None
    bias: Tensor | None = module.bias
    return linear(kept(module.weight), None if bias is None else kept(bias)).train(module.training)


class WidthMatrix(InputGatedMatrix):
    """The last matrix of a block: W diag(z), where every component has as many columns."""

    def __init__(self, weight_OI: nn.Parameter, gate: Gate, curve: CostCurve) -> None:
        super().__init__(weight_OI, gate, curve)
        self.size = weight_OI.shape[1] // gate.num_components
        """Columns of a component."""
        # in a tuple, so that the module registry does not see the layers a second time
        self.feeders: tuple[FeedingLayer, ...] = ()

    def columns_mask(self) -> tuple[Tensor | None, Tensor | None]:
        z_R, active = self.gate()
        z_I = z_R if z_R is None or self.size == 1 else z_R.repeat_interleave(self.size)
        return z_I, None if active is None else features(active, self.size)

    def magnitudes(self) -> Tensor:
        """The norm of each component's columns, times those of the rows that feed it."""
        columns = full_tensor(self.w.detach()).float().view(len(self.w), -1, self.size)
        norms: Tensor = torch.linalg.vector_norm(columns, dim=(0, 2))
        for module, outputs in self.feeders:
            rows = full_tensor(module.weight.detach()).float().view(-1, outputs * module.in_features)
            norms = norms * torch.linalg.vector_norm(rows, dim=1)
        return norms

    def export(self, kept: Tensor, z: Tensor | None) -> Export:
        w_OI = self.w.detach()
        if z is not None:
            w_OI = (w_OI * z.repeat_interleave(self.size)).to(w_OI.dtype)
        return DenseExport(nn.Parameter(w_OI.index_select(1, features(kept, self.size)), self.w.requires_grad))

    def exported(self) -> list[nn.Module]:
        return [self, *(layer.module for layer in self.feeders)]

    def narrow_feeders(self, kept: Tensor) -> dict[nn.Module, nn.Module]:
        """The layers that feed this matrix, and what takes their place when only `kept` components are left."""
        return {layer.module: narrowed(layer, kept) for layer in self.feeders}


def width_curve(site: WidthSite) -> CostCurve:
    """A component costs the columns of the matrix and the rows of its feeders."""
    return CostCurve(site.num_components, site.per_component, site.params, width=site.width, counts=site.counts)
