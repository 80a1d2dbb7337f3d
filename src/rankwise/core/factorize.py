"""Factorizations W = P Q: random, SVD, and SVD whitened by calibration data.

Paper: section 4.1 (P, Q), section 5 "Tasks" (starting rank), section 6 "BERT on Classification Tasks" (SVD).
Shapes: O = outputs, I = inputs, R = rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROWS = 4096
"""Rows of W that are held in double precision at a time."""
COLUMNS = 256
"""Rows of C that are."""
NEGLIGIBLE = 1e-12
"""Damping of moments that are exact, so that they have an inverse."""


@dataclass(frozen=True)
class Factors:
    """P, Q and how much each component carries, most first."""

    p_OR: Tensor
    q_RI: Tensor
    energy_R: Tensor
    """Squared singular values: what dropping a component adds to the squared error."""


@dataclass(frozen=True)
class Moments:
    """What calibration data says of the two sides of a matrix."""

    inputs_II: Tensor | None = None
    """Second moment E[x x^T] of the inputs."""
    rows_O: Tensor | None = None
    """What an error of each output weighs: how often a row is looked up, where the matrix is an embedding."""


def same_size_rank(shape: tuple[int, int]) -> int:
    """The rank at which P and Q hold as many parameters as W.  Paper: r = d1 d2 / (d1 + d2)."""
    return max(1, shape[0] * shape[1] // sum(shape))


def random(weight_OI: Tensor, rank: int, generator: torch.Generator) -> Factors:
    """Factors drawn so that the entries of P Q have the variance of those of W."""
    out_features, in_features = weight_OI.shape
    mean_square = weight_OI.detach().double().square().mean().item()
    # Var((P Q)_oi) = R sigma^4 for entries of variance sigma^2
    sigma = (mean_square / max(rank, 1)) ** 0.25

    def draw(*shape: int) -> Tensor:
        noise = torch.randn(*shape, generator=generator, dtype=torch.float32)
        scaled: Tensor = noise * sigma
        return scaled.to(weight_OI.device, weight_OI.dtype)

    p_OR, q_RI = draw(out_features, rank), draw(rank, in_features)
    return Factors(p_OR, q_RI, torch.ones(rank, dtype=torch.float64))


def svd(weight_OI: Tensor, rank: int | None = None, moments: Moments | None = None, damping: float = 1e-2) -> Factors:
    """The best factors of the given rank, with the singular values shared out between P and Q.

    Without `moments` the squared error of W is least; with them that of its outputs on the calibration data:
    || F^(1/2) (W - P Q) C^(1/2) ||, C = E[x x^T] and F = weights of the outputs, both damped.

    With C = L L^T, F^(1/2) W L = U S V^T is never computed: the smaller of its two Gram matrices has U or V as
    eigenvectors. P = W L V / d and Q = d V^T L^-1, or P = d F^(-1/2) U and Q = U^T F^(1/2) W / d: at full rank P Q is
    W to rounding, whatever the accuracy of the vectors. Gram matrices are summed in double precision, a few rows at a
    time, so a large embedding is never copied whole.
    """
    out_features, in_features = weight_OI.shape
    full = min(out_features, in_features)
    rank = full if rank is None else min(rank, full)
    moments = moments or Moments()
    rows_O = _damped_rows(moments.rows_O, damping)
    p_OR, q_RI, energy_R = _factors(weight_OI.detach(), rank, rows_O, moments.inputs_II, damping)
    return Factors(p_OR.to(weight_OI.dtype), q_RI.to(weight_OI.dtype).contiguous(), energy_R)


def svd_of_pair(
    p_OR: Tensor, q_RI: Tensor, rank: int | None = None, moments: Moments | None = None, damping: float = 1e-2
) -> Factors:
    """`svd` of W = P Q with no more work than its rank asks for.

    W x = P y with y = Q x: so it is P that is factorized, by the moments Q C Q^T of y, and W is never multiplied out.
    """
    moments = moments or Moments()
    rank = min(*p_OR.shape, *q_RI.shape, *([] if rank is None else [rank]))
    q = q_RI.detach().double()
    is_silent = moments.inputs_II is not None and _is_silent(moments.inputs_II)
    spread = q if moments.inputs_II is None or is_silent else _times_damped(q, moments.inputs_II, damping)
    rows_O = _damped_rows(moments.rows_O, damping)
    first, second, energy_R = _factors(p_OR.detach(), rank, rows_O, spread @ q.t(), NEGLIGIBLE)
    return Factors(first.to(p_OR.dtype), (second.double() @ q).to(q_RI.dtype), 0 * energy_R if is_silent else energy_R)


def _factors(
    weight: Tensor, rank: int, rows_O: Tensor | None, inputs_II: Tensor | None, damping: float
) -> tuple[Tensor, Tensor, Tensor]:
    """P, Q and energy. Where all inputs were zero, no component matters, and the factors are those of W alone."""
    is_silent = inputs_II is not None and _is_silent(inputs_II)
    make = _from_outputs if weight.shape[0] < weight.shape[1] else _from_inputs
    p_OR, q_RI, energy_R = make(weight, rank, rows_O, None if is_silent else inputs_II, damping)
    return p_OR, q_RI, 0 * energy_R if is_silent else energy_R


def _is_silent(inputs_II: Tensor) -> bool:
    """Whether all inputs were zero."""
    return not bool(inputs_II.diagonal().any())


def _from_inputs(
    weight: Tensor, rank: int, rows_O: Tensor | None, inputs_II: Tensor | None, damping: float
) -> tuple[Tensor, Tensor, Tensor]:
    gram = _gram(weight, rows_O)
    right, right_inverse = _square_root(inputs_II, damping)
    if right is not None:
        gram = right.t() @ gram @ right
    energy, vectors, d = _largest(gram, rank)
    precise = torch.promote_types(weight.dtype, torch.float32)
    to_p = (vectors if right is None else right @ vectors) / d
    to_q = (vectors if right_inverse is None else right_inverse.t() @ vectors) * d
    return weight.to(precise) @ to_p.to(precise), to_q.t(), energy


def _from_outputs(
    weight: Tensor, rank: int, rows_O: Tensor | None, inputs_II: Tensor | None, damping: float
) -> tuple[Tensor, Tensor, Tensor]:
    weighted = weight.double() if rows_O is None else weight.double() * rows_O.sqrt().unsqueeze(1)
    spread = weighted if inputs_II is None else _times_damped(weighted, inputs_II, damping)
    energy, vectors, d = _largest(spread @ weighted.t(), rank)
    p_OR = vectors * d if rows_O is None else vectors * d / rows_O.sqrt().unsqueeze(1)
    return p_OR, (vectors / d).t() @ weighted, energy


def _largest(gram: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The largest eigenvalues with their vectors, and their fourth roots: those of singular values' squares."""
    energy, vectors = torch.linalg.eigh(gram)
    energy, vectors = energy.flip(0)[:rank].clamp(min=0), vectors.flip(1)[:, :rank]
    # d = sqrt(singular value); a vanishing one must not divide by zero
    return energy, vectors, energy.clamp(min=max(1e-14 * float(energy[:1].sum()), 1e-30)).pow(0.25)


