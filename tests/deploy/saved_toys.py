"""Models that are pruned, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import rankwise as rw
from rankwise.modules import LowRankEmbedding, LowRankHead, LowRankLinear
from tests.models import Spec

METHODS: dict[str, dict[str, Any]] = {
    "dense": {},
    "fac": {},
    "np-l0": {"anneal_steps": 2},
    "agp": {"anneal_steps": 2, "mask_every": 1},
    "flop-agp": {"anneal_steps": 2, "mask_every": 1},
    "flop-l0": {"anneal_steps": 2},
    "svd": {},
    "flop-l0 pivot": {"anneal_steps": 2, "layout": "pivot"},
    "svd pivot": {"layout": "pivot"},
}


class Buffered(nn.Module):
    """Persistent and other buffers, a recurrent layer, and a head that is registered before its embedding."""

    def __init__(self) -> None:
        super().__init__()
        front = LowRankEmbedding(nn.Embedding(20, 6, padding_idx=0), nn.Linear(6, 8, bias=False))
        self.head = LowRankHead(front[0], front[1])
        self.norm = nn.BatchNorm1d(8)
        self.rnn = nn.GRU(8, 8)
        self.fc = nn.Linear(8, 8)
        self.front = front
        self.register_buffer("scale", torch.rand(()))
        self.register_buffer("kept_out", torch.full((), 2.0), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.rnn(self.front(tokens))[0]
        h = self.norm(torch.tanh(self.fc(h)).transpose(1, 2)).transpose(1, 2)
        return self.head(h * self.scale * self.kept_out)


class Tower(nn.Module):
    """One layer under two names, and a bias in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.first = nn.Linear(8, 8)
        self.again = self.first
        self.other = nn.Linear(8, 20)
        self.twin = nn.Linear(20, 8)
        self.twin.bias = self.first.bias

    def forward(self, tokens: Tensor) -> Tensor:
        return self.other(self.twin(self.other(self.again(torch.tanh(self.first(self.words(tokens)))))))


class Asks(nn.Module):
    """Forms its tensors by what its layers tell of themselves, and so runs only if they all do."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 12, padding_idx=0)
        self.first, self.second = nn.Linear(12, 16), nn.Linear(16, 12)
        self.head = nn.Linear(12, 20)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        real = (tokens % self.words.num_embeddings != self.words.padding_idx).unsqueeze(-1)
        x = self.words(tokens).view(-1, self.first.in_features)
        h = torch.tanh(self.first(x)).view(-1, 4, self.first.out_features // 4)
        y = self.second(h.view(-1, self.second.in_features)).view(*tokens.shape, self.words.embedding_dim)
        return self.head(y * real).view(*tokens.shape, self.head.out_features)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 10, bias=False))


def bf16() -> nn.Module:
    return Spec(num_words=20, back="tied").build().to(torch.bfloat16)


def tokens() -> Tensor:
    return torch.randint(0, 20, (6, 5))


def features() -> Tensor:
    return torch.randn(6, 10)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (mlp, features),
    "root": (lambda: nn.Linear(10, 10), features),
    "root-pair": (lambda: LowRankLinear(nn.Linear(10, 4, bias=False), nn.Linear(4, 10)), features),
    "tied": (Spec(num_words=20, back="bias-tied", parts=("linear", "conv1d", "pair", "norm")).build, tokens),
    "low-rank": (Spec(num_words=20, width=12, back="low-rank", parts=("pair", "nested")).build, tokens),
    "shared": (Tower, tokens),
    "buffered": (Buffered, tokens),
    "asks": (Asks, tokens),
    "bf16": (bf16, tokens),
}


def compact(build: Callable[[], nn.Module], x: Tensor, method: str, budget: rw.Budget | None = None) -> nn.Module:
    """A pruned model after a few steps."""
    model = build().train()
    budget = budget or rw.Budget(removed=0.6, of="prunable")
    if method == "dense":
        budget = rw.Budget(params=rw.count(model))
    pruner = rw.Pruner(model, budget, method.split()[0], rw.find_plan(model), **METHODS[method])
    optimizer = torch.optim.SGD(pruner.weight_parameters(), lr=0.1)
    for _ in range(3):
        model(x).float().square().mean().backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()
    return pruner.compact().eval()
