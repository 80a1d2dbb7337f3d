"""Our defaults on every engine that we name, in one table: `python benchmarks/engines.py [--engines torch,onnx,...]`.

A decoder of the width of Qwen3-0.6B and an encoder of the width of BERT-base, few layers of each, with random weights
whose singular values fall as those of trained ones do. Each is compressed by `rankwise.compress` with the defaults for
the target of an engine, 20, 30 and 50% of its matrices removed, and runs beside the dense one in the same engine and
precision, in turns: one token, and a batch. The table has how many times faster the small model is by the medians, the
spread of that ratio over rounds (20% to 80%), and whether the command that meets the engine prints a line because the
small model is slower. The goal: nothing is slower than 0.97x without such a line.

    torch     float32, `rankwise compress`             onnx, openvino            float32, `rankwise export --dense`
    bfloat16  `rankwise.deploy.bfloat16`, `bench`      onnx-int8, openvino-int8  8-bit matrices, `rankwise export`
    int8      `rankwise.deploy.int8`, `bench`          cuda, graph               bfloat16, `compress` and `bench`

`--toy` is a dry run of everything with tiny models: its times mean nothing. `--record` appends to results.csv.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from gpu_decoder import DECAY
from harness import interleaved, record
from torch import nn

import rankwise as rw
from rankwise.core.budget import SizeReport
from rankwise.core.targets import TARGETS
from rankwise.deploy import bfloat16, example_inputs, fuse_layers, int8
from rankwise.deploy.bench import engine
from rankwise.deploy.compressed import Compressed
from rankwise.deploy.export import FORMATS
from rankwise.deploy.quantize import can_multiply_bfloat16
from rankwise.kernels.int8 import can_multiply_bytes
from rankwise.measure import TOLERATED, slower_than_dense
from rankwise.swap import copied

GOAL = 1 / TOLERATED
REMOVED = (0.2, 0.3, 0.5)
WORDS = 4096
"""Few, so that what is timed is the layers that are compressed."""
SHAPES: dict[str, dict[str, Any]] = {
    "decoder": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "encoder": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
}
TOY: dict[str, dict[str, Any]] = {
    "decoder": {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "encoder": {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4},
}
KINDS = {
    "decoder": (hf.Qwen3Config, hf.AutoModelForCausalLM),
    "encoder": (hf.BertConfig, hf.AutoModelForMaskedLM),
}
ENGINES = {
    "torch": "cpu",
    "bfloat16": "cpu",
    "int8": "cpu",
    "onnx": "onnx",
    "onnx-int8": "onnx",
    "openvino": "openvino",
    "openvino-int8": "openvino",
    "cuda": "cuda",
    "graph": "cuda",
}
"""The target whose defaults each engine is measured with."""
Run = Callable[[dict[str, Any]], object]
"""A model in an engine, called with inputs by name."""


def build(kind: str, layers: int, *, toy: bool) -> nn.Module:
    """A dense model whose matrices have falling singular values."""
    torch.manual_seed(0)
    config, auto = KINDS[kind]
    shape = (TOY if toy else SHAPES)[kind]
    settings = {"num_hidden_layers": layers, "vocab_size": WORDS, "use_cache": False}
    model: nn.Module = auto.from_config(config(**shape, **settings))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                rank = min(module.weight.shape)
                s_R = torch.arange(1, rank + 1) ** -DECAY
                p_OR, q_RI = (torch.randn(size, rank) / size**0.5 for size in module.weight.shape)
                weight_OI = (p_OR * s_R) @ q_RI.T
                module.weight.copy_(weight_OI * 0.02 / weight_OI.std())
    return model.eval()


def missing(name: str) -> str | None:
    """Why an engine cannot be measured here."""
    if ENGINES[name] == "cuda":
        return None if torch.cuda.is_available() else "there is no GPU"
    if name == "bfloat16" and not can_multiply_bfloat16():
        return "this processor has no instructions for bfloat16"
    if name == "int8" and not can_multiply_bytes():
        return "this processor has no instructions for int8"
    if ENGINES[name] in FORMATS:
        made = FORMATS[ENGINES[name]]
        packages = [*made.packages, *((made.int8_packages or ()) if name.endswith("int8") else ())]
        absent = [package for package in packages if find_spec(package) is None]
        return f"{' and '.join(absent)} must be installed" if absent else None
    return None


def prepared(name: str, model: nn.Module, folder: Path, tokens: int) -> Run:
    """A model in an engine. A GPU gets a copy in bfloat16 with layers fused that read the same input."""
    if ENGINES[name] in FORMATS:
        made = FORMATS[ENGINES[name]]
        made.export(model, example_inputs(model, 2, 16), folder, int8=name.endswith("int8"))
        run = made.load(folder)
        return lambda inputs: run(**inputs)
    if ENGINES[name] == "cuda":
        model = fuse_layers(copied(model).to("cuda", torch.bfloat16))
    elif name in ("bfloat16", "int8"):
        model = {"bfloat16": bfloat16, "int8": int8}[name](model, tokens=tokens)

    @torch.inference_mode()
    def call(inputs: dict[str, Any]) -> object:
        return model(**inputs)

    return call


def call_of(name: str, run: Run, inputs: dict[str, Any]) -> Callable[[], object]:
    """What is timed: `run` on inputs that are where they are needed, for "graph" replayed as a CUDA graph."""
    if ENGINES[name] == "cuda":
        # without a mask, which transformers would look at from the host
        inputs = {"input_ids": inputs["input_ids"].cuda()}
    if name != "graph":
        return lambda: run(inputs)

    class Whole(nn.Module):
        def forward(self, *given: torch.Tensor) -> object:
            return run(dict(zip(inputs, given, strict=True)))

    return engine("graph", "cuda").prepare(Whole(), tuple(inputs.values()))


def printed(name: str, tokens: int, dense: float, small: float, size: SizeReport) -> str | None:
    """The line that a user gets from the command that meets this engine; times in milliseconds."""
    if name in ("torch", "cuda"):
        lines = Compressed(**vars(size), speed={tokens: (dense, small)}, device=name).remarks()
        return lines[0] if lines else None
    return slower_than_dense(f"The model in {name}", small, dense)


def measure(name: str, kind: str, models: dict[float, nn.Module], options: argparse.Namespace) -> Iterator[list[str]]:
    """The rows of an engine and a kind of model; `models` by the share removed, 0 for dense."""
    cases = {"one token": (1, 1), f"{options.batch} x {options.length} tokens": (options.batch, options.length)}
    runs: dict[float, Run] = {}
    for case, (batch, length) in cases.items():
        inputs = example_inputs(models[0.0], batch, length)
        # which pairs are worth two products in 8 or 16 bits depends on the number of tokens
        if not runs or name in ("bfloat16", "int8"):
            with tempfile.TemporaryDirectory() as scratch:
                for removed, model in models.items():
                    runs[removed] = prepared(name, model, Path(scratch) / str(removed), batch * length)
        calls = {removed: call_of(name, run, inputs) for removed, run in runs.items()}
        times = interleaved({str(removed): call for removed, call in calls.items()}, options.repeats)
        before = times.pop("0.0")
        for removed, taken in zip(REMOVED, times.values(), strict=True):
            ratios = sorted(one / other for one, other in zip(before, taken, strict=True))
            low, high = (ratios[round(q * (len(ratios) - 1))] for q in (0.2, 0.8))
            ms = [1000 * statistics.median(each) for each in (before, taken)]
            ratio, dense_size, size = ms[0] / ms[1], rw.count(models[0.0]), rw.count(models[removed])
            report = SizeReport(dense=dense_size, budget=size, expected=size, exported=size, prunable=dense_size)
            line = printed(name, batch * length, *ms, report)
            said = "-" if ratio >= GOAL else "yes" if line else "NO"
            share, spread = f"{removed:.0%}", f"{low:.2f} to {high:.2f}"
            if options.record:
                record("engines", f"{name}, {kind}, {share} removed, {case}", ratios, "x", f">= {GOAL:.2f}, or a line")
            yield [name, kind, share, case, f"{ms[0]:.2f}", f"{ratio:.2f}x", spread, said]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default=",".join(ENGINES), help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--toy", action="store_true", help="a dry run with tiny models")
    parser.add_argument("--record", action="store_true", help="append to results.csv")
    options = parser.parse_args()
    wanted = options.engines.split(",")
    for name in wanted:
        if name not in ENGINES:
            parser.error(f"an engine must be one of {', '.join(ENGINES)}, but is {name!r}")
    torch.set_num_threads(options.threads)
    able = [name for name in wanted if missing(name) is None]
    for name in wanted:
        if name not in able:
            print(f"Not measured: {name}, because {missing(name)}.", flush=True)

    header = ["engine", "model", "removed", "tokens", "dense ms", "small is faster", "20% to 80%", "line, where slower"]
    print(f"\n| {' | '.join(header)} |\n|{'---|' * len(header)}", flush=True)
    silent: list[list[str]] = []
    for kind in options.kinds.split(","):
        dense, made = build(kind, options.layers, toy=options.toy), {}
        for name in able:
            target = TARGETS[ENGINES[name]]
            if target not in made:
                small = {
                    r: rw.compress(dense, rw.Budget(removed=r, of="prunable"), target=target).eval() for r in REMOVED
                }
                made = {target: {0.0: dense, **small}}
            for cells in measure(name, kind, made[target], options):
                print(f"| {' | '.join(cells)} |", flush=True)
                if cells[-1] == "NO":
                    silent.append(cells)
    print(f"\nSlower than {GOAL:.2f}x without a line: {len(silent)} of the cases above.")


if __name__ == "__main__":
    main()
