"""The augmented Lagrangian: a penalty that drives the expected size to its target, then a commitment.

Paper: section 4.3 "Augmented Lagrangian Method" and appendix "Optimization details".

Two recipes. "published" is the paper's: both multipliers climb by gradient ascent for as long as training lasts. It
stalls: the gradient of the penalty at a gate carries sigmoid', which vanishes once the gate is surely open, while the
multipliers climb only as fast as their learning rate lets them (docs/log/ has the comparison). In "committed", the
default, the weight of the quadratic term rises a thousandfold along the ramp: weak at first, so that the loss sorts the
gates, strong at the end, so that the size is met; the target falls slowly at the end, where a step costs most; alpha
stays where sigmoid' is alive; and at the end of the ramp the export is chosen and the gates stay there. From then on
exactly the model that will be exported is trained.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rankwise.core.budget import Account, CostCurve
from rankwise.core.choice import ranked_counts
from rankwise.core.control import Controller, Layout
from rankwise.core.gates import HardConcrete, HardConcreteGate
from rankwise.core.matrices import GatedMatrix
from rankwise.core.optim import AdamState
from rankwise.core.schedules import SCHEDULES, linear
from rankwise.errors import InvalidValueError

OPEN_RANGE = (0.0067, 0.9994)
"""P(z > 0) of a gate never leaves this range while it learns (committed recipe)."""
QUADRATIC_RANGE = (10.0, 1e4)
"""Weight of the quadratic term at the start and at the end of the ramp (committed recipe)."""
TRAVEL = 50.0
"""How far Adam can move an alpha along the ramp at the default learning rate."""
LEAST_TRAVEL = 15.0
"""Below this, gates cannot get from surely open to surely closed: a warning."""
ROUNDING = 1e-3
"""What rounding may move alpha or z by, and far more."""
SOFT, MANY = (0.05, 0.95), 0.2
"""A gate that is open with a probability in this range has not decided; more than this share of them is a warning."""


@dataclass(frozen=True, kw_only=True)
class Lagrangian:
    """Settings of learned gates."""

    anneal_steps: int
    """m: the target is reached after this many steps. Those after the ramp train the model as it will be exported, and
    repair what pruning cost: so a twentieth to a seventh of all steps is good in a long run, but a few hundred are
    needed for gates to sort themselves."""
    schedule: Literal["cubic", "linear"] | None = None
    """How the target falls: fast at first and slowly at the end, or evenly, which suits models of several sizes taken
    on the way. None: "linear" in the published recipe, else "cubic"."""
    gate_lr: float | None = None
    """Adam's learning rate of alpha. Default: 50 / anneal_steps."""
    multiplier_lr: float = 1e-2
    """Adam's learning rate of the multipliers, which ascend."""
    recipe: Literal["committed", "published"] = "committed"
    """"committed" is ours, "published" the paper's; see the top of this file."""
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
        if self.alpha_lr * self.anneal_steps < LEAST_TRAVEL:
            warnings.warn(
                f"gates cannot decide: `gate_lr` ({self.alpha_lr:g}) times `anneal_steps` ({self.anneal_steps}) should "
                f"be at least {LEAST_TRAVEL:g}. Raise one of them, or leave `gate_lr` out.",
                stacklevel=4,
            )

    @property
    def alpha_lr(self) -> float:
        return TRAVEL / self.anneal_steps if self.gate_lr is None else self.gate_lr

    @property
    def distribution(self) -> HardConcrete:
        return HardConcrete(temperature=self.temperature, stretch=self.stretch)


def penalty(gap: Tensor, lambda_1: Tensor | float, lambda_2: Tensor | float) -> Tensor:
    """g = lambda_1 (s - t) + lambda_2 (s - t)^2.  Paper: section 4.3."""
    return lambda_1 * gap + lambda_2 * gap**2


