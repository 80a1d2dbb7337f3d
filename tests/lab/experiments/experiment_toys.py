"""Tiny experiments for the tests."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from rankwise.core.budget import Budget
from rankwise.lab.models.adaptive import Clusters
from rankwise.lab.models.sru import SRUConfig
from rankwise.lab.models.transformer_xl import TransformerXLConfig
from rankwise.lab.tasks.streams import CorpusConfig, StreamExperiment
from rankwise.lab.training import TrainingConfig, Watcher
from rankwise.methods import make_method

PHASE = TrainingConfig(
    steps=8, batch_size=4, window=8, lr=1e-2, eval_every=4, checkpoint_every=4, log_every=2, device="cpu"
)
SRU = SRUConfig(num_words=8, embedding_width=8, width=12, num_layers=2, rank=8)
MODELS = {
    "sru": SRU,
    "words": replace(SRU, embedding_width=12, clusters=Clusters(cutoffs=(4,), widths=(6, 4))),
    "transformer-xl": TransformerXLConfig(
        num_words=8, width=8, num_heads=2, head_width=4, inner=16, num_layers=2, memory_length=8
    ),
}


def text_file(folder: Path) -> Path:
    """A text with some structure: letters with spaces between them, so it is words as well."""
    draw, letter, text = random.Random(0), 0, []
    for _ in range(1_500):
        letter = (letter + draw.choice((1, 1, 1, 2, 5))) % 8
        text.append("abcdefgh"[letter])
    path = folder / "letters.txt"
    path.write_text(" ".join(text))
    return path


def toy(folder: Path, kind: str = "sru", **changes: Any) -> StreamExperiment:
    """Train eight steps, prune in eight."""
    corpus = CorpusConfig(
        name=str(text_file(folder)), cache=str(folder / "cache"), unit="word" if kind == "words" else "character"
    )
    experiment = StreamExperiment(
        name="toy",
        corpus=corpus,
        model=MODELS[kind],
        base=PHASE,
        method=make_method("flop-l0", anneal_steps=3),
        budget=Budget(removed=0.5, of="prunable"),
        training=PHASE,
        exclude=() if kind == "words" else ("embedding", "output"),
    )
    return replace(experiment, **changes)


class Phases(Watcher):
    """Remembers what was begun; stops a run there if asked to."""

    def __init__(self, stop_at: str | None = None, stop_step: int | None = None) -> None:
        self.titles: list[str] = []
        self.steps = 0
        self.stop_at, self.stop_step = stop_at, stop_step

    def phase(self, title: str) -> None:
        self.titles.append(title)
        if title == self.stop_at and self.stop_step is None:
            raise KeyboardInterrupt

    def advance(self, step: int) -> None:
        self.steps += 1
        if self.titles[-1] == self.stop_at and step == self.stop_step:
            raise KeyboardInterrupt
