"""What the paper claims, one by one, as it held here: every figure and every verdict is made from the records."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rankwise.lab.report import Table
from rankwise.lab.report.comparison import cells
from rankwise.lab.report.paper import ENWIK8_SRU, ENWIK8_TRANSFORMER_XL, FINE_TUNING, TIMING, WIKITEXT_103, PaperTable
from results_page import sections
from results_page.records import BENCHMARKS

Results = Mapping[str, Any]
TABLES: dict[str, tuple[PaperTable, str, str, str]] = {
    "SRU": (ENWIK8_SRU, "table-enwik8-sru", "enwik8-sru", sections.BITS),
    "Transformer-XL": (ENWIK8_TRANSFORMER_XL, "table-enwik8-transformer-xl", "enwik8-transformer-xl", sections.BITS),
    "words": (WIKITEXT_103, "table-words", "enwik8-words", "perplexity"),
}
"""The paper's table, and the record, the base and the measure of ours."""
EQUAL = 0.4
"""Losses that differ by less, in points, are called equal: seeds differ by as much (docs/log/training.md)."""
NOT_RUN = ("", "not run")


def claims(found: Results) -> Table:
    """Claim, the paper's figures, ours, verdict."""
    rows = (
        *_compared(found),
        ("70% of the SRU removed costs almost nothing", *_one(found, "SRU", 70)),
        ("half of a word-level model removed costs little", *_one(found, "words", 50)),
        ("rare words lose more of their dimensions", "a figure", *_clusters(found)),
        ("35% of an encoder removed keeps nearly 99%", *_encoder(found)),
        ("faster inference on a CPU", *_inference(found)),
        ("training on a GPU is up to 2.4x as fast", "2.4x", *_training(found)),
        ("the Lagrangian reaches the size asked for", "all runs", *_sizes(found)),
        ("gates decide: nearly all end open or closed", "a figure", *_decided(found)),
        ("the first layer of the SRU is pruned more than the last", "a figure", *_first_layer(found)),
    )
    return Table(("claim", "paper", "ours", "verdict"), rows)


def _compared(found: Results) -> Iterator[tuple[str, str, str, str]]:
    """Claims that one method loses less than another, at every size of every model that has both."""
    for claim, mine, others in (
        ("pruning beats a small model from scratch (FLOP-L0, FAC)", "flop-l0", {"fac": "fac-{}-scratch"}),
        ("FLOP-L0 beats even ranks of the same base (not a row of the paper)", "flop-l0", {"": "fac-{}"}),
        ("FLOP-L0 beats unstructured pruning (AGP)", "flop-l0", {"agp": "agp-{}"}),
        ("so does FLOP-AGP, with the same criterion", "flop-agp", {"agp": "agp-{}"}),
        ("learned gates beat magnitudes (FLOP-L0, FLOP-AGP)", "flop-l0", {"flop-agp": "flop-agp-{}"}),
        ("components beat input features (FLOP-L0, NP-L0)", "flop-l0", {"np-l0": "np-l0-{}"}),
    ):
        ((theirs, cell),) = others.items()
        printed, measured = [], []
        for name, (paper, *_) in TABLES.items():
            for level in sorted({level for level, _ in paper.rows}):
                pair = paper.lost(level, mine), paper.lost(level, theirs)
                printed.append((f"{name} {level}%", *(None if one is None else 100 * one for one in pair)))
                pair = _lost(found, name, f"{mine}-{level}"), _lost(found, name, cell.format(level))
                measured.append((f"{name} {level}%", *pair))
        yield claim, _verdict(printed)[1] if theirs else "", *_verdict(measured)


def _verdict(pairs: Sequence[tuple[str, float | None, float | None]]) -> tuple[str, str]:
    """The losses of both, and in how many cases the first is smaller."""
    known = [(where, one, other) for where, one, other in pairs if one is not None and other is not None]
    if not known:
        return NOT_RUN
    shown = "; ".join(f"{where}: {one:+.1f}% against {other:+.1f}%" for where, one, other in known)
    smaller = sum(other - one >= EQUAL for _, one, other in known)
    larger = sum(one - other >= EQUAL for _, one, other in known)
    words = [f"{number} {word}" for number, word in ((smaller, "better"), (larger, "worse")) if number]
    equal = len(known) - smaller - larger
    return shown, ", ".join([*words, *([f"{equal} equal"] if equal else [])])


def _lost(found: Results, name: str, cell: str) -> float | None:
    """What a cell loses against its dense control, in per cent; the mean over its seeds."""
    _, stem, base, measure = TABLES[name]
    if cell.startswith("np-l0"):
        stem, base = ("table-np-l0", f"{base}-plain-1536") if name == "SRU" else (stem, f"{base}-plain")
    losses = [loss for one in cells(found.get(stem), base, cell) if (loss := one.lost(measure)) is not None]
    return 100 * statistics.mean(losses) if losses else None


