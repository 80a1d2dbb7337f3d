"""Backward elimination of input features: which of them the others can replace, and the weights that replace them.

To leave out the features S of y = W x, the other columns take over what they can predict of them. With C = E[x x^T] and
H = C^-1 the squared error is then the trace of W_S (H_SS)^-1 W_S^T, which is what S is worth (Hassibi and Stork 1993,
"Optimal Brain Surgeon"). Features are left out a few at a time, and the rest is valued again each time, because of two
features that are alike only one can go.

Shapes: O = outputs, I = inputs, R = components, S = inputs of a component.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rankwise.core.factorize import Moments

ROUNDS = 128
"""At least this many times the rest is valued again, if there are as many components."""
DAMPING = 1e-2
"""Each feature has this much noise of its own, as a share of its power, so that no sample is fitted too closely."""
LEAST = 1e-8
"""The power that every feature has at least, as a share of the mean."""


class Elimination(NamedTuple):
    """The components of a matrix by their worth."""

    order: Tensor
    """Components, from the one to keep longest to the one to drop first."""
    energy_R: Tensor
    """What dropping each adds to the squared error of the outputs, in that order: never more than the one before."""


def eliminate(weight_OI: Tensor, moments: Moments, num_components: int) -> Elimination:
    """Leave out the components of `weight_OI`, equally many columns in a row each, until none is left.

    Without moments of the inputs, inputs count as independent and equally strong, and nothing can be replaced.
    """
    device = weight_OI.device
    size = weight_OI.shape[1] // num_components
    w = weight_OI.detach().double()
    if moments.rows_O is not None:
        w = w * moments.rows_O.to(w).sqrt().unsqueeze(1)
    if moments.inputs_II is None:
        energy = w.square().sum(0).view(num_components, size).sum(1)
        worst_first = energy.argsort(stable=True)
        return Elimination(worst_first.flip(0), energy[worst_first].flip(0))
    h = torch.linalg.inv(damped(moments.inputs_II))
    alive = torch.arange(num_components, device=device)
    gone, costs = [], []
    while len(alive):
        values = _values(w, h, size)
        cost, dropped = values.topk(min(max(1, num_components // ROUNDS), len(alive)), largest=False, sorted=True)
        gone.append(alive[dropped])
        costs.append(cost)
        is_left = torch.ones(len(alive), dtype=torch.bool, device=device).index_fill(0, dropped, False)
        alive = alive[is_left]
        out, rest = (mask.repeat_interleave(size).nonzero().flatten() for mask in (~is_left, is_left))
        h_rows = h.index_select(0, out)
        taken_over = torch.linalg.solve(h_rows.index_select(1, out), h_rows.index_select(1, rest))
        w = w.index_select(1, rest) - w.index_select(1, out) @ taken_over
        h = h.index_select(0, rest).index_select(1, rest) - h_rows.index_select(1, rest).t() @ taken_over
    energy = torch.cat(costs).clamp(min=0).cummax(0).values
    return Elimination(torch.cat(gone).flip(0), energy.flip(0))


def _values(w: Tensor, h: Tensor, size: int) -> Tensor:
    """The trace of W_S (H_SS)^-1 W_S^T of each component."""
    if size == 1:
        return w.square().sum(0) / h.diagonal()
    num = len(h) // size
    blocks = h.view(num, size, num, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    columns = w.view(len(w), num, size).permute(1, 2, 0)
    solved: Tensor = torch.linalg.solve(blocks, columns)
    return (solved * columns).sum((1, 2))


def replaced(weight_OI: Tensor, inputs_II: Tensor, kept: Tensor) -> Tensor:
    """The columns `kept` with what they take over from the others: the least squared error of the outputs."""
    c = damped(inputs_II)
    c_rows = c.index_select(0, kept)
    # symmetric, so that W C[:, kept] (C[kept, kept])^-1 is the transpose of a solution
    solved: Tensor = torch.linalg.solve(c_rows.index_select(1, kept), c_rows @ weight_OI.detach().double().t())
    return solved.t().to(weight_OI.dtype, memory_format=torch.contiguous_format)


def damped(inputs_II: Tensor) -> Tensor:
    """C with a little noise in every feature, in double precision."""
    c = inputs_II.double()
    power = c.diagonal()
    least = (LEAST * power.mean()).clamp(min=torch.finfo(torch.float32).tiny)
    return c + torch.diag(DAMPING * power + least)
