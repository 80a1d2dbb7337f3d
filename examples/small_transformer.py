"""Prune a small character transformer to a fifth of its size.

    python examples/small_transformer.py [--removed 0.8] [--method flop-l0] [--quick]

A dense model is trained briefly, gated, trained further while the target size falls, and compacted. A dense copy is
trained for as long, for comparison. The corpus is the text of Python's own help topics, so nothing is downloaded.
Shapes: B = batch, T = time, D = width, H = heads, V = vocabulary.
"""

import argparse
import copy
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rankwise as rw

CONTEXT = 128
BATCH_SIZE = 16

Batches = Iterator[tuple[Tensor, Tensor]]


class Block(nn.Module):
    """Pre-norm causal attention and feed-forward, each with a residual connection."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attend(self.attention_norm(x_BTD))
        return x_BTD + self.feed_forward(self.feed_forward_norm(x_BTD))

    def attend(self, x_BTD: Tensor) -> Tensor:
        heads = self.qkv(x_BTD).unflatten(-1, (3, self.num_heads, -1))  # (B, T, 3, H, D / H)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (B, H, T, D / H)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attention_out(y.transpose(1, 2).flatten(2))


class CharTransformer(nn.Module):
    """A causal language model over characters; embedding and head share one matrix."""

    def __init__(self, num_characters: int, width: int = 128, num_heads: int = 4, num_blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_characters, width)
        self.positions_TD = nn.Parameter(torch.zeros(CONTEXT, width))
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_characters)
        # a tied head of the embedding's usual unit variance would start with logits that are far too large
        nn.init.normal_(self.embedding.weight, std=0.05)
        nn.init.normal_(self.positions_TD, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, x_BT: Tensor) -> Tensor:
        x_BTD = self.embedding(x_BT) + self.positions_TD[: x_BT.shape[1]]
        return self.head(self.norm(self.blocks(x_BTD)))  # (B, T, V)


@dataclass(frozen=True)
class Corpus:
    train: Tensor
    valid: Tensor
    num_characters: int


def load_corpus() -> Corpus:
    """The help topics in order of their names; the last tenth is for validation."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = {character: i for i, character in enumerate(sorted(set(text)))}
    data = torch.tensor([ids[character] for character in text])
    num_train = int(0.9 * len(data))
    return Corpus(data[:num_train], data[num_train:], len(ids))


def random_batches(data: Tensor, num_steps: int, generator: torch.Generator) -> Batches:
    """Random windows and the same windows one character later, each (B, T)."""
    for _ in range(num_steps):
        starts_B1 = torch.randint(len(data) - CONTEXT, (BATCH_SIZE, 1), generator=generator)
        x_BT = data[starts_B1 + torch.arange(CONTEXT)]
        y_BT = data[starts_B1 + torch.arange(1, CONTEXT + 1)]
        yield x_BT, y_BT


def criterion(logits_BTV: Tensor, y_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1), y_BT.flatten())


def train_dense(model: nn.Module, batches: Batches) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()
    for x, y in batches:
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def prune(model: nn.Module, pruner: rw.Pruner, batches: Batches) -> None:
    optimizer = torch.optim.AdamW(pruner.weight_parameters(), lr=2e-3)
    model.train()
    for x, y in batches:
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()


@torch.inference_mode()
def bits_per_character(model: nn.Module, data: Tensor) -> float:
    """Mean over consecutive windows; an incomplete window at the end is left out."""
    model.eval()
    num_windows = (len(data) - 1) // CONTEXT
    x = data[: num_windows * CONTEXT].view(num_windows, CONTEXT)
    y = data[1 : num_windows * CONTEXT + 1].view(num_windows, CONTEXT)
    total = sum(
        criterion(model(x_BT), y_BT).item() * len(x_BT)
        for x_BT, y_BT in zip(x.split(BATCH_SIZE), y.split(BATCH_SIZE), strict=True)
    )
    return total / num_windows / math.log(2)


@torch.inference_mode()
def time_ratios(dense: nn.Module, compact: nn.Module, x: Tensor, num_repeats: int) -> list[float]:
    """Time of the dense over time of the compact model, one ratio per repeat.

    The two take turns, so that both see the same load on the machine.
    """

    def seconds(model: nn.Module) -> float:
        start = time.perf_counter()
        model(x)
        return time.perf_counter() - start

    dense.eval()
    compact.eval()
    for model in (dense, compact):
        seconds(model)  # the first pass allocates
    return [seconds(dense) / seconds(compact) for _ in range(num_repeats)]


@torch.inference_mode()
def round_trip_difference(compact: nn.Module, skeleton: nn.Module, x: Tensor) -> float:
    """Largest difference of logits between a compact model and the same model saved and loaded."""
    with tempfile.TemporaryDirectory() as folder:
        rw.save(compact, f"{folder}/small")
        loaded = rw.load(f"{folder}/small", skeleton)
    return (loaded.eval()(x) - compact.eval()(x)).abs().max().item()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Prune a small character transformer.")
    parser.add_argument("--removed", type=float, default=0.8, help="fraction of the parameters to remove")
    methods = ["flop-l0", "flop-agp", "np-l0", "agp"]
    parser.add_argument("--method", default="flop-l0", choices=methods, help="pruning method")
    parser.add_argument("--quick", action="store_true", help="a few steps only: checks that everything runs")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    warm_up_steps, prune_steps, num_repeats = (10, 20, 5) if arguments.quick else (400, 400, 50)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    corpus = load_corpus()

    def build() -> CharTransformer:
        return CharTransformer(corpus.num_characters)

    model = build()
    print(f"training the dense model: {warm_up_steps} steps", flush=True)
    train_dense(model, random_batches(corpus.train, warm_up_steps, generator))
    dense = copy.deepcopy(model)  # the pruner gates `model` in place

    print(f"pruning with {arguments.method}: {prune_steps} steps", flush=True)
    pruner = rw.Pruner(
        model, rw.Budget(removed=arguments.removed), method=arguments.method, anneal_steps=prune_steps // 4
    )
    prune(model, pruner, random_batches(corpus.train, prune_steps, generator))
    small = pruner.compact()
    print(pruner.size())

    # otherwise the table would compare a model with one that has seen twice the data
    print(f"training the dense model further, for comparison: {prune_steps} steps", flush=True)
    train_dense(dense, random_batches(corpus.train, prune_steps, generator))

    print(f"\n{'model':8} {'parameters':>11} {'bits per character':>19}")
    for name, row in (("dense", dense), ("compact", small)):
        print(f"{name:8} {rw.count(row):11,} {bits_per_character(row, corpus.valid):19.3f}")

    x, _ = next(random_batches(corpus.valid, 1, generator))
    ratios = time_ratios(dense, small, x, num_repeats)
    low, _, _, high = statistics.quantiles(ratios, n=5)
    print(
        f"\ninference: the compact model is {statistics.median(ratios):.2f} times as fast "
        f"(middle 60% of {num_repeats} repeats: {low:.2f} to {high:.2f})"
    )
    print(f"saved and loaded: largest difference of logits {round_trip_difference(small, build(), x):.1e}")


if __name__ == "__main__":
    main()
