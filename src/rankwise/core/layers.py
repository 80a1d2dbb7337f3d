"""Gated layers: what a gated matrix is used for. Any matrix x any gate, composed.

Layers that share a matrix are tied: they share its parameters, its gate and its one entry in the books. A planned layer
becomes a gated one in place, without changing its identity (`rankwise.swap`), and a compact model is a copy with plain
layers in place of gated ones.  Paper: section 4.4 "Inference".
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rankwise.core.exports import Export
from rankwise.core.matrices import GatedMatrix
from rankwise.core.plan import Site, bias_of, get_module, words_of
from rankwise.core.widths import WidthMatrix, WidthSite
from rankwise.lazy import lazy_weight
from rankwise.modules import Pair, scaling_of
from rankwise.swap import become, copied

if TYPE_CHECKING:
    from rankwise.core.controller import Controller


class GatedLayer(nn.Module, ABC):
    """A layer over a gated matrix. It is also what it replaces, an `nn.Linear` or an `nn.Embedding`, to code that asks.

    Why not so in compact models: README.md.
    """

    matrix: GatedMatrix

    @property
    def weight(self) -> Tensor:
        """The matrix as the gate stands, for code that reads `layer.weight`."""
        return lazy_weight(self.matrix.weight, self.matrix.shape, next(self.matrix.parameters()))

    @abstractmethod
    def plain(self, export: Export, memo: dict[int, object]) -> nn.Module:
        """The layer of the compact model that takes this one's place; `memo` is that of the copy being made."""


class GatedLinear(GatedLayer, nn.Linear):  # type: ignore[override]  # a stock layer stores its weight
    """y = x W^T + bias."""

    def __init__(self, matrix: GatedMatrix, bias: nn.Parameter | None) -> None:
        # not as a stock layer, which would draw a weight
        nn.Module.__init__(self)
        self.matrix = matrix
        self.bias = bias  # type: ignore[assignment]  # the stub forgets that bias may be None
        self.out_features, self.in_features = matrix.shape

    def forward(self, x: Tensor) -> Tensor:
        return self.matrix.linear(x, self.bias)

    def pair(self) -> Pair | None:
        """See `rankwise.modules.pair_of`."""
        return self.matrix.pair() if self.bias is None else None

    def whole(self) -> Tensor | None:
        """See `rankwise.modules.pair_of`."""
        return self.matrix.whole() if self.bias is None else None

    def plain(self, export: Export, memo: dict[int, object]) -> nn.Module:
        return export.as_linear(copy.deepcopy(self.bias, memo))


class GatedEmbedding(GatedLayer, nn.Embedding):  # type: ignore[override]
    """Rows of W, by index, scaled as the table did that stood here."""

    def __init__(self, matrix: GatedMatrix, padding_idx: int | None, scaling: nn.Embedding | None = None) -> None:
        nn.Module.__init__(self)
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, 2.0, False, False
        self.matrix = matrix
        self.scaling = scaling
        self.padding_idx = padding_idx
        self.num_embeddings, self.embedding_dim = matrix.shape

    def forward(self, index: Tensor) -> Tensor:
        rows = self.matrix.rows(index, self.padding_idx)
        if self.scaling is None:
            return rows
        scale: Tensor = self.scaling(torch.zeros(1, dtype=torch.long, device=rows.device))
        return rows * scale[0].to(rows.dtype)

    def plain(self, export: Export, memo: dict[int, object]) -> nn.Module:
        return export.as_embedding(self.padding_idx, copy.deepcopy(self.scaling, memo))


def install(model: nn.Module, site: Site, matrix: GatedMatrix) -> None:
    """Let every use of `site` go through `matrix`."""
    for use in site.uses:
        module = get_module(model, use)
        if use.is_embedding:
            words = words_of(module)
            become(module, GatedEmbedding(matrix, words.padding_idx, scaling_of(words)))
        else:
            become(module, GatedLinear(matrix, bias_of(module, use)))
    if isinstance(site, WidthSite):
        assert isinstance(matrix, WidthMatrix)
        matrix.feeders = site.feeding(model)


def gated_layers(model: nn.Module) -> list[GatedLayer]:
    """The gated layers of `model`, each once."""
    return [module for module in model.modules() if isinstance(module, GatedLayer)]


def compact(model: nn.Module, controller: Controller, limit: int) -> nn.Module:
    """A new model of at most `limit` parameters; `model` stays as it is."""
    layers = gated_layers(model)
    plain: dict[nn.Module, nn.Module] = {}
    memo: dict[int, object] = {}
    for i, (matrix, kept) in enumerate(zip(controller.matrices, controller.kept_components(limit), strict=True)):
        export = matrix.export(kept, controller.export_values(i))
        uses = [layer for layer in layers if layer.matrix is matrix]
        # an output layer is tied to its embedding, so that one is made first
        for layer in sorted(uses, key=lambda layer: not isinstance(layer, GatedEmbedding)):
            plain[layer] = layer.plain(export, memo).train(layer.training)
        if isinstance(matrix, WidthMatrix):
            plain.update(matrix.narrow_feeders(kept))
    return copied(model, memo, plain)
