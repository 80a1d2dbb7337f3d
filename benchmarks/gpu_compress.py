"""Time and memory to compress a decoder on a GPU: `python benchmarks/gpu_compress.py [--layers 32] [--record FILE]`.

The decoder of `gpu_decoder.py` (6.7B parameters with 32 layers) is compressed in place by `rankwise.compress`, with
calibration on windows of random tokens, as `rankwise compress` does it: 30% removed, ranks by the loss, pairs. Printed
are the seconds of each part of the work, and the peak of GPU memory against the weights. `--tiny` is a dry run.

`--offload` writes the decoder to a folder first and compresses it from there, block by block, with `--cap GIB` on a GPU
that pretends to be that small; printed besides are GiB, how often the blocks were read, and the peak of memory that the
process holds on the host but for what it maps from files.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gpu_decoder import SHAPE, TINY, build
from harness import Record
from torch import nn

import rankwise as rw
from rankwise.core.placement import Offload, block_names, num_bytes
from rankwise.deploy import Calibration
from rankwise.hf.loading import load_model

GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--removed", type=float, default=0.3)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--offload", action="store_true", help="from disk, block by block")
    parser.add_argument("--cap", type=float, metavar="GIB", help="memory that the GPU pretends to have")
    parser.add_argument("--folder", type=Path, help="where the decoder is written; by default a temporary folder")
    parser.add_argument("--tiny", action="store_true", help="a dry run on any machine")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write what was measured, as JSON")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = TINY if options.tiny else SHAPE
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if options.offload:
            build(shape, options.layers, device).save_pretrained(folder)
            model: Any = load_model(folder)
        else:
            model = build(shape, options.layers, device)
        row = measured(model, options, device, Path(folder))
    print(json.dumps(row, indent=1))
    print(f"{row['parameters'][0]:,} parameters in {row['seconds']} s", flush=True)
    kind = "gpu-compress-offload" if options.offload else "gpu-compress"
    Record(options.record, kind, vars(options)).add({"name": f"{options.layers} layers", **row})


def measured(model: nn.Module, options: argparse.Namespace, device: str, folder: Path) -> dict[str, Any]:
    """Compress a model; gives what was measured."""
    config: Any = model.config
    config.use_cache = False
    dense, weights = rw.count(model), num_bytes(model)
    length = 64 if options.tiny else options.length
    tokens = torch.randint(0, config.vocab_size, (options.windows, 1, length), device=device)
    seconds: dict[str, float] = defaultdict(float)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        if options.cap is not None:
            torch.cuda.set_per_process_memory_fraction(options.cap * GIB / torch.cuda.mem_get_info()[1])
    start = last = time.perf_counter()

    def progress(what: str, done: int, total: int) -> None:
        nonlocal last
        if device == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        seconds[what if seconds else "blocks found"] += now - last
        last = now

    with host_memory() as held:
        offload = Offload(model, torch.device(device), folder) if options.offload else None
        blocks = sum(num_bytes(model.get_submodule(name)) for name in block_names(model))
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
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    row = {
        "parameters": [dense, rw.count(model)],
        "seconds": round(taken, 1),
        "parts": {what: round(spent, 1) for what, spent in seconds.items()},
        "shares": {what: round(spent / taken, 3) for what, spent in seconds.items()},
        "peak memory against the weights": peak and round(peak / weights, 3),
    }
    if offload is not None:
        row |= {
            "weights, GiB": round(weights / GIB, 3),
            "peak memory, GiB": peak and round(peak / GIB, 3),
            "blocks read, times": round(offload.fetched / blocks, 1),
            "host memory but for files, GiB": [round(each / GIB, 3) for each in held],
        }
        offload.close()
    return row


@contextmanager
def host_memory() -> Iterator[list[int]]:
    """Bytes that this process holds but for what it maps from files: before, and the most; empty where unknown."""
    status, held, done = Path("/proc/self/status"), list[int](), threading.Event()

    def now() -> int:
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return 1024 * int(lines.get("RssAnon", "0").split()[0])

    def watch() -> None:
        while not done.wait(0.05):
            held[1] = max(held[1], now())

    if not status.is_file():
        yield held
        return
    held += [now()] * 2
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield held
    finally:
        done.set()
        thread.join()


if __name__ == "__main__":
    main()
