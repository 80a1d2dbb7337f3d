"""Examples that fit in memory as the loop trains on them: their batches, and the loss of a model on each.

Shapes: N = windows, T = tokens of a window.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor, nn

from rankwise.lab.training.config import LoopConfig
from rankwise.lab.training.objective import Objective

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


class Examples(Protocol):
    """What a model is tuned on."""

    def __len__(self) -> int: ...

    def batches(self, batch_size: int, seed: int) -> Iterator[Batch]:
        """One epoch, in an order that depends on `seed` alone."""


class TokenWindows:
    """Windows of a text, each of which is an example.

    Args:
        inputs: arguments of the model that a window is given as.
        multiple: an epoch has a multiple of so many windows; what is left over differs from epoch to epoch.
    """

    def __init__(self, windows_NT: Tensor, inputs: Sequence[str], multiple: int = 1) -> None:
        self.windows_NT, self.inputs = windows_NT, inputs
        self.number = len(windows_NT) // multiple * multiple

    def __len__(self) -> int:
        return self.number

    def batches(self, batch_size: int, seed: int) -> Iterator[Batch]:
        order = torch.randperm(len(self.windows_NT), generator=torch.Generator().manual_seed(seed % 2**63))
        for chosen in torch.split(order[: self.number], batch_size):
            yield dict.fromkeys(self.inputs, self.windows_NT[chosen.to(self.windows_NT.device)])


class ExampleObjective(Objective):
    """The loss of a model on batches of examples, epoch after epoch."""

    def __init__(
        self, model: nn.Module, examples: Examples, config: LoopConfig, device: torch.device, loss: Loss
    ) -> None:
        super().__init__(model, config, device)
        self.examples, self.loss_of = examples, loss
        self.per_epoch = -(-len(examples) // config.batch_size)
        self._epoch: Iterator[Batch] = iter(())
        self._next = -1
        """The step whose batch is the next of the epoch."""
        self._part_rows = 1.0
        """Rows of a part of the batch, on average."""
        self._memory: dict[Hashable, list[Batch]] = {}

    def batch(self, step: int) -> Sequence[Batch]:
        epoch, place = divmod(step, self.per_epoch)
        if step != self._next or place == 0:
            seed = self.config.seed * 1_000_003 + epoch
            self._epoch = islice(self.examples.batches(self.config.batch_size, seed), place, None)
        self._next = step + 1
        batch, self.share = self.ranks.rows(next(self._epoch), self.device)
        self._part_rows = _rows(batch) / self.config.accumulate
        parts = zip(*(tensor.chunk(self.config.accumulate) for tensor in batch.values()), strict=True)
        return [dict(zip(batch, part, strict=True)) for part in parts]

    def loss(self, part: Batch, index: int) -> tuple[Tensor, Tensor, None]:
        # the last batch of an epoch may not come in equal parts, or in fewer
        value = self.loss_of(self.model, part) * (_rows(part) / self._part_rows)
        return value, value.detach(), None

    def can_record(self, pruning: bool) -> bool:
        # gates open and close, and every change would need a graph of its own for every length
        return not pruning

    def fixed_batch(self, step: int) -> tuple[Sequence[Batch], Hashable]:
        parts = self.batch(step)
        key = tuple((name, tensor.shape, tensor.dtype) for part in parts for name, tensor in part.items())
        if key not in self._memory:
            self._memory[key] = [{name: tensor.clone() for name, tensor in part.items()} for part in parts]
        for there, here in zip(self._memory[key], parts, strict=True):
            for name, tensor in here.items():
                there[name].copy_(tensor)
        return self._memory[key], key


def _rows(batch: Batch) -> int:
    return len(next(iter(batch.values())))
