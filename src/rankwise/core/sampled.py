"""Losses of answers that a model itself gives at random, whose gradients tell what changes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rankwise.errors import RankwiseError


def sampled_loss(seed: int = 0, num_words: int | None = None) -> Callable[[Any], Tensor]:
    """The loss of answers that the model itself gives at random: its gradients tell what changes those answers.

    Their second moments are the Fisher information, with no need of labels. `logits`, and an output over `num_words`,
    are choices among classes; any other output is taken as numbers, with the squared error as their loss.
    """
    generator = torch.Generator().manual_seed(seed)

    def loss(output: Any) -> Tensor:
        logits = getattr(output, "logits", None)
        answer = logits if logits is not None else _first_tensor(output)
        if answer.shape[-1] == num_words or (logits is not None and answer.shape[-1] > 1):
            return loss_of_choices(answer, generator)
        return (answer * torch.randn(answer.shape, generator=generator).to(answer)).sum()

    return loss


def _first_tensor(output: Any) -> Tensor:
    if isinstance(output, Mapping):
        output = next(iter(output.values()), None)
    elif isinstance(output, tuple | list) and output:
        output = output[0]
    if not isinstance(output, Tensor) or not output.is_floating_point():
        raise RankwiseError(
            "To be compressed by its own answers, a model must return a floating-point tensor first, but returns "
            f"{type(output).__name__}. Pass `loss`, a function of what it returns, or loss=None."
        )
    return output


def loss_of_choices(logits: Tensor, generator: torch.Generator) -> Tensor:
    """The loss of choices that are drawn from the logits, over their last dimension.

    The generator, which may be that of another device, draws one number for each choice: its place among the running
    sums of the probabilities says what is chosen.
    """
    logits = logits.reshape(-1, logits.shape[-1])
    with torch.no_grad():
        sums = logits.float().softmax(-1).cumsum(-1)
        drawn = torch.rand(len(logits), 1, generator=generator, device=generator.device).to(logits.device)
        answers = torch.searchsorted(sums, drawn * sums[:, -1:], right=True).flatten().clamp(max=logits.shape[-1] - 1)
    return F.cross_entropy(logits, answers, reduction="sum")
