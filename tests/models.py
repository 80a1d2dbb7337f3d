"""Small models for tests: every kind of layer, nesting and tie that a plan may meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from rankwise.modules import LowRankEmbedding, LowRankHead, LowRankLinear

Front = Literal["embedding", "pair"]
Back = Literal["untied", "tied", "bias-tied", "low-rank"]
Part = Literal["linear", "nested", "pair", "shared", "conv1d", "norm"]


class Conv1D(nn.Module):
    """A linear layer that stores its weight as inputs x outputs, as transformers' GPT-2 does."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) / nx**0.5)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


@dataclass(frozen=True)
class Spec:
    """What a `TinyModel` is made of."""

    num_words: int = 11
    width: int = 8
    inner: int = 12
    front: Front = "embedding"
    back: Back = "untied"
    parts: tuple[Part, ...] = ("linear", "pair")

    def build(self) -> TinyModel:
        return TinyModel(self)


class TinyModel(nn.Module):
    """Tokens in, logits out."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        width, inner = spec.width, spec.inner
        low = max(1, width // 2)
        self.front: nn.Module = nn.Embedding(spec.num_words, width)
        if spec.front == "pair" or spec.back == "low-rank":
            self.front = LowRankEmbedding(nn.Embedding(spec.num_words, low), nn.Linear(low, width, bias=False))
        shared = nn.Linear(width, width)
        self.body = nn.ModuleList(self._part(kind, width, inner, low, shared) for kind in spec.parts)
        self.head: nn.Module = nn.Linear(width, spec.num_words, bias=spec.back != "tied")
        if spec.back == "low-rank":
            assert isinstance(self.front, nn.Sequential)
            self.head = LowRankHead(self.front[0], self.front[1], nn.Parameter(torch.randn(spec.num_words)))
        elif spec.back != "untied" and isinstance(self.front, nn.Embedding):
            self.head.weight = self.front.weight

    @staticmethod
    def _part(kind: Part, width: int, inner: int, low: int, shared: nn.Linear) -> nn.Module:
        match kind:
            case "linear":
                return nn.Linear(width, width)
            case "nested":
                return nn.Sequential(nn.Sequential(nn.Linear(width, inner), nn.Tanh()), nn.Linear(inner, width))
            case "pair":
                return LowRankLinear(nn.Linear(width, low, bias=False), nn.Linear(low, width))
            case "shared":
                return shared
            case "conv1d":
                return Conv1D(width, width)
            case "norm":
                return nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.front(tokens)
        for part in self.body:
            h = h + torch.tanh(part(h))
        return self.head(h)


specs = st.builds(
    Spec,
    num_words=st.integers(2, 13),
    width=st.integers(1, 9),
    inner=st.integers(1, 12),
    front=st.sampled_from(["embedding", "pair"]),
    back=st.sampled_from(["untied", "tied", "bias-tied", "low-rank"]),
    parts=st.lists(st.sampled_from(["linear", "nested", "pair", "shared", "conv1d", "norm"]), max_size=5).map(tuple),
)
"""Module trees of every kind, for hypothesis."""


def batch(spec: Spec, size: int = 16, length: int = 5, seed: int = 0) -> Tensor:
    """Random tokens for a model of `spec`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, spec.num_words, (size, length), generator=generator)
