"""What inference is compared with: the layers of the released code, and what others do with the same model.

`released_sru` puts `SRU` of the package `sru` with our matrices in the place of our layers. The paper's own package,
`flop`, cannot be imported as released; of it these layers need but two linear maps, one after the other. Weights are
copied, so what is compared computes the same. `OriginalTransformerXL`, written from the paper's equations, computes
what our model does in the order of operations that the published code has: scores of content and position as two full
tensors, a shift by padding, a mask, a softmax over keys; time first. `sparse` stores linear layers with most weights
zero as CSR, for torch's sparse kernels.

Shapes: those of `rankwise.lab.models`.
"""

from __future__ import annotations

import copy
import importlib
import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.errors import RankwiseError
from rankwise.lab.models.sru import SRULanguageModel, SRULayer
from rankwise.lab.models.transformer_xl import TransformerXL, TransformerXLLayer, sinusoid


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


class OriginalTransformerXL(nn.Module):
    """Around the parts of a model of ours."""

    def __init__(self, model: TransformerXL) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BT: Tensor, memory: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Logits and new memory, as `TransformerXL`; memory is (M, B, D) a layer."""
        model = self.model
        h_TBD = model.embedding(tokens_BT.t()) * math.sqrt(model.config.width)
        size_T, size_S = len(h_TBD), len(memory[0]) + len(h_TBD)
        r_SD = sinusoid(torch.arange(size_S - 1, -1, -1.0), model.config.width)
        mask_TS = torch.ones(size_T, size_S).triu(1 + size_S - size_T).bool()[:, :, None, None]
        new_memory = []
        for layer, old in zip(model.layers, memory, strict=True):
            h_SBD = torch.cat([old, h_TBD])
            new_memory.append(h_SBD[-model.config.memory_length :])
            h_TBD = layer.attention_norm(h_TBD + self._attention(layer, h_SBD, r_SD, mask_TS))
            h_TBD = layer.feed_forward_norm(h_TBD + layer.feed_forward(h_TBD))
        return model.head(h_TBD).transpose(0, 1), tuple(new_memory)

    def _attention(self, layer: TransformerXLLayer, h_SBD: Tensor, r_SD: Tensor, mask_TS: Tensor) -> Tensor:
        attention = layer.attention
        size_T = len(mask_TS)
        q, k, v = (attention.heads(x) for x in attention.qkv(h_SBD).chunk(3, -1))
        q, r = q[-size_T:], attention.heads(attention.position(r_SD))
        u, w = attention.heads(self.model.content_bias), attention.heads(self.model.position_bias)
        content = torch.einsum("ibnd,jbnd->ijbn", q + u, k)
        position = rel_shift(torch.einsum("ibnd,jnd->ijbn", q + w, r))
        scores = (content + position) / math.sqrt(attention.head_width)
        p = scores.float().masked_fill(mask_TS, -math.inf).softmax(1)
        return attention.out(torch.einsum("ijbn,jbnd->ibnd", p, v).flatten(2))


def rel_shift(x_TS: Tensor) -> Tensor:
    """Row i moved by i places: a column of zeros in front, then the same numbers in rows of another length."""
    size_T, size_S, *rest = x_TS.shape
    padded = torch.cat([x_TS.new_zeros(size_T, 1, *rest), x_TS], 1)
    return padded.view(size_S + 1, size_T, *rest)[1:].view_as(x_TS)


class SparseLinear(nn.Module):
    """y = x W^T + b with W as CSR."""

    def __init__(self, layer: nn.Linear, removed: float) -> None:
        super().__init__()
        weight = layer.weight.detach()
        kept = round(weight.numel() * (1 - removed))
        mask = torch.zeros(weight.numel(), dtype=torch.bool)
        mask[torch.randperm(weight.numel())[:kept]] = True
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            warnings.filterwarnings("ignore", message="Sparse invariant checks")
            self.weight = (weight * mask.view_as(weight)).to_sparse_csr()
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        y = (self.weight @ x.reshape(-1, x.shape[-1]).t()).t().contiguous().view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


def sparse(model: nn.Module, removed: float, exclude: tuple[str, ...]) -> nn.Module:
    """A copy of a dense model, that share of its linear layers' weights gone here and there."""
    result = copy.deepcopy(model)
    for name, parent in list(result.named_modules()):
        for child_name, child in list(parent.named_children()):
            if type(child) is nn.Linear and f"{name}.{child_name}".strip(".") not in exclude:
                setattr(parent, child_name, SparseLinear(child, removed))
    return result
