"""What a gated matrix becomes: plain parameters, and the plain modules that use them.

Paper: section 4.4 "Inference". One export serves every use of its matrix, so tied layers stay tied. Embeddings are
asked for before the output layers that are tied to them.

The pivot layout stores W = P Q of rank K as K of its own rows W_S = P_S Q and the coefficients of the others:
W_rest = C W_S with C = P_rest P_S^-1. That is K (O + I - K) numbers, where the pair P, Q takes K (O + I): never more
than W itself.

Shapes: O = outputs, I = inputs, K = kept components.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rankwise.modules import (
    LowRankEmbedding,
    LowRankHead,
    PivotLinear,
    SelectedLinear,
    around,
    embedding,
    joined,
    linear,
)

LARGE = 2**20
"""Factors with fewer entries are faster on the host, where rows are eliminated one after the other."""
BOUND = 1.5
"""No coefficient is larger, so that rounding errors are not magnified."""
ROUNDING = 0.02
"""If the pivot layout changes a matrix in half precision by more than this share of its norm, it stays a pair."""


class Export(ABC):
    """The parameters of an exported matrix."""

    @abstractmethod
    def as_linear(self, bias: nn.Parameter | None) -> nn.Module:
        """A module that computes x W^T + bias."""

    def as_embedding(self, padding_idx: int | None, like: nn.Embedding | None = None) -> nn.Module:
        """A module that looks up rows of W, and scales them as `like` does."""
        raise NotImplementedError("an embedding has no input features to prune")


@dataclass
class DenseExport(Export):
    """One plain matrix."""

    weight_OI: nn.Parameter

    def as_linear(self, bias: nn.Parameter | None) -> nn.Module:
        return linear(self.weight_OI, bias)

    def as_embedding(self, padding_idx: int | None, like: nn.Embedding | None = None) -> nn.Module:
        return embedding(self.weight_OI, padding_idx, like)


@dataclass
class SelectedExport(Export):
    """The columns of the input features that are kept."""

    weight_OK: nn.Parameter
    kept_I: Tensor

    def as_linear(self, bias: nn.Parameter | None) -> nn.Module:
        return SelectedLinear(self.weight_OK, self.kept_I.clone(), bias)


@dataclass
class LowRankExport(Export):
    """P and Q, with the gate's values absorbed into Q."""

    p_OK: nn.Parameter
    q_KI: nn.Parameter
    table: LowRankEmbedding | None = field(default=None, init=False)
    """The embedding made of this matrix, to which output layers are tied."""

    def as_linear(self, bias: nn.Parameter | None) -> nn.Module:
        if self.table is None:
            return joined(linear(self.q_KI, None), linear(self.p_OK, bias))
        return LowRankHead(*self.table.factors, bias)

    def as_embedding(self, padding_idx: int | None, like: nn.Embedding | None = None) -> nn.Module:
        words = embedding(self.p_OK, padding_idx, like)
        if self.table is not None:
            return joined(words, around(self.table.factors[1]))
        q_IK = nn.Parameter(self.q_KI.detach().t().contiguous(), self.q_KI.requires_grad)
        self.table = LowRankEmbedding(words, linear(q_IK, None))
        return self.table


@dataclass
class PivotExport(Export):
    """Rows of W and coefficients of the others; columns, where W is a table of words, which may be many.

    P and Q are in the precision to compute in; what is made of them has the dtype of `like`. Uses share parameters,
    and each has its places, because transformers knows tied parameters but no tied buffers.
    """

    p_OK: Tensor
    q_KI: Tensor
    like: nn.Parameter
    words: nn.Embedding | None = field(default=None, init=False)
    """The first embedding made of this matrix, to which output layers are tied."""
    made: tuple[nn.Parameter, nn.Parameter, Tensor] | None = field(default=None, init=False)
    """Rows (or columns), coefficients and places, once the first use has been asked for."""

    def as_linear(self, bias: nn.Parameter | None) -> nn.Module:
        rows_KI, pivot = self._parts(bias, by_columns=False)
        if self.words is not None:
            return LowRankHead(self.words, pivot, bias)
        return joined(linear(rows_KI, None), pivot)

    def as_embedding(self, padding_idx: int | None, like: nn.Embedding | None = None) -> nn.Module:
        columns_OK, pivot = self._parts(None, by_columns=True)
        words = embedding(columns_OK, padding_idx, like)
        self.words = self.words or words
        return joined(words, pivot)

    def _parts(self, bias: nn.Parameter | None, *, by_columns: bool) -> tuple[nn.Parameter, PivotLinear]:
        if self.made is None:
            places, chosen, coefficients = choose_rows(self.q_KI.t() if by_columns else self.p_OK)
            stored = self.p_OK @ self.q_KI[:, chosen] if by_columns else self.p_OK[chosen] @ self.q_KI
            self.made = (self._parameter(stored), self._parameter(coefficients), places)
        rows, coefficients, places = self.made
        return rows, PivotLinear(coefficients, places.clone(), None if self.words is not None else bias)

    def _parameter(self, tensor: Tensor) -> nn.Parameter:
        tensor = tensor.detach().to(self.like.dtype, memory_format=torch.contiguous_format)
        return nn.Parameter(tensor, self.like.requires_grad)


