"""How fast the paper's models train: `python benchmarks/lm_speed.py [loop] [step] [profile] [kernels] [--models sru]`.

sru              35M: 6 layers of width 3056, rank 512, 205 characters, batch 64 x 256, dropout 0.1, layer norm
transformer-xl   41M: 12 layers of width 512, batch 22 x 512, memory 512, dropout 0.1

Each in bf16: dense, and gated with all, a fifth and a tenth of the components open.

loop     characters/s by the training loop, with data, logging, clipping and gate updates, for `--seconds` a case
step     medians of single steps by CUDA events, peak memory, and how long the host takes to issue a step
profile  where the time of a step goes
kernels  the recurrence and the attention alone, by block, warps and stages

Wants a GPU; `--tiny` shows on a CPU that it runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
from core import hold_open
from harness import record
from torch import nn

import rankwise as rw
from rankwise.deploy.architectures import build
from rankwise.lab.data import Corpus, load_corpus
from rankwise.lab.models.sru import SRUConfig
from rankwise.lab.models.transformer_xl import TransformerXLConfig
from rankwise.lab.tasks.language import Streams
from rankwise.lab.training import TrainingConfig, fit
from rankwise.lab.training.run import Run

TRAINING = TrainingConfig(
    steps=10**6, batch_size=64, window=256, lr=1e-4, clip=0.5, precision="bf16", log_every=100, eval_every=10**9,
    checkpoint_every=10**9, eval_tokens=100_000,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, and how it is trained."""

    config: Any
    tiny: Any
    training: TrainingConfig
    plan: dict[str, Any]
    """What of it is gated."""
    goals: dict[str, str]
    expected: float
    """Characters per second, about."""


SRU = SRUConfig(
    num_words=205, embedding_width=205, width=3056, num_layers=6, rank=512, layer_norm=True, rescale=True, dropout=0.1
)
TRANSFORMER_XL = TransformerXLConfig(num_words=204)
MODELS = {
    "sru": Case(
        config=SRU,
        tiny=replace(SRU, num_words=20, embedding_width=12, width=32, num_layers=2, rank=16),
        training=TRAINING,
        plan={"include": r"sru\..*"},
        goals={"dense": ">= 1.8e6", "20% open": ">= 2.6e6", "10% open": ">= 2.8e6"},
        expected=2.2e6,
    ),
    "transformer-xl": Case(
        config=TRANSFORMER_XL,
        tiny=replace(TRANSFORMER_XL, width=32, num_heads=2, head_width=16, inner=64, num_layers=2, memory_length=8),
        training=replace(TRAINING, batch_size=22, window=512, clip=0.25),
        plan={"exclude": ["embedding", "head"]},
        goals={"dense": ">= 4e5", "20% open": ">= 6e5"},
        expected=4e5,
    ),
}
OPEN = {"100% open": 1.0, "20% open": 0.2, "10% open": 0.1}
CASES = ["dense", "factorized", *OPEN]


class Bench:
    """One size of one model, and a text for it."""

    def __init__(self, folder: Path, name: str, cases: list[str], *, tiny: bool) -> None:
        self.folder, self.name, self.tiny = folder, name, tiny
        self.about = MODELS[name]
        # only the SRU holds a plain matrix beside its pairs, of which a factorized one can be made
        self.cases = [case for case in cases if case != "factorized" or name == "sru"]
        self.model, self.training = self.about.config, self.about.training
        if tiny:
            self.model = self.about.tiny
            self.training = replace(TRAINING, batch_size=4, window=8, precision="no", log_every=2, eval_tokens=50)
        self.corpus = self._corpus()

    def _corpus(self) -> Corpus:
        """Random characters, every one of them in the training text."""
        letters = [chr(0x100 + i) for i in range(self.model.num_words)]
        path = self.folder / "random.txt"
        path.write_text("".join(letters + random.Random(0).choices(letters, k=10_000 if self.tiny else 4_000_000)))
        return load_corpus(path, cache=self.folder / "cache")

    def make(self, case: str) -> nn.Module:
        """`factorized` is the gated model without its gates: the pruner makes a pair of the first matrix too."""
        torch.manual_seed(0)
        config = replace(self.model, num_words=len(self.corpus.vocabulary))
        if case == "factorized":
            config = replace(config, first_rank=config.embedding_width)
        return build(config)

    def gate(self, case: str) -> Callable[[nn.Module], rw.Pruner] | None:
        def make_pruner(model: nn.Module) -> rw.Pruner:
            plan = rw.find_plan(model, **self.about.plan)
            pruner = rw.Pruner(model, rw.Budget(removed=0.5), plan=plan, anneal_steps=10**9, gate_lr=1e-9)
            hold_open(pruner.controller, OPEN[case])
            return pruner

        return make_pruner if case in OPEN else None

    def start(self, case: str) -> Run:
        """A run, to be stepped by hand."""
        run = Run(self.make(case), Streams(self.corpus), self.training, self.folder / case, pruner=self.gate(case))
        run.begin_pruning()
        return run


