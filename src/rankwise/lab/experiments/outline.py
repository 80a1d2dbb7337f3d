"""What an experiment amounts to, before anything is run: sizes, steps, and what it needs."""

from __future__ import annotations

import torch

from rankwise.core.budget import count
from rankwise.deploy.architectures import build
from rankwise.lab.data.download import PUBLISHED
from rankwise.lab.experiments.arms import AnyExperiment
from rankwise.lab.experiments.config import Experiment
from rankwise.lab.experiments.glue.presets import outline as glue_outline
from rankwise.lab.experiments.sizes import Outline
from rankwise.pruner import plan_for_method, size_account


def outline(experiment: AnyExperiment) -> Outline:
    """Built on the meta device, so it costs no memory; a pretrained encoder is known by its preset."""
    if not isinstance(experiment, Experiment):
        return glue_outline(experiment)
    with torch.device("meta"):
        model = build(experiment.model)
    plan = experiment.plan(model)
    exported = count(model)
    if experiment.budget is not None:
        method = experiment.method
        trained = experiment.init != "random"
        account = size_account(model, plan_for_method(model, plan, method), method, trained=trained)
        exported = experiment.budget.resolve(account)
    phases = [phase for phase in (experiment.base, experiment.training) if phase is not None]
    published = PUBLISHED.get(experiment.corpus.name.removesuffix("-words"))
    return Outline(
        parameters=count(model),
        prunable=plan.params,
        exported=exported,
        steps=sum(phase.steps for phase in phases),
        tokens=sum(phase.steps * phase.batch_size * phase.window for phase in phases),
        corpus=experiment.corpus.name,
        download_megabytes=0 if published is None or experiment.corpus.data else published.megabytes,
    )
