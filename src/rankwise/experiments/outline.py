"""What an experiment amounts to, before anything is run: sizes, steps, and what it needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rankwise.adapters.generic import find_plan
from rankwise.core.budget import count
from rankwise.data.published import PUBLISHED
from rankwise.experiments.config import Experiment
from rankwise.models.architectures import build
from rankwise.pruner import account_of, planned


@dataclass(frozen=True)
class Outline:
    """Sizes in parameters, for the vocabulary that the preset expects."""

    parameters: int
    """Of the dense model."""
    prunable: int
    exported: int
    """What the exported model may have."""
    steps: int
    """Dense and pruning steps of the method itself, comparisons not counted."""
    tokens: int
    """Tokens that are read in them."""
    corpus: str
    download_megabytes: int
    """0 where nothing is downloaded."""


def outline(experiment: Experiment) -> Outline:
    """Built on the meta device, so it costs no memory."""
    with torch.device("meta"):
        model = build(experiment.model)
    plan = find_plan(model, exclude=experiment.exclude)
    exported = count(model)
    if experiment.budget is not None:
        method = experiment.method
        trained = experiment.init != "random"
        account = account_of(model, planned(model, plan, method), method, experiment.budget, trained=trained)
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
