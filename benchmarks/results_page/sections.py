"""The other tables of the page of results: from records of their own shapes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rankwise.lab.report import MEASURES, Table, spread
from rankwise.lab.report.comparison import Cell, bases, cells
from rankwise.lab.report.paper import FINE_TUNING, TIMING

Record = Mapping[str, Any]
BITS = "bits_per_character"
MODELS = {"sru": "SRU", "txl": "Transformer-XL"}
TASKS = {"sst2": "SST-2", "mrpc": "MRPC", "stsb": "STS-B", "qnli": "QNLI"}

FIRST_SEED = ("dense", "control", "ours-35", "ours-60", "paper-35", "fac-35")
"""Rows of the fine-tuning that are compared by one seed, because some have no other."""


def within_minutes(name: str, single: Record | None, table: Record | None) -> Table:
    """The run of a preset alone, of one seed; and those with a dense control, over seeds."""
    rows = []
    for row in single["rows"] if single else ():
        title = f"{'dense base' if row['method'] == 'dense' else row['name']}, one run"
        rows.append((title, *_figures([Cell(row, single["seed"], None)])))
    found = {
        "dense base": [Cell(base, 0, None) for base in bases(table, name)],
        "dense control": cells(table, name, "dense"),
        "flop-l0": cells(table, name, "flop-l0-80"),
        "svd, one-shot": cells(table, name, "svd-80"),
    }
    rows += [(title, *_figures(group)) for title, group in found.items() if group]
    return Table(("", "parameters", "removed", "valid bits", "test bits", "lost", "seeds"), tuple(rows))


def gpu_decoder(record: Record) -> Table:
    """Milliseconds of a decoder that was compressed without training, and its speed relative to dense."""
    cases = [name for name in record["rows"][0] if name not in ("name", "parameters")]

    def timed(row: Record, case: str) -> str:
        spent, speed = row[case]["milliseconds"]["median"], row[case]["speed"]
        spread = (
            "" if row["name"] == "dense" else f" ({speed['median']:.2f}x, {speed['p20']:.2f} to {speed['p80']:.2f})"
        )
        return f"{spent:.2f} ms{spread}"

    rows = [(row["name"], f"{row['parameters']:,}", *(timed(row, case) for case in cases)) for row in record["rows"]]
    return Table(("", "parameters", *cases), tuple(rows))


def gpu_training(record: Record) -> Table:
    """The time of a step of a decoder that is being pruned, and the peak of memory, relative to dense."""
    dense = record["rows"][0]

    def row(found: Record) -> tuple[str, ...]:
        spent = found["milliseconds"]
        times = f"{spent['median']:.1f} ms ({spent['p20']:.1f} to {spent['p80']:.1f})"
        speed = dense["milliseconds"]["median"] / spent["median"]
        return (found["name"], times, f"{speed:.2f}x", f"{found['peak bytes'] / dense['peak bytes']:.2f}x")

    return Table(("", "step", "speed", "peak memory"), tuple(map(row, record["rows"])))


def gpu_compress(record: Record) -> Table:
    """The time and memory to compress a decoder."""
    rows = []
    for row in record["rows"]:
        dense, small = row["parameters"]
        parts = ", ".join(f"{what} {seconds:.0f} s" for what, seconds in row["parts"].items())
        peak = f"{row['peak memory against the weights']:.2f}x"
        rows.append((f"{dense:,}", f"{small:,}", f"{row['seconds']:.0f} s ({parts})", peak))
    return Table(("dense", "compressed", "time", "peak memory against the weights"), tuple(rows))


def gpu_offload(record: Record) -> Table:
    """The time and memory to compress a decoder from disk."""
    rows = []
    for row in record["rows"]:
        before, most = row["host memory but for files, GiB"] or (0.0, 0.0)
        figures = (f"{row['weights, GiB']:.1f} GiB", f"{row['peak memory, GiB']:.1f} GiB", f"{most - before:.1f} GiB")
        rows.append(
            (f"{row['parameters'][0]:,}", *figures, f"{row['blocks read, times']:.1f}", f"{row['seconds']:.0f} s")
        )
    columns = ("parameters", "weights", "peak of the GPU", "added on the host", "blocks read, times", "time")
    return Table(columns, tuple(rows))


def vllm_speed(record: Record) -> Table:
    """Tokens per second in vLLM, and the speed relative to dense in all and in each round."""
    settings, cases = record["settings"], [name for name in record["rows"][0] if name not in ("name", "parameters")]

    def cell(row: Record, case: str) -> str:
        found = row[case]
        rounds = ", ".join(f"{speed:.2f}" for speed in found["of rounds"])
        return f"{found['tokens/s']:.1f}" + ("" if row["name"] == "dense" else f" ({found['speed']:.2f}x; {rounds})")

    rows = [(row["name"], f"{row['parameters']:,}", *(cell(row, case) for case in cases)) for row in record["rows"]]
    return Table((f"{settings['shape']}, {settings['dtype']}", "parameters", *cases), tuple(rows))


def _figures(found: Sequence[Cell]) -> tuple[str, ...]:
    row = found[0].row
    lost = [100 * loss for cell in found if (loss := cell.lost(BITS)) is not None]
    return (
        f"{row['parameters']:,}",
        f"{row['removed_of_prunable']:.1%}",
        spread([cell.row["valid"][BITS] for cell in found]),
        spread([cell.row["test"][BITS] for cell in found]),
        spread(lost, "+.1f", "%"),
        str(len(found)),
    )


def fine_tuning(record: Record | None) -> Table:
    """The mean of each task's metrics, and the share of the dense model's mean that is kept."""
    rows = [
        (f"paper: RoBERTa-base, {name}", str(row["parameters"]), *(f"{row[task]:.2f}" for task in (*TASKS, "mean")))
        for name, row in FINE_TUNING.items()
    ]
    dense = float(FINE_TUNING["dense"]["mean"])
    rows = [(*row, f"{float(row[-1]) / dense:.1%}") for row in rows]
    found = (record or {}).get("rows", [])
    for name in dict.fromkeys(row["row"] for row in found):
        own = [row for row in found if row["row"] == name]
        runs = {(row["task"], row["seed"]) for row in own}
        # of the very models that these were made from
        origins = [row for row in found if row["row"] == "dense" and (row["task"], row["seed"]) in runs]
        mean, before = _task_mean(own), _task_mean(origins)
        overall = ("" if mean is None else f"{mean:.2f}", f"{mean / before:.1%}" if mean and before else "")
        scores = [spread([row["score"] for row in own if row["task"] == task], ".2f") for task in TASKS]
        rows.append((f"MPNet-base, {name}", f"{own[0]['parameters']:,}", *scores, *overall))
    means = {name: _task_mean([row for row in found if (row["row"], row["seed"]) == (name, 0)]) for name in FIRST_SEED}
    first = ", ".join(f"{name} {mean:.2f}" for name, mean in means.items() if mean is not None)
    notes = (f"Means of the first seed alone: {first}.",) if first else ()
    return Table(("", "parameters", *TASKS.values(), "mean", "of dense"), tuple(rows), notes)


def _task_mean(rows: Sequence[Record]) -> float | None:
    """The mean over tasks of the means over seeds; None where a task is missing."""
    scores = [[float(row["score"]) for row in rows if row["task"] == task] for task in TASKS]
    return statistics.mean(map(statistics.mean, scores)) if all(scores) else None


def fine_tuned(record: Record) -> Table:
    """Every task's own metrics, over seeds."""
    found = record["rows"]
    rows = []
    for task, name in dict.fromkeys((row["title"], row["row"]) for row in found):
        group = [row for row in found if (row["title"], row["row"]) == (task, name)]
        metrics = [f"{MEASURES[key]} {spread([row['test'][key] for row in group])}" for key in group[0]["test"]]
        rows.append((task, name, f"{group[0]['parameters']:,}", "; ".join(metrics), str(len(group))))
    return Table(("", "", "parameters", "development set", "seeds"), tuple(rows))


