"""Factorizations W = P Q: random, SVD, and SVD whitened by calibration data.

Paper: section 4.1 (P, Q), section 5 "Tasks" (starting rank), section 6 "BERT on Classification Tasks" (SVD).
Shapes: O = outputs, I = inputs, R = rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

WEIGHT_ROWS = 4096
"""The number of rows of W that are in double precision at a time."""
WHOLE_ROWS = 2048
"""The same where the weights of outputs are a whole matrix, of which as many columns are at a time."""
MOMENT_ROWS = 256
"""The number of rows of C that are in double precision at a time."""
DAMPING = 1e-2
"""What is added to the diagonal of moments, as a share of its mean, so that no sample is fitted too closely."""
EXACT_DAMPING = 1e-12
"""The damping of moments that are already damped, so that they have an inverse."""


@dataclass(frozen=True)
class Factors:
    """P, Q and the energy of each component, largest first."""

    p_OR: Tensor
    q_RI: Tensor
    energy_R: Tensor
    """The squared singular values: dropping a component adds this to the squared error."""


@dataclass(frozen=True)
class Moments:
    """Calibration statistics of a matrix."""

    inputs_II: Tensor | None = None
    """C = E[x x^T], the second moment of the inputs."""
    rows_O: Tensor | None = None
    """F, the weight of an error in each output; for an embedding, how often each row is looked up."""
    outputs_OO: Tensor | None = None
    """G, the weights of errors in two outputs at once, in place of F."""
    cross_II: Tensor | None = None
    """E[x0 x^T] with the inputs x0 of the dense model, where layers before the matrix are compressed already."""


@dataclass(frozen=True)
class _Whole:
    """G, damped when it is used: a damped copy in double precision would take twice its memory."""

    outputs_OO: Tensor
    damping: float

    def root(self) -> Tensor:
        """K with K K^T = G."""
        return _square_root(_damped(self.outputs_OO, self.damping))


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


def svd(
    weight_OI: Tensor, rank: int | None = None, moments: Moments | None = None, damping: float = DAMPING
) -> Factors:
    """The best factors of the given rank, with the singular values divided between P and Q.

    Without `moments` they minimise the squared error of W, with them the squared error of its outputs on calibration
    data, || G^(1/2) (W - P Q) C^(1/2) ||, where C and G are damped; G may be diagonal (F).

    With C = L L^T and G = K K^T, the SVD K^T W L = U S V^T is never computed: the smaller of the two Gram matrices has
    U or V as eigenvectors. P = W L V / d and Q = d V^T L^-1, or P = K^-T U d and Q = U^T K^T W / d, with d^2 = S. At
    full rank P Q is W up to rounding, however accurate the vectors are. Gram matrices are summed in double precision, a
    few rows at a time, so that a large embedding is never copied as a whole.
    """
    out_features, in_features = weight_OI.shape
    full = min(out_features, in_features)
    rank = full if rank is None else min(rank, full)
    moments = moments or Moments()
    rows_O = _damped_rows(moments, damping)
    p_OR, q_RI, energy_R = _factors(anchored(weight_OI, moments, damping), rank, rows_O, moments.inputs_II, damping)
    return Factors(p_OR.to(weight_OI.dtype).contiguous(), q_RI.to(weight_OI.dtype).contiguous(), energy_R)


def anchored(weight_OI: Tensor, moments: Moments, damping: float = DAMPING) -> Tensor:
    """W E[x0 x^T] E[x x^T]^-1: of all matrices, the one that gives the dense model's outputs W x0 best from inputs x.

    It is W itself where `moments` say nothing of the dense model's inputs.
    """
    weight = weight_OI.detach()
    if moments.cross_II is None or moments.inputs_II is None or _is_zero(moments.inputs_II):
        return weight
    cross = moments.cross_II.to(torch.float64, copy=True)
    # damped as C is, so that W stays where both inputs are the same
    cross.diagonal().add_(damping * _mean_diagonal(moments.inputs_II))
    root = _square_root(_damped(moments.inputs_II, damping))
    return torch.cholesky_solve((weight.double() @ cross).t(), root).t().to(weight.dtype)


def svd_of_pair(p_OR: Tensor, q_RI: Tensor, rank: int | None = None, moments: Moments | None = None) -> Factors:
    """`svd` of W = P Q without multiplying it out.

    Since W x = P y with y = Q x, it is enough to factorize P with the moments Q C Q^T of y.
    """
    moments = moments or Moments()
    rank = min(*p_OR.shape, *q_RI.shape, *([] if rank is None else [rank]))
    q = anchored(q_RI, moments).double()
    is_zero = moments.inputs_II is not None and _is_zero(moments.inputs_II)
    spread = q if moments.inputs_II is None or is_zero else _times_damped(q, moments.inputs_II, DAMPING)
    rows_O = _damped_rows(moments, DAMPING)
    first, second, energy_R = _factors(p_OR.detach(), rank, rows_O, spread @ q.t(), EXACT_DAMPING)
    return Factors(
        first.to(p_OR.dtype).contiguous(), (second.double() @ q).to(q_RI.dtype), 0 * energy_R if is_zero else energy_R
    )


def svd_energy(weight_OI: Tensor, rank: int, moments: Moments | None = None) -> Tensor:
    """The energies of `svd` alone, in a fraction of its time."""
    moments, weight = moments or Moments(), weight_OI.detach()
    if moments.inputs_II is not None and _is_zero(moments.inputs_II):
        return torch.zeros(rank, dtype=torch.float64, device=weight.device)
    rows_O = _damped_rows(moments, DAMPING)
    if weight.shape[0] < weight.shape[1]:
        gram = _output_gram(weight, rows_O, moments.inputs_II, DAMPING)[0]
    else:
        gram = _input_gram(weight, rows_O, moments.inputs_II, DAMPING)[0]
    energy: Tensor = torch.linalg.eigvalsh(gram)
    return energy.flip(0)[:rank].clamp(min=0)


def dropping_errors(factors: Factors, moments: Moments, damping: float = DAMPING) -> Tensor:
    """The squared error of the outputs that dropping each component p q of any factors alone adds: p^T G p q C q^T.

    Those of `svd` with the same moments are orthogonal in this measure, and the result is their energy.
    """
    p_OR, q_RI = factors.p_OR.detach().double(), factors.q_RI.detach().double()
    c_II, rows_O = moments.inputs_II, _damped_rows(moments, damping)
    if c_II is not None and _is_zero(c_II):
        return torch.zeros_like(factors.energy_R)
    inputs_R = ((q_RI if c_II is None else _times_damped(q_RI, c_II, damping)) * q_RI).sum(1)
    if isinstance(rows_O, _Whole):
        return inputs_R * (p_OR * _times_damped(p_OR.t(), rows_O.outputs_OO, damping).t()).sum(0)
    return inputs_R * (p_OR.square() if rows_O is None else p_OR.square() * rows_O.unsqueeze(1)).sum(0)


def _factors(
    weight: Tensor, rank: int, rows_O: Tensor | _Whole | None, inputs_II: Tensor | None, damping: float
) -> tuple[Tensor, Tensor, Tensor]:
    """P, Q and energy. If all inputs were zero, the factors are those of W alone, and their energy is zero."""
    is_zero = inputs_II is not None and _is_zero(inputs_II)
    make = _from_outputs if weight.shape[0] < weight.shape[1] else _from_inputs
    p_OR, q_RI, energy_R = make(weight, rank, rows_O, None if is_zero else inputs_II, damping)
    return p_OR, q_RI, 0 * energy_R if is_zero else energy_R


def _is_zero(inputs_II: Tensor) -> bool:
    """Whether all inputs were zero."""
    return not bool(inputs_II.diagonal().any())


def _from_inputs(
    weight: Tensor, rank: int, rows_O: Tensor | _Whole | None, inputs_II: Tensor | None, damping: float
) -> tuple[Tensor, Tensor, Tensor]:
    gram, right = _input_gram(weight, rows_O, inputs_II, damping)
    energy, vectors, d = _largest(gram, rank)
    precise = torch.promote_types(weight.dtype, torch.float32)
    to_p = (vectors if right is None else right @ vectors) / d
    to_q = (vectors if right is None else torch.linalg.solve_triangular(right.t(), vectors, upper=True)) * d
    return weight.to(precise) @ to_p.to(precise), to_q.t(), energy


def _from_outputs(
    weight: Tensor, rank: int, rows_O: Tensor | _Whole | None, inputs_II: Tensor | None, damping: float
) -> tuple[Tensor, Tensor, Tensor]:
    gram, weighted = _output_gram(weight, rows_O, inputs_II, damping)
    energy, vectors, d = _largest(gram, rank)
    p_OR = vectors * d
    if isinstance(rows_O, _Whole):
        p_OR = torch.linalg.solve_triangular(rows_O.root().t(), p_OR, upper=True)
    elif rows_O is not None:
        p_OR = p_OR / rows_O.sqrt().unsqueeze(1)
    return p_OR, (vectors / d).t() @ weighted, energy


def _input_gram(
    weight: Tensor, rows_O: Tensor | _Whole | None, inputs_II: Tensor | None, damping: float
) -> tuple[Tensor, Tensor | None]:
    """L^T W^T F W L, and L."""
    gram = _gram(weight, rows_O)
    right = None if inputs_II is None else _square_root(_damped(inputs_II, damping))
    return gram if right is None else right.t() @ gram @ right, right


def _output_gram(
    weight: Tensor, rows_O: Tensor | _Whole | None, inputs_II: Tensor | None, damping: float
) -> tuple[Tensor, Tensor]:
    """F^(1/2) W C W^T F^(1/2), and F^(1/2) W."""
    weighted = weight.double()
    if isinstance(rows_O, _Whole):
        weighted = rows_O.root().t() @ weighted
    elif rows_O is not None:
        weighted = weighted * rows_O.sqrt().unsqueeze(1)
    spread = weighted if inputs_II is None else _times_damped(weighted, inputs_II, damping)
    return spread @ weighted.t(), weighted


def _largest(gram: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The largest eigenvalues, their vectors, and d, the square roots of the singular values."""
    energy, vectors = torch.linalg.eigh(gram)
    energy, vectors = energy.flip(0)[:rank].clamp(min=0), vectors.flip(1)[:, :rank]
    # eigenvalues are squared singular values; d divides, so it must not be zero
    return energy, vectors, energy.clamp(min=max(1e-14 * float(energy[:1].sum()), 1e-30)).pow(0.25)