def _one(found: Results, name: str, level: int) -> tuple[str, str, str]:
    """FLOP-L0 at one size."""
    printed = TABLES[name][0].lost(level, "flop-l0")
    assert printed is not None
    lost = _lost(found, name, f"flop-l0-{level}")
    theirs = f"{100 * printed:+.1f}%"
    if lost is None:
        return theirs, *NOT_RUN
    return (
        theirs,
        f"{lost:+.1f}%",
        "holds" if lost < 100 * printed + EQUAL else f"{lost - 100 * printed:.1f} points more",
    )


def _clusters(found: Results) -> tuple[str, str]:
    rows = [
        cell.row
        for level in (50, 70, 80)
        for cell in cells(found.get("table-words"), "enwik8-words", f"flop-l0-{level}")
    ]
    if not rows:
        return NOT_RUN
    parts = sections.cluster_parameters(rows[0]["matrices"])
    kept = [after / before for part, (before, after) in sorted(parts.items()) if part != "layers"]
    shown = ", ".join(f"{share:.0%}" for share in kept) + " kept of the most to the least frequent"
    return shown, "holds" if kept == sorted(kept, reverse=True) else "does not hold"


def _encoder(found: Results) -> tuple[str, str, str]:
    theirs = f"{float(FINE_TUNING['35%']['mean']) / float(FINE_TUNING['dense']['mean']):.1%}"
    rows = [row for row in sections.fine_tuning(found.get("glue-mpnet")).rows if "-35" in row[0] and "ours" in row[0]]
    if not rows or not rows[0][-1]:
        return theirs, *NOT_RUN
    return theirs, f"{rows[0][-1]}, MPNet", "holds" if float(rows[0][-1].rstrip("%")) >= 98.5 else "does not hold"


def _inference(found: Results) -> tuple[str, str, str]:
    theirs = "; ".join(
        f"{sections.MODELS[model]} {level}%: {faster}x" for (model, level), (_, faster) in TIMING.items()
    )
    if BENCHMARKS not in found:
        return theirs, *NOT_RUN
    rows = sections.timing(found[BENCHMARKS]).rows
    shown = "; ".join(f"{row[0]} {row[1]}: {row[4]}" for row in rows if row[4])
    ahead = all(float(row[4].rstrip("x")) >= float(row[3].rstrip("x")) for row in rows if row[4])
    return theirs, f"{shown} (1 thread)", "holds" if ahead else "in part"


def _training(found: Results) -> tuple[str, str]:
    rates = sections.latest(found.get(BENCHMARKS, []), "sru loop")
    if not {"dense", "10% open"} <= rates.keys():
        return NOT_RUN
    faster = max(rates[case] / rates["dense"] for case in ("20% open", "10% open") if case in rates)
    return f"{faster:.1f}x of a faster dense loop", "holds" if faster >= 2.4 else "not so large here"


def _sizes(found: Results) -> tuple[str, str]:
    if "lagrangian-recipes" not in found:
        return NOT_RUN
    rows = {row[0]: (row[2], row[1]) for row in sections.recipes(found["lagrangian-recipes"]).rows}
    shown = "; ".join(f"{name}: {hits} of {runs}" for name, (hits, runs) in rows.items())
    hits, runs = rows.get("published", ("0", "0"))
    return shown, "holds" if hits == runs else "as published it stalls; with a rising weight and a commitment it holds"


def _gates(found: Results) -> list[tuple[float, float]]:
    """(between, open) of the first and the last matrix of the SRU before the choice was made."""
    rows = [
        cell.row for cell in cells(found.get("table-enwik8-sru"), "enwik8-sru", "flop-l0-80") if "gates" in cell.row
    ]
    if not rows:
        return []
    histograms = [each[max(len(each) - 2, 0)] for each in rows[0]["gates"]["histograms"].values()]
    return [(sum(counts[1:-1]) / sum(counts), counts[-1] / sum(counts)) for counts in histograms]


def _decided(found: Results) -> tuple[str, str]:
    if not (shares := _gates(found)):
        return NOT_RUN
    between = max(share for share, _ in shares)
    return f"{between:.0%} between, before the choice", "holds" if between < 0.05 else "does not hold"


def _first_layer(found: Results) -> tuple[str, str]:
    if not (shares := _gates(found)):
        return NOT_RUN
    first, last = shares[0][1], shares[-1][1]
    return f"{first:.0%} and {last:.0%} of their components open", "holds" if first < last else "the other way round"
