"""Fine-tuning: a few epochs over examples that fit in memory, for models that end in a loss of their own.

The sibling of `loop.py`, which reads an endless text with a state that is carried along, for days, and
resumes bit for bit. Here a phase takes minutes: it is kept when it is finished, and begun anew where it was not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from rankwise.errors import InvalidValueError
from rankwise.lab.training.graph import BatchGraphs
from rankwise.lab.training.interrupt import interruption
from rankwise.lab.training.schedules import SCHEDULES
from rankwise.pruner import Pruner

Batch = dict[str, Tensor]
Precision = Literal["auto", "no", "bf16"]
Loss = Callable[[nn.Module, Batch], Tensor]
"""Of a model on a batch."""


class Examples(Protocol):
    """What can be trained on."""

    def __len__(self) -> int: ...

    def batches(self, batch_size: int, seed: int) -> Iterator[Batch]:
        """One epoch, in an order that `seed` says."""


@dataclass(frozen=True, kw_only=True)
class TuningConfig:
    """Settings of `tune`."""

    epochs: float = 3.0
    """Passes over the training set; a part of one is allowed."""
    max_steps: int | None = None
    """No more steps than that, however large the training set is."""
    min_steps: int = 1
    """No fewer steps than that, however small it is."""
    batch_size: int = 32
    """Examples in a step."""
    lr: float = 5e-5
    """The peak of the learning rate."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """How the learning rate moves after its warm-up: linear and cosine fall to 0."""
    warmup: float = 0.1
    """The learning rate rises linearly in this share of the steps."""
    weight_decay: float = 0.01
    """Of AdamW, on matrices."""
    clip: float | None = 1.0
    """Largest norm of the gradient of all weights together."""
    log_every: int = 50
    """Steps between lines of metrics."""

    def __post_init__(self) -> None:
        for name, least in (("min_steps", 1), ("batch_size", 1), ("log_every", 1), ("max_steps", 1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise InvalidValueError(
                    f"`{name}` must be a whole number of at least {least}, but is {value!r} instead."
                )
        for name in ("epochs", "lr", "clip"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InvalidValueError(f"`{name}` must be positive and finite, but is {value} instead.")
        if not 0 <= self.weight_decay < math.inf:
            raise InvalidValueError(
                f"`weight_decay` must be at least 0 and finite, but is {self.weight_decay} instead."
            )
        if not 0 <= self.warmup < 1:
            raise InvalidValueError(f"`warmup` must be a share of the steps, in [0, 1), but is {self.warmup} instead.")
        if self.schedule not in (known := ("linear", "cosine", "constant")):
            words = ", ".join(map(repr, known))
            raise InvalidValueError(f"`schedule` must be one of {words}, but is {self.schedule!r} instead.")

    def steps(self, num_examples: int) -> int:
        """How many there are over a training set of that size."""
        steps = max(self.min_steps, math.ceil(self.epochs * math.ceil(num_examples / self.batch_size)))
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def lr_at(self, step: int, num_steps: int) -> float:
        """The learning rate of step 1, 2, ..., `num_steps`."""
        return self.lr * SCHEDULES[self.schedule](step, int(self.warmup * num_steps), num_steps)


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """The precision of a model's forward pass; its weights stay float32."""
    low = precision == "bf16" or (precision == "auto" and device.type == "cuda")
    return torch.autocast(device.type, torch.bfloat16, enabled=low)


def tune(
    model: nn.Module,
    examples: Examples,
    config: TuningConfig,
    loss: Loss,
    *,
    seed: int = 0,
    precision: Precision = "auto",
    pruner: Pruner | None = None,
    after_step: Callable[[], None] | None = None,
    log: Callable[[Mapping[str, Any]], None] | None = None,
) -> float:
    """Train `model` in place; the seconds it took.

    Args:
        model: on the device that it is trained on.
        examples: what it is trained on, on that device.
        config: epochs, learning rate and so on.
        loss: of the model on a batch.
        seed: of dropout and of the order of the examples.
        precision: "bf16" for mixed precision; "auto": on a GPU.
        pruner: one that has gated `model`; its gates move after every step.
        after_step: called when a step is complete.
        log: is given lines of metrics.
    """
    torch.manual_seed(seed)
    device, num_steps = next(model.parameters()).device, config.steps(len(examples))
    lr = torch.tensor(config.lr, device=device)
    on_gpu = device.type == "cuda"
    optimizer = torch.optim.AdamW(_groups(model, config.weight_decay), lr=lr, fused=True, capturable=on_gpu)
    # summed on the device: nothing waits for it until a line is written
    total, since, began = torch.zeros((), device=device), 0, time.perf_counter()

    def move_weights(batch: Batch) -> None:
        optimizer.zero_grad()
        with autocast(precision, device):
            value = loss(model, batch)
        value.backward()  # type: ignore[no-untyped-call]
        if config.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        total.add_(value.detach())
        if pruner is None:
            optimizer.zero_grad()

    # gates open and close, and every change would want a graph of its own for every length
    move = BatchGraphs(move_weights).run if on_gpu and pruner is None else move_weights
    batches = _endless(examples, config.batch_size, seed)
    model.train()
    with interruption() as stop:
        for step in range(1, num_steps + 1):
            stop.check()
            lr.fill_(config.lr_at(step, num_steps))
            move(next(batches))
            if pruner is not None:
                pruner.step()
            if after_step is not None:
                after_step()
            since += 1
            if log is not None and (step % config.log_every == 0 or step == num_steps):
                line = {"step": step, "seconds": time.perf_counter() - began, "loss": float(total) / since}
                if pruner is not None:
                    line["target_size"] = pruner.controller.target_size()
                    line["expected_size"] = pruner.controller.expected_size()
                log(line)
                total.zero_()
                since = 0
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Matrices decay; biases and norms do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]


def _endless(examples: Examples, batch_size: int, seed: int) -> Iterator[Batch]:
    epoch = 0
    while True:
        yield from examples.batches(batch_size, seed * 1_000_003 + epoch)
        epoch += 1
