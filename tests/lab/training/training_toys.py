"""Tiny runs for the tests of training; as a program, a run in a process of its own that may be killed.

python training_toys.py MODEL METHOD FOLDER [WHAT HAPPENS]
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rankwise as rw
from rankwise.lab.data.corpus import Corpus
from rankwise.lab.data.sources import load_corpus
from rankwise.lab.models.adaptive import Clusters
from rankwise.lab.models.sru import SRUConfig, SRULanguageModel
from rankwise.lab.models.transformer_xl import TransformerXL, TransformerXLConfig
from rankwise.lab.tasks.language import Streams
from rankwise.lab.training import Outcome, Progress, TrainingConfig, fit

LETTERS = "abcdefgh"
SETTINGS: dict[str, dict[str, Any]] = {
    "dense": {},
    "fac": {},
    "np-l0": {"anneal_steps": 4},
    "agp": {"anneal_steps": 4, "mask_every": 2},
    "flop-agp": {"anneal_steps": 4, "mask_every": 2, "l1": 1e-3},
    "flop-l0": {"anneal_steps": 4},
}
CONFIG = TrainingConfig(
    steps=12,
    dense_steps=4,
    batch_size=4,
    window=6,
    lr=1e-2,
    warmup_steps=2,
    clip=1.0,
    eval_every=3,
    checkpoint_every=2,
    log_every=2,
    device="cpu",
)


def make_corpus(folder: Path, unit: str = "character") -> Corpus:
    """A text with some structure, read as characters or as words."""
    draw = random.Random(0)
    text, letter = [], 0
    for _ in range(1_500):
        letter = (letter + draw.choice((1, 1, 1, 2, 5))) % len(LETTERS)
        text.append(LETTERS[letter])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{unit}.txt"
    if not path.exists():
        path.write_text(("" if unit == "character" else " ").join(text))
    return load_corpus(path, cache=folder / "cache", unit=unit)  # type: ignore[arg-type]


def make_model(kind: str, num_words: int, dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(1)
    if kind == "txl":
        config = TransformerXLConfig(
            num_words=num_words,
            width=8,
            num_heads=2,
            head_width=4,
            inner=16,
            num_layers=2,
            memory_length=8,
            dropout=dropout,
        )
        return TransformerXL(config)
    sru = SRUConfig(num_words=num_words, embedding_width=8, width=12, num_layers=2, rank=8, dropout=dropout)
    if kind == "sru":
        return SRULanguageModel(sru)
    clusters = Clusters(cutoffs=(4,), widths=(6, 4))
    config = SRUConfig(
        num_words=num_words, embedding_width=8, width=8, num_layers=2, rank=6, dropout=dropout, clusters=clusters
    )
    return SRULanguageModel(config)


def pruner_of(method: str) -> Callable[[nn.Module], rw.Pruner]:
    def make(model: nn.Module) -> rw.Pruner:
        budget = rw.Budget(params=rw.count(model)) if method == "dense" else rw.Budget(removed=0.3)
        return rw.Pruner(model, budget, method, **SETTINGS[method])

    return make


def run(
    kind: str,
    method: str | None,
    folder: Path,
    *,
    config: TrainingConfig = CONFIG,
    progress: Progress | None = None,
    dropout: float = 0.1,
    **more: Any,
) -> Outcome:
    """One call of `fit`, the same for every model and method."""
    corpus = make_corpus(folder.parent / "data", "word" if kind == "adaptive" else "character")
    model = make_model(kind, len(corpus.vocabulary), dropout)
    with warnings.catch_warnings():
        # so few steps leave gates undecided
        warnings.filterwarnings("ignore", message=".*had not decided.*")
        return fit(
            model,
            Streams(corpus),
            config,
            folder,
            pruner=pruner_of(method) if method else None,
            progress=progress,
            **more,
        )


class KillError(Exception):
    """In this process, as good as a kill: nothing of the run's own code comes after it."""


def kill() -> None:
    raise KillError


class At(Progress):
    """Something happens when a step was taken, before anything of it is written."""

    def __init__(self, step: int, event: Any) -> None:
        self.step, self.event = step, event

    def advance(self, step: int) -> None:
        if step == self.step:
            self.event()


def _kill(*args: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(kind: str, method: str, folder: str, event: str = "") -> None:
    torch.set_num_threads(1)
    progress = None
    what, _, number = event.partition("=")
    if what == "step":
        progress = At(int(number), _kill)
    elif what == "write":
        # dies between writing the tensors and giving the folder its name
        import rankwise.lab.training.checkpoint as checkpoint

        calls = iter(range(100))
        real = checkpoint.write_json
        checkpoint.write_json = lambda *args: _kill() if next(calls) == int(number) else real(*args)  # type: ignore
    elif what == "disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(number), resource.RLIM_INFINITY))
    try:
        run(kind, method, Path(folder), progress=progress)
    except rw.RankwiseError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
