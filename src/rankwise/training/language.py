"""What the loop sees of a language model: tokens, targets and a carried state in, the mean loss and a new state out.

Shapes: B = streams, T = window, D = width, V = words, N = targets that count.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankwise.data.windows import IGNORED
from rankwise.kernels import loss
from rankwise.models.adaptive import AdaptiveSoftmax, split_words
from rankwise.models.sru import SRULanguageModel
from rankwise.modules import is_observed

State = Tensor | tuple[Tensor, ...]
"""What a model carries from window to window: the SRU a tensor, Transformer-XL one a layer."""


class LanguageModel(nn.Module):
    """The loss of any model that maps (tokens, state) to (logits, state), gated and compact ones included.

    An `SRULanguageModel` whose output is an `AdaptiveSoftmax` never builds logits of the whole vocabulary, and a
    plain one on a GPU none in float32.
    Tokens and targets may lie on the CPU; targets that are `IGNORED` do not count.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether a window leads to the same work on a GPU whatever its words are: those of clusters do not."""
        return not isinstance(getattr(self.model, "output", None), AdaptiveSoftmax)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def empty(self, state: State | None, stream: int) -> None:
        """Empty a stream's part of a recurrent state; a memory, which other models carry, is short, and stays."""
        if isinstance(self.model, SRULanguageModel) and isinstance(state, Tensor):
            state[:, stream] = 0

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """The mean loss in nats over the targets that count, and the state after the window."""
        softmax = getattr(self.model, "output", None)
        if isinstance(self.model, SRULanguageModel) and isinstance(softmax, AdaptiveSoftmax):
            return self._adaptive_loss(self.model, softmax, tokens_BT, targets_BT, state)
        tokens_BT = tokens_BT.to(self.device, non_blocking=True)
        targets_BT = targets_BT.to(self.device, non_blocking=True)
        if isinstance(self.model, SRULanguageModel) and loss.fits(self.model.output) and not is_observed(self.model):
            h_BTD, state = self.model.hidden(tokens_BT, cast(Tensor | None, state))
            return loss.output_loss(h_BTD, cast(nn.Linear, self.model.output), targets_BT, IGNORED), state
        logits_BTV, state = self.logits(tokens_BT, state)
        logits = logits_BTV.flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, targets_BT.flatten(), ignore_index=IGNORED), state

    def logits(self, tokens_BT: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """The model's answers (B, T, V), and the state after the window."""
        found: tuple[Tensor, State] = self.model(tokens_BT.to(self.device, non_blocking=True), state)
        return found

    def _adaptive_loss(
        self, model: SRULanguageModel, softmax: AdaptiveSoftmax, tokens_BT: Tensor, targets_BT: Tensor, state: Any
    ) -> tuple[Tensor, State]:
        # words are sorted into clusters where they lie, so that from the CPU no GPU is made to wait
        tokens = split_words(tokens_BT, softmax.config) if _takes_split(model) else tokens_BT
        h_BTD, state = model.hidden(tokens.to(self.device), state)
        counted_N = (targets_BT.flatten() != IGNORED).nonzero().squeeze(1)
        targets = split_words(targets_BT.flatten()[counted_N], softmax.config).to(self.device)
        h_ND = h_BTD.flatten(0, 1)
        if len(counted_N) < len(h_ND):
            h_ND = h_ND.index_select(0, counted_N.to(self.device))
        return softmax.loss(h_ND, targets), state


def _takes_split(model: SRULanguageModel) -> bool:
    return hasattr(model.embedding, "clusters")


def carry(before: State | None, after: State) -> State:
    """`after`, cut off from the graph that made it: in the memory of `before`, where it fits in."""
    if isinstance(after, Tensor):
        if not isinstance(before, Tensor) or before.shape != after.shape or before.dtype != after.dtype:
            return after.detach()
        return before.copy_(after.detach())
    parts = before if isinstance(before, tuple) and len(before) == len(after) else (None,) * len(after)
    return tuple(cast(Tensor, carry(old, new)) for old, new in zip(parts, after, strict=True))


def shape_of(state: State | None) -> Hashable:
    """The shapes of the tensors of a state."""
    return tuple(part.shape for part in ((state,) if isinstance(state, Tensor) else state or ()))