def bench_loop(bench: Bench, seconds: float) -> None:
    for case in bench.cases:
        tokens = bench.training.batch_size * bench.training.window
        steps = 6 if bench.tiny else 300 + int(seconds * bench.about.expected / tokens) // 100 * 100
        config = replace(bench.training, steps=steps)
        with tempfile.TemporaryDirectory() as folder:
            fit(bench.make(case), Streams(bench.corpus), config, folder, pruner=bench.gate(case))
            lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        # the first lines have the compilation of kernels in them
        speeds = [line["tokens_per_second"] for line in lines][2:]
        record(f"{bench.name} loop", case, speeds, "characters/s", bench.about.goals.get(case, ""))


def bench_step(bench: Bench) -> None:
    medians = {}
    for case in bench.cases:
        run = bench.start(case)
        reset_peak()
        for _ in range(3 if bench.tiny else 30):
            run.train_step()
        times = [timed(run.train_step) for _ in range(3 if bench.tiny else 40)]
        medians[case] = statistics.median(times)
        rates = [run.objective.per_step / each for each in times]
        record(f"{bench.name} step", case, rates, "characters/s", bench.about.goals.get(case, ""))
        record(f"{bench.name} step", f"{case}: host", [issued(run.train_step) for _ in range(5)], "s")
        if torch.cuda.is_available():
            record(f"{bench.name} step", f"{case}: peak memory", [torch.cuda.max_memory_allocated() / 1e9], "GB")
    if {"100% open", "factorized"} <= medians.keys():
        overhead = 100 * (medians["100% open"] / medians["factorized"] - 1)
        record(f"{bench.name} step", "overhead of open gates", [overhead], "%", "<= 5")


def timed(step: Callable[[], None]) -> float:
    """Seconds of one step on the device, behind work that is queued already."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    step()
    begin.record()
    for _ in range(5):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 5e3


def issued(step: Callable[[], None]) -> float:
    """Seconds until the host has issued one step to an idle device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def reset_peak() -> None:
    # runs are in cycles, those before this one too
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


KINDS = {
    "recurrence forward": ("sru_fwd",),
    "recurrence backward": ("sru_bwd",),
    "attention": ("attention", "fmha", "flash"),
    "norm": ("row_stats", "fold_", "scale_rows", "layer_norm", "layernorm"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "splitk", "gemv", "aten::mm", "aten::addmm", "aten::bmm"),
    "optimizer and clip": ("adam", "multi_tensor", "lpnorm"),
    "softmax and loss": ("softmax", "nll_loss", "loss_fwd", "loss_bwd"),
    "copies": ("memcpy", "memset"),
}


def bench_profile(bench: Bench) -> None:
    for case in bench.cases:
        run, steps = bench.start(case), 2 if bench.tiny else 10
        if run.pruner is not None:
            run.pruner.step = torch.profiler.record_function("pruner")(run.pruner.step)  # type: ignore[method-assign]
        for _ in range(2 if bench.tiny else 15):
            run.train_step()
        with torch.profiler.profile(acc_events=True) as profile:
            for _ in range(steps):
                run.train_step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        names, of_pruner = kernels_of(profile)
        spent = {"pruner": sum(of_pruner.values()) / 1e3 / steps}
        for name, times in names.items():
            kind = next((kind for kind, words in KINDS.items() if any(w in name.lower() for w in words)), "elementwise")
            spent[kind] = spent.get(kind, 0.0) + (sum(times) - of_pruner[name]) / 1e3 / steps
        number = sum(map(len, names.values())) // steps
        print(f"\n{case}: ms per step, {sum(spent.values()):.2f} in all, in {number} kernels")
        for kind, milliseconds in sorted(spent.items(), key=lambda item: -item[1]):
            print(f"  {kind:<22} {milliseconds:7.3f}")
        for name, times in sorted(names.items(), key=lambda item: -sum(item[1])):
            print(f"      {sum(times) / 1e3 / steps:7.3f} {len(times) / steps:5.1f} x  {name[:200]}")


def kernels_of(profile: torch.profiler.profile) -> tuple[dict[str, list[float]], dict[str, float]]:
    """The microseconds of each kernel by name, and the sum of those that the pruner started."""
    on_gpu, cpu = torch.cuda.is_available(), torch.autograd.DeviceType.CPU
    names: dict[str, list[float]] = defaultdict(list)
    of_pruner: dict[str, float] = defaultdict(float)
    for event in profile.events():
        if event.device_type != cpu and event.name != "pruner":
            names[event.name].append(event.device_time)
        elif not on_gpu:
            names[event.name].append(event.self_cpu_time_total)
        for kernel in event.kernels if _below(event, "pruner") else ():
            of_pruner[kernel.name] += kernel.duration
    return names, of_pruner


