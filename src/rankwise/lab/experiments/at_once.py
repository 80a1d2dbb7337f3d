"""A language model at its size before any training, by what its own answers to training text would lose."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from rankwise.lab.experiments.config import Experiment
from rankwise.methods.svd import Svd
from rankwise.oneshot import compress, loss_of_choices

NUM_WINDOWS = 64
"""Of training text, at equal distances, each as long as a window of training."""


def compress_at_once(experiment: Experiment, model: nn.Module, text: NDArray[np.integer]) -> nn.Module:
    """`model` itself, small."""
    assert experiment.budget is not None and isinstance(experiment.method, Svd)
    device, length = next(model.parameters()).device, min(experiment.training.window, len(text))
    starts = torch.linspace(0, len(text) - length, NUM_WINDOWS).long().tolist()
    windows = [torch.from_numpy(text[start : start + length].astype("int64"))[None].to(device) for start in starts]
    generator = torch.Generator().manual_seed(experiment.seed)
    return compress(
        model,
        experiment.budget,
        windows,
        loss=lambda output: loss_of_choices(output[0], generator),
        plan=experiment.plan(model),
        layout=experiment.method.layout,
        in_place=True,
    )