def _gram(weight_OI: Tensor, rows_O: Tensor | None) -> Tensor:
    """W^T F W in double precision."""
    total = torch.zeros(weight_OI.shape[1], weight_OI.shape[1], dtype=torch.float64, device=weight_OI.device)
    for start in range(0, len(weight_OI), ROWS):
        part = weight_OI[start : start + ROWS].double()
        weighted = part if rows_O is None else part * rows_O[start : start + ROWS, None]
        total.addmm_(part.t(), weighted)
    return total


def _damped_rows(rows_O: Tensor | None, damping: float) -> Tensor | None:
    if rows_O is None or not (rows_O.double().mean() > 0):
        return None
    rows_O = rows_O.double()
    return rows_O + damping * rows_O.mean()


def _square_root(inputs_II: Tensor | None, damping: float) -> tuple[Tensor | None, Tensor | None]:
    """L and L^-1 with L L^T = C + damping * mean(diag C)."""
    if inputs_II is None:
        return None, None
    values, vectors = torch.linalg.eigh(_damped(inputs_II, damping))
    root = values.clamp(min=torch.finfo(torch.float64).tiny).sqrt()
    return vectors * root, vectors.t() / root.unsqueeze(1)


def _times_damped(weight_OI: Tensor, inputs_II: Tensor, damping: float) -> Tensor:
    """W times the damped C, of which a few rows at a time are held in double precision."""
    product = weight_OI * (damping * _mean_diagonal(inputs_II))
    for start in range(0, len(inputs_II), COLUMNS):
        part = slice(start, start + COLUMNS)
        product.addmm_(weight_OI[:, part], inputs_II[part].double())
    return product


def _mean_diagonal(inputs_II: Tensor) -> Tensor:
    mean: Tensor = inputs_II.diagonal().double().mean()
    return mean.clamp(min=torch.finfo(torch.float64).tiny)


def _damped(inputs_II: Tensor, damping: float) -> Tensor:
    """C + damping * mean(diag C), in double precision."""
    damped = inputs_II.to(torch.float64, copy=True)
    damped.diagonal().add_(damping * _mean_diagonal(inputs_II))
    return damped
