"""A language model as a loss on streams of text: windows, carried states, a teacher, and the quality on a whole text.

Tokens, targets and a carried state go in, the mean loss and a new state come out.
Shapes: B = streams, T = window, D = width, V = words, N = targets that count.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankwise.errors import InvalidValueError, RankwiseError
from rankwise.lab.data.corpus import Corpus, Unit
from rankwise.lab.data.windows import IGNORED, Evaluation, Windows
from rankwise.lab.kernels.layers import cross_entropy
from rankwise.lab.models.adaptive import AdaptiveSoftmax, WordSplit, split_words
from rankwise.lab.models.sru import SRULanguageModel
from rankwise.lab.tasks.states import State, carry, gather_states, load_states, own_states, shape_of, state_tensors
from rankwise.lab.training.config import TrainingConfig
from rankwise.lab.training.objective import Objective
from rankwise.measure import evaluating

Words = Tensor | WordSplit
"""Tokens or targets of a window, (B, T), or the same by cluster."""


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
        """Whether all windows have the same shapes once they are `sorted`, whatever their words."""
        return self.adaptive is None or isinstance(self.model, SRULanguageModel)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def empty(self, state: State | None, stream: int) -> None:
        """Empty a stream's part of a recurrent state; the memory that other models carry is short, and is kept."""
        if isinstance(self.model, SRULanguageModel) and isinstance(state, Tensor):
            state[:, stream] = 0

    def sorted(self, tokens_BT: Tensor, targets_BT: Tensor, room: Sequence[int]) -> tuple[Words, Words]:
        """Both in shapes that depend only on `room`, the places of each cluster; all targets must count."""
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


@dataclass(frozen=True, eq=False)
class Streams:
    """A corpus as the loop sees it, for any model that maps (tokens, state) to (logits, state)."""

    corpus: Corpus

    @property
    def fingerprint(self) -> str:
        return self.corpus.fingerprint

    def record(self) -> dict[str, Any]:
        return self.corpus.record()

    def objective(
        self, model: nn.Module, config: TrainingConfig, device: torch.device, teacher: nn.Module | None = None
    ) -> StreamObjective:
        return StreamObjective(model, self.corpus, config, device, teacher)