def _gram(weight_OI: Tensor, rows_O: Tensor | _Whole | None) -> Tensor:
    """W^T G W in double precision."""
    total = torch.zeros(weight_OI.shape[1], weight_OI.shape[1], dtype=torch.float64, device=weight_OI.device)
    for rows in _parts(len(weight_OI), WHOLE_ROWS if isinstance(rows_O, _Whole) else WEIGHT_ROWS):
        part = weight_OI[rows].double()
        if isinstance(rows_O, _Whole):
            weighted = part * (rows_O.damping * _mean_diagonal(rows_O.outputs_OO))
            for others in _parts(len(weight_OI), WHOLE_ROWS):
                weighted.addmm_(rows_O.outputs_OO[rows, others].double(), weight_OI[others].double())
        else:
            weighted = part if rows_O is None else part * rows_O[rows, None]
        total.addmm_(part.t(), weighted)
    return total


def _parts(number: int, size: int) -> Iterator[slice]:
    """All of `number` rows, so many at a time."""
    return (slice(start, start + size) for start in range(0, number, size))


def _damped_rows(moments: Moments, damping: float) -> Tensor | _Whole | None:
    """G if it is known, otherwise its diagonal, damped."""
    if moments.outputs_OO is not None and bool(moments.outputs_OO.diagonal().any()):
        return _Whole(moments.outputs_OO, damping)
    rows_O = moments.rows_O
    if rows_O is None or not (rows_O.double().mean() > 0):
        return None
    rows_O = rows_O.double()
    return rows_O + damping * rows_O.mean()


def _square_root(c_II: Tensor) -> Tensor:
    """L, which is lower triangular, with L L^T = C."""
    root: Tensor
    root, failed = torch.linalg.cholesky_ex(c_II)
    if not failed:
        return root
    # rounding has made C indefinite
    values, vectors = torch.linalg.eigh(c_II)
    whole = vectors * values.clamp(min=torch.finfo(torch.float64).tiny).sqrt()
    root = torch.linalg.qr(whole.t()).R.t()
    return root


def _times_damped(weight_OI: Tensor, inputs_II: Tensor, damping: float) -> Tensor:
    """W times the damped C, of which a few rows at a time are in double precision."""
    product = weight_OI * (damping * _mean_diagonal(inputs_II))
    for part in _parts(len(inputs_II), MOMENT_ROWS):
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
