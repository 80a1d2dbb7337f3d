"""The paper's tables, filled cell by cell: `python benchmarks/tables.py enwik8-sru --data FOLDER --seconds 560`.

A table has one dense base, or a few, and cells that start from it, the most telling first: "dense" (the control, which
trains on for as many steps), METHOD-PERCENT, METHOD-PERCENT-published (the paper's recipe) and fac-PERCENT-scratch;
METHOD-PERCENT-distilled and dense-distilled learn the dense control's answers beside the text.
After each cell OUT/table-NAME.json is written, and cells that it holds are never run again. The same command goes on:
with the step where `--seconds` or Ctrl-C stopped it if WORK is still there; otherwise the base is trained again with
the same seed and steps, and the record gains a run of its own for the rows that come from it. `--plan` says what would
be run and how long it should take on one H200. "demo" shows on a CPU that all of it works.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import rankwise as rw
from rankwise.errors import RankwiseError
from rankwise.lab.experiments import pipeline, presets
from rankwise.lab.experiments.pipeline import Variant
from rankwise.lab.experiments.run_folder import experiment_from
from rankwise.lab.models.adaptive import Clusters
from rankwise.lab.models.sru import SRUConfig
from rankwise.lab.report import TABLE
from rankwise.lab.tasks.base import described
from rankwise.lab.tasks.streams import CorpusConfig, StreamExperiment, lighter_dropout
from rankwise.lab.training import TrainingConfig, Watcher
from rankwise.methods import make_method

RAMP = 0.05
"""Share of the further steps in which the size is reached; short ramps leave more steps to heal (docs/log/)."""
DISTILL = 0.8
"""Share of the loss that asks for the dense control's answers in cells called distilled."""
TEACHER = 0.35
"""What asking a teacher takes, of the time of a step of the dense model (measured)."""
MASKED = 0.95
"""Rate of training with masks of single weights, of the dense model's (measured on the SRU)."""
RARELY = {"eval_every": 10**6, "checkpoint_every": 10**6}


@dataclass(frozen=True, kw_only=True)
class Base:
    """A dense model, and how fast it is trained on one H200."""

    make: Callable[[], StreamExperiment]
    dense: float
    """Tokens per second."""
    pruned: float
    """Tokens per second with a fifth of the components open."""
    overhead: float
    """Seconds a cell takes beside training: evaluations, export, graphs."""
    measured: bool = True
    """Whether the rates were; otherwise they are guesses."""


def phases(experiment: StreamExperiment, base: int, further: int, **shared: Any) -> StreamExperiment:
    """So many steps of each phase, evaluated at its end. A quarter is the base's, as in the paper (docs/log/)."""
    assert experiment.base is not None
    shared = {"warmup_steps": 500, "log_every": 100, **RARELY, **shared}
    return replace(
        experiment,
        base=replace(experiment.base, steps=base, **shared),
        # cells say whether they are taught
        training=replace(experiment.training, steps=further, distill=0.0, **shared),
        compare=(),
    )


def sru() -> StreamExperiment:
    return phases(replace(presets.enwik8_sru(short=True), name="enwik8-sru"), 4_000, 12_000)


def plain_sru(width: int) -> StreamExperiment:
    """Without factorization, as NP-L0 prunes it."""
    preset = presets.enwik8_sru("np-l0", 0.8, plain=width, short=True)
    return phases(replace(preset, name=f"enwik8-sru-plain-{width}"), 4_000, 12_000)


def transformer_xl() -> StreamExperiment:
    return phases(replace(presets.enwik8_transformer_xl(short=True), name="enwik8-transformer-xl"), 2_500, 7_500)


def words(
    name: str = "enwik8-words", *, width: int = 1024, rank: int | None = 256, dropout: float = 0.2
) -> StreamExperiment:
    """A word-level model for ten million words: a sixth of the paper's, embedding and softmax adaptive."""
    preset = presets.wikitext_103_sru("flop-l0" if rank else "np-l0", 0.7, plain=None if rank else width, short=True)
    clusters = Clusters(cutoffs=(5_000, 20_000), widths=(512, 256, 64), scale=width**0.5)
    model = SRUConfig(
        num_words=60_000, embedding_width=width, width=width, num_layers=6, rank=rank, first_rank=rank,
        layer_norm=True, dropout=dropout, clusters=clusters,
    )  # fmt: skip
    corpus = CorpusConfig(name=name)
    return phases(replace(preset, name=f"{name}{'' if rank else '-plain'}", model=model, corpus=corpus), 1_750, 5_250)


def wikitext_2() -> StreamExperiment:
    """So little text that a model is best long before the end: it is evaluated often."""
    return phases(words("wikitext-2", dropout=0.4), 350, 1_050, warmup_steps=100, log_every=20, eval_every=100)


