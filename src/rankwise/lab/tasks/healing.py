"""Healing: a compressed model of transformers learns to answer windows of a text as the dense one does.

It has no labels, so that any text will do. Windows at the end of each text are held out; they choose the learning rate
and say what was gained. Shapes: N = windows, T = tokens of a window.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rankwise.deploy import documents
from rankwise.deploy.documents import SpecialTokens
from rankwise.deploy.inputs import ERROR, LARGEST, Calibration, KeptBack, text_windows
from rankwise.distill import Distillation, distillation_loss
from rankwise.errors import DataError
from rankwise.lab.tasks.examples import ExampleObjective, TokenWindows
from rankwise.lab.training.config import LoopConfig

HELD_OUT = 32
"""Windows that are held out, of all texts together."""
HELD_OUT_SHARE = 0.1
"""The most that is held out of a short text."""
TEXT = "`text`"
LOGITS_AT_ONCE, TOKENS_AT_ONCE = (2**26, 2**28), (2**11, 2**13)
"""What a part of a batch may have, on a CPU and on a GPU: fixed numbers, so that a resumed run has the same parts."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HealingText:
    """Windows of some texts in the numbers of a model's tokenizer."""

    name: str
    train_NT: Tensor
    held_out_NT: Tensor
    own: int = 0
    """Windows at the end of `train_NT` that the dense model has written."""
    times: float = 1.0
    """How often each of these stands there."""

    @property
    def fingerprint(self) -> str:
        sha = hashlib.sha256()
        for part in (self.train_NT, self.held_out_NT):
            sha.update(f"{list(part.shape)}".encode() + part.numpy().tobytes())
        return sha.hexdigest()

    @property
    def window(self) -> int:
        return self.train_NT.shape[1]

    def record(self) -> dict[str, Any]:
        again = self.own - round(self.own / self.times)
        tokens = {"train": (len(self.train_NT) - again) * self.window, "valid": self.held_out_NT.numel()}
        return {"name": self.name, "tokens": tokens, "fingerprint": self.fingerprint}