def latest(benchmarks: Sequence[Mapping[str, str]], name: str) -> dict[str, float]:
    """The value of every case of a benchmark; the last run of a case counts."""
    return {row["case"]: float(row["value"]) for row in benchmarks if row["benchmark"] == name}


def timing(benchmarks: Sequence[Mapping[str, str]]) -> Table:
    """Speed against the dense model on a CPU."""
    rows = []
    for (model, level), (seconds, faster) in TIMING.items():
        ratios = _ratios(benchmarks, model, f"{level}% / dense")
        rows.append((MODELS[model], f"{level}%", f"{seconds:.2f} s", f"{faster:.1f}x", *ratios))
    return Table(("", "removed", "paper: time", "paper: faster", "ours: 1 thread", "ours: 2 threads"), tuple(rows))


def more_timing(benchmarks: Sequence[Mapping[str, str]]) -> Table:
    """Speed on a CPU against the published implementations, and what int8 adds."""
    rows = []
    for model, theirs in (("sru", "released"), ("txl", "original")):
        for level in ("dense", "80%", "90%"):
            size = level if level == "dense" else f"{level} removed"
            what = f"{size}, against the {theirs} code at the same size"
            rows.append((MODELS[model], what, *_ratios(benchmarks, model, f"{level} / {level} {theirs}")))
        for level in ("80%", "90%"):
            what = f"{level} removed, int8 against float32"
            rows.append((MODELS[model], what, *_ratios(benchmarks, model, f"{level} int8 / {level}")))
    return Table(("", "", "1 thread", "2 threads"), tuple(rows))


