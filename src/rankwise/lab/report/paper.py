"""The figures that the paper prints, table by table. They stand beside ours, and are never mixed with them.

Paper: "Structured Pruning of Large Language Models", sections 5 and 6. Sizes are as printed, rounded to millions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """A model in a table of the paper."""

    size: str
    value: float


@dataclass(frozen=True, eq=False)
class PaperTable:
    """What became of one dense model at several sizes."""

    title: str
    dense: Figure
    rows: Mapping[tuple[int, str], Figure]
    """By (percent removed, method)."""
    own_dense: Mapping[str, Figure | None]
    """Methods that were not pruned from `dense`, and what they were pruned from; None where that is not printed."""
    of: Mapping[str, Any]
    """The corpus and the model, as an experiment of ours describes them."""
    plain_width: int | None = None
    """The width of the model without factorization that np-l0 prunes."""

    def lost(self, level: int, method: str) -> float | None:
        """How much larger the figure is than that of the dense model it came from."""
        found, dense = self.rows.get((level, method)), self.own_dense.get(method, self.dense)
        return None if found is None or dense is None else found.value / dense.value - 1

    def points(self) -> Iterator[tuple[str, str, float, float]]:
        """(method, what was removed, parameters, figure) of every model."""
        yield "dense", "", _parameters(self.dense), self.dense.value
        for (level, method), figure in self.rows.items():
            yield method, f"{level}% of prunable", _parameters(figure), figure.value

    def is_of(self, experiment: Mapping[str, Any], *, plain: bool = False) -> bool:
        """Whether an experiment trains this very model on this very text; `plain`: the one without factorization."""
        model = experiment.get("model") or {}
        corpus = experiment.get("corpus") or {}
        found = {**model, "corpus": corpus.get("name") if isinstance(corpus, Mapping) else None}
        wanted = {**self.of, "width": self.plain_width, "rank": None} if plain else self.of
        return all(found.get(key) == value for key, value in wanted.items()) and (not plain or bool(self.plain_width))


def _parameters(figure: Figure) -> float:
    return 1e6 * float(figure.size.removesuffix("M"))


def _rows(level: int, **figures: tuple[str, float]) -> dict[tuple[int, str], Figure]:
    return {(level, method.replace("_", "-")): Figure(*figure) for method, figure in figures.items()}


PLAIN_SMALL, PLAIN_LARGE = Figure("37M", 1.30), Figure("66M", 1.25)
"""The models without factorization that NP-L0 prunes."""

ENWIK8_SRU = PaperTable(
    title="SRU",
    dense=Figure("35M", 1.24),
    rows=_rows(
        70, fac=("11M", 1.33), agp=("11M", 1.27), np_l0=("11M", 1.31), flop_agp=("11M", 1.27), flop_l0=("11M", 1.25)
    )
    | _rows(80, fac=("8M", 1.38), agp=("8M", 1.29), np_l0=("8M", 1.34), flop_agp=("8M", 1.29), flop_l0=("8M", 1.27))
    | _rows(90, fac=("4M", 1.47), agp=("4M", 1.35), np_l0=("4M", 1.43), flop_agp=("4M", 1.34), flop_l0=("4M", 1.33)),
    own_dense={"np-l0": PLAIN_SMALL},
    of={"corpus": "enwik8", "architecture": "sru", "num_layers": 6, "width": 3056, "rank": 512},
    plain_width=1536,
)
ENWIK8_TRANSFORMER_XL = PaperTable(
    title="Transformer-XL",
    dense=Figure("41M", 1.08),
    rows=_rows(80, fac=("8M", 1.20), agp=("8M", 1.14), flop_agp=("8M", 1.17), flop_l0=("8M", 1.13))
    | _rows(90, flop_agp=("4M", 1.25), flop_l0=("4M", 1.17)),
    own_dense={},
    of={"corpus": "enwik8", "architecture": "transformer-xl", "num_layers": 12, "width": 512, "inner": 2048},
)
WIKITEXT_103 = PaperTable(
    title="SRU on WikiText-103",
    dense=Figure("100M", 24.5),
    rows=_rows(
        50, fac=("50M", 28.2), agp=("50M", 25.7), np_l0=("51M", 26.7), flop_agp=("51M", 25.6), flop_l0=("50M", 25.3)
    )
    | _rows(
        70, fac=("30M", 31.0), agp=("30M", 28.4), np_l0=("31M", 31.3), flop_agp=("31M", 28.1), flop_l0=("30M", 27.7)
    )
    | _rows(
        80, fac=("21M", 35.2), agp=("20M", 32.6), np_l0=("18M", 39.1), flop_agp=("21M", 31.3), flop_l0=("21M", 31.9)
    ),
    own_dense={"np-l0": None},
    of={"corpus": "wikitext-103", "architecture": "sru", "num_layers": 12, "width": 2048, "rank": 512},
    plain_width=1184,
)
LANGUAGE_MODELS = {
    ENWIK8_SRU: "bits_per_character",
    ENWIK8_TRANSFORMER_XL: "bits_per_character",
    WIKITEXT_103: "perplexity",
}
"""The tables of language models, and the measure of each."""
FACTORIZATION: Mapping[str, tuple[Figure, Mapping[int, float]]] = {
    "NP-L0, small": (PLAIN_SMALL, {70: 1.31, 80: 1.34, 85: 1.37, 90: 1.43}),
    "NP-L0, large": (PLAIN_LARGE, {70: 1.28, 80: 1.31, 85: 1.32, 90: 1.37}),
    "FLOP-L0": (ENWIK8_SRU.dense, {70: 1.25, 80: 1.27, 85: 1.29, 90: 1.33}),
}
"""Bits per character by percent removed, and the dense model of each."""

FINE_TUNING: Mapping[str, Mapping[str, str | float]] = {
    "dense": {"parameters": "125M", "sst2": 92.43, "mrpc": 90.9, "stsb": 90.22, "qnli": 89.77, "mean": 90.83},
    "35%": {"parameters": "80M", "sst2": 92.09, "mrpc": 88.61, "stsb": 88.18, "qnli": 89.05, "mean": 89.48},
}
"""RoBERTa-base, pruned while it is fine-tuned."""

TIMING: Mapping[tuple[str, int], tuple[float, float]] = {
    ("sru", 80): (0.21, 1.9),
    ("sru", 90): (0.18, 2.2),
    ("txl", 80): (0.87, 1.5),
    ("txl", 90): (0.82, 1.6),
}
"""Seconds on a CPU, and how much faster than dense (0.39 s and 1.33 s)."""


def paper_of(experiment: Mapping[str, Any]) -> PaperTable | None:
    """The table of the paper that an experiment is of."""
    return next(
        (table for table in LANGUAGE_MODELS if table.is_of(experiment) or table.is_of(experiment, plain=True)), None
    )
