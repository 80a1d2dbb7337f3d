"""Many methods, sizes and seeds. Runs of one seed share their dense base, and a dense control of equal training."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rankwise.core.budget import Budget
from rankwise.errors import RankwiseError
from rankwise.lab.experiments.arms import SWEEP, AnyExperiment, Arm, Watcher, check_seed, run_arms
from rankwise.lab.experiments.config import Experiment
from rankwise.lab.experiments.folder import RECORD, claim, write, write_experiment

VERSION = 1


def sweep(
    experiment: AnyExperiment,
    folder: str | os.PathLike[str],
    *,
    methods: Sequence[str],
    removed: Sequence[float],
    seeds: Sequence[int] = (0,),
    watcher: Watcher | None = None,
    trackers: Sequence[str] = (),
) -> dict[str, Any]:
    """Run every method at every size with every seed; the record, which is also in `record.json`.

    `removed` is a fraction of what the experiment's own budget counts. Of language models the dense control is trained
    too, whether or not "dense" is among the methods.
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
    if isinstance(experiment, Experiment) and "dense" not in methods:
        methods = ["dense", *methods]
    path, watcher = Path(folder), watcher or Watcher()
    claim(path, SWEEP)
    arms = _arms(experiment, methods, removed)
    records = []
    for seed in seeds:
        watcher.phase(f"seed {seed}")
        seeded = [Arm(arm.name, replace(arm.experiment, seed=seed)) for arm in arms]
        records.append(
            run_arms(replace(experiment, seed=seed), seeded, path / f"seed-{seed}", watcher=watcher, trackers=trackers)
        )
    write_experiment(path, experiment)
    record = {"format": SWEEP, "version": VERSION, "name": experiment.name, "runs": records}
    write(path / RECORD, record)
    return record


def _arms(experiment: AnyExperiment, methods: Sequence[str], removed: Sequence[float]) -> list[Arm[Any]]:
    arms: list[Arm[Any]] = []
    of = "model" if experiment.budget is None else experiment.budget.of
    for method in methods:
        if method == "dense":
            arms.append(Arm(method, experiment.with_method(method)))
            continue
        for level in removed:
            sized = experiment.with_method(method, Budget(removed=level, of=of))
            arms.append(Arm(f"{method}-{100 * level:g}", sized))
    return arms