def _ratios(benchmarks: Sequence[Mapping[str, str]], model: str, of: str) -> list[str]:
    found = latest(benchmarks, "cpu inference")
    ratios = [found.get(f"{model} {threads}: speed of {of}") for threads in ("1 thread", "2 threads")]
    return ["" if ratio is None else f"{ratio:.2f}x" for ratio in ratios]


def training_speed(benchmarks: Sequence[Mapping[str, str]]) -> Table:
    """Characters per second of the training loop on a GPU."""
    rows = []
    for name, title in (("sru loop", "SRU"), ("transformer-xl loop", "Transformer-XL")):
        found = latest(benchmarks, name)
        rates = (found.get(case) for case in ("dense", "20% open", "10% open"))
        rows.append((title, *("" if rate is None else f"{rate / 1e6:.2f}M" for rate in rates)))
    return Table(("characters per second", "dense", "20% open", "10% open"), tuple(rows))


def gpu_timing(benchmarks: Sequence[Mapping[str, str]]) -> Table:
    """Time of the dense model and speed against it on a GPU, by precision and batch."""
    found = latest(benchmarks, "gpu inference")
    rows = []
    # "sru float32, batch 1, graph: dense"
    for case in dict.fromkeys(case.rpartition(", ")[0] for case in found):
        model, precision, _, batch = case.replace(",", "").split()
        row = [MODELS[model], precision, batch]
        for how in ("torch", "graph"):
            row.append(f"{found[f'{case}, {how}: dense']:.2f} ms")
            row += (f"{found[f'{case}, {how}: speed of {level}% / dense']:.2f}x" for level in (80, 90))
        rows.append(tuple(row))
    kinds = [f"{how}: {what}" for how in ("kernels", "graph") for what in ("dense", "80% removed", "90% removed")]
    return Table(("", "", "batch", *kinds), tuple(rows))


def clusters(record: Record | None, base: str) -> Table:
    """What flop-l0 keeps of each cluster of words, and of the layers; the most frequent words first."""
    levels = [level for level in (50, 70, 80) if cells(record, base, f"flop-l0-{level}")]
    parts: dict[str, list[str]] = {}
    for level in levels:
        matrices = cells(record, base, f"flop-l0-{level}")[0].row["matrices"]
        for name, (dense, kept) in cluster_parameters(matrices).items():
            parts.setdefault(name, [f"{dense:,}"]).append(f"{kept:,} ({kept / dense:.0%})")
    rows = tuple((name, *found) for name, found in parts.items())
    return Table(("", "dense", *(f"{level}% removed" for level in levels)), rows)


def cluster_parameters(matrices: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, int]]:
    """(parameters before, after) of each cluster of words, and of everything else together."""
    found: dict[str, tuple[int, int]] = {}
    for name, (dense, kept) in matrices.items():
        head, _, number = name.rpartition(".clusters.")
        part = f"words, cluster {int(number.split('.')[0]) + 1}" if head else "layers"
        before = found.get(part, (0, 0))
        found[part] = (before[0] + dense, before[1] + kept)
    return found