class Pivots(NamedTuple):
    """Which rows of an O x K matrix span the others, and how."""

    places_O: Tensor
    """The position of each row in [chosen rows; other rows], both in ascending order."""
    chosen_K: Tensor
    coefficients: Tensor
    """(O - K) x K: other rows = coefficients x chosen rows."""


def choose_rows(p_OK: Tensor) -> Pivots:
    """Rows of P (O >= K) from which the others are combined with coefficients of at most `BOUND`."""
    if p_OK.device.type != "cpu" and p_OK.numel() < LARGE:
        # elimination goes row by row, which is slow on a GPU
        return Pivots(*(tensor.to(p_OK.device) for tensor in choose_rows(p_OK.cpu())))
    num_rows, rank = p_OK.shape
    assert rank <= num_rows
    # an orthonormal basis of P's columns exists whatever the rank of P
    basis = torch.linalg.qr(p_OK.detach().double()).Q
    # if weights have diverged, any rows do, and the coefficients are NaN
    is_finite = bool(torch.isfinite(basis).all())
    chosen = _independent_rows(basis) if is_finite else torch.arange(rank, device=basis.device)
    is_other = torch.ones(num_rows, dtype=torch.bool, device=basis.device).index_fill(0, chosen, False)
    others = basis[is_other]
    coefficients = torch.linalg.solve(basis[chosen], others, left=False) if is_finite else others * torch.nan
    order = torch.cat([chosen, is_other.nonzero().flatten()])
    return Pivots(order.argsort().int(), chosen, coefficients)


def _independent_rows(basis_OK: Tensor) -> Tensor:
    """Rows of large volume, in ascending order.

    It starts with the rows that Gaussian elimination with row pivoting takes. Then, as long as a coefficient exceeds
    the bound, its two rows are swapped. Each swap multiplies the volume of the chosen rows by that coefficient, so the
    search ends.
    """
    num_rows, rank = basis_OK.shape
    _, swaps = torch.linalg.lu_factor(basis_OK)
    order = list(range(num_rows))
    for here, there in enumerate(swaps.tolist()):
        # LAPACK counts from one
        order[here], order[there - 1] = order[there - 1], order[here]
    chosen = torch.tensor(order[:rank], dtype=torch.long, device=basis_OK.device)
    weights = torch.linalg.solve(basis_OK[chosen], basis_OK, left=False)
    while 0 < rank < num_rows:
        row, column = divmod(int(weights.abs().argmax()), rank)
        if abs(float(weights[row, column])) <= BOUND:
            break
        change = weights[row].clone()
        change[column] -= 1
        weights.addr_(weights[:, column].clone(), change / weights[row, column], alpha=-1)
        chosen[column] = row
    return chosen.sort().values


def rounding_error(p_OK: Tensor, q_KI: Tensor, *, by_columns: bool) -> float:
    """The change of W = P Q by the pivot layout in the dtype of the factors, as a share of W's norm."""
    p, q = (q_KI.t(), p_OK.t()) if by_columns else (p_OK, q_KI)
    exact = p.double() @ q.double()
    _, chosen, coefficients = choose_rows(p)
    rows = exact[chosen].to(p.dtype).double()
    other = torch.ones(len(p), dtype=torch.bool, device=p.device).index_fill(0, chosen, False)
    changed = (coefficients.to(p.dtype).double() @ rows - exact[other]).square().sum()
    changed = changed + (rows - exact[chosen]).square().sum()
    return float((changed / exact.square().sum().clamp(min=torch.finfo(torch.float64).tiny)).sqrt())
