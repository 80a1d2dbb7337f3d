"""Many methods, sizes and seeds. Runs of one seed share their dense base, and a dense control of equal training."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rankwise.core.budget import Budget
from rankwise.errors import RankwiseError
from rankwise.lab.experiments.pipeline import run_variants
from rankwise.lab.experiments.run_folder import RECORD, SWEEP, claim, write_experiment
from rankwise.lab.experiments.variants import DENSE, Variant
from rankwise.lab.tasks.base import Experiment, check_seed
from rankwise.lab.training import Watcher
from rankwise.lab.training.records import write_file

VERSION = 1


def sweep(
    experiment: Experiment,
    folder: str | os.PathLike[str],
    *,
    methods: Sequence[str],
    removed: Sequence[float],
    seeds: Sequence[int] = (0,),
    watcher: Watcher | None = None,
    trackers: Sequence[str] = (),
) -> dict[str, Any]:
    """Run every method at every size with every seed; the record, which is also in `record.json`.

    `removed` is a fraction of what the experiment's own budget counts. Where the others are compared with a dense
    control, it is trained whether or not "dense" is among the methods.
    """
    if experiment.base is None:
        raise RankwiseError(f"A sweep needs a base to share, but {experiment.name} has none. Choose another preset.")
    for name, values in (("methods", methods), ("removed", removed), ("seeds", seeds)):
        if not values or len(set(values)) < len(values):
            raise RankwiseError(
                f"`{name}` must hold at least one value, and none twice, but is {list(values)} instead."
            )
    for seed in seeds:
        check_seed(seed)
    if experiment.reference == "control" and DENSE not in methods:
        methods = [DENSE, *methods]
    path, watcher = Path(folder), watcher or Watcher()
    claim(path, SWEEP)
    variants = _variants(experiment, methods, removed)
    records = []
    for seed in seeds:
        watcher.phase(f"seed {seed}")
        seeded = [replace(each, experiment=replace(each.experiment, seed=seed)) for each in variants]
        own = replace(experiment, seed=seed)
        records.append(run_variants(own, seeded, path / f"seed-{seed}", watcher=watcher, trackers=trackers))
    write_experiment(path, experiment)
    record = {"format": SWEEP, "version": VERSION, "name": experiment.name, "runs": records}
    write_file(path / RECORD, record)
    return record


def _variants(experiment: Experiment, methods: Sequence[str], removed: Sequence[float]) -> list[Variant]:
    variants: list[Variant] = []
    of = "model" if experiment.budget is None else experiment.budget.of
    for method in methods:
        if method == DENSE:
            variants.append(Variant(method, experiment.control()))
            continue
        for level in removed:
            sized = experiment.with_method(method, Budget(removed=level, of=of))
            variants.append(Variant(f"{method}-{100 * level:g}", sized))
    return variants