def demo() -> StreamExperiment:
    return phases(replace(presets.demo(), name="demo"), 150, 450, warmup_steps=20, log_every=20)


BASES = {
    "enwik8-sru": Base(make=sru, dense=1.75e6, pruned=2.67e6, overhead=12),
    "enwik8-sru-10min": Base(make=presets.enwik8_sru_10min, dense=1.75e6, pruned=2.67e6, overhead=12),
    "enwik8-sru-30min": Base(make=presets.enwik8_sru_30min, dense=1.75e6, pruned=2.67e6, overhead=12),
    "enwik8-sru-plain-1536": Base(make=lambda: plain_sru(1536), dense=1.62e6, pruned=2.37e6, overhead=8),
    "enwik8-sru-plain-2048": Base(make=lambda: plain_sru(2048), dense=1.07e6, pruned=1.8e6, overhead=8),
    "enwik8-transformer-xl": Base(make=transformer_xl, dense=0.54e6, pruned=0.53e6, overhead=24),
    "enwik8-words": Base(make=words, dense=2.0e6, pruned=2.2e6, overhead=10),
    "enwik8-words-plain": Base(
        make=lambda: words(width=592, rank=None), dense=2.0e6, pruned=2.2e6, overhead=10, measured=False
    ),
    "wikitext-2": Base(make=wikitext_2, dense=2.0e6, pruned=2.2e6, overhead=15, measured=False),
    "demo": Base(make=demo, dense=2e4, pruned=4e4, overhead=2, measured=False),
}

TABLES: dict[str, dict[str, str]] = {
    "ten-minutes": {"enwik8-sru-10min": "flop-l0-80 svd-80 dense"},
    "half-hour": {"enwik8-sru-30min": "flop-l0-80 dense"},
    "enwik8-sru": {
        "enwik8-sru": "dense flop-l0-80 flop-l0-80-distilled svd-80 fac-80 flop-l0-90 flop-l0-90-distilled fac-90 "
        "agp-80 agp-90 flop-l0-80-published flop-agp-80 flop-agp-90 flop-l0-70 agp-70 dense-distilled "
        "flop-l0-70-distilled fac-80-distilled fac-90-distilled svd-80-distilled svd-90 flop-l0-85 fac-80-scratch "
        "flop-l0-90-published fac-90-scratch"
    },
    "np-l0": {
        "enwik8-sru-plain-1536": "dense np-l0-80 np-l0-90 np-l0-70 np-l0-85",
        "enwik8-sru-plain-2048": "dense np-l0-80 np-l0-90 np-l0-70 np-l0-85",
    },
    "enwik8-transformer-xl": {
        "enwik8-transformer-xl": "dense flop-l0-80 fac-80 flop-l0-80-distilled svd-80 agp-80 flop-l0-90 flop-agp-80 "
        "flop-agp-90 fac-80-scratch"
    },
    "words": {
        "enwik8-words": "dense flop-l0-70 fac-70 svd-70 agp-70 flop-l0-80 flop-l0-50 fac-80 fac-50 flop-agp-70 agp-80 "
        "agp-50 flop-agp-80 flop-agp-50 fac-70-scratch fac-80-scratch fac-50-scratch",
        "enwik8-words-plain": "dense np-l0-70 np-l0-80 np-l0-50",
    },
    "wikitext-2": {"wikitext-2": "dense flop-l0-70 fac-70 agp-70 flop-agp-70 flop-l0-50 fac-50 flop-l0-80 fac-80"},
    "demo": {
        "demo": "dense flop-l0-80 svd-80 fac-80 flop-l0-80-distilled dense-distilled svd-80-distilled "
        "flop-l0-80-published fac-80-scratch agp-80"
    },
}
"""Of each base, its cells, the most telling first."""


def variant_of(experiment: StreamExperiment, cell: str) -> Variant:
    """What a cell is: a method from the experiment's base, at a size."""
    if cell.endswith("-distilled"):
        plain = variant_of(experiment, cell.removesuffix("-distilled")).experiment
        return Variant(cell, replace(plain, training=replace(plain.training, distill=DISTILL)))
    if cell == "dense":
        return Variant(cell, experiment.with_method("dense"))
    found = re.fullmatch(r"(.+?)-(\d+)(?:-(published|scratch))?", cell)
    if found is None:
        raise RankwiseError(f"A cell must be dense or METHOD-PERCENT, such as flop-l0-80, but is {cell!r}.")
    method, percent, variant = found.groups()
    # one from the other: settings that both have, such as the ramp, are the experiment's
    removed = int(percent) / 100
    chosen = replace(
        experiment.with_method(method),
        budget=rw.Budget(removed=removed, of="prunable"),
        dropout=lighter_dropout(experiment.model.dropout, removed),
    )
    if variant == "published":
        chosen = replace(chosen, method=replace(chosen.method, recipe="published", refactor=False), dropout=None)
    if variant == "scratch":
        assert experiment.base is not None
        steps = experiment.base.steps + experiment.training.steps
        chosen = replace(chosen, base=None, init="random", training=replace(experiment.training, steps=steps))
    return Variant(cell, chosen)