def recipes(records: Sequence[Mapping[str, str]]) -> Table:
    """How often each recipe reaches the size, and what its exports cost in bits."""
    numbers = [{key: float(value) for key, value in row.items() if key != "recipe"} for row in records]
    settings: dict[tuple[Any, ...], list[float]] = {}
    for row, run in zip(records, numbers, strict=True):
        if abs(run["expected"] - run["target"]) <= 0.01:
            key = (run["target"], row["recipe"], run["gate_lr"], run["multiplier_lr"])
            settings.setdefault(key, []).append(run["bits"])
    best: dict[float, float] = {}
    for (target, *_), bits in settings.items():
        best[target] = min(best.get(target, float("inf")), statistics.mean(bits))
    rows = []
    for name in dict.fromkeys(row["recipe"] for row in records):
        mine = [run for row, run in zip(records, numbers, strict=True) if row["recipe"] == name]
        miss = [100 * abs(run["expected"] - run["target"]) for run in mine]
        extra = [run["bits"] - best[run["target"]] for run in mine]
        hits = sum(m <= 1 for m in miss)
        measured = (f"{max(miss):.1f}", f"{statistics.mean(extra):.3f}", f"{max(extra):.3f}")
        rows.append((name, str(len(mine)), str(hits), *measured))
    columns = ("recipe", "runs", "within 1 point", "worst miss (points)", "extra bits, mean", "worst")
    return Table(columns, tuple(rows))


def methods(record: Record) -> Table:
    """All methods from one base, of a transformer."""
    rows = [(row["name"], f"{row['params']:,}", f"{row['bits']:.3f}") for row in record["rows"]]
    return Table(("", "parameters", "valid bits per character"), tuple(rows), (f"{record['what']}.",))


def arena(record: Record) -> Table:
    """Compression without training, ours and its peers', on the calibration text's kind and on another."""
    split, dense = record["settings"]["split"], record["dense"]
    # by sample: generated text is another one at another commit
    groups: dict[tuple[Any, ...], dict[Any, Record]] = {(0.0, 0, "dense", ""): {0: dense}}
    for row in record["rows"]:
        refined = row.get("refine", record["settings"]["refine"])
        for after, figures in _stages(row).items():
            made = ", ".join(filter(None, (_made(row), after)))
            samples = groups.setdefault((row["removed"], refined, row["name"], made), {})
            samples[row["seed"], row.get("commit")] = {**row, **figures}
    cells = []
    for (removed, refined, name, made), samples in sorted(groups.items(), key=lambda item: item[0]):
        rows = list(samples.values())
        # of the first sample: others differ by a few
        about = (f"{removed:.0%}" if removed else "", str(refined or ""), f"{rows[0]['parameters']:,}")
        texts = [_of_dense([row[text] for row in rows], dense[text], is_dense=not removed) for text in (split, "other")]
        cells.append((name, made, *about, str(len(rows)) if len(rows) > 1 else "", *texts))
    columns = ("", "made with", "removed", "refined", "parameters", "samples", "WikiText-2", "other text")
    # columns that no row fills are left out
    shown = [place for place in range(len(columns)) if place == 0 or any(row[place] for row in cells)]
    return Table(tuple(columns[place] for place in shown), tuple(tuple(row[place] for place in shown) for row in cells))


def _stages(row: Record) -> dict[str, Record]:
    """The figures of a model as it was compressed, and after each training of it."""
    trained = {
        "polished": f"trained by {row.get('polish')} steps",
        "healed": f"healed by {row.get('heal')} steps",
        "healed, generated": f"healed by {row.get('heal')} steps, with generated text too",
    }
    return {"": row, **{words: row[name] for name, words in trained.items() if name in row}}


def _of_dense(values: Sequence[float], dense: float, *, is_dense: bool) -> str:
    """Perplexity, the mean and standard deviation over samples, and its mean as a multiple of the dense model's."""
    mean = statistics.mean(values)
    spread = f" ± {statistics.stdev(values):,.1f}" if len(values) > 1 else ""
    return f"{mean:,.1f}{spread}" + ("" if is_dense else f" ({mean / dense:,.2f}x)")


def _made(row: Record) -> str:
    """The settings of a row of the arena that are not the default, in words."""
    words = {
        "calibrate": "{}",
        "calibration_windows": "{} windows",
        "smoothing": "smoothing {}",
        "rank_multiple": "ranks in multiples of {}",
        "refine_lr": "rate {}",
    }
    return ", ".join(text.format(row[name]) for name, text in words.items() if row.get(name))


def oneshot(record: Record) -> Table:
    """Compression without training, and after a little of it."""
    rows = sorted(record["rows"], key=lambda row: row.get("removed", 0.0))
    cells = [
        (
            row["name"],
            row.get("about", ""),
            f"{row.get('removed', 0.0):.0%}",
            f"{row['parameters']:,}",
            f"{row['perplexity']:,.1f}",
            f"{row['healed']:,.1f}" if "healed" in row else "",
        )
        for row in rows
    ]
    return Table(("", "", "removed", "parameters", "perplexity", "healed"), tuple(cells))
