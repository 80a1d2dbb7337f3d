"""GLUE with an encoder made small: `python benchmarks/glue.py OUT.json --preset glue-mpnet --model FOLDER --data GLUE`.

Rows are RECIPE-PERCENT, the share of the whole model that is removed. Recipes are steps of one ladder, each with all
that stands before it: paper (plain SVD, FLOP-L0, embeddings left alone), whitening, distillation, healing, pivot,
embeddings, and ours (compressed in one shot instead of along a ramp). "fac-35" is paper-35 with the same share of every
matrix and nothing to learn about it. "control" is the dense model trained on as ours is, with nothing removed.
"curve-60" is embeddings-60 with smaller cuts taken from the same run, for comparison with embeddings-20, -35 and -50.
Cells run in the order in which rows are given, every task of a row before the next row; OUT.json is written after each,
and cells that it holds are not run again. FOLDER may hold the weights in parts, in any float format: several
safetensors files, or model.safetensors.00, .01, ... to be joined. `--scale 0.02` shows that it runs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import rankwise as rw
from rankwise.errors import BudgetError, RankwiseError
from rankwise.lab.data.glue import task_named
from rankwise.lab.experiments import pipeline
from rankwise.lab.experiments.pipeline import Part, Variant
from rankwise.lab.experiments.presets import glue
from rankwise.lab.experiments.run_folder import BASE, MODEL
from rankwise.lab.tasks.pretrained import PretrainedConfig
from rankwise.lab.tasks.sentences import ENCODERS, GlueExperiment
from rankwise.lab.training.config import TuningConfig
from rankwise.surroundings import surroundings

TABLES = ("word_embeddings", "position_embeddings")
EMBEDDINGS = {
    "glue-minilm": (*TABLES, "token_type_embeddings"),
    "glue-mpnet": TABLES,
    "glue-roberta": (*TABLES, "token_type_embeddings"),
}
"""Tables of words, by preset."""
LADDER = ("paper", "whitening", "distillation", "healing", "pivot", "embeddings", "ours")
SIZES = (0.2, 0.35, 0.5)
ROWS = "dense,ours-60,ours-35,paper-35"
GATED_LR = {"glue-minilm": 1e-4, "glue-mpnet": 5e-5, "glue-roberta": 5e-5}
"""Learning rates of the recipes with gates, which have a way to go."""
SETTINGS = ("preset", "scale", "held_out", "precision", "device")
"""Arguments that all cells of a record share."""
ABLATION = "paper-60,whitening-60,distillation-60,healing-60,pivot-60,embeddings-60"


@dataclass(frozen=True)
class Cell:
    """One row of the table on one task with one seed."""

    row: str
    task: str
    seed: int

    @property
    def recipe(self) -> str:
        return self.row.rpartition("-")[0] or self.row

    @property
    def removed(self) -> float:
        return int(self.row.rpartition("-")[2]) / 100


def recipe(experiment: GlueExperiment, name: str, removed: float) -> GlueExperiment:
    """The experiment with a step of the ladder; without healing, pruning goes on for as many steps."""
    step = LADDER.index({"curve": "embeddings", "fac": "paper"}.get(name, name))
    training, healing = experiment.training, experiment.healing
    assert healing is not None
    if step < LADDER.index("ours"):
        training, healing = (replace(phase, lr=GATED_LR[experiment.name]) for phase in (training, healing))
    if step < LADDER.index("healing"):
        training = replace(
            training,
            epochs=training.epochs + healing.epochs,
            min_steps=training.min_steps + healing.min_steps,
            max_steps=(training.max_steps or 0) + (healing.max_steps or 0) or None,
        )
    method = experiment.with_method({"fac": "fac", "ours": "svd"}.get(name, "flop-l0")).method
    if name == "curve":
        method = replace(method, schedule="linear")
    layout: Any = "pivot" if step >= LADDER.index("pivot") else "pair"
    return replace(
        experiment,
        budget=rw.Budget(removed=removed),
        init="svd" if step < LADDER.index("whitening") else "whitened",
        distillation=None if step < LADDER.index("distillation") else experiment.distillation,
        training=training,
        healing=None if step < LADDER.index("healing") else healing,
        method=replace(method, layout=layout),
        exclude=() if step >= LADDER.index("embeddings") else EMBEDDINGS[experiment.name],
        sizes=tuple(size for size in SIZES if size < removed) if name == "curve" else (),
    )


def scaled(phase: TuningConfig, scale: float, **changes: Any) -> TuningConfig:
    """Fewer or more steps."""
    most = None if phase.max_steps is None else max(4, round(scale * phase.max_steps))
    least = max(1, round(scale * phase.min_steps))
    return replace(phase, epochs=scale * phase.epochs, max_steps=most, min_steps=least, **changes)


def experiment_of(options: argparse.Namespace, model: Path, cell: Cell) -> GlueExperiment:
    preset = glue(options.preset)
    # the texts of SST-2 are short, so that twice as many cost the same
    changes: dict[str, Any] = {"batch_size": 64} if cell.task == "sst2" else {}
    assert preset.healing is not None
    experiment = replace(
        preset,
        task=cell.task,
        data=options.data,
        held_out=options.held_out,
        model=PretrainedConfig(name=str(model)),
        base=scaled(preset.base, options.scale, **changes),
        training=scaled(preset.training, options.scale, **changes),
        healing=scaled(preset.healing, options.scale, **changes),
        precision=options.precision,
        device=options.device,
        seed=cell.seed,
    )
    if cell.row in ("dense", pipeline.CONTROL):
        return experiment.with_method("dense")
    return recipe(experiment, cell.recipe, cell.removed)


def joined(folder: Path, work: Path) -> Path:
    """A folder that `from_pretrained` loads, in float32, from one that holds its weights in parts."""
    files = sorted(folder.glob("*.safetensors"))
    pieces = sorted(path for path in folder.iterdir() if ".safetensors." in path.name and path.suffix != ".json")
    if len(files) == 1 and not pieces:
        return folder
    target = work / "model"
    if (target / "model.safetensors").is_file():
        return target
    target.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.is_file() and path not in files and path not in pieces and "index" not in path.name:
            shutil.copy(path, target)
    whole = target / ".joined"
    if pieces:
        with whole.open("wb") as out:
            for piece in pieces:
                out.write(piece.read_bytes())
        files = [whole]
    tensors = {name: tensor for path in files for name, tensor in load_file(path).items()}
    plain = {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
    save_file(plain, target / "model.safetensors", metadata={"format": "pt"})
    whole.unlink(missing_ok=True)
    return target


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """The most telling first: all tasks of the first seed, the ablation, then the other seeds."""
    tasks = [task_named(name).name for name in options.tasks.split(",")]
    seeds = [int(seed) for seed in options.seeds.split(",")]
    ablation = [task_named(name).name for name in options.ablation.split(",") if name]
    for seed in seeds:
        for row in options.rows.split(","):
            yield from (Cell(row, task, seed) for task in tasks)
        if seed == seeds[0]:
            yield from (Cell(row, task, seed) for row in ABLATION.split(",") for task in ablation)


def run_cell(options: argparse.Namespace, model: Path, cell: Cell) -> list[dict[str, Any]]:
    experiment = experiment_of(options, model, cell)
    began = time.perf_counter()
    context = pipeline.begin(experiment, options.work / cell.task / f"seed-{cell.seed}")
    experiment.make_task(context.data).check()
    (base,) = Part.of_base(context, experiment).make()
    rows = [base]
    if cell.row != "dense":
        rows = Part.of_variant(context, Variant(cell.row, experiment), context.folder / BASE / MODEL).make()
    title = context.data.record()["name"]
    wall = time.perf_counter() - began
    about = {"task": cell.task, "title": title, "seed": cell.seed, "row": cell.row, "wall_seconds": round(wall, 1)}
    return [{**about, **row, "score": 100 * statistics.mean(row["test"].values())} for row in rows]


def print_table(found: list[dict[str, Any]]) -> None:
    """Scores: the mean of a task's official metrics on its development set, times 100."""
    tasks = list(dict.fromkeys(row["task"] for row in found))
    names = list(dict.fromkeys(row["name"] for row in found))
    width = max(map(len, names))
    print(" ".join([" " * width, *(f"{task:>14}" for task in tasks), f"{'mean':>7}", f"{'of dense':>8}", "parameters"]))
    means: dict[tuple[str, str], float] = {}
    for name in names:
        line = [name.ljust(width)]
        for task in tasks:
            scores = [row["score"] for row in found if (row["name"], row["task"]) == (name, task)]
            if not scores:
                line.append(" " * 14)
                continue
            means[name, task] = statistics.mean(scores)
            spread = f" ± {statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
            line.append(f"{means[name, task]:.2f}{spread}".rjust(14))
        mine = [task for task in tasks if (name, task) in means and ("dense", task) in means]
        own, dense = (sum(means[which, task] for task in mine) for which in (name, "dense"))
        line.append(f"{own / len(mine):7.2f} {own / dense:8.2%}" if mine else " " * 16)
        size = next(row["parameters"] for row in found if row["name"] == name)
        print(" ".join([*line, f"{size:,}"]))


