"""What a method is: how a matrix is written, which gate it gets, and what moves the gates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from torch import Tensor, nn

from rankwise.core.budget import Account, CostCurve
from rankwise.core.control import Controller
from rankwise.core.factorize import Factors
from rankwise.core.gates import Gate
from rankwise.core.matrices import GatedMatrix
from rankwise.core.plan import Site, Source

Factorize: TypeAlias = Callable[[Site, Tensor, int], Factors]
"""Factors of the given rank for the matrix of a site."""


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

    @abstractmethod
    def represent(self, site: Site, source: Source, gate: Gate, factorize: Factorize) -> GatedMatrix:
        """The gated matrix that takes the place of `source`."""

    def overhead_bytes(self, site: Site) -> int:
        """Bytes that an exported `site` saves beside its parameters."""
        return 0

    def allot(self, account: Account, limit: int, rank_multiple: int) -> Account:
        """The books once the ranks that are chosen before training are chosen."""
        return account

    @abstractmethod
    def gate(self, num_components: int) -> Gate:
        """A gate over the components of one matrix."""

    @abstractmethod
    def controller(
        self, matrices: Sequence[GatedMatrix], account: Account, limit: int, *, seed: int, rank_multiple: int
    ) -> Controller:
        """What moves the gates."""


def factors(site: Site, source: Source, rank: int, factorize: Factorize) -> tuple[nn.Parameter, nn.Parameter]:
    """P and Q of a site: those the model holds, or new ones."""
    if source.p_OR is not None and source.q_RI is not None and site.pair_rank == rank:
        return as_parameter(source.p_OR), as_parameter(source.q_RI)
    made = factorize(site, dense_weight(source), rank)
    return nn.Parameter(made.p_OR, source.requires_grad), nn.Parameter(made.q_RI, source.requires_grad)


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