class ExpectedSize:
    """s(alpha) of all matrices together, as a function of the open probabilities of their components.

    Per matrix the value is the cost of exporting the expected rank, which is that of the dense matrix where low rank
    does not pay; the gradient of a component is its cost also there, so that a full-rank start is no dead end. In the
    pivot layout, where k components cost k (c - k), each has the mean cost c - k: what the last one costs is nothing in
    a square matrix of full rank, which would be such an end.
    """

    def __init__(self, curves: Sequence[CostCurve], layout: Layout) -> None:
        self.layout = layout
        self.sizes = torch.tensor(layout.sizes)
        self.costs = torch.tensor([curve.per_component for curve in curves], dtype=torch.float64)
        self.caps = torch.tensor([curve.cap for curve in curves], dtype=torch.float64)
        self.thresholds = torch.tensor([curve.threshold for curve in curves], dtype=torch.float64)
        self.pivots = torch.tensor([curve.pivot for curve in curves], dtype=torch.float64)

    def __call__(self, open_probability: Tensor) -> Tensor:
        device = open_probability.device
        self.costs, self.caps, self.pivots = (t.to(device) for t in (self.costs, self.caps, self.pivots))
        self.sizes, self.thresholds = self.sizes.to(device), self.thresholds.to(device)
        p = open_probability.double()
        with torch.no_grad():
            ranks = self.layout.sums(p)
            mean = self.costs - self.pivots * torch.minimum(ranks, self.costs / 2)
            low_rank = ranks * mean
            value = torch.where(low_rank >= self.thresholds, self.caps, low_rank).sum()
            of_component = mean.repeat_interleave(self.sizes, output_size=self.layout.total)
        uncapped = (of_component * p).sum()
        return uncapped + (value - uncapped).detach()


class Foreseen(NamedTuple):
    """A bound on the number of open components of each gate at a step to come."""

    step: int
    numbers: Tensor
    """On the CPU; not to be read before `event` has happened."""
    event: torch.cuda.Event | None


