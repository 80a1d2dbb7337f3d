"""Distillation: while a model is pruned, its outputs and hidden states learn to match those of the dense one.

Low-rank pruning keeps every width, so the hidden states of the two models match one to one.
Shapes: L = layers, B = batch, T = tokens, D = width, C = classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankwise.errors import InvalidValueError, RankwiseError

Problem = Literal["regression", "single_label_classification", "multi_label_classification"]
"""The problem types of transformers, `config.problem_type`."""
IGNORED = -100
"""The label of a token that does not count."""
CHUNK = 2**24
"""Logits of which the divergence is computed at a time: 64 MiB of float32."""


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """Weights of the loss: labels * L + logits * T^2 KL(teacher | student) + hidden * (error of hidden states)."""

    labels: float = 0.5
    """Weight of the model's own loss on the labels."""
    logits: float = 1.0
    """Weight of the difference of logits: KL divergence, or squared error of a regression."""
    hidden: float = 1.0
    """Weight of the squared error of all hidden states, relative to their size."""
    temperature: float = 2.0
    """T: logits are divided by it before they are compared."""

    def __post_init__(self) -> None:
        for name in ("labels", "logits", "hidden"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise InvalidValueError(f"`{name}` must be at least 0 and finite, but is {value} instead.")
        if not 0 < self.temperature < math.inf:
            raise InvalidValueError(f"`temperature` must be positive and finite, but is {self.temperature} instead.")
        if not self.labels + self.logits + self.hidden:
            raise InvalidValueError("One of `labels`, `logits` and `hidden` must be above 0, but all are 0.")


def distillation_loss(
    teacher: nn.Module, config: Distillation | None = None
) -> Callable[[nn.Module, dict[str, Tensor]], Tensor]:
    """The loss of a student on a batch, for a model of transformers that returns `logits`.

    The student's configuration says whether sequences or tokens are classified, words predicted or numbers estimated,
    as it does for its own loss. Without labels set their weight to 0. The teacher is set to evaluation mode; keep it on
    the student's device, and copy it before the student is gated.
    """
    settings = config or Distillation()
    teacher.eval().requires_grad_(False)
    states = bool(settings.hidden)

    def loss(student: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        inner = _unwrapped(student)
        # a decoder may get its inputs from the labels
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels" or _has_encoder(inner)}
        with torch.no_grad():
            wanted = teacher(**inputs, output_hidden_states=states)
        given = student(**batch, output_hidden_states=states)
        parts: list[Tensor] = []
        if settings.labels:
            parts.append(settings.labels * _own_loss(given))
        if settings.logits:
            x, y = _logits(given, wanted)
            kind, mask = problem_of(inner, x, batch), answers_that_count(inner, x, batch)
            parts.append(settings.logits * answer_difference(x, y, settings.temperature, kind, mask))
        if states:
            sides = [hidden_difference(*side) for side in _sides(given, wanted, batch)]
            sides += _pooled_difference(given, wanted)
            parts.append(settings.hidden * torch.cat(sides).mean())
        return torch.stack(parts).sum()

    return loss


def problem_of(student: nn.Module, given: Tensor, batch: dict[str, Tensor]) -> Problem:
    """The problem type of a model, found as transformers finds it."""
    said: Problem | None = getattr(getattr(student, "config", None), "problem_type", None)
    labels = batch.get("labels")
    # `problem_type` is that of whole sequences
    if given.dim() == 2 and said is not None:
        return said
    if given.shape[-1] == 1:
        return "regression"
    if given.dim() == 2 and labels is not None and labels.is_floating_point():
        return "multi_label_classification"
    return "single_label_classification"


def answers_that_count(student: nn.Module, given: Tensor, batch: dict[str, Tensor]) -> Tensor | None:
    """Positions of (B, T) that count, those without padding and with a label; None if all do.

    A causal model predicts at each position the token after it, so the label of that token counts.
    """
    if given.dim() == 2:
        return None
    masks: list[Tensor] = []
    for name in ("decoder_attention_mask" if _has_encoder(student) else "attention_mask", "labels"):
        tensor = batch.get(name)
        if tensor is None:
            continue
        if tensor.shape != given.shape[:2]:
            raise RankwiseError(
                f"`{name}` must be {list(given.shape[:2])}, one for each answer, but is {list(tensor.shape)} instead. "
                "Set Distillation(logits=0)."
            )
        kept = tensor != (IGNORED if name == "labels" else 0)
        if name == "labels" and _is_causal(student):
            kept = F.pad(kept[:, 1:], (0, 1))
        masks.append(kept)
    return torch.stack(masks).all(0) if masks else None


def answer_difference(
    given: Tensor, wanted: Tensor, temperature: float, kind: Problem, mask: Tensor | None = None
) -> Tensor:
    """The mean difference of logits of shape (B, C) or (B, T, C), by the `kind` of problem.

    T^2 KL(softmax(wanted / T) | softmax(given / T)); for multiple labels the same of a sigmoid each, as mean over C;
    for a regression the squared error, as mean over C.
    """
    if kind == "regression":
        values = (given.float() - wanted.float()).square().mean(-1)
    elif kind == "multi_label_classification":
        given, wanted = given.float(), wanted.float()
        p = torch.sigmoid(wanted / temperature)
        given_loss, wanted_loss = (
            F.binary_cross_entropy_with_logits(x / temperature, p, reduction="none") for x in (given, wanted)
        )
        values = temperature**2 * (given_loss - wanted_loss).mean(-1)
    else:
        values = softmax_divergence(given, wanted, temperature).float()
    if mask is None:
        return values.mean()
    # not by index: a number of answers that is not known would make a GPU wait
    return values.masked_fill(~mask, 0).sum() / mask.sum().clamp(min=1)


def divergence_reference(given: Tensor, wanted: Tensor, temperature: float) -> Tensor:
    """T^2 KL(softmax(wanted / T) | softmax(given / T)) over the last dimension, in float32 or better."""
    dtype = torch.promote_types(given.dtype, torch.float32)
    log_p, log_q = (torch.log_softmax(x.to(dtype) / temperature, -1) for x in (wanted, given))
    return temperature**2 * F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


def softmax_divergence(given: Tensor, wanted: Tensor, temperature: float) -> Tensor:
    """`divergence_reference`, a chunk of answers at a time, with a gradient for `given` alone.

    Of a vocabulary of 262,144 words, the logits of a window take a gigabyte in float32, and the reference holds six
    tensors of this size. Here there are three, in the precision of the logits: both answers, and the gradient.
    """
    values: Tensor = _SoftmaxDivergence.apply(given.flatten(0, -2), wanted.flatten(0, -2), temperature)  # type: ignore[no-untyped-call]
    return values.view(given.shape[:-1])


class _SoftmaxDivergence(torch.autograd.Function):
    """N = answers, C = classes."""

    @staticmethod
    def forward(ctx: Any, given_NC: Tensor, wanted_NC: Tensor, temperature: float) -> Tensor:
        ctx.save_for_backward(given_NC, wanted_NC)
        ctx.temperature = temperature
        pairs = zip(*(torch.split(x, _rows_at_once(given_NC)) for x in (given_NC, wanted_NC)), strict=True)
        return torch.cat([divergence_reference(given, wanted, temperature) for given, wanted in pairs])

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None]:
        """d/dx of T^2 KL(p | softmax(x / T)) is T (softmax(x / T) - p); chunks are computed again, and not kept."""
        given_NC, wanted_NC = ctx.saved_tensors
        grad_NC = torch.empty_like(given_NC)
        parts = (torch.split(x, _rows_at_once(given_NC)) for x in (given_NC, wanted_NC, grad_NC, grad_N))
        for given, wanted, target, grad in zip(*parts, strict=True):
            q, p = (torch.softmax(x.to(grad.dtype) / ctx.temperature, -1) for x in (given, wanted))
            target.copy_(q.sub_(p).mul_(ctx.temperature * grad[:, None]))
        return grad_NC, None, None


def _rows_at_once(logits_NC: Tensor) -> int:
    return max(1, CHUNK // max(1, logits_NC.shape[-1]))


def hidden_difference(given: Any, wanted: Any, mask_BT: Tensor | None) -> Tensor:
    """|given - wanted|^2 / |wanted|^2 of each layer, over tokens that are not padding."""
    given_LBTD, wanted_LBTD = (torch.stack(tuple(states)).float() for states in (given, wanted))
    squares_LBT = (given_LBTD - wanted_LBTD).square().sum(-1)
    sizes_LBT = wanted_LBTD.square().sum(-1)
    if mask_BT is not None:
        squares_LBT, sizes_LBT = squares_LBT * mask_BT, sizes_LBT * mask_BT
    return squares_LBT.sum((1, 2)) / sizes_LBT.sum((1, 2))


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside a wrapper such as DDP."""
    while not hasattr(model, "config") and isinstance(getattr(model, "module", None), nn.Module):
        model = model.module  # type: ignore[assignment]
    return model


def _has_encoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _is_causal(model: nn.Module) -> bool:
    """Whether a model predicts the next token, and shifts its labels itself."""
    can = getattr(model, "can_generate", None)
    return can is not None and can() and not _has_encoder(model)


def _own_loss(output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    if loss is None:
        raise RankwiseError("A batch must have `labels`, but has none. Add them, or set Distillation(labels=0).")
    value: Tensor = loss.float()
    return value


def _logits(given: Any, wanted: Any) -> tuple[Tensor, Tensor]:
    x, y = (getattr(output, "logits", None) for output in (given, wanted))
    if not isinstance(x, Tensor) or not isinstance(y, Tensor) or x.dim() not in (2, 3) or x.shape != y.shape:
        shapes = [list(z.shape) if isinstance(z, Tensor) else None for z in (x, y)]
        raise RankwiseError(
            "Student and teacher must answer with `logits` of one shape, (batch, classes) or (batch, tokens, classes), "
            f"but those of {type(given).__name__} are {shapes[0]} and {shapes[1]}. Set Distillation(logits=0)."
        )
    return x, y


def _sides(given: Any, wanted: Any, batch: dict[str, Tensor]) -> list[tuple[Any, Any, Tensor | None]]:
    """Hidden states of the two models, and which tokens count; those of an encoder and a decoder are apart."""
    masks = {"hidden_states": batch.get("attention_mask")}
    if getattr(given, "hidden_states", None) is None:
        masks = {"encoder_hidden_states": masks["hidden_states"], "decoder_hidden_states": _decoded(given, batch)}
    found = []
    for name, mask in masks.items():
        a, b = getattr(given, name, None) or (), getattr(wanted, name, None) or ()
        shape = a[0].shape if a else ()
        alike = len(shape) == 3 and len(a) == len(b) and all(x.shape == shape for x in (*a, *b))
        if not alike or (mask is not None and mask.shape != shape[:2]):
            raise RankwiseError(
                "Hidden states must be (batch, tokens, width), alike in all layers of student and teacher, but "
                f"`{name}` of {type(given).__name__} are not. Set Distillation(hidden=0)."
            )
        found.append((a, b, mask))
    return found


def _pooled_difference(given: Any, wanted: Any) -> list[Tensor]:
    """The relative squared error of the pooled outputs, where both models have one."""
    x, y = (getattr(output, "pooler_output", None) for output in (given, wanted))
    if x is None or y is None or x.shape != y.shape:
        return []
    return [((x - y).float().square().sum() / y.float().square().sum())[None]]


def _decoded(output: Any, batch: dict[str, Tensor]) -> Tensor | None:
    """Which tokens of a decoder count, where that is known."""
    mask, labels = batch.get("decoder_attention_mask"), batch.get("labels")
    states = getattr(output, "decoder_hidden_states", None)
    if mask is None and labels is not None and states and labels.shape == states[0].shape[:2]:
        return labels != IGNORED
    return mask
