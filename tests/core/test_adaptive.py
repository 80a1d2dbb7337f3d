"""Adaptive embedding and softmax: one gate per word cluster, shared by both sides, counted once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rankwise as rw
from rankwise.core.gates import HardConcreteGate
from rankwise.modules import LowRankEmbedding, LowRankHead

WIDTH = 16
CLUSTERS = [(20, 16), (40, 8), (80, 4)]
"""Words and embedding width of each cluster, most frequent words first."""


class Adaptive(nn.Module):
    """Each cluster has an embedding of its own width, tied to its part of the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.clusters = nn.ModuleList(
            LowRankEmbedding(nn.Embedding(words, low), nn.Linear(low, WIDTH, bias=False)) for words, low in CLUSTERS
        )
        self.heads = nn.ModuleList(LowRankHead(cluster[0], cluster[1]) for cluster in self.clusters)
        self.body = nn.Linear(WIDTH, WIDTH)

    def embed(self, words: Tensor) -> Tensor:
        out = torch.zeros(*words.shape, WIDTH)
        start = 0
        for cluster, (number, _) in zip(self.clusters, CLUSTERS, strict=True):
            inside = (words >= start) & (words < start + number)
            out[inside] = cluster(words[inside] - start)
            start += number
        return out

    def forward(self, words: Tensor) -> Tensor:
        h = torch.tanh(self.body(self.embed(words)))
        return F.log_softmax(torch.cat([head(h) for head in self.heads], -1), -1)


def train(model: nn.Module, pruner: rw.Pruner, steps: int) -> None:
    """Text in which a frequent word predicts the next and a rare one is followed by chance."""
    optimizer = torch.optim.Adam(pruner.weight_parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        frequent = torch.randint(0, 20, (64,), generator=generator)
        rare = torch.randint(20, 140, (8,), generator=generator)
        words = torch.cat([frequent, rare])
        following = torch.cat([(frequent * 7 + 3) % 20, torch.randint(0, 20, (8,), generator=generator)])
        F.nll_loss(model(words), following).backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()


def test_each_cluster_has_one_gate_and_one_entry_in_the_books() -> None:
    model = Adaptive()
    dense = rw.count(model)
    pruner = rw.Pruner(model, rw.Budget(removed=0.5), anneal_steps=5)
    assert [len(site.uses) for site in pruner.plan.sites] == [2, 2, 2, 1]
    assert pruner.account.dense == dense == 20 * 16 + 40 * 8 + 80 * 4 + 28 * 16 + WIDTH * WIDTH + WIDTH
    assert pruner.account.prunable == dense - WIDTH
    for cluster, head in zip(model.clusters, model.heads, strict=True):
        assert isinstance(cluster.matrix.gate, HardConcreteGate)
        assert cluster.matrix is head.matrix


@pytest.mark.parametrize("method", ["flop-l0", "flop-agp", "np-l0", "fac", "agp"])
@pytest.mark.filterwarnings("ignore:.* of the gates had not decided")
def test_both_sides_of_a_pruned_cluster_agree(method: str) -> None:
    model = Adaptive()
    settings = {} if method == "fac" else {"anneal_steps": 5}
    pruner = rw.Pruner(model, rw.Budget(removed=0.5), method, **settings)
    train(model, pruner, 8)
    small = pruner.compact().eval()
    words = torch.arange(140)
    torch.testing.assert_close(small(words), model.eval()(words), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(small(words).exp().sum(-1), torch.ones(140))
    for cluster, head in zip(small.clusters, small.heads, strict=True):
        assert {id(p) for p in head.parameters()} <= {id(p) for p in cluster.parameters()} | {id(head.bias)}
    assert method == "agp" or rw.count(small) <= pruner.limit


@pytest.mark.filterwarnings("ignore:.* of the gates had not decided")
def test_rare_words_lose_most() -> None:
    """What the paper's figure of parameters per cluster shows."""
    model = Adaptive()
    plan = rw.find_plan(model, include=r"clusters\.\d|heads\.\d")
    pruner = rw.Pruner(model, rw.Budget(removed=0.6, of="prunable"), plan=plan, anneal_steps=250)
    train(model, pruner, 300)
    kept = [k / low for k, (_, low) in zip(pruner.ranks().values(), CLUSTERS, strict=True)]
    assert kept[0] > kept[1] >= kept[2]
