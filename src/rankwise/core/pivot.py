"""The pivot layout: a matrix of rank r as r of its own rows, and the coefficients of the others.

W = P Q has r independent rows W_S = P_S Q, and each other row is a combination of them: W_rest = C W_S with
C = P_rest P_S^-1. That is r (O + I - r) numbers, where the pair P, Q takes r (O + I): never more than W itself.

Shapes: O = outputs, I = inputs, K = rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BOUND = 1.5
"""No coefficient is larger, so that rounding errors are not magnified."""
ROUNDING = 0.02
"""If the pivot layout changes a matrix in half precision by more than this share of its norm, it stays a pair."""


class Pivots(NamedTuple):
    """Which rows of an O x K matrix span the others, and how."""

    places_O: Tensor
    """The position of each row in [chosen rows; other rows], both in ascending order."""
    chosen_K: Tensor
    coefficients: Tensor
    """(O - K) x K: other rows = coefficients x chosen rows."""


def choose_rows(p_OK: Tensor) -> Pivots:
    """Rows of P (O >= K) from which the others are combined with coefficients of at most `BOUND`.

    It starts with the rows that Gaussian elimination with row pivoting takes in an orthonormal basis of P's columns,
    which exists whatever the rank of P. Then, as long as a coefficient exceeds the bound, its two rows are swapped.
    Each swap multiplies the volume of the chosen rows by that coefficient, so the search ends.
    """
    if p_OK.device.type == "cuda":
        # elimination goes row by row, which is slow on a GPU
        return Pivots(*(tensor.to(p_OK.device) for tensor in choose_rows(p_OK.cpu())))
    num_rows, rank = p_OK.shape
    assert rank <= num_rows
    basis = torch.linalg.qr(p_OK.detach().double()).Q
    if not torch.isfinite(basis).all():
        # weights have diverged: any rows do, and the coefficients are NaN
        nan = torch.full((num_rows - rank, rank), torch.nan, dtype=torch.float64, device=p_OK.device)
        return _pivots(num_rows, torch.arange(rank, device=p_OK.device), nan)
    chosen = _eliminated_rows(basis)
    weights = torch.linalg.solve(basis[chosen], basis, left=False)
    while rank and rank < num_rows:
        largest = int(weights.abs().argmax())
        row, column = divmod(largest, rank)
        if abs(float(weights[row, column])) <= BOUND:
            break
        change = weights[row].clone()
        change[column] -= 1
        weights.addr_(weights[:, column].clone(), change / weights[row, column], alpha=-1)
        chosen[column] = row
    chosen = chosen.sort().values
    rest = torch.ones(num_rows, dtype=torch.bool, device=p_OK.device).index_fill(0, chosen, False)
    return _pivots(num_rows, chosen, torch.linalg.solve(basis[chosen], basis[rest], left=False))


def _eliminated_rows(basis_OK: Tensor) -> Tensor:
    """The rows that Gaussian elimination with row pivoting takes."""
    rank = basis_OK.shape[1]
    _, swaps = torch.linalg.lu_factor(basis_OK)
    order = list(range(len(basis_OK)))
    for here, there in enumerate(swaps.tolist()):
        # LAPACK counts from one
        order[here], order[there - 1] = order[there - 1], order[here]
    return torch.tensor(order[:rank], dtype=torch.long, device=basis_OK.device)


def _pivots(num_rows: int, chosen_K: Tensor, coefficients: Tensor) -> Pivots:
    is_rest = torch.ones(num_rows, dtype=torch.bool, device=chosen_K.device).index_fill(0, chosen_K, False)
    rest = is_rest.nonzero().flatten()
    places = torch.empty(num_rows, dtype=torch.int32, device=chosen_K.device)
    places[torch.cat([chosen_K, rest])] = torch.arange(num_rows, dtype=torch.int32, device=chosen_K.device)
    return Pivots(places, chosen_K, coefficients)


def rounding_error(p_OK: Tensor, q_KI: Tensor, *, by_columns: bool) -> float:
    """The change of W = P Q by the pivot layout in the dtype of the factors, as a share of W's norm."""
    p, q = (q_KI.t(), p_OK.t()) if by_columns else (p_OK, q_KI)
    exact = p.double() @ q.double()
    _, chosen, coefficients = choose_rows(p)
    rows = exact[chosen].to(p.dtype).double()
    other = torch.ones(len(p), dtype=torch.bool, device=p.device).index_fill(0, chosen, False)
    changed = (coefficients.to(p.dtype).double() @ rows - exact[other]).square().sum()
    changed = changed + (rows - exact[chosen]).square().sum()
    norm = exact.square().sum()
    return float((changed / norm.clamp(min=torch.finfo(torch.float64).tiny)).sqrt())