def with_steps(experiment: StreamExperiment, options: argparse.Namespace, seed: int) -> StreamExperiment:
    """The experiment of a base as it is asked for."""
    assert experiment.base is not None
    base = replace(experiment.base, steps=options.base_steps or experiment.base.steps)
    training = replace(experiment.training, steps=options.steps or experiment.training.steps)
    ramp = max(1, round((options.ramp or RAMP) * training.steps))
    method = replace(experiment.method, anneal_steps=ramp) if hasattr(experiment.method, "anneal_steps") else None
    return replace(
        experiment,
        corpus=replace(experiment.corpus, data=options.data),
        base=_on(options.device, base),
        training=_on(options.device, training),
        method=method or make_method("flop-l0", anneal_steps=ramp),
        seed=seed,
    )


def _on(device: str, phase: TrainingConfig) -> TrainingConfig:
    # mixed precision gains nothing on most CPUs
    return replace(phase, device=device, precision=phase.precision if device == "auto" else "no")


@dataclass(frozen=True)
class Task:
    """One cell of one base with one seed."""

    base: str
    experiment: StreamExperiment
    cell: str

    @property
    def key(self) -> tuple[str, int, str]:
        return self.experiment.name, self.experiment.seed, self.cell

    def seconds(self) -> float:
        """How long it should take on one H200."""
        arm, rates = variant_of(self.experiment, self.cell).experiment, BASES[self.base]
        steps, tokens = arm.training.steps, arm.training.batch_size * arm.training.window
        ramp = min(getattr(arm.method, "anneal_steps", 0), steps)
        more = rates.overhead + (TEACHER * tokens * steps / rates.dense if arm.training.distill else 0)
        if arm.method.name in ("dense", "agp"):
            # masks of single weights spare nothing
            return more + tokens * steps / (rates.dense if arm.method.name == "dense" else MASKED * rates.dense)
        return more + tokens * (ramp / rates.dense + (steps - ramp) / rates.pruned)

    def base_seconds(self) -> float:
        phase, rates = self.experiment.base, BASES[self.base]
        assert phase is not None
        return rates.overhead + phase.steps * phase.batch_size * phase.window / rates.dense


def tasks(table: str, options: argparse.Namespace) -> Iterator[Task]:
    """In the order in which they are run: all cells of the first seed, then those of the next."""
    for seed in map(int, options.seeds.split(",")):
        for base, cells in TABLES[table].items():
            experiment = with_steps(BASES[base].make(), options, seed)
            for cell in cells.split():
                if not options.cells or cell in options.cells.split(","):
                    yield Task(base, experiment, cell)