def earlier(path: Path, settings: dict[str, str]) -> list[dict[str, Any]]:
    """The rows of a record that goes on; refuses one of other settings."""
    if not path.exists():
        return []
    record = json.loads(path.read_text())
    before = {key: record["settings"][key] for key in SETTINGS}
    if before != settings:
        raise RankwiseError(
            f"{path} must be of the same settings, but was run with {before} and not {settings}. "
            "Give those again, or another file."
        )
    rows: list[dict[str, Any]] = record["rows"]
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("out", type=Path)
    add("--preset", default="glue-mpnet", choices=list(ENCODERS))
    add("--model", type=Path, required=True, help="the folder of the pretrained encoder")
    add("--data", required=True, help="the folder with GLUE's files")
    add("--tasks", default="mrpc,stsb,sst2,qnli")
    add("--rows", default=ROWS, help=f"default: {ROWS}")
    add("--ablation", default="", help=f"tasks on which {ABLATION} are run too")
    add("--seeds", default="0")
    add("--seconds", type=float, default=float("inf"), help="begin no cell that would end later")
    add("--scale", type=float, default=1.0, help="of all numbers of steps")
    add("--held-out", type=float, default=0.0, help="share of the training set to choose settings on")
    add("--precision", default="auto", choices=["auto", "no", "bf16"])
    add("--device", default="auto", choices=["auto", "cpu"])
    add("--work", type=Path, help="where models are kept (default: OUT without its suffix)")
    options = parser.parse_args(arguments)
    options.work = options.work or options.out.with_suffix("")
    began = time.perf_counter()
    device = torch.device("cuda" if options.device == "auto" and torch.cuda.is_available() else "cpu")
    model = joined(options.model, options.work)
    settings = {key: str(getattr(options, key)) for key in SETTINGS}
    around = surroundings(device)
    found = earlier(options.out, settings)
    known = {Cell(row["row"], row["task"], row["seed"]) for row in found}
    took: dict[tuple[str, bool], float] = {}
    for cell in cells(options):
        if cell in known:
            continue
        kind = cell.task, cell.row == "dense"
        if time.perf_counter() - began + took.get(kind, 0.0) > options.seconds:
            print(f"left out for want of time: {cell.row} on {cell.task}, seed {cell.seed}", flush=True)
            continue
        try:
            rows = run_cell(options, model, cell)
        except BudgetError as error:
            print(f"cannot be had: {cell.row} on {cell.task}: {error}", flush=True)
            continue
        took[kind] = rows[0]["wall_seconds"]
        found += [row | {"commit": around["commit"]} for row in rows]
        for row in rows:
            figures = ", ".join(f"{name} {value:.4f}" for name, value in row["test"].items())
            print(
                f"{time.perf_counter() - began:7.1f} s  {row['title']}, seed {cell.seed}, {row['name']}: {figures}, "
                f"{row['parameters']:,} parameters, {row['steps']} steps in {row['seconds']:.1f} s",
                flush=True,
            )
        record = {"format": "rankwise-glue", "version": 1, "name": options.preset, "settings": settings, "rows": found}
        record |= around
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    if found:
        print_table(found)


if __name__ == "__main__":
    main()
