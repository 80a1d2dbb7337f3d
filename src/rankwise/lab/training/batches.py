"""Where a recorded step reads its batch."""

from __future__ import annotations

import itertools

from torch import Tensor

from rankwise.lab.data.windows import Windows
from rankwise.lab.training.language import LanguageModel, Words


def parts_of(batch: tuple[Tensor, Tensor], num_parts: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens and targets of each part of the streams."""
    x_BT, y_BT = batch
    return list(zip(x_BT.chunk(num_parts), y_BT.chunk(num_parts), strict=True))


class BatchMemory:
    """Memory of a GPU that stays where it is, and that every batch is copied into.

    Words of an adaptive softmax are sorted by cluster on the CPU; each cluster has as many places as any of the run's
    batches needs, so that all of them have the same shapes.
    """

    def __init__(self, language: LanguageModel, windows: Windows, *, steps: int, num_parts: int) -> None:
        self.language, self.num_parts = language, num_parts
        config = None if language.adaptive is None else language.adaptive.config
        ends = () if config is None else (*config.starts, config.num_words)
        self.room = [windows.most(low, high, steps=steps, parts=num_parts) for low, high in itertools.pairwise(ends)]
        first = self._sorted(windows.at(0))
        self.parts = [(x.to(language.device), y.to(language.device)) for x, y in first]

    def fill(self, batch: tuple[Tensor, Tensor]) -> None:
        """Copy a batch into it, when the GPU comes to it."""
        for there, here in zip(self.parts, self._sorted(batch), strict=True):
            for old, new in zip(map(_tensors, there), map(_tensors, here), strict=True):
                for target, source in zip(old, new, strict=True):
                    # pinned, so that the host goes on
                    target.copy_(source.pin_memory(), non_blocking=True)

    def _sorted(self, batch: tuple[Tensor, Tensor]) -> list[tuple[Words, Words]]:
        return [self.language.sorted(x, y, self.room) for x, y in parts_of(batch, self.num_parts)]


def _tensors(words: Words) -> tuple[Tensor, ...]:
    return (words,) if isinstance(words, Tensor) else words.tensors