def _below(event: torch.autograd.profiler_util.FunctionEvent | None, name: str) -> bool:
    while event is not None:
        if event.name == name:
            return True
        event = event.cpu_parent
    return False


def bench_kernels(bench: Bench) -> None:
    if bench.tiny or not torch.cuda.is_available():
        return
    for name, launches, run in recurrences() if bench.name == "sru" else attentions():
        with ThreadPoolExecutor(12) as pool:
            fits = list(pool.map(partial(_fits, run), launches))
        usable = [launch for launch, fit in zip(launches, fits, strict=True) if fit]
        times = {launch: do_bench(partial(run, launch)) for launch in usable}
        print(f"\n{name}: microseconds")
        for launch, milliseconds in sorted(times.items(), key=lambda item: item[1])[:8]:
            print(f"  {launch!s:<70} {1e3 * milliseconds:7.1f}")


def _fits(run: Callable[[Any], object], launch: Any) -> bool:
    """Whether the hardware has room for such blocks."""
    try:
        run(launch)
    except Exception as error:
        if "out of resource" not in str(error):
            raise
        return False
    return True


def do_bench(run: Callable[[], object]) -> float:
    from triton.testing import do_bench

    torch.cuda.synchronize()
    milliseconds: float = do_bench(run, warmup=5, rep=30, return_mode="median")
    return milliseconds


def recurrences() -> Iterator[tuple[str, list[Any], Callable[[Any], object]]]:
    from rankwise.lab.kernels.sru import triton as kernels

    steps, batch, width = 256, 64, 3056
    u = torch.randn(steps, batch, 3, width, device="cuda", dtype=torch.bfloat16)
    x, dh, product, states = (torch.randn(steps, batch, width, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    gates = torch.randn(2, width, device="cuda")
    c0 = torch.randn(batch, width, device="cuda")
    mask = torch.ones(batch, width, device="cuda")
    rows = [torch.randn(steps, batch, device="cuda") for _ in range(3)]
    arrivals = kernels.Arrivals(dh, None, product, (rows[0], rows[1], rows[2]))
    launches = [
        kernels.Launch(block, warps, stages)
        for block, warps in ((128, 2), (256, 2), (256, 4), (512, 4), (512, 8))
        for stages in (3, 4, 6, 8)
    ]

    def forward(launch: Any) -> Any:
        return kernels.forward(u, x, gates, gates, c0, mask, 1.0, keeps_states=True, launch=launch)

    def backward(launch: Any) -> Any:
        return kernels.backward(arrivals, u, x, gates, gates, states, mask, 1.0, launch=launch)

    yield "recurrence forward", launches, forward
    yield "recurrence backward", launches, backward


BLOCKS = [
    (64, 64, 4),
    (64, 128, 4),
    (64, 128, 8),
    (128, 64, 4),
    (128, 64, 8),
    (128, 128, 8),
    (128, 32, 4),
    (32, 128, 4),
]


def attentions() -> Iterator[tuple[str, list[Any], Callable[[Any], object]]]:
    from rankwise.lab.kernels.relative_attention import triton as kernels

    batch, queries, keys, heads, width = 22, 512, 1024, 8, 64
    qkv = torch.randn(batch, keys, 3, heads, width, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(batch, queries, heads, width, device="cuda", dtype=torch.bfloat16)
    scores = torch.randn(heads, batch * queries, keys, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(heads, width, device="cuda")
    _, lse = kernels.forward(qkv, bias, scores, queries, None)
    launches = [
        kernels.Launch(block_t, block_s, warps, stages) for block_t, block_s, warps in BLOCKS for stages in (1, 2, 3, 4)
    ]

    def forward(launch: Any) -> Any:
        return kernels.forward(qkv, bias, scores, queries, None, launch)

    def backward(launch: Any) -> Any:
        return kernels.backward(dy, qkv, bias, scores, lse, lse, None, launch)

    yield "attention forward", launches, forward
    yield "attention backward", launches, backward


@contextmanager
def quiet() -> Iterator[None]:
    """Gates that are held where they stand are warned of, rightly."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "gates cannot decide|pruning has only")
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["loop", "step", "profile", "kernels", []])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--seconds", type=float, default=30.0)
    arguments = parser.parse_args()
    parts = arguments.parts or ["loop", "step", "profile", "kernels"]
    with tempfile.TemporaryDirectory() as folder, quiet():
        if arguments.tiny and "RANKWISE_BENCHMARKS_CSV" not in os.environ:
            harness.RESULTS = Path(folder) / "results.csv"
        for name in arguments.models:
            place = Path(folder) / name
            place.mkdir()
            bench = Bench(place, name, arguments.cases, tiny=arguments.tiny)
            if "loop" in parts:
                bench_loop(bench, arguments.seconds)
            if "step" in parts:
                bench_step(bench)
            if "profile" in parts:
                bench_profile(bench)
            if "kernels" in parts:
                bench_kernels(bench)


if __name__ == "__main__":
    main()
