"""What compression costs: the model's answers on windows that were kept back, and its speed, before and after."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankwise.deploy.inputs import example_inputs, positions_of
from rankwise.measure import evaluating, time_together

PERPLEXITY = "perplexity"
ANSWERS = "perplexity of the dense model's likeliest words"
ERROR = "relative error of the outputs"
MUCH = {PERPLEXITY: 1.5, ANSWERS: 1.5, ERROR: 0.3}
"""What counts as a large loss: the factor by which a perplexity grows, or the error itself."""
LARGEST = 700.0
"""Nats whose exponential is a number."""
REPEATS = 5


@dataclass(frozen=True)
class Quality:
    """A figure of the dense model and of the small one on windows kept back from calibration; less is better."""

    measure: str
    dense: float
    small: float
    windows: int

    @property
    def is_bad(self) -> bool:
        """Whether so much was lost that another way of sharing out the ranks is worth a try."""
        return self.small > MUCH[self.measure] * (1.0 if self.measure == ERROR else self.dense)

    def __str__(self) -> str:
        both = f"{self.small:.4g}" if self.measure == ERROR else f"{self.dense:.4g} dense, {self.small:.4g} small"
        return f"{self.measure} {both} on {self.windows} windows kept back"


class KeptBack:
    """Windows that calibration does not see. For a decoder the text itself says what is right, else the dense model."""

    def __init__(self, model: nn.Module, batches: Sequence[Any], *, is_decoder: bool) -> None:
        self.batches = batches
        self.wanted: list[Tensor] = []
        self.measure = PERPLEXITY
        if is_decoder:
            self.wanted = [tokens_of(batch)[:, 1:] for batch in batches]
        else:
            answers = [answer.cpu() for answer in self._answers(model, likeliest=True)]
            self.measure = ERROR if answers[0].is_floating_point() else ANSWERS
            self.wanted = answers
        self.dense = self.measured(model)

    def quality(self, small: nn.Module) -> Quality:
        return Quality(self.measure, self.dense, self.measured(small), len(self.batches))

    def measured(self, model: nn.Module) -> float:
        """The measure of a model, on the device where it is."""
        total, number = 0.0, 0.0
        for wanted, answer in zip(self.wanted, self._answers(model), strict=True):
            if self.measure == ERROR:
                total += (answer.float() - wanted.to(answer.device).float()).square().sum().item()
                number += wanted.float().square().sum().item()
                continue
            # of a decoder all but the last position say what comes next
            logits = answer[:, : wanted.shape[1]].flatten(0, 1)
            total += F.cross_entropy(logits.float(), wanted.to(logits.device).flatten(), reduction="sum").item()
            number += wanted.numel()
        if self.measure == ERROR:
            return math.sqrt(total / number) if number else 0.0
        mean = total / max(number, 1)
        # not a number is the worst of all
        return math.exp(min(mean, LARGEST)) if math.isfinite(mean) else math.inf

    def _answers(self, model: nn.Module, *, likeliest: bool = False) -> Any:
        with torch.inference_mode(), evaluating(model):
            for batch in self.batches:
                output = model(**batch) if isinstance(batch, Mapping) else model(batch)
                answer = output.logits if hasattr(output, "logits") else output[0]
                words = getattr(getattr(model, "config", None), "vocab_size", None)
                yield answer.argmax(-1) if likeliest and answer.shape[-1] == words else answer


def tokens_of(batch: Any) -> Tensor:
    tokens: Tensor = batch["input_ids"] if isinstance(batch, Mapping) else batch
    return tokens


def milliseconds(model: nn.Module, length: int) -> dict[int, float]:
    """The median time of a call with one window of tokens, and with a single token; empty where no inputs are known."""
    most = positions_of(model) if hasattr(model, "get_input_embeddings") else None
    device = next(model.parameters()).device
    found: dict[int, float] = {}
    for number in sorted({length if most is None else min(length, most), 1}, reverse=True):
        try:
            inputs = _on(device, example_inputs(model, 1, number))
            with torch.inference_mode(), evaluating(model):
                timing = time_together({"": lambda given=inputs: model(**given)}, repeats=REPEATS, device=device)  # type: ignore[misc]
        # models of other kinds than text read other things, and say so in many ways
        except Exception:
            return {}
        found[number] = timing[""].median
    return found


def _on(device: torch.device, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {name: _on(device, each) for name, each in value.items()}
    return tuple(_on(device, each) for each in value) if isinstance(value, tuple | list) else value