def read_healing_text(
    encode: Callable[[str], list[int]],
    texts: Sequence[Path],
    valid: Sequence[Path],
    *,
    number: int,
    window: int,
    special: SpecialTokens,
    generate: Callable[[int], Tensor] | None = None,
) -> HealingText:
    """Windows to train on, from each text by its size, and windows that are held out.

    Args:
        valid: texts to hold out instead of the ends of `texts`.
        number: windows that training asks for; a short text has fewer, which are then read again.
        special: tokens around every window.
        generate: gives so many windows that the dense model writes, or fewer, which are repeated: as many stand in the
            result as of a text on average.
    """
    train: list[Tensor] = []
    held_out: list[Tensor] = []

    def windows(files: Sequence[Path], wanted: int, more: int) -> Iterator[tuple[list[Tensor], float]]:
        sizes = [_size(file) for file in files]
        for file, size in zip(files, sizes, strict=True):
            share = size / sum(sizes)
            calibration = Calibration(file=file, num_windows=math.ceil(share * wanted), window=window)
            yield text_windows(encode, calibration, special=special, more=math.ceil(share * more), what=TEXT), share

    def divide(found: list[Tensor], most: float) -> list[Tensor]:
        """The windows to train on; at most so many of the last are held out."""
        last = 0 if valid else max(1, min(math.ceil(most), int(HELD_OUT_SHARE * len(found))))
        held_out.extend(found[len(found) - last :])
        return found[: len(found) - last]

    own = 0 if generate is None else number // (len(texts) + 1)
    rest = HELD_OUT * (number - own) / number
    for found, share in windows(texts, number - own, 0 if valid else math.ceil(rest)):
        train += divide(found, share * rest)
    for found, _ in windows(valid, HELD_OUT, 0):
        held_out += found
    names, times = [path.name for path in texts], 1.0
    # a short text has fewer
    own = min(own, len(train) // len(texts)) if texts else own
    if generate is not None and own:
        more = 0 if valid else math.ceil(HELD_OUT - rest)
        before = len(held_out)
        once = divide(list(generate(own + more)), HELD_OUT - rest)[:own]
        # a few may be written in vain
        read = len(once) + len(held_out) - before
        names.append(f"{read} window{'s'[: read - 1]} of the dense model's own")
        own = own if once else 0
        times = own / len(once) if once else 1.0
        train += (once * math.ceil(times))[:own]
    if not train:
        raise DataError(
            f"{TEXT} must hold at least 2 windows of {window} tokens, one of them to hold out, but "
            f"{texts[0] if texts else 'what is generated'} has 1. Give a longer text, or shorter windows."
        )
    parts = {"train_NT": torch.stack(train), "held_out_NT": torch.stack(held_out)}
    return HealingText(name=", ".join(names), **parts, own=own, times=times)


def _size(file: Path) -> int:
    try:
        size = file.stat().st_size
    except OSError as error:
        raise DataError(f"{TEXT} must be a text, but {file} is not: {error.strerror}.") from None
    if not size or file.is_dir():
        raise DataError(f"{TEXT} must be a text, but {file} is {'a folder' if file.is_dir() else 'empty'}.")
    return size


def check_known(text: HealingText, unknown: int | None, token: str | None, words: int, name: str) -> None:
    """Refuse a text that the tokenizer does not know, and one in numbers that the model does not have."""
    tokens = torch.cat([text.train_NT, text.held_out_NT])
    if int(tokens.max()) >= words:
        raise DataError(
            f"The tokenizer of {name} must give numbers below {words:,}, the words of the model, but gives "
            f"{int(tokens.max()):,}. Save the model's own tokenizer beside it."
        )
    documents.check_known(tokens, unknown, token, TEXT, text.name)


@dataclass(frozen=True, eq=False)
class HealingTask:
    """A text as the loop sees it."""

    text: HealingText
    inputs: Sequence[str]
    """Arguments of the model that a window is given as."""
    distillation: Distillation
    kept_back: KeptBack
    """The windows that are held out, with what the dense model makes of them."""
    records_graphs: bool
    """Whether a step may be recorded as a CUDA graph."""

    @property
    def fingerprint(self) -> str:
        return self.text.fingerprint

    def record(self) -> dict[str, Any]:
        return self.text.record()

    def objective(
        self, model: nn.Module, config: LoopConfig, device: torch.device, teacher: nn.Module | None = None
    ) -> HealingObjective:
        assert teacher is not None
        return HealingObjective(self, model, config, device, teacher)


class HealingObjective(ExampleObjective):
    """How far the answers of a model are from the teacher's; evaluated by the measure of the windows held out."""

    unit: ClassVar[str] = "tokens"

    def __init__(
        self, task: HealingTask, model: nn.Module, config: LoopConfig, device: torch.device, teacher: nn.Module
    ) -> None:
        # full batches alone
        windows = TokenWindows(task.text.train_NT, task.inputs, multiple=config.batch_size)
        super().__init__(model, windows, config, device, distillation_loss(teacher.to(device), task.distillation))
        self.task = task

    @property
    def per_step(self) -> int:
        return self.config.batch_size * self.task.text.window

    def can_record(self, pruning: bool) -> bool:
        return self.task.records_graphs and super().can_record(pruning)

    @property
    def num_targets(self) -> int:
        return self.task.text.held_out_NT.numel()

    def evaluate(self, check: Callable[[], None]) -> float:
        """The logarithm of a perplexity, or the relative error of the outputs."""
        check()
        measured = self.task.kept_back.measured(self.model)
        return measured if self.task.kept_back.measure == ERROR else math.log(measured)

    def valid_figures(self, loss: float) -> dict[str, float]:
        if self.task.kept_back.measure == ERROR:
            return {"loss": loss, "output_error": loss}
        return {"loss": loss, "perplexity": math.exp(min(loss, LARGEST))}


def parts_of_batch(batch_size: int, window: int, num_logits: int, *, on_gpu: bool) -> int:
    """The fewest equal parts of a batch that are small enough; `num_logits`: of the answer for one token."""
    most = min(TOKENS_AT_ONCE[on_gpu], LOGITS_AT_ONCE[on_gpu] // max(1, num_logits)) // window
    return next(n for n in range(1, batch_size + 1) if batch_size % n == 0 and batch_size // n <= max(1, most))
