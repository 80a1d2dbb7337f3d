"""Time and memory to compress a decoder on a GPU: `python benchmarks/gpu_compress.py [--layers 32] [--record FILE]`.

The decoder of `gpu_decoder.py` (6.7B parameters with 32 layers) is compressed in place by `rankwise.compress`, with
calibration on windows of random tokens, as `rankwise compress` does it: 30% removed, ranks by the loss, pairs. Printed
are the seconds of each part of the work, and the peak of GPU memory against the weights. `--tiny` is a dry run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from datetime import date
from pathlib import Path

import torch
import transformers
from gpu_decoder import SHAPE, TINY, build
from harness import commit, hardware

import rankwise as rw
from rankwise.deploy import Calibration


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--removed", type=float, default=0.3)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--tiny", action="store_true", help="a dry run on any machine")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write what was measured, as JSON")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(TINY if options.tiny else SHAPE, options.layers, device)
    model.config.use_cache = False
    dense = rw.count(model)
    length = 64 if options.tiny else options.length
    tokens = torch.randint(0, model.config.vocab_size, (options.windows, 1, length), device=device)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    start = last = time.perf_counter()
    seconds: dict[str, float] = defaultdict(float)

    def progress(what: str, done: int, total: int) -> None:
        nonlocal last
        if device == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        seconds[what] += now - last
        last = now

    rw.compress(
        model,
        rw.Budget(removed=options.removed),
        list(tokens),
        loss_batches=list(tokens[:, :, : Calibration.loss_window]),
        target="cuda",
        in_place=True,
        progress=progress,
    )
    if device == "cuda":
        torch.cuda.synchronize()
    taken = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() / weights if device == "cuda" else None
    row = {
        "parameters": [dense, rw.count(model)],
        "seconds": round(taken, 1),
        "parts": {what: round(spent, 1) for what, spent in seconds.items()},
        "peak memory against the weights": peak and round(peak, 3),
    }
    print(row)
    if options.record is not None:
        record = {
            "name": "gpu-compress",
            "settings": {key: value for key, value in vars(options).items() if key != "record"},
            "rows": [row],
            "seed": 0,
            "date": date.today().isoformat(),
            "hardware": hardware(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "rankwise": rw.__version__,
            "commit": commit(),
        }
        options.record.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
