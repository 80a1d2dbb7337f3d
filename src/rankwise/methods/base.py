"""The interface of a method: how a matrix is represented, which gate it gets, and what moves the gates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rankwise.core.budget import Budget, CostCurve, SizeAccount
from rankwise.core.calibrate import Loss, loss_weights, second_moments, weighed
from rankwise.core.controller import Controller
from rankwise.core.factorize import Factors, Moments, random, svd, svd_energy, svd_of_pair
from rankwise.core.gates import Gate
from rankwise.core.matrices import GatedMatrix
from rankwise.core.plan import Plan, Site, Source
from rankwise.core.targets import Target
from rankwise.errors import InvalidValueError


@dataclass(frozen=True)
class Factorizer:
    """How a matrix becomes factors, and what is known of its inputs and outputs."""

    make: Callable[[Site, Source, int], Factors]
    """Makes factors of the given rank for the matrix of a site."""
    keeps_weight: bool
    """Whether P Q approximates the matrix; otherwise the factors are random."""
    moments: Mapping[str, Moments] = field(default_factory=dict)
    """Calibration statistics by the name of a site, if there are any."""
    weighed: Collection[str] | None = None
    """The sites whose moments weigh errors by a loss, so that they can be compared; None without a loss."""


def make_factorizer(
    init: str, model: nn.Module, plan: Plan, calibration: Iterable[Any] | None, seed: int, loss: Loss | None = None
) -> Factorizer:
    """Factors by `Pruner(init=)`: the SVD of the weights, the same whitened by `calibration` data, or random ones.

    With `loss`, errors of outputs are weighed by what they cost it.
    """
    if init == "random":
        generator = torch.Generator().manual_seed(seed)
        return Factorizer(lambda site, source, rank: random(dense_weight(source), rank, generator), keeps_weight=False)
    batches = None if calibration is None else list(calibration)
    moments = {} if batches is None else second_moments(model, plan, batches)
    weights: dict[str, Moments] | None = None
    if batches is not None and loss is not None:
        found = loss_weights(model, plan, batches, loss)
        weights = {name: each for name, each in found.items() if each.rows_O is not None}
        moments = {name: weighed(each, weights.get(name)) for name, each in moments.items()}
    return Factorizer(
        lambda site, source, rank: svd_of_source(source, rank, moments.get(site.name) if init == "whitened" else None),
        keeps_weight=True,
        moments=moments,
        weighed=weights,
    )


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A row of the paper's tables. The fields of a method are its settings.

    A method combines a representation (how a matrix is divided into components, `rankwise.methods.representations`)
    and a gating (what opens and closes them, `rankwise.methods.paper`).
    """

    name: ClassVar[str]
    counts_nonzeros: ClassVar[bool] = False
    """Whether sizes count non-zero weights, because matrices keep their shape."""
    splits_pairs: ClassVar[bool] = False
    """Whether the two matrices of a low-rank pair are pruned separately."""
    prunes_widths: ClassVar[bool] = False
    """Whether neurons and heads are pruned instead of matrices, to one width for all layers."""
    prunes: ClassVar[bool] = True
    """Whether the method prunes at all, so that a plan without any matrix is a mistake."""

    @property
    def can_start_by_worth(self) -> bool:
        """Whether the method can start by what a loss says components are worth."""
        return False

    def check_budget(self, budget: Budget) -> None:
        """Raise if this method cannot keep to such a budget."""
        return None

    def check_loss(self, loss: Loss | None) -> None:
        """Raise if this method needs a loss by which components are weighed, and there is none."""
        return None

    def skip_reason(self, site: Site) -> str | None:
        """Why this method cannot prune `site`, or None if it can."""
        return None

    @abstractmethod
    def cost_curve(self, site: Site, *, trained: bool) -> CostCurve:
        """What exporting k components of `site` costs; `trained` if its weights are to be kept."""

    def for_target(self, site: Site, curve: CostCurve, target: Target, rank_multiple: int | None) -> CostCurve:
        """`curve` with the rank multiple that is fast on `target`, or with `rank_multiple` if it is given."""
        full_rank = min(site.shape) if site.pair_rank is None else site.pair_rank
        return replace(curve, multiple=rank_multiple or target.rank_multiple(full_rank))

    @abstractmethod
    def make_matrix(
        self, site: Site, source: Source, gate: Gate, curve: CostCurve, factorizer: Factorizer
    ) -> GatedMatrix:
        """The gated matrix that replaces `source`."""

    def overhead_bytes(self, site: Site) -> int:
        """The bytes that an exported `site` saves in addition to its parameters."""
        return 0

    def limit_ranks(self, account: SizeAccount, max_rank: int) -> SizeAccount:
        """The sizes of a model whose matrices start with `max_rank` components at most."""
        raise InvalidValueError(
            f"`max_rank` goes with methods that factorize matrices, but {self.name!r} does not. Leave it out."
        )

    def fix_ranks(self, account: SizeAccount, limit: int) -> SizeAccount:
        """The account with the ranks that are chosen before training, for methods that choose them then."""
        return account

    @abstractmethod
    def make_gate(self, num_components: int) -> Gate:
        """A gate over the components of one matrix."""

    @abstractmethod
    def make_controller(
        self, matrices: Sequence[GatedMatrix], account: SizeAccount, limit: int, *, seed: int
    ) -> Controller:
        """The controller that moves the gates."""


def factor_parameters(
    site: Site, source: Source, rank: int, factorizer: Factorizer, *, refactor: bool = False
) -> tuple[nn.Parameter, nn.Parameter]:
    """P and Q of a site: the model's own pair unless `refactor` is set, otherwise new ones."""
    if source.p_OR is not None and source.q_RI is not None and site.pair_rank == rank and not refactor:
        return as_parameter(source.p_OR), as_parameter(source.q_RI)
    made = factorizer.make(site, source, rank)
    return nn.Parameter(made.p_OR, source.requires_grad), nn.Parameter(made.q_RI, source.requires_grad)


def svd_of_source(source: Source, rank: int, moments: Moments | None = None) -> Factors:
    """The SVD of a site's matrix; a pair that the model holds is not multiplied out."""
    if source.weight_OI is not None:
        return svd(source.weight_OI, rank, moments)
    assert source.p_OR is not None and source.q_RI is not None
    return svd_of_pair(source.p_OR, source.q_RI, rank, moments)


def energy_of_source(source: Source, rank: int, moments: Moments | None = None) -> Tensor:
    """The energies of `svd_of_source`."""
    if source.weight_OI is not None:
        return svd_energy(source.weight_OI, rank, moments)
    return svd_of_source(source, rank, moments).energy_R


def dense_weight(source: Source) -> Tensor:
    """The matrix of a site; a pair that the model holds is multiplied out."""
    if source.weight_OI is not None:
        return source.weight_OI.detach()
    assert source.p_OR is not None and source.q_RI is not None
    return source.p_OR.detach() @ source.q_RI.detach()


def as_parameter(tensor: Tensor, requires_grad: bool = True) -> nn.Parameter:
    """`tensor` itself if it is a parameter, so that optimizers that hold it keep it; otherwise a new parameter."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    return nn.Parameter(tensor.detach().contiguous(), requires_grad)