class StreamObjective(Objective):
    """The loss of a language model on windows of a text, with a state of every part of the batch.

    A teacher reads the same windows with states of its own; its answers are learned to the share `config.distill`.
    """

    unit: ClassVar[str] = "tokens"
    carries: ClassVar[bool] = True
    config: TrainingConfig

    def __init__(
        self,
        model: nn.Module,
        corpus: Corpus,
        config: TrainingConfig,
        device: torch.device,
        teacher: nn.Module | None = None,
    ) -> None:
        if (teacher is None) != (config.distill == 0):
            raise InvalidValueError(
                f"A `teacher` goes with a share of the loss in `distill`, but that is {config.distill:g} "
                f"{'without one' if teacher is None else 'with one'}. Give both, or neither."
            )
        self.valid = config.evaluation(corpus.valid)
        self.reset_every = len(self.valid) if config.reset_every is None else config.reset_every
        self.corpus = corpus
        super().__init__(model, config, device)
        self.streams = self.ranks.share(config.batch_size)
        """Those that this rank reads, of all streams."""
        all_streams = Windows(corpus.train, batch=config.batch_size, unroll=config.window, seed=config.seed)
        self.windows = all_streams.share(self.streams)
        self.language = LanguageModel(model)
        self.states: list[State | None] = [None] * config.accumulate
        self.teacher = None if teacher is None else LanguageModel(teacher.eval().requires_grad_(False)).to(device)
        self.teacher_states = list(self.states)
        if self.teacher is not None and self.teacher.adaptive is not None:
            raise RankwiseError(
                "A teacher must give logits of all words, but an adaptive softmax is made to avoid them. "
                "Leave `distill` at 0."
            )
        self.memory: BatchMemory | None = None

    @property
    def per_step(self) -> int:
        return self.config.batch_size * self.config.window

    def batch(self, step: int) -> Sequence[tuple[Words, Words]]:
        return in_parts(self.windows.at(step), self.config.accumulate)

    def loss(self, part: tuple[Words, Words], index: int) -> tuple[Tensor, Tensor, Any]:
        x, y = part
        if self.teacher is None:
            loss, state = self.language(x, y, self.states[index])
            return loss, loss.detach(), (state, None)
        assert isinstance(x, Tensor) and isinstance(y, Tensor)
        logits_BTV, state = self.language.logits(x, self.states[index])
        with torch.no_grad():
            wanted_BTV, teacher_state = self.teacher.logits(x, self.teacher_states[index])
        loss, on_text = distillation_loss(logits_BTV, wanted_BTV, y, self.config.distill)
        return loss, on_text, (state, teacher_state)

    def carry(self, state: Any, index: int) -> None:
        own, teachers = state
        self.states[index] = carry(self.states[index], own)
        if teachers is not None:
            self.teacher_states[index] = carry(self.teacher_states[index], teachers)

    def begin_step(self, step: int) -> None:
        """Empty the states of the streams whose turn it is, in the memory that a graph knows."""
        every, size = self.reset_every, self.config.batch_size
        if not every:
            return
        turn = step % every
        for stream in range(-(-turn * size // every), -(-(turn + 1) * size // every)):
            if stream not in self.streams:
                continue
            part, row = divmod(stream - self.streams.start, len(self.streams) // self.config.accumulate)
            self.language.empty(self.states[part], row)
            if self.teacher is not None:
                self.teacher.empty(self.teacher_states[part], row)

    def can_record(self, pruning: bool) -> bool:
        # a teacher asks for logits of all words, for which an adaptive softmax sorts them itself
        return self.language.has_fixed_shapes and (self.teacher is None or self.language.adaptive is None)

    def fixed_batch(self, step: int) -> tuple[Sequence[tuple[Words, Words]], Hashable]:
        if self.memory is None:
            self.memory = BatchMemory(self.language, self.windows, self.config)
        self.memory.fill(self.windows.at(step))
        return self.memory.parts, None

    def carried_shapes(self) -> Hashable:
        return tuple(shape_of(state) for state in (*self.states, *self.teacher_states))

    def tensors(self) -> dict[str, Tensor]:
        states, teacher_states = (gather_states(each, self.ranks) for each in (self.states, self.teacher_states))
        return {**state_tensors(states, "state"), **state_tensors(teacher_states, "teacher")}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        num_parts = self.config.accumulate
        self.states, self.teacher_states = (
            own_states(load_states(tensors, num_parts, self.device, name), self.ranks) for name in ("state", "teacher")
        )

    @property
    def num_targets(self) -> int:
        return self.valid.num_targets

    def evaluate(self, check: Callable[[], None]) -> float:
        return evaluate(self.language, self.valid, self.corpus.unit, check=check).loss

    def figures(self, loss: float) -> dict[str, float]:
        quality = Quality(loss=loss, num_targets=self.num_targets, unit=self.corpus.unit)
        return {"loss": loss, quality.measure: quality.value}


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


def in_parts(batch: tuple[Tensor, Tensor], num_parts: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens and targets of each part of the streams."""
    x_BT, y_BT = batch
    return list(zip(x_BT.chunk(num_parts), y_BT.chunk(num_parts), strict=True))


class BatchMemory:
    """Memory of a GPU that stays where it is, and that every batch is copied into.

    Words of an adaptive softmax are sorted by cluster on the CPU; each cluster has as many places as any of the run's
    batches needs, so that all of them have the same shapes.
    """

    def __init__(self, language: LanguageModel, windows: Windows, config: TrainingConfig) -> None:
        self.language, self.num_parts = language, config.accumulate
        adaptive = None if language.adaptive is None else language.adaptive.config
        ends = () if adaptive is None else (*adaptive.starts, adaptive.num_words)
        self.room = [
            windows.most(low, high, steps=config.steps, parts=self.num_parts) for low, high in itertools.pairwise(ends)
        ]
        first = self._sorted(windows.at(0))
        self.parts = [(x.to(language.device), y.to(language.device)) for x, y in first]

    def fill(self, batch: tuple[Tensor, Tensor]) -> None:
        """Copy a batch into it, when the GPU comes to it."""
        for there, here in zip(self.parts, self._sorted(batch), strict=True):
            for old, new in zip(map(_tensors, there), map(_tensors, here), strict=True):
                for target, source in zip(old, new, strict=True):
                    # pinned, so that the host does not wait
                    target.copy_(source.pin_memory(), non_blocking=True)

    def _sorted(self, batch: tuple[Tensor, Tensor]) -> list[tuple[Words, Words]]:
        return [self.language.sorted(x, y, self.room) for x, y in in_parts(batch, self.num_parts)]


def _tensors(words: Words) -> tuple[Tensor, ...]:
    return (words,) if isinstance(words, Tensor) else words.tensors
