"""All methods from one trained base, at equal training: `python benchmarks/methods.py ENWIK8 OUT.json [options]`.

A character transformer (6 x 512, 19M parameters) is trained on enwik8; then every method prunes a copy of it to the
same size in the same number of further steps, next to a dense control that trains on for as many. Prints bits per
character on validation text. Wants a GPU; `--tiny` shows on a CPU that it runs. `--only` takes some rows, so that
several processes can share the work from one `--base` checkpoint.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from models import Block
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

import rankwise as rw

LENGTH, BATCH = 256, 64


class Characters(nn.Module):
    """A character language model with tied embeddings."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        nn.init.normal_(self.words.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(width, width // 64, causal=True) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Runner:
    """Trains and evaluates on one text, on one device."""

    def __init__(self, data: Path, batch: int) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        text = torch.frombuffer(bytearray(data.read_bytes()), dtype=torch.uint8)
        cut = int(0.9 * len(text))
        self.train_text = text[:cut].to(self.device)
        self.valid_text = text[cut : cut + min(1_000_000, len(text) - cut)].to(self.device)
        self.batch = batch

    def windows(self, step: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(step)
        starts = torch.randint(
            0, len(self.train_text) - LENGTH, (self.batch, 1), generator=generator, device=self.device
        )
        return self.train_text[starts + torch.arange(LENGTH + 1, device=self.device)].long()

    def loss(self, model: nn.Module, window: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            logits = model(window[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())

    def train(self, model: nn.Module, steps: int, lr: float, pruner: rw.Pruner | None = None, seed: int = 0) -> float:
        """Adam, a short warm-up, then a cosine to a tenth. Returns the seconds it took."""
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01, fused=True)
        start = time.perf_counter()
        for step in range(steps):
            for group in optimizer.param_groups:
                cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))
                group["lr"] = lr * min(1.0, (step + 1) / 200) * cosine
            self.loss(model, self.windows(seed * 10**6 + step)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if pruner is not None:
                pruner.step()
            optimizer.zero_grad()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    @torch.no_grad()
    def bits(self, model: nn.Module) -> float:
        """Bits per character on validation text, in windows that do not overlap."""
        model.eval()
        windows = self.valid_text.unfold(0, LENGTH + 1, LENGTH).long()
        total = sum(float(self.loss(model, part)) * len(part) for part in windows.split(256))
        return total / len(windows) / math.log(2)


def cases(steps: int) -> dict[str, dict[str, Any]]:
    """The rows of the table: arguments of the pruner."""
    ramp = {"anneal_steps": steps // 4}
    return {
        "flop-l0": {"method": "flop-l0", **ramp},
        "fac": {"method": "fac"},
        "flop-agp": {"method": "flop-agp", **ramp},
        "agp (non-zeros)": {"method": "agp", **ramp},
        "np-l0": {"method": "np-l0", **ramp},
        "flop-l0, published recipe": {"method": "flop-l0", "recipe": "published", "gate_lr": 1e-2, **ramp},
        "flop-l0, ramp 10%": {"method": "flop-l0", "anneal_steps": steps // 10},
        "flop-l0, ramp 40%": {"method": "flop-l0", "anneal_steps": int(0.4 * steps)},
        "one-shot svd, then trained": {"method": "svd"},
    }


class Table:
    """Rows as they come, on the terminal and in a file."""

    def __init__(self, path: Path, options: argparse.Namespace) -> None:
        self.path = path
        self.options = {name: str(value) for name, value in vars(options).items()}
        self.rows: list[dict[str, Any]] = []

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        print(f"{row['name']:<28}{row['params']:>12,}{row['bits']:>8.4f} bits{row['seconds']:>8.1f} s", flush=True)
        self.path.write_text(json.dumps({"options": self.options, "rows": self.rows}, indent=1) + "\n")


def prune(runner: Runner, base: nn.Module, case: dict[str, Any], removed: float, steps: int) -> dict[str, Any]:
    """One row: a copy of the base, pruned in `steps` further steps."""
    model = copy.deepcopy(base)
    # the paper's convention: attention and feed-forward matrices are pruned, embeddings are not counted
    plan = rw.find_plan(model, exclude=["words", "positions", "head"])
    pruner = rw.Pruner(model, rw.Budget(removed=removed, of="prunable"), plan=plan, **case)
    with torch.no_grad():
        after_gating = float(runner.loss(model.train(), runner.windows(0))) / math.log(2)
    if case["method"] == "svd":
        small = pruner.compact()
        seconds = runner.train(small, steps, 5e-4, seed=1)
    else:
        seconds = runner.train(model, steps, 5e-4, pruner, seed=1)
        small = pruner.compact()
    size = pruner.size()
    return {
        "params": size.exported,
        "bits": runner.bits(small),
        "seconds": seconds,
        "expected_removed": (size.dense - size.expected) / size.prunable,
        "bits_after_gating": after_gating,
        "ranks": pruner.ranks(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--base", type=Path, help="a checkpoint of the base: read if it exists, else written")
    parser.add_argument("--only", nargs="+", help="names of rows; 'control' is the dense control")
    parser.add_argument("--removed", type=float, default=0.8)
    parser.add_argument("--base-steps", type=int, default=4000)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    runner = Runner(options.data, 8 if options.tiny else BATCH)
    base = (Characters(2, 64) if options.tiny else Characters(6, 512)).to(runner.device)
    table = Table(options.out, options)
    if options.base is not None and options.base.exists():
        load_model(base, options.base)
    else:
        seconds = runner.train(base, options.base_steps, 1e-3)
        table.add(name="base", params=rw.count(base), bits=runner.bits(base), seconds=seconds)
        if options.base is not None:
            save_model(base, str(options.base))
    if options.only is None or "control" in options.only:
        control = copy.deepcopy(base)
        seconds = runner.train(control, options.steps, 5e-4, seed=1)
        table.add(name="control", params=rw.count(control), bits=runner.bits(control), seconds=seconds)
    for name, case in cases(options.steps).items():
        if options.only is None or name in options.only:
            table.add(name=name, **prune(runner, base, case, options.removed, options.steps))


if __name__ == "__main__":
    main()
