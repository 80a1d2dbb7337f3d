"""What a long run costs: `python benchmarks/training.py [length] [memory]`.

length   training time per token on corpora of 1, 10 and 100 million characters: it must not grow with the length
memory   anonymous memory of a run of 3,000 steps with pruning, evaluation, metrics and checkpoints: it must stay flat
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import interleaved, record

import rankwise as rw
from rankwise.lab.data.corpus import Corpus
from rankwise.lab.data.sources import load_corpus
from rankwise.lab.models.sru import SRUConfig, SRULanguageModel
from rankwise.lab.tasks.language import Streams
from rankwise.lab.training import Progress, TrainingConfig, fit
from rankwise.lab.training.run import Run

REPEATS, STEPS = 7, 20


def corpus_of(length: int, folder: Path) -> Corpus:
    """Random letters."""
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz \n", np.uint8)
    path = folder / f"{length}.txt"
    path.write_bytes(letters[np.random.default_rng(0).integers(len(letters), size=length)].tobytes())
    return load_corpus(path, cache=folder / "cache")


def model_of(corpus: Corpus) -> SRULanguageModel:
    torch.manual_seed(0)
    words = len(corpus.vocabulary)
    return SRULanguageModel(SRUConfig(num_words=words, embedding_width=32, width=256, num_layers=2, rank=64))


def config_of(steps: int) -> TrainingConfig:
    return TrainingConfig(steps=steps, batch_size=16, window=64, lr=1e-3, clip=1.0, eval_every=1_000, device="cpu")


def length(folder: Path) -> None:
    sizes = (1, 10, 100)

    def steps(size: int) -> Callable[[], None]:
        corpus = corpus_of(size * 10**6, folder)
        run = Run(model_of(corpus), Streams(corpus), config_of(10**6), folder / f"run-{size}")

        def take() -> None:
            for _ in range(STEPS):
                run.train_step()

        return take

    times = interleaved({str(size): steps(size) for size in sizes}, REPEATS)
    tokens = STEPS * 16 * 64
    for size, taken in times.items():
        record("length", f"{size}M characters", [1e6 * t / tokens for t in taken], "us/token")
    for size in sizes[1:]:
        ratios = [long / short for long, short in zip(times[str(size)], times["1"], strict=True)]
        record("length", f"{size}M / 1M characters", ratios, "x", "about 1")


class Memory(Progress):
    """Anonymous memory whenever metrics are written: mapped files are not counted, they can be dropped."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.megabytes: list[float] = []

    def report(self, line: Mapping[str, Any]) -> None:
        status = Path("/proc/self/status").read_text()
        kilobytes = next(text for text in status.splitlines() if text.startswith("RssAnon")).split()[1]
        self.steps.append(line["step"])
        self.megabytes.append(int(kilobytes) / 1000)


def memory(folder: Path) -> None:
    corpus = corpus_of(2 * 10**6, folder)
    memory = Memory()
    fit(
        model_of(corpus),
        Streams(corpus),
        config_of(3_000),
        folder / "memory",
        pruner=lambda model: rw.Pruner(model, rw.Budget(removed=0.5), anneal_steps=500),
        progress=memory,
    )
    early = [m for step, m in zip(memory.steps, memory.megabytes, strict=True) if 500 < step <= 1_500]
    late = [m for step, m in zip(memory.steps, memory.megabytes, strict=True) if step > 2_000]
    record("memory", "anonymous memory, steps 500 to 1,500", early, "MB")
    record("memory", "anonymous memory, steps 2,000 to 3,000", late, "MB", "no growth")


def main() -> None:
    chosen = sys.argv[1:] or ["length", "memory"]
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            {"length": length, "memory": memory}[name](Path(folder))


if __name__ == "__main__":
    main()
