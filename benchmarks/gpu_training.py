"""Training a decoder while it is pruned, on a GPU: `python benchmarks/gpu_training.py [--layers 4] [--record FILE]`.

The decoder of `gpu_decoder.py` (1.07B parameters with 4 layers) with weights in float32, 4 x 1024 random tokens,
under autocast to bfloat16, fused AdamW. The time of a step and the peak of memory: dense; gated with all components
open; after the gates have committed to 50% and 80% removed, before and after `pruner.drop_closed(optimizer)`; and the
compact model; once more where every matrix starts with at most half of its rank (`max_rank`). Models are timed one
after the other, as only one fits beside its optimizer's state. `--compile` compiles every model by `torch.compile`, the
dense one too, and leaves out those whose gates still move; `--profile` prints where the time of a step goes; `--tiny`
is a dry run.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from gpu_decoder import SHAPE, TINY, build, profile
from harness import Record, spread
from torch import nn

import rankwise as rw

RAMP = 4
"""Steps until the gates commit."""


class Training:
    """Steps of a model, timed."""

    def __init__(self, tokens: torch.Tensor, options: argparse.Namespace) -> None:
        self.tokens, self.repeats, self.options = tokens, options.repeats, options
        self.is_gpu = tokens.is_cuda
        self.record = Record(options.record, "gpu-training", vars(options))

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, pruner: rw.Pruner | None = None) -> None:
        with torch.autocast(self.tokens.device.type, torch.bfloat16):
            loss = self.forward(model)
        loss.backward()
        optimizer.step()
        if pruner is not None:
            pruner.step()
        optimizer.zero_grad()

    def forward(self, model: nn.Module) -> torch.Tensor:
        loss: torch.Tensor = model(self.tokens, labels=self.tokens, use_cache=False).loss
        return loss

    def measure(self, name: str, model: nn.Module, take: Callable[[], None]) -> None:
        """Time `take`, and note the peak of memory, after some steps that are not counted."""
        if self.options.compile:
            # every model is compiled anew: shapes differ
            torch._dynamo.reset()
            self.forward = torch.compile(Training.forward.__get__(self), dynamic=False)  # type: ignore[method-assign]
        for _ in range(3):
            take()
        if self.options.profile:
            print(f"\n{name}:\n{profile(take, kernels=14)}", flush=True)
        # models, pruners and optimizers are in cycles
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(self.repeats):
            start = time.perf_counter()
            take()
            if self.is_gpu:
                torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - start))
        peak = torch.cuda.max_memory_allocated() if self.is_gpu else 0
        self.record.add(
            {"name": name, "parameters": rw.count(model), "milliseconds": spread(times), "peak bytes": peak}
        )
        first = self.record.rows[0]
        speed = first["milliseconds"]["median"] / statistics.median(times)
        memory = peak / first["peak bytes"] if self.is_gpu else float("nan")
        print(f"{name}: {statistics.median(times):.1f} ms, {speed:.2f}x of dense; memory {memory:.2f}x", flush=True)


def prune(training: Training, make: Callable[[], nn.Module], removed: float, max_rank: int | None) -> None:
    """The rows of one size."""
    name = f"{removed:.0%} removed" + ("" if max_rank is None else f", max_rank={max_rank}")
    if training.record.row(f"compact, {name}") is not None:
        print(f"measured before: {name}", flush=True)
        return
    model = make()
    budget = rw.Budget(removed=removed)
    pruner = rw.Pruner(model, budget, target="cuda", anneal_steps=RAMP, max_rank=max_rank)
    optimizer = torch.optim.AdamW(pruner.weight_parameters(), lr=1e-5, fused=training.is_gpu)
    if not training.options.compile:
        training.measure(f"gated, all open, for {name}", model, partial(training.step, model, optimizer))
    while pruner.steps <= RAMP:
        training.step(model, optimizer, pruner)
    if not training.options.compile:
        training.measure(f"committed, {name}", model, partial(training.step, model, optimizer, pruner))
    pruner.drop_closed(optimizer)
    training.measure(f"closed components dropped, {name}", model, partial(training.step, model, optimizer, pruner))
    small = pruner.compact()
    del model, optimizer, pruner
    optimizer = torch.optim.AdamW(small.parameters(), lr=1e-5, fused=training.is_gpu)
    training.measure(f"compact, {name}", small, partial(training.step, small, optimizer))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--removed", type=float, nargs="+", default=[0.5, 0.8])
    parser.add_argument("--max-rank", type=int, nargs="+", help="components of a matrix; 0: all (default: 0, half)")
    parser.add_argument("--compile", action="store_true", help="compile all models by torch.compile")
    parser.add_argument("--profile", action="store_true", help="print where the time of every case goes")
    parser.add_argument("--tiny", action="store_true", help="a dry run on any machine")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write what was measured, as JSON")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*gates had not decided")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = TINY if options.tiny else SHAPE

    def make() -> nn.Module:
        return build(shape, options.layers, device).float().train()

    torch.manual_seed(0)
    tokens = torch.randint(0, shape["vocab_size"], (4, 16 if options.tiny else 1024), device=device)
    training = Training(tokens, options)
    if training.record.row("dense") is None:
        dense = make()
        optimizer = torch.optim.AdamW(dense.parameters(), lr=1e-5, fused=device == "cuda")
        training.measure("dense", dense, partial(training.step, dense, optimizer))
        del dense, optimizer
    for max_rank in options.max_rank or (0, shape["hidden_size"] // 2):
        for removed in options.removed:
            prune(training, make, removed, max_rank or None)


if __name__ == "__main__":
    main()
