"""What the core costs: `python benchmarks/core.py [step] [factorize] [pruner]`.

step       a training step with all gates, a fifth and a tenth of them open, against the same factorized model without
           gates (12 layers of width 768, 8 x 128 tokens, Adam included), and the share of `pruner.step()` in it
factorize  gating a 110M-parameter encoder by SVD: time and peak memory; then `compact` + `save` of it
"""

from __future__ import annotations

import copy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from harness import interleaved, record
from models import Encoder
from torch import nn

import rankwise as rw
from rankwise.core.controller import Controller
from rankwise.core.gates import HardConcreteGate
from rankwise.modules import LowRankLinear

REPEATS = 5


def factorized_encoder(device: str) -> nn.Module:
    """The encoder with each linear layer as a low-rank pair of the same size: the paper's starting rank."""
    model = Encoder()
    for block in model.blocks:
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear):
                rank = layer.in_features * layer.out_features // (layer.in_features + layer.out_features)
                first = nn.Linear(layer.in_features, rank, bias=False)
                setattr(block, name, LowRankLinear(first, nn.Linear(rank, layer.out_features)))
    return model.to(device)


def hold_open(controller: Controller, fraction: float) -> None:
    """Set every gate so that a random `fraction` of its components is surely open and the rest surely closed."""
    generator = torch.Generator().manual_seed(0)
    for gate in controller.gates:
        assert isinstance(gate, HardConcreteGate)
        order = torch.randperm(gate.num_components, generator=generator)
        open_ = order < fraction * gate.num_components
        gate.alpha.copy_(torch.where(open_, 30.0, -30.0))
    controller.invalidate_masks()


def training_step(model: nn.Module, x: torch.Tensor, after: Callable[[], None]) -> Callable[[], None]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        after()
        optimizer.zero_grad()

    return step


def bench_step() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    plain = factorized_encoder(device)
    x = torch.randn(8, 128, 768, device=device)
    steps = {"plain": training_step(plain, x, lambda: None)}
    spent: dict[str, list[float]] = {}
    for fraction in (1.0, 0.2, 0.1):
        model = copy.deepcopy(plain)
        pruner = rw.Pruner(model, rw.Budget(removed=0.5), anneal_steps=10**6, gate_lr=1e-9)
        hold_open(pruner.controller, fraction)
        name = f"{fraction:.0%} open"
        spent[name] = []
        steps[name] = training_step(model, x, _timed(pruner.step, spent[name]))
    times = interleaved(steps, REPEATS)
    goals = {"100% open": "<= 1.10", "20% open": "<= 0.5", "10% open": "<= 0.4"}
    record("step", f"{device} factorized, no gates", times["plain"], "s")
    for name, goal in goals.items():
        ratios = [gated / plain for gated, plain in zip(times[name], times["plain"], strict=True)]
        record("step", f"{device} {name} / no gates", ratios, "x", goal)
        shares = [100 * s / t for s, t in zip(spent[name][-REPEATS:], times[name], strict=True)]
        record("step", f"{device} {name}: share of pruner.step()", shares, "%", "< 3")


def _timed(function: Callable[[], None], times: list[float]) -> Callable[[], None]:
    def timed() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)

    return timed


def peak_bytes() -> int:
    """The most memory this process ever held (`ru_maxrss` would count the parent's from before exec)."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def bench_factorize() -> None:
    """Each repeat in a process of its own: peak memory only ever grows."""
    rows = []
    for _ in range(3):
        run = subprocess.run([sys.executable, __file__, "--factorize-once"], capture_output=True, text=True, check=True)
        rows.append([float(word) for word in run.stdout.split()])
    gating, memory, export = (list(column) for column in zip(*rows, strict=True))
    record("factorize", "110M encoder, full-rank SVD", gating, "s", "< 120")
    record("factorize", "peak memory / dense model", memory, "x", "<= 1.6")
    record("factorize", "compact + save", export, "s", "< 10")


def factorize_once() -> None:
    torch.linalg.eigh(torch.eye(8, dtype=torch.float64))
    before = peak_bytes()
    model = Encoder(num_words=30_522)
    dense = 4 * rw.count(model)
    start = time.perf_counter()
    pruner = rw.Pruner(model, rw.Budget(removed=0.6), anneal_steps=1000)
    gating = time.perf_counter() - start
    memory = (peak_bytes() - before) / dense
    model(torch.randint(0, 30_522, (1, 8))).square().mean().backward()
    pruner.step()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        rw.save(pruner.compact(), Path(folder) / "small")
        export = time.perf_counter() - start
    print(gating, memory, export)


if __name__ == "__main__":
    parts = {"step": bench_step, "factorize": bench_factorize}
    if sys.argv[1:] == ["--factorize-once"]:
        factorize_once()
    else:
        for name in sys.argv[1:] or parts:
            parts[name]()
