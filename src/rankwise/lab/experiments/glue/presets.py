"""GLUE presets: the paper's RoBERTa, and two encoders that install by package name."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rankwise.core.budget import Budget
from rankwise.distill import Distillation
from rankwise.lab.data.glue.read import ARCHIVES
from rankwise.lab.data.glue.tasks import task_named
from rankwise.lab.experiments.glue.config import EncoderConfig, GlueExperiment
from rankwise.lab.experiments.sizes import Outline
from rankwise.lab.training.tune import TuningConfig
from rankwise.methods import make_method


@dataclass(frozen=True)
class KnownEncoder:
    """Sizes in parameters with a head of two labels, so that a preset can be listed without a download."""

    hub: str
    parameters: int
    prunable: int
    """In matrices and embeddings of the encoder."""
    megabytes: int


ENCODERS = {
    "glue-roberta": KnownEncoder("FacebookAI/roberta-base", 124_647_170, 123_933_696, 499),
    "glue-mpnet": KnownEncoder("sentence-transformers/all-mpnet-base-v2", 109_488_002, 108_774_528, 438),
    "glue-minilm": KnownEncoder("sentence-transformers/all-MiniLM-L6-v2", 22_713_986, 22_682_112, 91),
}


def glue(name: str) -> GlueExperiment:
    """Our recipe: compressed at once, embeddings too, then distilled; 35% of the model removed, as in the paper."""
    small = name == "glue-minilm"
    tuned = TuningConfig(epochs=3, lr=1e-4 if small else 3e-5, max_steps=1_500, min_steps=200)
    # low: a model that is compressed already has more to lose than to learn (docs/log/)
    made_small = replace(tuned, lr=3e-5 if small else 1.5e-5, schedule="cosine")
    return GlueExperiment(
        name=name,
        model=EncoderConfig(name=ENCODERS[name].hub),
        base=tuned,
        method=make_method("svd", layout="pivot"),
        budget=Budget(removed=0.35),
        training=replace(made_small, epochs=4 if small else 10, max_steps=1_000 if small else 2_000, min_steps=400),
        healing=replace(made_small, epochs=2 if small else 5, max_steps=500 if small else 1_000, min_steps=200),
        distillation=Distillation(),
    )


def outline(experiment: GlueExperiment) -> Outline:
    """For the encoder that the preset names."""
    known, task = ENCODERS[experiment.name], task_named(experiment.task)
    removed = 0.0 if experiment.budget is None else experiment.budget.removed or 0.0
    phases = [phase for phase in (experiment.base, experiment.training, experiment.healing) if phase is not None]
    rows = round((1 - experiment.held_out) * task.train_rows)
    archive = ARCHIVES.get(task.title)
    return Outline(
        parameters=known.parameters,
        prunable=known.prunable,
        exported=known.parameters - int(removed * known.parameters),
        steps=sum(phase.steps(rows) for phase in phases),
        tokens=sum(phase.steps(rows) * phase.batch_size for phase in phases) * experiment.model.max_length,
        corpus=f"GLUE {task.title}",
        download_megabytes=known.megabytes + (1 if archive is None else archive.megabytes),
    )