class Record:
    """The file of a table: runs, each from one base; a base that was lost and trained again begins a new one."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        empty = {"format": TABLE, "version": 1, "name": name, "runs": []}
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else empty

    def has(self, task: Task) -> bool:
        """Whether a cell was run; refuses a record of other settings."""
        settings = described(task.experiment)
        for run in self.content["runs"]:
            # settings that came later had their defaults then
            before = described(experiment_from(run["experiment"]))
            if (run["name"], run["seed"]) == task.key[:2] and before != settings:
                raise RankwiseError(
                    f"{self.path} must be of the same settings, but its {run['name']} was run with others. "
                    "Give those again, or another `--out`."
                )
        keys = {(run["name"], run["seed"], row["name"]) for run in self.content["runs"] for row in run["rows"]}
        return task.key in keys

    def add(self, found: Mapping[str, Any], cell: str, wall_seconds: float) -> dict[str, Any]:
        """Keep the row of a cell, and write the file."""
        row = next(row for row in found["rows"] if row["folder"] == cell)
        row |= {"wall_seconds": round(wall_seconds, 1), "finished": found["finished"], "commit": found["commit"]}
        for run in self.content["runs"]:
            # the very same base, and not one that was trained again
            if (run["name"], run["seed"], run["base"]["valid"]) == (
                found["name"], found["seed"], found["base"]["valid"],
            ):  # fmt: skip
                run["rows"].append(row)
                break
        else:
            self.content["runs"].append({**found, "arms": None, "rows": [row]})
        text = json.dumps(self.content, indent=1)
        # histograms and sizes on one line each
        text = re.sub(r"\[\s+([-\d.e,\s]+?)\s+\]", lambda m: "[" + re.sub(r"\s+", " ", m[1]) + "]", text)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".unfinished")
        unfinished.write_text(text + "\n")
        unfinished.replace(self.path)
        return row


class Lines(Watcher):
    """One line per event, and one for so many lines of metrics."""

    def __init__(self, began: float) -> None:
        self.began, self.printed = began, 0.0

    def say(self, words: str) -> None:
        self.printed = time.perf_counter()
        print(f"{self.printed - self.began:7.1f} s  {words}", flush=True)

    def phase(self, title: str) -> None:
        self.say(title)

    def report(self, line: Mapping[str, Any]) -> None:
        if "loss" in line and time.perf_counter() - self.printed > 30:
            rate = f", {line['tokens_per_second'] / 1e6:.2f}M tokens/s" if "tokens_per_second" in line else ""
            self.say(f"step {line['step']}: loss {line['loss']:.4f}{rate}")


def fill(table: str, options: argparse.Namespace, lines: Lines) -> None:
    """Run what is missing."""
    record = Record(options.out / f"table-{table}.json", table)
    for task in tasks(table, options):
        if record.has(task):
            continue
        left = options.seconds - (time.perf_counter() - lines.began)
        folder = options.work / table / f"{task.base}-seed-{task.experiment.seed}"
        needed = task.seconds() + (0 if (folder / "base/export.json").exists() else task.base_seconds())
        if options.whole and needed > left:
            lines.say(f"{task.cell} of {task.base} would take {needed:.0f} s: left out for want of time")
            continue
        began = time.perf_counter()
        found = pipeline.run_variants(task.experiment, [variant_of(task.experiment, task.cell)], folder, watcher=lines)
        row = record.add(found, task.cell, time.perf_counter() - began)
        for part in ("base", task.cell):
            # what is exported needs no checkpoint, and a disk has its end
            shutil.rmtree(folder / part / "checkpoints", ignore_errors=True)
        # a run and the graph of its step hold each other, and the memory of a GPU
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        figures = {split: next(v for k, v in row[split].items() if k in FIGURES) for split in ("valid", "test")}
        lines.say(
            f"{task.base}, seed {task.experiment.seed}, {task.cell}: {row['parameters']:,} parameters, valid "
            f"{figures['valid']:.4f}, test {figures['test']:.4f}, {row['wall_seconds']:.0f} s of {needed:.0f} expected"
        )


FIGURES = ("bits_per_character", "perplexity")


def plan(names: list[str], options: argparse.Namespace) -> None:
    """What is missing, and how long it should take."""
    for table in names:
        record, passed, begun = Record(options.out / f"table-{table}.json", table), 0.0, set()
        print(f"{table}:")
        for task in tasks(table, options):
            done = record.has(task)
            if not done and task.key[:2] not in begun:
                begun.add(task.key[:2])
                passed += task.base_seconds()
                steps = task.experiment.base.steps if task.experiment.base else 0
                print(f"  {task.base:<24} {'base':<24} seed {task.experiment.seed} {steps:>7,} steps {passed:7.0f} s")
            passed += 0 if done else task.seconds()
            steps = variant_of(task.experiment, task.cell).experiment.training.steps
            when = "done" if done else f"{passed:7.0f} s" + ("" if BASES[task.base].measured else " (rates guessed)")
            print(f"  {task.base:<24} {task.cell:<24} seed {task.experiment.seed} {steps:>7,} steps {when}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("tables", nargs="+", choices=list(TABLES), metavar="TABLE", help=", ".join(TABLES))
    add("--data", help="the folder that holds the corpora; without it they are downloaded")
    add("--out", type=Path, default=Path("results"), help="where table-NAME.json is written (default: results)")
    add("--work", type=Path, default=Path("runs/tables"), help="where models are kept (default: runs/tables)")
    add("--seconds", type=float, default=float("inf"), help="stop after so long; the same command goes on")
    add("--whole", action="store_true", help="begin no cell that would not end in time")
    add("--cells", help="only these, with commas")
    add("--seeds", default="0", help="with commas (default: 0)")
    add("--base-steps", type=int, help="of the dense base (default: the table's)")
    add("--steps", type=int, help="of every cell (default: the table's)")
    add("--ramp", type=float, help=f"share of the steps in which the size is reached (default: {RAMP})")
    add("--device", default="auto", choices=["auto", "cpu"])
    add("--plan", action="store_true", help="say what would be run, and how long it should take")
    options = parser.parse_args(arguments)
    if options.plan:
        plan(options.tables, options)
        return
    lines = Lines(time.perf_counter())
    if options.seconds < float("inf"):
        # the loop takes it for Ctrl-C: it keeps a checkpoint and goes on from there next time
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, options.seconds)
    try:
        for table in options.tables:
            fill(table, options, lines)
        lines.say("all cells are there: print docs/results.md anew by the command at its top")
    except KeyboardInterrupt as stop:
        lines.say(str(stop) or "stopped; run the same again to go on")
    finally:
        if options.seconds < float("inf"):
            signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main()
