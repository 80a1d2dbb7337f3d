"""Sweeps: every method at every size with every seed, one after the other or in many processes at a time.

Runs of one seed share their base. A launcher makes the same parts in the same folders, each in a process of its own
(`cells.py`), so a sweep may be stopped with one and go on without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rankwise.errors import PartsFailedError, RankwiseError
from rankwise.lab.experiments.cells import PLAN, TABLE, WORKERS, Cell, Grid, Scheduler
from rankwise.lab.experiments.following import led
from rankwise.lab.experiments.launchers import Launcher
from rankwise.lab.experiments.pipeline import Place, announce, begin, check_parts, from_base, run_variants
from rankwise.lab.experiments.run_folder import BASE, FORMAT, RECORD, SWEEP, VERSION, claim, write_experiment
from rankwise.lab.experiments.variants import DENSE
from rankwise.lab.tasks.base import Experiment
from rankwise.lab.training import Watcher
from rankwise.lab.training.config import check_seed
from rankwise.lab.training.ranks import refuse_several
from rankwise.lab.training.records import RunFolder, read_json, write_file

SHOWN = 3
"""Failed cells that a message tells of."""


@led
def sweep(
    experiment: Experiment,
    folder: Place,
    *,
    methods: Sequence[str],
    removed: Sequence[float],
    seeds: Sequence[int] = (0,),
    watcher: Watcher | None = None,
    trackers: Sequence[str] = (),
    launcher: Launcher | None = None,
) -> dict[str, Any]:
    """Run every method at every size with every seed; the record, which is also in `record.json`.

    Runs of one seed share their base. `removed` is a fraction of what the experiment's own budget counts. Where the
    others are compared with a dense control, it is trained whether or not "dense" is among the methods. With a
    launcher, each part is made in a process of its own; `failed` in the record tells of those that failed twice.
    """
    if launcher is not None:
        refuse_several("A sweep with a launcher, which starts processes itself,")
    check_grid(experiment, methods=methods, removed=removed, seeds=seeds)
    path, watcher, grid = Path(folder), watcher or Watcher(), Grid(experiment, methods, removed)
    seeded = {seed: grid.of_seed(seed) for seed in seeds}
    claim(path, SWEEP)
    with RunFolder(path).held():
        record: dict[str, Any] = {"format": SWEEP, "version": VERSION, "name": experiment.name}
        if launcher is None:
            record["runs"] = []
            for seed, (own, variants) in seeded.items():
                watcher.phase(f"seed {seed}")
                place = path / f"seed-{seed}"
                record["runs"].append(run_variants(own, variants, place, watcher=watcher, trackers=trackers))
        else:
            record |= _launched(grid, seeds, path, watcher, trackers, launcher)
        write_experiment(path, experiment)
        write_file(path / RECORD, record)
        return record


def check_grid(experiment: Experiment, **grid: Sequence[Any]) -> None:
    """Refuse what no sweep can be made of."""
    if experiment.base is None:
        raise RankwiseError(f"A sweep needs a base to share, but {experiment.name} has none. Choose another preset.")
    for name, values in grid.items():
        if not values or len(set(values)) < len(values):
            raise RankwiseError(
                f"`{name}` must hold at least one value, and none twice, but is {list(values)} instead."
            )
    for seed in grid["seeds"]:
        check_seed(seed)


def _launched(
    grid: Grid, seeds: Sequence[int], path: Path, watcher: Watcher, trackers: Sequence[str], launcher: Launcher
) -> dict[str, Any]:
    """The records of the seeds, made by a launcher, and what failed."""
    launcher.open(path / WORKERS)
    scheduler = Scheduler(launcher, path, watcher)
    try:
        cells = _cells(grid, seeds, path, watcher, trackers, launcher)
        write_file(path / WORKERS / PLAN, grid.to_json(trackers))
        scheduler.run(cells)
        lost = {seed: tuple(c.name for c in cells if c.seed == seed and c.title in scheduler.failed) for seed in seeds}
        tables = [Cell(seed, TABLE, without=names) for seed, names in lost.items() if BASE not in names]
        # models are timed, so nothing else may run
        scheduler.run(tables, at_most=1)
    finally:
        launcher.close()
    logs = {cell.title: str(cell.log(path)) for cell in (*cells, *tables) if cell.title in scheduler.tries}
    failed = [{"cell": title, "log": logs.get(title), "why": why} for title, why in scheduler.failed.items()]
    runs = [read_json(path / f"seed-{cell.seed}" / RECORD) for cell in tables if cell.title in scheduler.finished]
    if not runs:
        raise failure(failed)
    return {"runs": runs, **({"failed": failed} if failed else {})}


def _cells(
    grid: Grid, seeds: Sequence[int], path: Path, watcher: Watcher, trackers: Sequence[str], launcher: Launcher
) -> list[Cell]:
    """The cells of a sweep, once everything that can be refused now was not. Data are downloaded here, once."""
    context, cells = begin(grid.experiment, path, watcher, trackers), []
    for seed in seeds:
        own, variants = grid.of_seed(seed)
        variants, place = from_base(own, variants), path / f"seed-{seed}"
        claim(place, FORMAT)
        for variant in variants:
            variant.experiment.make_task(context.data).check()
        if launcher.here:
            # another machine may choose another precision, so there each process checks its own part
            check_parts(replace(context, folder=place), own, variants)
        cells.append(Cell(seed, BASE))
        for variant in variants:
            learns = variant.experiment.distills and own.reference == "control" and variant.name != DENSE
            cells.append(Cell(seed, variant.name, (BASE, DENSE) if learns else (BASE,)))
    for seed in seeds:
        announce(grid.of_seed(seed)[0], path / f"seed-{seed}", None)
    # every base first, so that no worker waits long
    return sorted(cells, key=lambda cell: cell.name != BASE)


def failure(failed: Sequence[Mapping[str, Any]]) -> PartsFailedError:
    """The error that tells which cells failed, why, and where their logs are, if they were started."""
    logs = [f" (log: {each['log']})" if each["log"] else "" for each in failed]
    parts = [f"{each['cell']}: {each['why'].rstrip('.')}{log}" for each, log in zip(failed, logs, strict=True)]
    told = "; ".join(parts[:SHOWN])
    more = f"; and {len(failed) - SHOWN} more" if len(failed) > SHOWN else ""
    cells = "1 cell" if len(failed) == 1 else f"{len(failed)} cells"
    return PartsFailedError(f"{cells} of the sweep failed. {told}{more}. The same command again goes on with them.")
