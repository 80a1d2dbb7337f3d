"""Neurons and ranks in one budget: fewer neurons and heads first, then low rank for what is still too large.

What a neuron is worth and what a component of a matrix is worth are both errors of outputs, weighed by the loss. But
they cannot be added up: components of a matrix that has lost neurons are others, and the errors of one kind change the
inputs of the other. So shares of the two are tried, and what the small models answer to batches that were kept back
decides.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankwise.adapters.plans import find_plan
from rankwise.core.budget import Budget, count
from rankwise.core.plan import Plan
from rankwise.errors import BudgetError, InvalidValueError, RankwiseError
from rankwise.measure import call_model, evaluating
from rankwise.swap import copied

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the removed parameters that are tried for neurons and heads; 0 is low rank alone, 1 the opposite."""
KEPT_BACK = 8
"""One in so many batches, and at least one, is kept back to compare them."""


class NeuronsThenRanks:
    """Compresses one model by the two methods, one after the other.

    Args:
        compress: `rankwise.compress`.
        plan: the layers that are compressed.
        limit: parameters of the result, at most.
        shared: arguments of `compress` for both methods.
        low_rank: the budget of low rank, and arguments that it alone has.
    """

    def __init__(
        self,
        compress: Callable[..., nn.Module],
        plan: Plan,
        limit: int,
        shared: dict[str, Any],
        low_rank: dict[str, Any],
    ) -> None:
        self.compress, self.plan, self.limit = compress, plan, limit
        self.shared, self.low_rank = shared, low_rank
        self.names = {use.name for site in plan.sites for use in site.uses}

    def __call__(self, model: nn.Module, share: float, **settings: Any) -> nn.Module:
        """Compress `model` in place; neurons and heads are `share` of what is removed."""
        settings = {**self.shared, **settings, "in_place": True}
        middle = Budget(params=count(model) - round(share * (count(model) - self.limit)))
        if share:
            self.compress(model, middle, method="width", plan=self.plan, **settings)
        if count(model) > self.limit:
            # with the shapes that layers have now
            sites = find_plan(model, include=".*").sites
            plan = self.plan.only([site for site in sites if self.names.issuperset(use.name for use in site.uses)], [])
            self.compress(model, method="svd", plan=plan, **self.low_rank, **settings)
        return model

    def best_share(self, model: nn.Module, calibration: Sequence[Any] | None, loss_batches: Sequence[Any]) -> float:
        """The one of `SHARES` that changes least what the model answers to batches that were kept back.

        It takes the memory of a second model.
        """
        if calibration is None or len(calibration) < 2:
            raise RankwiseError(
                "Neurons and ranks share a budget by what they cost on a batch that is kept back, but `calibration` "
                f"has {len(calibration or ())}. Pass at least two batches, or `width_share`."
            )
        number = max(1, len(calibration) // KEPT_BACK)
        kept_back, used = calibration[-number:], calibration[:-number]
        # the same texts, which may be shorter and more in a batch
        loss_batches = loss_batches[: max(1, len(loss_batches) * len(used) // len(calibration))]
        progress = self.shared["progress"] or (lambda what, done, total: None)
        errors: dict[float, float] = {}
        for done, share in enumerate(SHARES):
            progress("shares", done, len(SHARES))
            try:
                with warnings.catch_warnings():
                    # what is worth saying is said of the model that is kept
                    warnings.simplefilter("ignore")
                    settings = {"calibration": used, "loss_batches": loss_batches, "progress": None}
                    errors[share] = divergence(model, self(copied(model), share, **settings), kept_back)
            except BudgetError:
                # the narrowest model of the family is larger
                continue
        progress("shares", len(SHARES), len(SHARES))
        return min(errors, key=lambda share: errors[share])


@torch.no_grad()
def divergence(dense: nn.Module, small: nn.Module, batches: Sequence[Any]) -> float:
    """How far the answers of `small` are from those of `dense`.

    For logits it is the mean of KL(dense || small) over tokens, for other outputs the squared error as a share of the
    outputs' own squares.
    """
    total = 0.0
    with evaluating(dense), evaluating(small):
        for batch in batches:
            outputs = [call_model(model, batch) for model in (dense, small)]
            p, q = (_answer(output).float() for output in outputs)
            if hasattr(outputs[0], "logits"):
                error = F.kl_div(q.log_softmax(-1), p.log_softmax(-1), reduction="none", log_target=True).sum(-1).mean()
            else:
                error = (p - q).square().sum() / p.square().sum()
            total += float(error) if torch.isfinite(error) else float("inf")
    return total / len(batches)


def _answer(output: Any) -> Tensor:
    answer = getattr(output, "logits", None)
    if answer is None:
        answer = output if isinstance(output, Tensor) else output[0]
    assert isinstance(answer, Tensor)
    return answer


def check_share(width_share: float | None, *, both: bool) -> None:
    """Refuse a share that is none, and one that has nothing to share."""
    if width_share is None:
        return
    if not both:
        raise RankwiseError('`width_share` goes with method="width+svd". Leave it out.')
    if not isinstance(width_share, int | float) or not 0 <= width_share <= 1:
        raise InvalidValueError(
            f"`width_share` must be the share of the removed parameters that neurons and heads are, in [0, 1], but is "
            f"{width_share!r} instead."
        )
