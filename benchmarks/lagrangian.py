"""Does the recipe hold? `python benchmarks/lagrangian.py DATA OUT.csv [--recipes ...] [--seeds N] [--workers N]`.

A toy on which the published recipe stalls: a language model of 8 characters of context on the first bytes of enwik8 (or
any file), two factorized layers with 128 components in all, trained from scratch for 4,000 steps while the target falls
over 1,500. Every target x gate learning rate x multiplier learning rate x seed is one run of the library. Prints, for
each recipe, how many runs end with the expected size within a point of the target, and how many bits per character
the exported models lose against the best setting of any recipe at that target.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import statistics
import warnings
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rankwise as rw
from rankwise.modules import LowRankLinear

STEPS, RAMP, BATCH, CONTEXT = 4000, 1500, 128, 8
TARGETS, GATE_LRS, MULTIPLIER_LRS = (0.5, 0.8, 0.9), (1e-2, 3e-2, 1e-1), (1e-3, 1e-2, 1e-1)
COLUMNS = ["recipe", "target", "gate_lr", "multiplier_lr", "seed", "expected", "exported", "bits"]


class Toy(nn.Module):
    """The next character from the last eight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.hidden_1 = LowRankLinear(nn.Linear(128, 64, bias=False), nn.Linear(64, 256))
        self.hidden_2 = LowRankLinear(nn.Linear(256, 64, bias=False), nn.Linear(64, 256))
        self.out = nn.Linear(256, 256)

    def forward(self, context: Tensor) -> Tensor:
        h = self.embedding(context).flatten(1)
        return self.out(F.relu(self.hidden_2(F.relu(self.hidden_1(h)))))


def bits(model: nn.Module, text: Tensor) -> float:
    """Bits per character on `text`."""
    windows = text.unfold(0, CONTEXT + 1, 1)
    with torch.no_grad():
        losses = [F.cross_entropy(model(w[:, :-1]), w[:, -1], reduction="sum") for w in windows.split(8192)]
    return float(sum(losses)) / len(windows) / math.log(2)


def run(job: tuple[str, str, float, float, float, int]) -> dict[str, object]:
    """One training run."""
    data, recipe, target, gate_lr, multiplier_lr, seed = job
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    text = torch.frombuffer(bytearray(Path(data).read_bytes()[:5_000_000]), dtype=torch.uint8).long()
    train, valid = text[:4_000_000], text[4_000_000 : 4_000_000 + 81_920 + CONTEXT]
    torch.manual_seed(seed)
    model = Toy()
    pruner = rw.Pruner(
        model,
        rw.Budget(removed=target, of="prunable"),
        plan=rw.find_plan(model, include=["hidden_1", "hidden_2"]),
        anneal_steps=RAMP,
        gate_lr=gate_lr,
        multiplier_lr=multiplier_lr,
        recipe=recipe,
        seed=seed,
    )
    optimizer = torch.optim.Adam(pruner.weight_parameters(), lr=1e-3)
    offsets = torch.arange(CONTEXT + 1)
    for _ in range(STEPS):
        window = train[torch.randint(0, len(train) - CONTEXT, (BATCH, 1)) + offsets]
        F.cross_entropy(model(window[:, :-1]), window[:, -1]).backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()
    size = pruner.size()
    removed = [(size.dense - value) / size.prunable for value in (size.expected, size.exported)]
    return dict(zip(COLUMNS, (*job[1:], *removed, bits(pruner.compact().eval(), valid)), strict=True))


def summary(rows: list[dict[str, object]]) -> str:
    """A line per recipe."""
    settings: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for row in rows:
        if abs(float(row["expected"]) - float(row["target"])) <= 0.01:
            settings[row["recipe"], row["target"], row["gate_lr"], row["multiplier_lr"]].append(float(row["bits"]))
    best = {t: min(statistics.mean(b) for key, b in settings.items() if key[1] == t) for t in TARGETS}
    lines = ["recipe       runs  within 1 point  worst miss  extra bits: mean    max  over 0.15  by gate lr"]
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        mine = [row for row in rows if row["recipe"] == recipe]
        miss = [100 * abs(float(r["expected"]) - float(r["target"])) for r in mine]
        extra = [float(r["bits"]) - best[r["target"]] for r in mine]
        by_lr = (statistics.mean(e for e, r in zip(extra, mine, strict=True) if r["gate_lr"] == lr) for lr in GATE_LRS)
        lines.append(
            f"{recipe:<12} {len(mine):>4} {sum(m <= 1 for m in miss):>15} {max(miss):>11.2f}"
            f" {statistics.mean(extra):>17.3f} {max(extra):>6.3f} {sum(e > 0.15 for e in extra):>11}  "
            + " / ".join(f"{e:.3f}" for e in by_lr)
        )
    return "\n".join([*lines, "best bits at " + ", ".join(f"{t:.0%}: {b:.3f}" for t, b in best.items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("out", type=Path)
    parser.add_argument("--recipes", nargs="+", default=["committed", "published"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    grid = itertools.product(options.recipes, TARGETS, GATE_LRS, MULTIPLIER_LRS, range(options.seeds))
    jobs = [(options.data, *setting) for setting in grid]
    with ProcessPoolExecutor(options.workers) as pool:
        rows = list(pool.map(run, jobs))
    with options.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(summary(rows))


if __name__ == "__main__":
    main()
