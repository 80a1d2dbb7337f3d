"""Inference on a GPU: `python benchmarks/gpu_inference.py [--record] [--batch 1,16,128]`.

The models of cpu_inference.py, the Transformer-XL without a memory: dense, 80% and 90% of the prunable removed, in
float32 and bfloat16, called one kernel after the other (torch) and as CUDA graphs; all of a case in turns. Rows are
printed, and with --record also kept in results.csv.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from cpu_inference import models, sru, transformer_xl
from harness import interleaved, record

from rankwise.deploy.bench import Autocast, engine

REPEATS = 20
LENGTHS = {"sru": 256, "txl": 512}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--batch", default="1,16,128")
    parser.add_argument("--tiny", action="store_true", help="a dry run on a CPU: few characters, no graphs")
    options = parser.parse_args()
    report = partial(record, "gpu inference", keep=options.record)
    device, kinds = ("cpu", ("torch",)) if options.tiny else ("cuda", ("torch", "graph"))
    for name, make in (("sru", sru), ("txl", transformer_xl)):
        plain = {size: model.to(device) for size, model in models(make).items()}
        for precision, ours in (("float32", plain), ("bfloat16", {k: Autocast(m) for k, m in plain.items()})):
            for batch in (1,) if options.tiny else map(int, options.batch.split(",")):
                tokens = torch.randint(0, 205, (batch, 4 if options.tiny else LENGTHS[name]), device=device)
                for how in kinds:
                    calls = {size: engine(how, device).prepare(model, (tokens,)) for size, model in ours.items()}
                    times = interleaved(calls, 1 if options.tiny else REPEATS)
                    case = f"{name} {precision}, batch {batch}, {how}"
                    for size, taken in times.items():
                        report(f"{case}: {size}", [1e3 * t for t in taken], "ms")
                    for size in ("80%", "90%"):
                        ratios = [a / b for a, b in zip(times["dense"], times[size], strict=True)]
                        report(f"{case}: speed of {size} / dense", ratios, "x")


if __name__ == "__main__":
    main()
