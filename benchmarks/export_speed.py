"""Compact MPNet-base against dense on CPU engines: `python benchmarks/export_speed.py [--threads N] [--quick]`.

ONNX Runtime, OpenVINO and torch.compile; batch 1 and 16, length 128; 35% and 60% of the whole model removed. Each file
is checked against torch before it is timed. How fast a model is does not depend on its weights, so they are random, and
so are the factors: every matrix keeps the same share of its parameters, in ranks that are multiples of 16.

Two conventions for 60% of the whole model, of which a fifth is embeddings, which cost size but no time:
  all      embeddings give up the same share as the encoder
  encoder  embeddings stay as they are, the encoder alone gives up 77% of itself
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import transformers as hf
from harness import interleaved, record
from torch import nn

import rankwise as rw
from rankwise.deploy.export import onnx, openvino
from rankwise.deploy.inputs import example_inputs

LENGTH = 128
GOAL = ">= 1.8"
REPEATS = {1: 11, 16: 5}
EMBEDDINGS = ["word_embeddings", "position_embeddings"]
CASES = {"35% removed, all": (0.35, []), "60% removed, all": (0.6, []), "60% removed, encoder": (0.6, EMBEDDINGS)}


def dense_model() -> nn.Module:
    torch.manual_seed(0)
    return hf.AutoModelForSequenceClassification.from_config(hf.MPNetConfig(num_labels=2)).eval()


def compact_model(dense: nn.Module, removed: float, exclude: list[str]) -> nn.Module:
    plan = rw.find_plan(dense, exclude=exclude)
    pruner = rw.Pruner(copy.deepcopy(dense), rw.Budget(removed=removed), "fac", plan, init="random", rank_multiple=16)
    return pruner.compact().eval()


def engines(model: nn.Module, folder: Path, threads: int, int8: bool) -> Iterator[tuple[str, Callable[..., object]]]:
    inputs = example_inputs(model, 2, LENGTH)
    for name, engine in (("onnxruntime", onnx), ("openvino", openvino)):
        for eight in (False, True) if int8 else (False,):
            place = folder / f"{name}{eight}"
            made = engine.export(model, inputs, place, int8=eight)
            label = f"{name} int8" if eight else name
            print(f"  {label}: {made.bytes / 1e6:.1f} MB, difference {made.difference:.1e}", flush=True)
            yield label, engine.load(place, threads=threads)
    compiled = torch.compile(model, dynamic=False)
    yield "torch.compile", lambda **given: compiled(**given).logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="60%% of all alone, batch 1")
    parser.add_argument("--int8", action="store_true", help="ONNX Runtime and OpenVINO with 8 bits too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    cases = {name: CASES[name] for name in (["60% removed, all"] if options.quick else CASES)}
    dense = dense_model()
    models = {"dense": dense, **{name: compact_model(dense, *case) for name, case in cases.items()}}
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        calls: dict[str, dict[str, Callable[..., object]]] = {}
        for name, model in models.items():
            print(f"{name}: {rw.count(model):,} parameters", flush=True)
            for engine, run in engines(model, Path(scratch) / name.replace("%", ""), options.threads, options.int8):
                calls.setdefault(engine, {})[name] = run
        for batch in (1,) if options.quick else REPEATS:
            measure(calls, dense, batch)


def measure(calls: dict[str, dict[str, Callable[..., object]]], dense: nn.Module, batch: int) -> None:
    inputs = example_inputs(dense, batch, LENGTH)
    for engine, runs in calls.items():
        times = interleaved({name: lambda run=run: run(**inputs) for name, run in runs.items()}, REPEATS[batch])
        where = f"{engine}, batch {batch}"
        record("export", f"{where}, dense", [1000 * t for t in times["dense"]], "ms")
        for name in list(runs)[1:]:
            ratios = [before / after for before, after in zip(times["dense"], times[name], strict=True)]
            record(
                "export",
                f"{where}, {name}",
                ratios,
                "x",
                GOAL if name.startswith("60%") and "int8" not in engine else "",
            )


if __name__ == "__main__":
    main()
