"""A language model as a loss: tokens, targets and a carried state in, the mean loss and a new state out.

Shapes: B = streams, T = window, D = width, V = words, N = targets that count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from rankwise.lab.data.corpus import Unit
from rankwise.lab.data.windows import IGNORED, Evaluation
from rankwise.lab.kernels.compiled import cross_entropy
from rankwise.lab.models.adaptive import AdaptiveSoftmax, WordSplit, split_words
from rankwise.lab.models.sru import SRULanguageModel
from rankwise.measure import evaluating

Words = Tensor | WordSplit
"""Tokens or targets of a window, (B, T), or the same by cluster."""
State = Tensor | tuple[Tensor, ...]
"""What a model carries from window to window: the SRU a tensor, Transformer-XL one a layer."""


class LanguageModel(nn.Module):
    """The loss of any model that maps (tokens, state) to (logits, state), gated and compact ones included.

    An `SRULanguageModel` whose output is an `AdaptiveSoftmax` never builds logits of the whole vocabulary.
    Tokens and targets may lie on the CPU; targets that are `IGNORED` do not count.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def adaptive(self) -> AdaptiveSoftmax | None:
        """The softmax by clusters of words, where the model has one."""
        output = getattr(self.model, "output", None)
        return output if isinstance(output, AdaptiveSoftmax) else None

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether windows that are `sorted` by their words lead to the same work on a GPU, whatever those are."""
        return self.adaptive is None or isinstance(self.model, SRULanguageModel)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def empty(self, state: State | None, stream: int) -> None:
        """Empty a stream's part of a recurrent state; a memory, which other models carry, is short, and stays."""
        if isinstance(self.model, SRULanguageModel) and isinstance(state, Tensor):
            state[:, stream] = 0

    def sorted(self, tokens_BT: Tensor, targets_BT: Tensor, room: Sequence[int]) -> tuple[Words, Words]:
        """Both in shapes that depend on `room`, the places of each cluster, alone; all targets must count."""
        if not isinstance(self.model, SRULanguageModel) or self.adaptive is None:
            return tokens_BT, targets_BT
        config = self.adaptive.config
        tokens = split_words(tokens_BT, config).padded(room) if _takes_split(self.model) else tokens_BT
        return tokens, split_words(targets_BT.flatten(), config).padded(room)

    def forward(self, tokens: Words, targets: Words, state: State | None = None) -> tuple[Tensor, State]:
        """The mean loss in nats over the targets that count, and the state after the window."""
        if isinstance(self.model, SRULanguageModel) and self.adaptive is not None:
            return self._adaptive_loss(self.model, self.adaptive, tokens, targets, state)
        assert isinstance(tokens, Tensor) and isinstance(targets, Tensor)
        tokens_BT = tokens.to(self.device, non_blocking=True)
        targets_BT = targets.to(self.device, non_blocking=True)
        logits_BTV, state = self.logits(tokens_BT, state)
        return cross_entropy(logits_BTV, targets_BT.flatten(), IGNORED), state

    def logits(self, tokens_BT: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """The model's answers (B, T, V), and the state after the window."""
        found: tuple[Tensor, State] = self.model(tokens_BT.to(self.device, non_blocking=True), state)
        return found

    def _adaptive_loss(
        self, model: SRULanguageModel, softmax: AdaptiveSoftmax, tokens: Words, targets: Words, state: Any
    ) -> tuple[Tensor, State]:
        # words are sorted into clusters where they lie, so that from the CPU no GPU is made to wait
        if isinstance(tokens, Tensor) and _takes_split(model):
            tokens = split_words(tokens, softmax.config)
        h_BTD, state = model.hidden(tokens.to(self.device), state)
        h_ND = h_BTD.flatten(0, 1)
        if isinstance(targets, Tensor):
            counted_N = (targets.flatten() != IGNORED).nonzero().squeeze(1)
            targets = split_words(targets.flatten()[counted_N], softmax.config)
            if len(counted_N) < len(h_ND):
                h_ND = h_ND.index_select(0, counted_N.to(self.device))
        return softmax.loss(h_ND, targets.to(self.device)), state


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


@dataclass(frozen=True, kw_only=True)
class Quality:
    """How well a model predicts a text."""

    loss: float
    """Mean negative log likelihood of a token, in nats."""
    num_targets: int
    unit: Unit

    @property
    def measure(self) -> str:
        """The name of the figure that is reported for this unit."""
        return "bits_per_character" if self.unit == "character" else "perplexity"

    @property
    def value(self) -> float:
        """Bits per character, or perplexity per word."""
        return self.loss / math.log(2) if self.unit == "character" else perplexity(self.loss)

    def record(self) -> dict[str, float]:
        return {"loss": self.loss, self.measure: self.value, "num_targets": self.num_targets}


def perplexity(loss: float) -> float:
    """exp(loss); JSON has no infinity."""
    return math.exp(min(loss, 700.0))


@contextmanager
def _tf32() -> Iterator[None]:
    """Products on a GPU from factors of 11 bits where they would be float32: three times as fast for a dense SRU."""
    matmul = torch.backends.cuda.matmul
    name, value = ("fp32_precision", "tf32") if hasattr(matmul, "fp32_precision") else ("allow_tf32", True)
    before = getattr(matmul, name)
    setattr(matmul, name, value)
    try:
        yield
    finally:
        setattr(matmul, name, before)


@torch.no_grad()
@_tf32()
def evaluate(
    language: LanguageModel, text: Evaluation, unit: Unit, *, check: Callable[[], None] = lambda: None
) -> Quality:
    """Quality over every target of `text`, each once, from an empty state that is carried from window to window.

    `check` is called between windows, and may raise to stop.
    """
    with evaluating(language):
        total, num_targets = torch.zeros((), dtype=torch.float64), 0
        state: State | None = None
        for x_BT, y_BT in text:
            check()
            loss, state = language(x_BT, y_BT, state)
            counted = int((y_BT != IGNORED).sum())
            # on the CPU in float64: windows are few, and a GPU that waits here has nothing else to do
            total += loss.double().cpu() * counted
            num_targets += counted
    return Quality(loss=float(total) / num_targets, num_targets=num_targets, unit=unit)
