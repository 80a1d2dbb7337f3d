"""Which rows of the arena are measured, and how settings are chosen from those that were: for `arena_queue.py`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from arena import Cell

TEXTS = ("valid", "docstrings", "news", "test", "other")
BOS = {"smollm2": None, "gemma": 2}
LEVELS = {"smollm2": (0.2, 0.3, 0.4), "gemma": (0.1, 0.2, 0.3)}
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
    def needs_generated(self) -> bool:
        return self.cell is not None and "generated" in self.cell.calibrate


def ours(model: str, removed: float, *, alone: bool = False, **settings: Any) -> Job:
    given = {"name": "ours", "removed": removed, **settings}
    return Job(model=model, cell=Cell(**given), alone=alone)


def first_plan() -> list[Job]:
    """SmolLM2 and Gemma at 20%: refinement, which takes longest, and texts."""
    jobs = [Job(model="smollm2", kind=kind) for kind in ("generate", "dense")]
    tried = (
        {"refine": 500, "calibration_windows": 1024, "refine_lr": 2e-4},
        {"refine": 500, "calibration_windows": 1024},
        {"refine": 250, "calibration_windows": 512},
    )
    jobs += [ours("smollm2", 0.2, calibrate=MIXED, **how) for how in tried]
    jobs += [Job(model="gemma", kind=kind) for kind in ("generate", "dense")]
    return jobs + [ours(model, 0.2, calibrate=mix) for model in ("gemma", "smollm2") for mix in (MIXED, "train")]


def second_plan(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> list[Job]:
    """By what the first has shown: sizes, healing, peers on the same texts, samples, aligned ranks, seconds."""
    best = {model: chosen(rows, model, options) for model in BOS}
    refined = best_refinement(rows, options)

    def levels(model: str, **more: Any) -> list[Job]:
        return [ours(model, level, **{**best[model], **more}) for level in LEVELS[model]]

    def beside(*names: str, **more: Any) -> list[Job]:
        given = {**more, "calibrate": best["smollm2"]["calibrate"]}
        cells = [Cell(name=name, removed=level, **given) for level in LEVELS["smollm2"] for name in names]
        return [Job(model="smollm2", cell=cell) for cell in cells]

    jobs = [Job(model=model, kind="dense") for model in BOS]
    healed = {"heal": 300, "heal_generated": True}
    jobs += levels("smollm2", **refined, **healed) + levels("gemma", **healed) + beside("zs-svd", "aa-svd", **refined)
    jobs += levels("smollm2", **refined, seed=1) + levels("gemma", seed=1) + levels("smollm2", **refined, seed=2)
    jobs += levels("smollm2", calibration_windows=refined["calibration_windows"]) + beside("svd-llm", **refined)
    jobs += [*levels("gemma", seed=2), Job(model="smollm2", kind="command")]
    jobs += [*beside("zs-svd", "aa-svd", "svd-llm"), ours("gemma", 0.3, **best["gemma"], refine=250)]
    jobs += [ours("smollm2", 0.2, name="ours-pairs", rank_multiple=number) for number in (None, 64, 32, 16, 8)]
    jobs += [ours("smollm2", 0.2, name="ours-gpu")]
    return [*jobs, Job(model="smollm2", kind="command", words=("--refine", "0", "--ranks", "global"), alone=True)]


def ratios(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Perplexities of a row as shares of the dense model's."""
    dense = next((each for each in rows if each["kind"] == "dense" and each["model"] == row["model"]), None)
    return {name: row[name] / dense[name] for name in TEXTS if name in row} if dense else {}


def score(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> float:
    found = {name: math.log(value) for name, value in ratios(row, rows).items()}
    return 0.5 * found["valid"] + 0.25 * (found["docstrings"] + found["news"]) if found else math.inf


def chosen(rows: Sequence[dict[str, Any]], model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Texts and smoothing that lose least at 20%, not refined."""
    given = {name: getattr(options, name) for name in ("calibrate", "smoothing") if getattr(options, name) is not None}
    tried = [
        row
        for row in rows
        if (row["model"], row["kind"], row.get("removed")) == (model, "row", 0.2)
        and row["name"] == "ours"
        and not any(row.get(name) for name in ("refine", "polish", "heal", "calibration_windows"))
        and "code" not in row.get("calibrate", "")
    ]
    best = min(tried, key=lambda row: score(row, rows), default={"calibrate": MIXED})
    return {"calibrate": best.get("calibrate", "train"), "smoothing": best.get("smoothing", ""), **given}


def best_refinement(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Steps, rate and windows that are best on validation text, of those tried on the mixed texts."""
    tried = [row for row in rows if row["model"] == "smollm2" and row.get("refine") and "polish" not in row]
    tried = [row for row in tried if row.get("calibrate") == MIXED and row.get("removed") == 0.2]
    tried = [row for row in tried if row["name"] == "ours" and not row.get("seed") and not row.get("heal")]
    names = ("refine", "refine_lr", "calibration_windows")
    best = min(tried, key=lambda row: float(row["valid"]), default={"refine": 250, "calibration_windows": 512})
    found = {name: best[name] for name in names if name in best}
    return {**found, **({} if options.windows is None else {"calibration_windows": options.windows})}
