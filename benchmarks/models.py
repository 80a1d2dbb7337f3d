"""The models that benchmarks measure, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DECAY = 0.6
"""The k-th singular value of a drawn matrix is about k to the power of minus this."""


@torch.no_grad()
def draw_falling(model: nn.Module) -> None:
    """Draw the linear layers of a model with singular values that fall as those of trained ones do."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            rank, device = min(module.weight.shape), module.weight.device
            s_R = torch.arange(1, rank + 1, device=device) ** -DECAY
            p_OR, q_RI = (torch.randn(size, rank, device=device) / size**0.5 for size in module.weight.shape)
            weight_OI = (p_OR * s_R) @ q_RI.T
            module.weight.copy_(weight_OI * 0.02 / weight_OI.std())


class Block(nn.Module):
    """A transformer layer: attention and feed-forward, normalized first."""

    def __init__(self, width: int, num_heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.num_heads, self.causal = num_heads, causal
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm_1(x)
        q, k, v = (f(h).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Encoder(nn.Module):
    """Embeddings (if a vocabulary is given), then a stack of blocks."""

    def __init__(self, num_layers: int = 12, width: int = 768, num_words: int | None = None, length: int = 512) -> None:
        super().__init__()
        self.words = nn.Embedding(num_words, width) if num_words else None
        self.positions = nn.Embedding(length, width) if num_words else None
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        if self.words is not None and self.positions is not None:
            x = self.words(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return x
