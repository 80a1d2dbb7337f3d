"""The table of the README: one line per kind of result, each from a record."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from rankwise.lab.report import Table
from rankwise.lab.report.comparison import cells
from results_page.records import BENCHMARKS
from results_page.sections import BITS, TASKS, latest

Results = Mapping[str, Any]
COLUMNS = ("model and measure", "parameters", "removed", "dense", "small", "CPU speed")
LANGUAGE_MODELS = (
    ("SRU, enwik8, bits per character", "enwik8-sru", "enwik8-sru", "flop-l0-80-distilled", BITS, ".3f", "sru", 80),
    ("the same", "enwik8-sru", "enwik8-sru", "flop-l0-90-distilled", BITS, ".3f", "sru", 90),
    ("Transformer-XL, enwik8, bits per character", "enwik8-transformer-xl", "enwik8-transformer-xl", "flop-l0-80", BITS,
     ".3f", "txl", 80),
    ("SRU, words of enwik8, perplexity", "words", "enwik8-words", "flop-l0-70", "perplexity", ".1f", "", 0),
)  # fmt: skip
"""What it is; record, base and cell; measure and its digits; the model and the level of the CPU benchmark."""


def headline(found: Results) -> Table:
    """Size and quality of the dense model and the small one, and speed on two CPU cores against dense."""
    rows = [_ten_minutes(found["enwik8-sru-10min"])]
    rows += [_language_model(found, *row) for row in LANGUAGE_MODELS]
    rows += [_fine_tuned(found["glue-mpnet"], "ours-35"), _fine_tuned(found["glue-mpnet"], "ours-60")]
    rows += _one_shot(found["arena-smollm2-refined"])
    return Table(COLUMNS, tuple(rows))


def _sizes(dense: int, small: int) -> tuple[str, str]:
    return f"{dense / 1e6:.1f}M to {small / 1e6:.1f}M", f"{1 - small / dense:.0%}"


def _ten_minutes(record: Mapping[str, Any]) -> tuple[str, ...]:
    base, small = record["rows"]
    sizes = _sizes(base["parameters"], small["parameters"])
    return "SRU, enwik8, bits per character, ten minutes in all", *sizes, "", f"{small['test'][BITS]:.3f}", ""


def _language_model(
    found: Results, title: str, table: str, base: str, name: str, measure: str, digits: str, model: str, level: int
) -> tuple[str, ...]:
    # the first seed, which every cell has
    cell = cells(found[f"table-{table}"], base, name)[0]
    assert cell.control is not None
    sizes = _sizes(cell.control["parameters"], cell.row["parameters"])
    scores = (format(row["test"][measure], digits) for row in (cell.control, cell.row))
    speeds = latest(found[BENCHMARKS], "cpu inference")
    speed = speeds.get(f"{model} 2 threads: speed of {level}% / dense")
    return title, *sizes, *scores, "" if speed is None else f"{speed:.1f}x"


def _fine_tuned(record: Mapping[str, Any], name: str) -> tuple[str, ...]:
    # the first seed: the only one with a control for every task
    control, small = (
        [row for row in record["rows"] if (row["row"], row["seed"]) == (own, 0)] for own in ("control", name)
    )
    scores = (f"{statistics.mean(row['score'] for row in rows):.1f}" for rows in (control, small))
    assert len(control) == len(small) == len(TASKS)
    title = "MPNet-base, mean of four GLUE tasks" if name == "ours-35" else "the same"
    return title, *_sizes(control[0]["parameters"], small[0]["parameters"]), *scores, ""


def _one_shot(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    dense, rows = record["dense"], [row for row in record["rows"] if "healed" in row]
    made = {row["removed"]: (_sizes(dense["parameters"], row["parameters"]), row) for row in rows}
    title = "SmolLM2-135M, compressed without labels, perplexity"
    (sizes, small), (smaller_sizes, smaller) = made[0.2], made[0.3]
    return [
        (title, *sizes, f"{dense['test']:.1f}", f"{small['test']:.1f}", ""),
        ("the same, then healed", *smaller_sizes, f"{dense['test']:.1f}", f"{smaller['healed']['test']:.1f}", ""),
    ]
