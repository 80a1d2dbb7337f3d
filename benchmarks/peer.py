"""The layers of the released code, for comparison: `SRU` of the package `sru`, with our matrices in its places.

The paper's own package, `flop`, cannot be imported as released; of it these layers need but two linear maps, one after
the other. Weights are copied, so what is compared computes the same.

Shapes: those of `rankwise.lab.models.sru`.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.errors import RankwiseError
from rankwise.lab.models.sru import SRULanguageModel, SRULayer


def released_sru(model: nn.Module) -> nn.Module:
    """`model` with its stack of layers exchanged for that of the package `sru`."""
    if not isinstance(model, SRULanguageModel) or not isinstance(model.embedding, nn.Embedding):
        raise RankwiseError(
            "The released code can be timed for SRU models with a plain embedding only, but this is a "
            f"{type(model).__name__} instead."
        )
    try:
        package = importlib.import_module("sru")
    except ImportError as error:
        raise RankwiseError(
            f"The released code is the package `sru`, but importing it failed: {error}. "
            "Install it (pip install sru==2.6.0; it compiles itself when it is first imported)."
        ) from None
    config = model.config
    layers: list[SRULayer] = list(model.sru.layers)  # type: ignore[arg-type]
    stack = package.SRU(
        config.embedding_width,
        config.width,
        num_layers=config.num_layers,
        layer_norm=config.layer_norm,
        highway_bias=config.highway_bias,
        rescale=config.rescale,
        custom_m=[_interleaved(layer) for layer in layers],
    )
    for layer, cell in zip(layers, stack.rnn_lst, strict=True):
        cell.weight_c.data.copy_(layer.weight_c)
        cell.bias.data.copy_(layer.bias)
        if layer.norm is not None:
            cell.layer_norm.load_state_dict(layer.norm.state_dict())
    return Released(model.embedding, stack, model.output).eval()


class Released(nn.Module):
    """Embedding, layers of the released code, output."""

    def __init__(self, embedding: nn.Module, stack: nn.Module, output: nn.Module) -> None:
        super().__init__()
        self.embedding, self.stack, self.output = embedding, stack, output

    def forward(self, tokens_BT: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        h_TBD, state = self.stack(self.embedding(tokens_BT).transpose(0, 1), state)
        logits_TBV: Tensor = self.output(h_TBD)
        return logits_TBV.transpose(0, 1), state


def _interleaved(layer: SRULayer) -> nn.Module:
    """The projection, its outputs in the package's order: unit by unit, not projection by projection."""
    linears = [module for module in layer.projection.modules() if isinstance(module, nn.Linear)]
    copies = []
    for linear in linears:
        copies.append(nn.Linear(linear.in_features, linear.out_features, bias=False))
        copies[-1].weight.data.copy_(linear.weight)
    order = torch.arange(layer.num_projections * layer.width).view(layer.num_projections, layer.width).t().flatten()
    copies[-1].weight.data = copies[-1].weight.data[order].contiguous()
    return nn.Sequential(*copies)