class LagrangianController(Controller):
    """Moves hard concrete gates so that the expected size follows the target."""

    moments: Tensor
    multipliers: Tensor
    multiplier_moments: Tensor

    def __init__(
        self,
        matrices: Sequence[GatedMatrix],
        account: Account,
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
        self._slope = torch.empty(0)
        """dz / dalpha of the masks that are drawn."""
        self._foreseen: Foreseen | None = None
        self.register_buffer("moments", AdamState.zeros(self.layout.total))
        self.register_buffer("multipliers", torch.zeros(2))
        self.register_buffer("multiplier_moments", AdamState.zeros(2))

    @property
    def gates(self) -> list[HardConcreteGate]:  # type: ignore[override]
        return [matrix.gate for matrix in self.matrices]  # type: ignore[misc]

    @property
    def frozen(self) -> bool:
        return self.settings.recipe == "committed" and self.step >= self.anneal_steps

    def alpha(self) -> Tensor:
        """alpha of all gates as one flat vector."""
        return torch.cat([gate.alpha for gate in self.gates])

    def noise(self, ahead: int = 0) -> Tensor:
        """The uniform noise of this step, or of a later one: a function of seed and step alone.

        So all ranks and resumed runs agree.
        """
        device = self.moments.device
        generator = torch.Generator(device).manual_seed((self.seed * 1_000_003 + self.step + ahead) % 2**63)
        return torch.rand(self.layout.total, generator=generator, device=device)

    def gap(self, alpha: Tensor) -> Tensor:
        """s - t as a fraction of the prunable parameters, differentiable in alpha."""
        target = self.target() - self.account.fixed
        return (self.size_of(self.distribution.open_probability(alpha)) - target) / max(self.account.prunable, 1)

    def expected_size(self) -> float:
        if self.frozen:
            return self.account.size(self.counts(self.limit))
        return self.account.fixed + float(self.size_of(self.distribution.open_probability(self.alpha())))

    def counts(self, limit: int) -> list[int]:
        scores = [gate.alpha for gate in self.gates]
        return ranked_counts(scores, self.account.curves, limit - self.account.fixed)

    def order(self, i: int) -> Tensor:
        return self.gates[i].alpha.argsort(descending=True, stable=True)

    def values(self, i: int) -> Tensor | None:
        return None if self.frozen else self.distribution.expected(self.gates[i].alpha)

    def openness(self) -> list[Tensor]:
        if not self.frozen:
            return [self.distribution.expected(gate.alpha) for gate in self.gates]
        chosen = zip(self.gates, self.choose(self.limit), strict=True)
        return [torch.zeros_like(gate.alpha).index_fill(0, kept, 1.0) for gate, kept in chosen]

    def draw(self) -> None:
        for gate in self.gates:
            assert gate.z is not None
            gate.z.requires_grad_(not self.frozen)
        alpha = self.alpha()
        if not self.frozen:
            z, self._slope = self.distribution.sample_and_slope(alpha, self.noise())
            self.fill(z, self._foreseen_numbers())
            self._foreseen = self.foresee(alpha) if alpha.is_cuda else None
            return
        self._warn_if_undecided()
        chosen = self.choose(self.limit)
        kept = torch.cat([index + start for index, start in zip(chosen, self.layout.starts, strict=True)])
        self.fill(torch.zeros_like(alpha).index_fill(0, kept, 1.0), [len(index) for index in chosen], binary=True)

    def foresee(self, alpha: Tensor) -> Foreseen:
        """How many components can be open at most after the next update, counted while a GPU trains on.

        An update moves alpha no further than Adam can, and z grows with alpha.
        """
        highest = alpha + (self.settings.alpha_lr * AdamState.reach() + ROUNDING)
        if self.settings.recipe == "committed":
            highest = highest.clamp(*self._alpha_range())
        can_open = self.distribution.sample(highest, self.noise(ahead=1)) > 0
        numbers = self.layout.sums(can_open.long()).to("cpu", non_blocking=True)
        event = torch.cuda.current_stream(alpha.device).record_event() if alpha.is_cuda else None
        return Foreseen(self.step + 1, numbers, event)

    def _foreseen_numbers(self) -> list[int] | None:
        """What was foreseen of this step; the numbers have arrived long since, unless the host is a step ahead."""
        foreseen = self._foreseen
        if foreseen is None or foreseen.step != self.step:
            return None
        if foreseen.event is not None:
            foreseen.event.synchronize()
        numbers: list[int] = foreseen.numbers.tolist()
        return numbers

    def outdate(self) -> None:
        self._foreseen = None
        super().outdate()

    @property
    def uses_gradient(self) -> bool:
        return not self.frozen

    def update(self, grad: Tensor) -> None:
        committed = self.settings.recipe == "committed"
        low, high = QUADRATIC_RANGE
        passed = linear(self.step, self.anneal_steps)
        lambda_2 = low * (high / low) ** passed if committed else self.multipliers[1]
        with torch.enable_grad():
            alpha = self.alpha().requires_grad_()
            gap = self.gap(alpha)
            (of_penalty,) = torch.autograd.grad(penalty(gap, self.multipliers[0], lambda_2), alpha)
        with torch.no_grad():
            # dL/dalpha = dL/dz dz/dalpha, and the penalty's own gradient
            grad = torch.addcmul(of_penalty, grad, self._slope)
            alpha = alpha - self.settings.alpha_lr * AdamState.direction(self.moments, grad, self.step + 1)
            if committed:
                alpha = alpha.clamp(*self._alpha_range())
                if self.step + 1 == self.anneal_steps:
                    alpha = alpha + self._tie_break()
            self.layout.scatter(alpha, [gate.alpha for gate in self.gates])
            # ascent: the gradients of the penalty with respect to the multipliers are the gap and its square
            ascent = AdamState.direction(self.multiplier_moments, torch.stack([gap, gap**2]).float(), self.step + 1)
            self.multipliers += self.settings.multiplier_lr * ascent

    def _tie_break(self) -> Tensor:
        """Next to nothing, and more for components that weigh more: parts gates that stand at the same bound.

        Added once, with the last update, so that from then on alpha alone says what is kept.
        """
        ranks = (matrix.magnitudes().argsort().argsort() for matrix in self.matrices)
        return 1e-3 * torch.cat([rank / max(len(rank), 1) for rank in ranks])

    def _warn_if_undecided(self) -> None:
        p = self.distribution.open_probability(self.alpha())
        soft = float(((p > SOFT[0]) & (p < SOFT[1])).double().mean())
        if soft > MANY:
            warnings.warn(
                f"{soft:.0%} of the gates had not decided when the ramp ended, so the choice of components is poor. "
                "Raise `anneal_steps` or `gate_lr`.",
                stacklevel=2,
            )

    def _alpha_range(self) -> tuple[float, float]:
        low, high = OPEN_RANGE
        return self.distribution.alpha(low), self.distribution.alpha(max(high, self.settings.open_probability))
