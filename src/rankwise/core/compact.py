"""From gated to compact: an ordinary dense model that holds no gate and no trace of one.

Paper: section 4.4 "Inference".
"""

from __future__ import annotations

import copy

from torch import Tensor, nn

from rankwise.core.control import Controller
from rankwise.core.layers import GatedEmbedding
from rankwise.core.surgery import gated_layers


def compact(model: nn.Module, controller: Controller, limit: int) -> nn.Module:
    """A new model of at most `limit` parameters; `model` stays as it is."""
    layers = gated_layers(model)
    # a copy of the model in which each gated layer has been copied already: as its plain counterpart
    memo: dict[int, object] = {id(tensor): tensor.detach().clone() for tensor in _made_tensors(model)}
    for i, (matrix, kept) in enumerate(zip(controller.matrices, controller.choose(limit), strict=True)):
        export = matrix.export(kept, controller.values(i))
        uses = [layer for layer in layers if layer.matrix is matrix]
        # an output layer is tied to its embedding, so that one is made first
        for layer in sorted(uses, key=lambda layer: not isinstance(layer, GatedEmbedding)):
            memo[id(layer)] = layer.plain(export, memo).train(layer.training)
    return copy.deepcopy(model, memo)


def _made_tensors(model: nn.Module) -> list[Tensor]:
    """Tensors that modules have computed and kept, as old-style weight norm does: they cannot be copied as they are."""
    kept = (value for module in model.modules() for value in vars(module).values())
    return [value for value in kept if isinstance(value, Tensor) and not value.is_leaf]
