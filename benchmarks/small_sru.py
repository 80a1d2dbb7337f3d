"""A 2M-parameter SRU on enwik8, on a CPU: `python benchmarks/small_sru.py DATA OUT.json [--seeds 0,1,2] [--scale 1]`.

DATA is a folder that holds enwik8. From one dense base, flop-l0 and fac remove 80% of the prunable weights, next to a
dense control that trains on for as long, and that teaches where a row is called distilled; the paper's FAC trains a
small model from scratch for all of the steps; np-l0, which does not factorize, has a plain model of the same size with
a base and a control of its own. One seed takes half an hour on one core. `--scale 0.01` shows that it runs.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tables import Lines

import rankwise as rw
from rankwise.lab.experiments.pipeline import Variant, run_variants
from rankwise.lab.models.sru import SRUConfig
from rankwise.lab.report import table
from rankwise.lab.tasks.streams import CorpusConfig, StreamExperiment
from rankwise.lab.training import TrainingConfig
from rankwise.methods import make_method


def factorized(data: str, scale: float) -> StreamExperiment:
    """The rows that share the factorized base."""
    base = TrainingConfig(
        steps=max(8, round(425 * scale)),
        batch_size=16,
        window=64,
        lr=4e-3,
        schedule="constant",
        warmup_steps=min(100, round(100 * scale)),
        clip=1.0,
        # as evaluation does on so many characters
        reset_every=25,
        eval_every=10**6,
        eval_tokens=100_000,
        checkpoint_every=10**6,
        device="cpu",
    )
    # the learning rate falls once, at the end of every row
    pruning = replace(base, steps=max(8, round(1_275 * scale)), schedule="cosine")
    return StreamExperiment(
        name="enwik8-small-sru",
        corpus=CorpusConfig(name="enwik8", data=data),
        model=SRUConfig(
            num_words=205, embedding_width=64, width=896, num_layers=4, rank=160, layer_norm=True, dropout=0.0
        ),
        base=base,
        method=make_method("flop-l0", anneal_steps=pruning.steps // 6),
        budget=rw.Budget(removed=0.8, of="prunable"),
        training=pruning,
        exclude=("embedding", "output"),
    )


def from_scratch(experiment: StreamExperiment) -> StreamExperiment:
    """The paper's FAC: small factors from the start, for as many steps in all."""
    assert experiment.base is not None
    steps = experiment.base.steps + experiment.training.steps
    return replace(
        experiment,
        base=None,
        method=make_method("fac"),
        training=replace(experiment.training, steps=steps),
        init="random",
    )


def plain(experiment: StreamExperiment) -> StreamExperiment:
    """NP-L0: a model of plain matrices, as large."""
    assert isinstance(experiment.model, SRUConfig)
    method = make_method("np-l0", anneal_steps=experiment.training.steps // 6)
    model = replace(experiment.model, rank=None, width=464)
    return replace(experiment, method=method, model=model)


def variants(experiment: StreamExperiment) -> dict[str, tuple[StreamExperiment, list[Variant]]]:
    """Of each base its experiment, and what starts from it."""
    scratch, other = from_scratch(experiment), plain(experiment)
    taught = replace(experiment, training=replace(experiment.training, distill=0.8))
    shared = [Variant(name, experiment.with_method(name)) for name in ("dense", "flop-l0", "fac")]
    return {
        "factorized": (experiment, [*shared, Variant("flop-l0, distilled", taught)]),
        "from-scratch": (scratch, [Variant("fac, from scratch", scratch)]),
        "plain": (other, [Variant("dense", other.with_method("dense")), Variant("np-l0", other)]),
    }


def one_seed(experiment: StreamExperiment, folder: Path) -> dict[str, Any]:
    began = time.perf_counter()
    rows = []
    for name, (part, runs) in variants(experiment).items():
        record = run_variants(part, runs, folder / name, watcher=Lines(began))
        rows += [row | {"name": f"{row['name']}, plain" if name == "plain" else row["name"]} for row in record["rows"]]
    seconds = time.perf_counter() - began
    return {**record, "experiment": None, "arms": [row["name"] for row in rows], "rows": rows, "wall_seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("data")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--scale", type=float, default=1.0)
    options = parser.parse_args()
    experiment = factorized(options.data, options.scale)
    runs = [
        one_seed(replace(experiment, seed=seed), options.out.with_suffix("") / f"seed-{seed}")
        for seed in map(int, options.seeds.split(","))
    ]
    record = {"name": experiment.name, "runs": runs}
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(table(record).markdown())
    print("seconds per seed:", *(f"{run['wall_seconds']:.0f}" for run in runs))


if __name__ == "__main__":
    main()
