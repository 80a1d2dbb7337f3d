"""Distillation: a language model learns the answers of a teacher that reads the same text, with states of its own.

Shapes: B = streams, T = window, V = words, N = targets.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankwise.errors import RankwiseError
from rankwise.lab.data.windows import IGNORED
from rankwise.lab.training.language import LanguageModel, State, carry


class Teacher:
    """A trained model that is asked, and no longer trained."""

    def __init__(self, model: nn.Module, device: torch.device, *, num_parts: int) -> None:
        self.language = LanguageModel(model.eval().requires_grad_(False)).to(device)
        if self.language.adaptive is not None:
            raise RankwiseError(
                "A teacher must give logits of all words, but an adaptive softmax is made to avoid them. "
                "Leave `distill` at 0."
            )
        self.states: list[State | None] = [None] * num_parts
        """Of each part of a batch."""

    @torch.no_grad()
    def logits(self, tokens_BT: Tensor, part: int) -> Tensor:
        """What it answers to a window, (B, T, V), after all that this part of the batch has read before."""
        logits_BTV, state = self.language.logits(tokens_BT, self.states[part])
        self.states[part] = carry(self.states[part], state)
        return logits_BTV


def distillation_loss(
    logits_BTV: Tensor, wanted_BTV: Tensor, targets_BT: Tensor, share: float
) -> tuple[Tensor, Tensor]:
    """(1 - share) L + share KL(teacher | student), and L: the loss on the text, in nats over the targets that count."""
    log_NV, wanted_NV = (F.log_softmax(logits.flatten(0, 1).float(), -1) for logits in (logits_BTV, wanted_BTV))
    targets_N = targets_BT.flatten().to(log_NV.device)
    loss = F.nll_loss(log_NV, targets_N, ignore_index=IGNORED)
    counts_N = targets_N != IGNORED
    divergence_N = F.kl_div(log_NV, wanted_NV, log_target=True, reduction="none").sum(-1)
    divergence = (divergence_N * counts_N).sum() / counts_N.sum()
    return (1 - share) * loss + share * divergence, loss.detach()
