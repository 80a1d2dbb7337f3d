"""How much of stock PyTorch language models can be removed, and what half of it costs.

Small models of characters, made of `nn.TransformerEncoder`, a tied `nn.GRU` and an `nn.LSTM`, learn the `pydoc` topics
that every Python carries. Each is trained, then trained again for as long: dense, with half of it removed by learned
gates (flop-l0), and with half of it removed by equal ranks at the start (fac).

    python benchmarks/removable.py [--steps 600] [--json removable.json]
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import pydoc_data.topics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rankwise as rw

BATCH, WINDOW, WIDTH = 16, 64, 128
REMOVED = 0.5


class EncoderModel(nn.Module):
    """A causal `nn.TransformerEncoder`."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, WIDTH), nn.Embedding(WINDOW, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, words)

    def forward(self, x_BT: Tensor) -> Tensor:
        length = x_BT.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        h = self.words(x_BT) + self.places(torch.arange(length))
        logits: Tensor = self.head(self.encoder(h, mask, is_causal=True))
        return logits


class RecurrentModel(nn.Module):
    """An `nn.LSTM` or `nn.GRU` between an embedding and an output layer, which may be tied."""

    def __init__(self, kind: Callable[..., nn.Module], words: int, *, tied: bool) -> None:
        super().__init__()
        self.words, self.rnn = nn.Embedding(words, WIDTH), kind(WIDTH, WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, words)
        if tied:
            nn.init.normal_(self.words.weight, std=WIDTH**-0.5)
            self.head.weight = self.words.weight

    def forward(self, x_BT: Tensor) -> Tensor:
        logits: Tensor = self.head(self.rnn(self.words(x_BT))[0])
        return logits


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "nn.TransformerEncoder": EncoderModel,
    "nn.GRU, tied": lambda words: RecurrentModel(nn.GRU, words, tied=True),
    "nn.LSTM": lambda words: RecurrentModel(nn.LSTM, words, tied=False),
}


def corpus() -> tuple[Tensor, Tensor, int]:
    """Characters to train on and to evaluate on, and how many kinds there are."""
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    known = sorted(set(text))
    number = {letter: i for i, letter in enumerate(known)}
    letters = torch.tensor([number[letter] for letter in text])
    end = int(0.95 * len(letters))
    return letters[:end], letters[end:], len(known)


def loss_of(model: nn.Module, windows_BT: Tensor) -> Tensor:
    """Nats a character."""
    return F.cross_entropy(model(windows_BT[:, :-1]).flatten(0, 1), windows_BT[:, 1:].flatten())


def train(model: nn.Module, letters: Tensor, steps: int, pruner: rw.Pruner | None = None) -> None:
    """AdamW with a cosine of learning rates; the same windows for every model."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min(1, k / 20) * (1 + math.cos(math.pi * k / steps)) / 2
    )
    model.train()
    for _ in range(steps):
        starts = torch.randint(len(letters) - WINDOW, (BATCH, 1))
        loss = loss_of(model, letters[starts + torch.arange(WINDOW)])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if pruner is not None:
            pruner.step()
        optimizer.zero_grad()
        rates.step()


@torch.no_grad()
def evaluate(model: nn.Module, letters: Tensor) -> float:
    """The loss on text that was not trained on."""
    windows = letters[: len(letters) // WINDOW * WINDOW].view(-1, WINDOW)
    return float(torch.stack([loss_of(model.eval(), part) for part in windows.split(64)]).mean())


def measure(name: str, steps: int) -> dict[str, Any]:
    """One row: the share that can be removed, and losses."""
    training, held_out, words = corpus()
    torch.manual_seed(0)
    base = MODELS[name](words)
    train(base, training, steps)
    size, plan = rw.count(base), rw.find_plan(base)
    row: dict[str, Any] = {"model": name, "parameters": size, "removable": plan.params / size}
    dense = copy.deepcopy(base)
    train(dense, training, steps)
    row["dense"] = evaluate(dense, held_out)
    for method, settings in (("flop-l0", {"anneal_steps": steps // 2}), ("fac", {})):
        model = copy.deepcopy(base)
        pruner = rw.Pruner(model, rw.Budget(removed=REMOVED), method, plan, **settings)
        train(model, training, steps, pruner)
        small = pruner.compact()
        assert rw.count(small) <= (1 - REMOVED) * size
        row[method] = evaluate(small, held_out)
    return row


def main() -> None:
    """Print a row for every model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="of each training (default: 600)")
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    arguments = parser.parse_args()
    # a few gates of a short run may stay undecided; the export decides
    warnings.filterwarnings("ignore", message=".* of the gates had not decided")
    print(f"{'model':24}{'parameters':>12}{'removable':>11}{'dense':>8}{'flop-l0 50%':>13}{'fac 50%':>9}")
    rows = []
    for name in MODELS:
        row = measure(name, arguments.steps)
        rows.append(row)
        print(
            f"{name:24}{row['parameters']:12,}{row['removable']:11.1%}{row['dense']:8.3f}{row['flop-l0']:13.3f}"
            f"{row['fac']:9.3f}",
            flush=True,
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"steps": arguments.steps, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
