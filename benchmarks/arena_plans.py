"""Which rows of the arena are measured: for `arena_queue.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from arena import Cell

TEXTS = ("valid", "docstrings", "news", "test", "other")
BOS = {"smollm2": None, "gemma": 2}
LEVELS = {"smollm2": (0.2, 0.3, 0.4), "gemma": (0.1, 0.2, 0.3)}
REFINED: dict[str, Any] = {"refine": 500, "calibration_windows": 1024, "refine_lr": 2e-4}
HEALED: dict[str, Any] = {"heal": 300, "heal_generated": True}
MIXED = "train+generated"
"""Better on validation texts than `train` alone and than other mixtures, with few windows (docs/log/one-shot.md)."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One process."""

    model: str
    kind: str = "row"
    """row, dense, generate or command."""
    cell: Cell | None = None
    words: tuple[str, ...] = ()
    """Of a command of rankwise, which is timed."""
    alone: bool = False
    """Whether nothing else runs beside it, so that its seconds mean something."""

    @property
    def key(self) -> str:
        parts = () if self.cell is None else [f"{name}={value}" for name, value in self.cell.settings.items()]
        return " ".join([self.model, self.kind, *parts, *self.words, *(["alone"] if self.alone else [])])

    @property
    def heals(self) -> bool:
        return self.cell is not None and self.cell.heal > 0

    @property
    def needs_generated(self) -> bool:
        return self.cell is not None and "generated" in self.cell.calibrate


def ours(model: str, removed: float, **settings: Any) -> Job:
    return Job(model=model, cell=Cell(**{"name": "ours", "removed": removed, "calibrate": MIXED, **settings}))


def plan() -> list[Job]:
    """What is in no record comes first. Settings are those that are best on validation text (docs/log/one-shot.md)."""
    jobs = [Job(model=model, kind=kind) for model in LEVELS for kind in ("generate", "dense")]
    jobs += levels("smollm2", **REFINED, **HEALED) + levels("gemma", heal=HEALED["heal"])
    jobs += beside("zs-svd", "aa-svd", "svd-llm", **REFINED)
    for seed in (1, 2):
        jobs += levels("gemma", seed=seed) + levels("smollm2", **REFINED, seed=seed)
    jobs += levels("smollm2", calibration_windows=REFINED["calibration_windows"])
    jobs += [ours("gemma", 0.3, refine=250), *beside("zs-svd", "aa-svd", "svd-llm")]
    jobs += [ours("smollm2", 0.2, name="ours-pairs", rank_multiple=number) for number in (None, 64, 32, 16, 8)]
    jobs += [ours("smollm2", 0.2, name="ours-gpu"), Job(model="smollm2", kind="command", alone=True)]
    return [*jobs, Job(model="smollm2", kind="command", words=("--refine", "0", "--ranks", "global"), alone=True)]


def levels(model: str, **settings: Any) -> list[Job]:
    return [ours(model, level, **settings) for level in LEVELS[model]]


def beside(*names: str, **settings: Any) -> list[Job]:
    """Peers, calibrated on what ours is."""
    return [ours("smollm2", level, name=name, **settings) for level in LEVELS["smollm2"] for name in names]


def ratios(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Perplexities of a row as shares of the dense model's."""
    dense = next((each for each in rows if each["kind"] == "dense" and each["model"] == row["model"]), None)
    return {name: row[name] / dense[name] for name in TEXTS if name in row} if dense else {}
