"""From gated to compact: an ordinary dense model that holds no gate and no trace of one.

Paper: section 4.4 "Inference".
"""

from __future__ import annotations

from torch import nn

from rankwise.core.controller import Controller
from rankwise.core.copies import copied
from rankwise.core.layers import GatedEmbedding
from rankwise.core.surgery import gated_layers


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
    return copied(model, memo, plain)
