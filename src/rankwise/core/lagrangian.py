"""The augmented Lagrangian: a penalty that moves the expected size to its target, then a choice that stays.

Paper: section 4.3 "Augmented Lagrangian Method" and appendix "Optimization details".

There are two recipes. "published" is the paper's: both multipliers rise by gradient ascent throughout training. It
stalls, because the gradient of the penalty at a gate contains sigmoid', which vanishes once the gate is surely open,
while the multipliers rise only as fast as their learning rate allows (docs/log/ has the comparison). In "committed",
the default, the weight of the quadratic term rises a thousandfold along the ramp: it is small at first, so that the
loss sorts the gates, and large at the end, so that the size is met. The target falls slowly at the end, where a step
costs most. alpha stays in a range where sigmoid' does not vanish. At the end of the ramp the components of the export
are chosen and the gates stay there, so that from then on exactly the model that will be exported is trained.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rankwise.core.allocation import blended_allocation, global_allocation
from rankwise.core.budget import CostCurve, SizeAccount
from rankwise.core.controller import Controller, FlatLayout
from rankwise.core.gates import HardConcrete, HardConcreteGate
from rankwise.core.matrices import GatedMatrix
from rankwise.core.optim import SCHEDULES, AdamState, linear
from rankwise.errors import InvalidValueError

OPEN_RANGE = (0.0067, 0.9994)
"""P(z > 0) of a gate stays in this range while it learns (committed recipe)."""
QUADRATIC_RANGE = (10.0, 1e4)
"""Weight of the quadratic term at the start and at the end of the ramp (committed recipe)."""
DEFAULT_TRAVEL = 50.0
"""`gate_lr` times `anneal_steps` by default: about how far Adam can move an alpha along the ramp."""
WORTH_TRAVEL = 4.0
"""The same where gates start by what components are worth, and only those near the limit have to move."""
SHARPNESS = 2.0
"""How alpha grows with the logarithm of what a component is worth, where gates start by it."""
MIN_TRAVEL = 15.0
"""Below this, gates cannot move from surely open to surely closed, and a warning says so."""
ROUNDING = 1e-3
"""Much more than rounding changes alpha or z by."""
UNDECIDED_RANGE, MAX_UNDECIDED = (0.05, 0.95), 0.2
"""A gate with P(z > 0) in this range is undecided; a warning says so if more than this share of them is."""


@dataclass(frozen=True, kw_only=True)
class Lagrangian:
    """The settings of learned gates."""

    anneal_steps: int
    """m: the length of the ramp, after which the target size is reached. Later steps train the model as it will be
    exported and repair what pruning cost. A twentieth to a seventh of all steps is good in a long run, but gates need a
    few hundred steps to sort themselves."""
    schedule: Literal["cubic", "linear"] | None = None
    """How the target size falls: "cubic", fast at first and slowly at the end, or "linear", which suits exports of
    several sizes along the ramp. Default: "linear" in the published recipe, "cubic" in the committed one."""
    gate_lr: float | None = None
    """Adam's learning rate for alpha. Default: 50 / anneal_steps."""
    multiplier_lr: float = 1e-2
    """Adam's learning rate for the multipliers, which ascend."""
    recipe: Literal["committed", "published"] = "committed"
    """"committed" is ours, "published" the paper's, in which
    both multipliers rise by gradient ascent alone, and which can miss the size."""
    open_probability: float = 0.9999
    """P(z > 0) at the start: almost one, so that gating does not ruin trained weights."""
    temperature: float = 1.0
    """beta of the hard concrete distribution."""
    stretch: float = 0.1
    """The distribution is stretched to (-stretch, 1 + stretch)."""

    def __post_init__(self) -> None:
        if not isinstance(self.anneal_steps, int) or self.anneal_steps < 1:
            raise InvalidValueError(
                f"`anneal_steps` must be a whole number of at least 1, but is {self.anneal_steps!r} instead."
            )
        for name in ("gate_lr", "multiplier_lr"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InvalidValueError(f"`{name}` must be positive and finite, but is {value} instead.")
        if self.schedule not in (None, *SCHEDULES):
            raise InvalidValueError(f'`schedule` must be "cubic" or "linear", but is {self.schedule!r} instead.')
        if self.recipe not in ("committed", "published"):
            raise InvalidValueError(f'`recipe` must be "committed" or "published", but is {self.recipe!r} instead.')
        self.distribution.alpha(self.open_probability)
        if self.alpha_lr * self.anneal_steps < MIN_TRAVEL:
            warnings.warn(
                f"gates cannot decide: `gate_lr` ({self.alpha_lr:g}) times `anneal_steps` ({self.anneal_steps}) should "
                f"be at least {MIN_TRAVEL:g}. Raise one of them, or leave `gate_lr` out.",
                stacklevel=4,
            )

    @property
    def alpha_lr(self) -> float:
        """The learning rate of alpha in use."""
        return DEFAULT_TRAVEL / self.anneal_steps if self.gate_lr is None else self.gate_lr

    @property
    def distribution(self) -> HardConcrete:
        return HardConcrete(temperature=self.temperature, stretch=self.stretch)


def penalty(gap: Tensor, lambda_1: Tensor | float, lambda_2: Tensor | float) -> Tensor:
    """g = lambda_1 (s - t) + lambda_2 (s - t)^2.  Paper: section 4.3."""
    return lambda_1 * gap + lambda_2 * gap**2


class ExpectedSize:
    """s(alpha), the expected size of all matrices, as a function of the open probabilities of their components.

    The value for a matrix is the cost of exporting its expected rank, which is that of the dense matrix if low rank
    is not smaller. The gradient of a component is its cost even then, because a start at full rank would otherwise have
    no gradient. In the pivot layout k components cost k (c - k), and the gradient of each is the mean cost c - k: the
    cost of the last one is zero in a square matrix of full rank, which would again be no gradient.
    """

    def __init__(self, curves: Sequence[CostCurve], layout: FlatLayout) -> None:
        self.layout = layout
        self.sizes = torch.tensor(layout.sizes)
        rows = [(curve.per_component, curve.cap, curve.threshold, curve.pivot) for curve in curves]
        self.table = torch.tensor(rows, dtype=torch.float64).view(-1, 4).t().contiguous()

    def __call__(self, open_probability: Tensor) -> Tensor:
        device = open_probability.device
        self.sizes, self.table = self.sizes.to(device), self.table.to(device)
        per_component, cap, threshold, pivot = self.table.unbind()
        p = open_probability.double()
        with torch.no_grad():
            ranks = self.layout.sums(p)
            mean_cost = per_component - pivot * torch.minimum(ranks, per_component / 2)
            low_rank = ranks * mean_cost
            value = torch.where(low_rank >= threshold, cap, low_rank).sum()
            of_component = mean_cost.repeat_interleave(self.sizes, output_size=self.layout.total)
        uncapped = (of_component * p).sum()
        return uncapped + (value - uncapped).detach()


def _at_the_end(step: int, num_steps: int) -> float:
    """A ramp that is over before the first step; a function of the module, so that the controller can be pickled."""
    return 1.0


class OpenCountBound(NamedTuple):
    """An upper bound on the number of open components of each gate at a later step."""

    step: int
    num_open: Tensor
    """A CPU tensor that may be read once `event` has happened."""
    event: torch.cuda.Event | None


class LagrangianController(Controller):
    """Moves hard concrete gates so that the expected size follows the target size."""

    moments: Tensor
    multipliers: Tensor
    multiplier_moments: Tensor

    def __init__(
        self,
        matrices: Sequence[GatedMatrix],
        account: SizeAccount,
        limit: int,
        settings: Lagrangian,
        *,
        seed: int,
    ) -> None:
        schedule = SCHEDULES[settings.schedule or ("cubic" if settings.recipe == "committed" else "linear")]
        super().__init__(matrices, account, limit, settings.anneal_steps, schedule)
        self.settings = settings
        self.seed = seed
        self.distribution = settings.distribution
        self.size_of = ExpectedSize(account.curves, self.layout)
        self.alpha_lr = settings.alpha_lr
        self._slope = torch.empty(0)
        """dz / dalpha of the current masks."""
        self._bound: OpenCountBound | None = None
        self.register_buffer("moments", AdamState.zeros(self.layout.total))
        self.register_buffer("multipliers", torch.zeros(2))
        self.register_buffer("multiplier_moments", AdamState.zeros(2))

    @property
    def gates(self) -> list[HardConcreteGate]:  # type: ignore[override]
        return [matrix.gate for matrix in self.matrices]  # type: ignore[misc]

    @property
    def is_frozen(self) -> bool:
        return self.settings.recipe == "committed" and self.step >= self.anneal_steps

    def start_by_worth(self, worths: Sequence[Tensor]) -> None:
        """Start at the final size, with the components open that are worth most.

        Ranks are between even ones and those of one-shot compression, which takes too much from matrices whose loss
        training repairs (docs/log/methods.md). alpha is `SHARPNESS` times the logarithm of a component's worth against
        that of the last one of its matrix, plus a number by which the expected size is the limit: so what is near the
        limit is undecided, and training decides it.

        Args:
            worths: for each matrix what each component is worth per parameter.
        """
        self.starts_by_worth, self.schedule = True, _at_the_end
        if self.settings.gate_lr is None:
            self.alpha_lr = WORTH_TRAVEL / self.anneal_steps
        worths = [worth.double().clamp(min=1e-9 * float(worth.max()) + 1e-300).log() for worth in worths]
        counts = blended_allocation(worths, self.account.curves, self.limit - self.account.fixed)
        last = [(w[max(k - 1, 0)] + w[min(k, len(w) - 1)]) / 2 for w, k in zip(worths, counts, strict=True)]
        order = SHARPNESS * torch.cat([worth - cut for worth, cut in zip(worths, last, strict=True)])
        low, high, bounds = float(-order.max()) - 20, float(-order.min()) + 20, self._alpha_range()
        for _ in range(60):
            middle = (low + high) / 2
            alpha = (order + middle).clamp(*bounds)
            low, high = (middle, high) if self.gap(alpha) < 0 else (low, middle)
        self.layout.scatter(alpha.to(self.gates[0].alpha), [gate.alpha for gate in self.gates])

    def alpha(self) -> Tensor:
        """alpha of all gates as one flat vector."""
        return torch.cat([gate.alpha for gate in self.gates])

    def noise(self, ahead: int = 0) -> Tensor:
        """The uniform noise of this step, or of `ahead` steps later.

        It depends on seed and step alone, so that all ranks and resumed runs agree.
        """
        device = self.moments.device
        generator = torch.Generator(device).manual_seed((self.seed * 1_000_003 + self.step + ahead) % 2**63)
        return torch.rand(self.layout.total, generator=generator, device=device)

    def gap(self, alpha: Tensor) -> Tensor:
        """s - t as a fraction of the prunable parameters, differentiable in alpha."""
        target = self.target_size() - self.account.fixed
        return (self.size_of(self.distribution.open_probability(alpha)) - target) / max(self.account.prunable, 1)

    def expected_size(self) -> float:
        if self.is_frozen:
            return self.account.size(self.num_kept(self.limit))
        return self.account.fixed + float(self.size_of(self.distribution.open_probability(self.alpha())))

    def num_kept(self, limit: int) -> list[int]:
        scores = [gate.alpha for gate in self.gates]
        return global_allocation(scores, self.account.curves, limit - self.account.fixed)

    def best_first(self, i: int) -> Tensor:
        return self.gates[i].alpha.argsort(descending=True, stable=True)

    def export_values(self, i: int) -> Tensor | None:
        return None if self.is_frozen else self.distribution.expected(self.gates[i].alpha)

    def open_fractions(self) -> list[Tensor]:
        if not self.is_frozen:
            return [self.distribution.expected(gate.alpha) for gate in self.gates]
        chosen = zip(self.gates, self.kept_components(self.limit), strict=True)
        return [torch.zeros_like(gate.alpha).index_fill(0, kept, 1.0) for gate, kept in chosen]

    def draw_masks(self) -> None:
        for gate in self.gates:
            assert gate.z is not None
            gate.z.requires_grad_(not self.is_frozen)
        alpha = self.alpha()
        if not self.is_frozen:
            z, self._slope = self.distribution.sample_and_slope(alpha, self.noise())
            self.set_masks(z, self._bounded_counts())
            self._bound = self.bound_open_counts(alpha) if alpha.is_cuda else None
            return
        self._warn_if_undecided()
        chosen = self.kept_components(self.limit)
        kept = torch.cat([index + start for index, start in zip(chosen, self.layout.starts, strict=True)])
        z = torch.zeros_like(alpha).index_fill(0, kept, 1.0)
        self.set_masks(z, [len(index) for index in chosen], is_binary=True)

    def bound_open_counts(self, alpha: Tensor) -> OpenCountBound:
        """The most components that can be open after the next update, counted while the GPU works on this step.

        Adam bounds how far an update moves alpha, and z increases with alpha. So the host never waits for the counts.
        """
        highest = alpha + (self.alpha_lr * AdamState.max_direction() + ROUNDING)
        if self.settings.recipe == "committed":
            highest = highest.clamp(*self._alpha_range())
        can_open = self.distribution.sample(highest, self.noise(ahead=1)) > 0
        num_open = self.layout.sums(can_open.long()).to("cpu", non_blocking=True)
        event = torch.cuda.current_stream(alpha.device).record_event() if alpha.is_cuda else None
        return OpenCountBound(self.step + 1, num_open, event)

    def _bounded_counts(self) -> list[int] | None:
        """The bound for this step, if there is one; its copy has long arrived unless the host is a step ahead."""
        bound = self._bound
        if bound is None or bound.step != self.step:
            return None
        if bound.event is not None:
            bound.event.synchronize()
        num_open: list[int] = bound.num_open.tolist()
        return num_open

    def resize(self, sizes: Sequence[int]) -> None:
        super().resize(sizes)
        self.size_of = ExpectedSize(self.account.curves, self.layout)

    def invalidate_masks(self) -> None:
        self._bound = None
        super().invalidate_masks()

    @property
    def uses_gradient(self) -> bool:
        return not self.is_frozen

    def update(self, grad: Tensor) -> None:
        committed = self.settings.recipe == "committed"
        low, high = QUADRATIC_RANGE
        progress = linear(self.step, self.anneal_steps)
        lambda_2 = low * (high / low) ** progress if committed else self.multipliers[1]
        with torch.enable_grad():
            alpha = self.alpha().requires_grad_()
            gap = self.gap(alpha)
            (of_penalty,) = torch.autograd.grad(penalty(gap, self.multipliers[0], lambda_2), alpha)
        with torch.no_grad():
            # dL/dalpha = dL/dz dz/dalpha, plus the gradient of the penalty
            grad = torch.addcmul(of_penalty, grad, self._slope)
            alpha = alpha - self.alpha_lr * AdamState.direction(self.moments, grad, self.step + 1)
            if committed:
                alpha = alpha.clamp(*self._alpha_range())
                if self.step + 1 == self.anneal_steps:
                    alpha = alpha + self._tie_break()
            self.layout.scatter(alpha, [gate.alpha for gate in self.gates])
            # ascent: the gradients of the penalty with respect to the multipliers are the gap and its square
            ascent = AdamState.direction(self.multiplier_moments, torch.stack([gap, gap**2]).float(), self.step + 1)
            self.multipliers += self.settings.multiplier_lr * ascent

    def _tie_break(self) -> Tensor:
        """A tiny amount that orders gates at the same bound of alpha by the magnitudes of their components.

        It is added once, in the last update, so that afterwards alpha alone decides what is kept.
        """
        ranks = (matrix.magnitudes().argsort().argsort() for matrix in self.matrices)
        return 1e-3 * torch.cat([rank / max(len(rank), 1) for rank in ranks])

    def _warn_if_undecided(self) -> None:
        p = self.distribution.open_probability(self.alpha())
        low, high = UNDECIDED_RANGE
        undecided = float(((p > low) & (p < high)).double().mean())
        # what is undecided was near the limit from the start
        if undecided > MAX_UNDECIDED and not self.starts_by_worth:
            warnings.warn(
                f"{undecided:.0%} of the gates had not decided when the ramp ended, so the choice of components is "
                "poor. Raise `anneal_steps` or `gate_lr`.",
                stacklevel=2,
            )

    def _alpha_range(self) -> tuple[float, float]:
        low, high = OPEN_RANGE
        return self.distribution.alpha(low), self.distribution.alpha(max(high, self.settings.open_probability))
