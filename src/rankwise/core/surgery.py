"""Gating in place: a planned module becomes a gated one without changing its identity.

Whoever holds the module (several parents, a Python list, the user's own variable for a model that is itself a
layer) sees the gated one, so shared modules and root modules need no special care.
"""

from __future__ import annotations

from torch import nn

from rankwise.core.copies import hooks
from rankwise.core.layers import GatedEmbedding, GatedLayer, GatedLinear
from rankwise.core.matrices import GatedMatrix
from rankwise.core.plan import Site, bias_of, get_module, pair
from rankwise.modules import scaling_of


def install(model: nn.Module, site: Site, matrix: GatedMatrix) -> None:
    """Let every use of `site` go through `matrix`."""
    for use in site.uses:
        module = get_module(model, use)
        if use.is_embedding:
            words = module if use.kind == "embedding" else pair(module)[0]
            assert isinstance(words, nn.Embedding)
            become(module, GatedEmbedding(matrix, words.padding_idx, scaling_of(words)))
        else:
            become(module, GatedLinear(matrix, bias_of(module, use)))


def become(module: nn.Module, other: nn.Module) -> None:
    """Turn `module` into `other`, keeping its identity, its mode and its hooks."""
    other.train(module.training)
    kept = hooks(module)
    module.__class__ = other.__class__
    module.__dict__ = {**other.__dict__, **kept}


def gated_layers(model: nn.Module) -> list[GatedLayer]:
    """The gated layers of `model`, each once."""
    return [module for module in model.modules() if isinstance(module, GatedLayer)]
