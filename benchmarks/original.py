"""What inference is compared with: the original Transformer-XL's attention, and unstructured pruning's sparse matrices.

`OriginalTransformerXL` computes what our model does in the order of operations that the published code has: scores of
content and position as two full tensors, a shift by padding, a mask, a softmax over keys; time first. It is written
from the paper's equations. `sparse` stores linear layers with most weights zero as CSR, for torch's sparse kernels.
"""

from __future__ import annotations

import copy
import math
import warnings

import torch
from torch import Tensor, nn

from rankwise.lab.models.transformer_xl import TransformerXL, TransformerXLLayer, sinusoid


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
