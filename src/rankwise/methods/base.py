"""What a method is: how a matrix is written, which gate it gets, and what moves the gates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from rankwise.core.budget import Account, CostCurve
from rankwise.core.calibrate import second_moments
from rankwise.core.control import Controller
from rankwise.core.factorize import Factors, Moments, random, svd, svd_of_pair
from rankwise.core.gates import Gate
from rankwise.core.matrices import GatedMatrix
from rankwise.core.plan import Plan, Site, Source
from rankwise.core.targets import Target

Init = Literal["svd", "whitened", "random"]


@dataclass(frozen=True)
class Factorizer:
    """How a matrix becomes factors."""

    make: Callable[[Site, Source, int], Factors]
    """Factors of the given rank for the matrix of a site."""
    keeps: bool
    """Whether P Q is that matrix, as far as the rank allows; else they start afresh."""


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A row of the paper's tables. Its fields are its settings.

    A method is a representation (how a matrix is cut into components) x a gating (what opens and closes them):
    `rankwise.methods.representations` x `rankwise.methods.gatings`.
    """

    name: ClassVar[str]
    counts_nonzeros: ClassVar[bool] = False
    """Whether sizes count non-zero weights, because matrices keep their shape."""
    splits_pairs: ClassVar[bool] = False
    """Whether the two matrices of a low-rank pair are pruned each for itself."""
    prunes: ClassVar[bool] = True
    """Whether a plan without a single matrix is a mistake."""

    def refuses(self, site: Site) -> str | None:
        """Why this method cannot prune `site`, or None if it can."""
        return None

    @abstractmethod
    def curve(self, site: Site, *, trained: bool) -> CostCurve:
        """What exporting k components of `site` costs; `trained` says that its weights are worth keeping."""

    def aimed(self, site: Site, curve: CostCurve, target: Target, rank_multiple: int | None) -> CostCurve:
        """`curve` with the ranks that `target` wants; `rank_multiple`, where it is given, is what the user wants."""
        full_rank = min(site.shape) if site.pair_rank is None else site.pair_rank
        return replace(curve, multiple=rank_multiple or target.rank_multiple(full_rank))

    @abstractmethod
    def represent(
        self, site: Site, source: Source, gate: Gate, curve: CostCurve, factorizer: Factorizer
    ) -> GatedMatrix:
        """The gated matrix that takes the place of `source`."""

    def overhead_bytes(self, site: Site) -> int:
        """Bytes that an exported `site` saves beside its parameters."""
        return 0

    def allot(self, account: Account, limit: int) -> Account:
        """The books once the ranks that are chosen before training are chosen."""
        return account

    @abstractmethod
    def gate(self, num_components: int) -> Gate:
        """A gate over the components of one matrix."""

    @abstractmethod
    def controller(self, matrices: Sequence[GatedMatrix], account: Account, limit: int, *, seed: int) -> Controller:
        """What moves the gates."""


def factors(
    site: Site, source: Source, rank: int, factorizer: Factorizer, *, anew: bool = False
) -> tuple[nn.Parameter, nn.Parameter]:
    """P and Q of a site: those the model holds, unless they are to be made anew, or new ones."""
    if source.p_OR is not None and source.q_RI is not None and site.pair_rank == rank and not anew:
        return as_parameter(source.p_OR), as_parameter(source.q_RI)
    made = factorizer.make(site, source, rank)
    return nn.Parameter(made.p_OR, source.requires_grad), nn.Parameter(made.q_RI, source.requires_grad)


def factorized(source: Source, rank: int, moments: Moments | None = None) -> Factors:
    """The SVD of a site's matrix, which is not multiplied out if the model holds a pair."""
    if source.weight_OI is not None:
        return svd(source.weight_OI, rank, moments)
    assert source.p_OR is not None and source.q_RI is not None
    return svd_of_pair(source.p_OR, source.q_RI, rank, moments)


def dense_weight(source: Source) -> Tensor:
    """The matrix of a site, multiplied out if the model holds a pair."""
    if source.weight_OI is not None:
        return source.weight_OI.detach()
    assert source.p_OR is not None and source.q_RI is not None
    return source.p_OR.detach() @ source.q_RI.detach()


def as_parameter(tensor: Tensor, requires_grad: bool = True) -> nn.Parameter:
    """The model's own parameter where it is one, so that what holds it keeps it; else a new one."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    return nn.Parameter(tensor.detach().contiguous(), requires_grad)


def make_factorizer(
    init: Init, model: nn.Module, plan: Plan, calibration: Iterable[Any] | None, seed: int
) -> Factorizer:
    """How `init` makes factors of a matrix, with `calibration` for what reaches it."""
    if init == "random":
        generator = torch.Generator().manual_seed(seed)
        return Factorizer(lambda site, source, rank: random(dense_weight(source), rank, generator), keeps=False)
    moments = second_moments(model, plan, calibration) if calibration is not None else {}
    return Factorizer(lambda site, source, rank: factorized(source, rank, moments.get(site.name)), keeps=True)
