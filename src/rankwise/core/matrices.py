"""Weight matrices written as a sum of gated components, W = sum_k z_k (p_k q_k).

Paper: section 4.1 "Structured Pruning using Factorization". A matrix defines how its components act, its gate opens
and closes them, and layers (`rankwise.core.layers`) define what the matrix is used for.

Shapes: O = outputs (or words), I = inputs (or embedding width), R = components, B = any batch dimensions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankwise.core.budget import CostCurve
from rankwise.core.exports import (
    ROUNDING,
    DenseExport,
    Export,
    LowRankExport,
    PivotExport,
    SelectedExport,
    rounding_error,
)
from rankwise.core.gates import Gate, LoadedOnce, Mask
from rankwise.core.loading import check_gates
from rankwise.core.sharding import full_tensor, is_sharded
from rankwise.errors import RankwiseError
from rankwise.kernels.linear import linear, pair_linear
from rankwise.modules import Pair


class GatedMatrix(LoadedOnce, ABC):
    """A matrix W of shape O x I whose components share one gate."""

    def __init__(self, shape: tuple[int, int], gate: Gate, cost_curve: CostCurve) -> None:
        super().__init__()
        assert gate.num_components == cost_curve.num_components
        self.shape = shape
        self.gate = gate
        self.cost_curve = cost_curve
        """What exporting k components costs."""

    def _load_from_state_dict(self, *args: Any) -> None:
        if self._loaded is not args[4]:
            check_gates(args[0], args[1], self.gate, args[6])
        super()._load_from_state_dict(*args)

    @abstractmethod
    def linear(self, x_BI: Tensor, bias_O: Tensor | None) -> Tensor:
        """x W^T + bias."""

    def pair(self) -> Pair | None:
        """The two factors of W under the current mask, for kernels that fuse `linear`; None if W has no factors."""
        return None

    def whole(self) -> Tensor | None:
        """W under the current mask if no component is ever left out of the product, for kernels; else None."""
        return None

    @abstractmethod
    def rows(self, index_B: Tensor, padding_idx: int | None) -> Tensor:
        """The rows of W at `index`: W as an embedding table."""

    @abstractmethod
    def weight(self) -> Tensor:
        """W under the current mask: the reference for `linear` and `rows`."""

    def gathered_weight(self) -> Tensor:
        """`weight()`, or an error where the parameters are shards."""
        self.check_gathered()
        return self.weight()

    def check_gathered(self) -> None:
        """Raise if the matrix is used where its parameters are shards."""
        if any(is_sharded(parameter) for parameter in self._parameters.values() if parameter is not None):
            rows, columns = self.shape
            raise RankwiseError(
                f"A sharded matrix must be used within the forward pass of the module that `fully_shard` was applied "
                f"to, but one of {rows} x {columns} is used outside of it. Call that module. Tied layers go into one "
                "group: `fully_shard([embedding, head])`, or leave both to the model around them."
            )

    @abstractmethod
    def magnitudes(self) -> Tensor:
        """The Frobenius norm of each component, R values."""

    def narrow(self, kept: Tensor) -> dict[nn.Parameter, int]:
        """Drop all other components in place: what was narrowed, and along which dimension. Nothing if it cannot be."""
        return {}

    @abstractmethod
    def export(self, kept: Tensor, z: Tensor | None) -> Export:
        """The matrix with only the components `kept`, each multiplied by its `z` (None: one)."""

    def exported(self) -> list[nn.Module]:
        """The modules whose own parameters an export is made of."""
        return [self]

    def narrow_feeders(self, kept: Tensor) -> dict[nn.Module, nn.Module]:
        """Other layers that lose something with this matrix, and what takes their place."""
        return {}

    def extra_repr(self) -> str:
        return f"{self.shape[0]} x {self.shape[1]}"


class FactorizedMatrix(GatedMatrix):
    """W = P diag(z) Q: component k is the rank-1 matrix p_k q_k.  Paper: section 4.1."""

    def __init__(self, p_OR: nn.Parameter, q_RI: nn.Parameter, gate: Gate, cost_curve: CostCurve | None = None) -> None:
        shape, rank = (p_OR.shape[0], q_RI.shape[1]), gate.num_components
        super().__init__(shape, gate, cost_curve or factorized_curve(shape, rank))
        assert p_OR.shape[1] == q_RI.shape[0] == rank
        self.p = p_OR
        self.q = q_RI

    def linear(self, x_BI: Tensor, bias_O: Tensor | None) -> Tensor:
        return pair_linear(x_BI, self.pair(), bias_O)

    def pair(self) -> Pair:
        return Pair(self.q, self.p, *self.gate())

    def rows(self, index_B: Tensor, padding_idx: int | None) -> Tensor:
        z_R, active = self.gate()
        q_RI: Tensor = self.q
        h_BR = F.embedding(index_B, self.p, padding_idx)
        if active is not None:
            h_BR, q_RI = h_BR.index_select(-1, active), q_RI.index_select(0, active)
            z_R = None if z_R is None else z_R.index_select(0, active)
        return _scale(h_BR, z_R) @ q_RI

    def weight(self) -> Tensor:
        z_R, _ = self.gate()
        return _scale(self.p, z_R) @ self.q

    def magnitudes(self) -> Tensor:
        p, q = self.p.detach().float(), self.q.detach().float()
        # of sharded factors only the norms are gathered
        return full_tensor(torch.linalg.vector_norm(p, dim=0)) * full_tensor(torch.linalg.vector_norm(q, dim=1))

    def narrow(self, kept: Tensor) -> dict[nn.Parameter, int]:
        _narrow_parameter(self.p, 1, kept)
        _narrow_parameter(self.q, 0, kept)
        self.gate.narrow(kept)
        self.cost_curve = replace(self.cost_curve, num_components=len(kept))
        return {self.p: 1, self.q: 0}

    def _widen(self, number: int) -> None:
        """Make room for components that were dropped."""
        _set_parameter(self.p, self.p.new_zeros(self.p.shape[0], number))
        _set_parameter(self.q, self.q.new_zeros(number, self.q.shape[1]))
        self.gate.widen(number)
        self.cost_curve = replace(self.cost_curve, num_components=number)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # the checkpoint of a model whose closed components were dropped, or one from before they were
        saved = state_dict.get(f"{prefix}q")
        if self.gate.z is not None and isinstance(saved, Tensor) and len(saved) != self.gate.num_components:
            if len(saved) < self.gate.num_components:
                self.narrow(torch.arange(len(saved), device=self.q.device))
            elif len(saved) <= self.gate.most_components:
                self._widen(len(saved))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def export(self, kept: Tensor, z: Tensor | None) -> Export:
        p, q = self._kept(kept, z)
        precise = torch.promote_types(p.dtype, torch.float32)
        if self.cost_curve(len(kept)) == self.cost_curve.cap:
            return DenseExport(_like((p.to(precise) @ q.to(precise)).to(p.dtype), self.p))
        if self.cost_curve.pivot:
            return PivotExport(p.to(precise), q.to(precise), self.p)
        return LowRankExport(_like(p, self.p), _like(q, self.q))

    def rounds_pivots(self, num_kept: int, dtype: torch.dtype | None) -> bool:
        """Whether an export is in the pivot layout and in half precision."""
        is_low_rank = self.cost_curve(num_kept) != self.cost_curve.cap
        return self.cost_curve.pivot and is_low_rank and (dtype or self.p.dtype).itemsize <= 2

    def loses_precision(self, kept: Tensor, z: Tensor | None, dtype: torch.dtype | None, *, by_columns: bool) -> bool:
        """Whether an export of `kept` in half precision would be much less accurate in the pivot layout than a pair."""
        if not self.rounds_pivots(len(kept), dtype):
            return False
        device, dtype = self.p.device, dtype or self.p.dtype
        p, q = self._kept(kept.to(device), None if z is None else z.to(device))
        return rounding_error(p.to(dtype), q.to(dtype), by_columns=by_columns) > ROUNDING

    def _kept(self, kept: Tensor, z: Tensor | None) -> tuple[Tensor, Tensor]:
        p, q = self.p.detach().index_select(1, kept), self.q.detach().index_select(0, kept)
        return p, q if z is None else (q * z.index_select(0, kept).unsqueeze(1)).to(q.dtype)


class InputGatedMatrix(GatedMatrix):
    """W diag(z): component k is the k-th column, so whole input features are pruned (NP).

    The special case P = W, Q = I of a factorized matrix.  Paper: footnote of section 4.1.
    """

    def __init__(self, weight_OI: nn.Parameter, gate: Gate, cost_curve: CostCurve | None = None) -> None:
        shape = (weight_OI.shape[0], weight_OI.shape[1])
        super().__init__(shape, gate, cost_curve or input_gated_curve(shape))
        self.w = weight_OI

    def columns_mask(self) -> tuple[Tensor | None, Tensor | None]:
        """z of each column, and the indices of the columns to multiply; None as in `Mask`."""
        mask: Mask = self.gate()
        return mask

    def linear(self, x_BI: Tensor, bias_O: Tensor | None) -> Tensor:
        z_I, active = self.columns_mask()
        w_OI: Tensor = self.w
        if active is not None:
            x_BI, w_OI = x_BI.index_select(-1, active), w_OI.index_select(1, active)
            z_I = None if z_I is None else z_I.index_select(0, active)
        return linear(_scale(x_BI, z_I), w_OI, bias_O)

    def rows(self, index_B: Tensor, padding_idx: int | None) -> Tensor:
        raise NotImplementedError("an embedding has no input features to prune")

    def weight(self) -> Tensor:
        return _scale(self.w, self.columns_mask()[0])

    def magnitudes(self) -> Tensor:
        return full_tensor(torch.linalg.vector_norm(self.w.detach().float(), dim=0))

    def export(self, kept: Tensor, z: Tensor | None) -> Export:
        w = self.w.detach()
        w = w if z is None else (w * z).to(w.dtype)
        if len(kept) == w.shape[1]:
            return DenseExport(_like(w, self.w))
        mask = torch.zeros(w.shape[1], dtype=torch.bool, device=w.device).index_fill(0, kept, True)
        return SelectedExport(_like(w[:, mask], self.w), mask)


class MaskedMatrix(GatedMatrix):
    """W * z: every weight is a component (unstructured AGP). The shape never shrinks."""

    def __init__(self, weight_OI: nn.Parameter, gate: Gate) -> None:
        shape = (weight_OI.shape[0], weight_OI.shape[1])
        super().__init__(shape, gate, masked_curve(shape))
        self.w = weight_OI

    def linear(self, x_BI: Tensor, bias_O: Tensor | None) -> Tensor:
        return linear(x_BI, self.weight(), bias_O)

    def whole(self) -> Tensor:
        return self.weight()

    def rows(self, index_B: Tensor, padding_idx: int | None) -> Tensor:
        return F.embedding(index_B, self.weight(), padding_idx)

    def weight(self) -> Tensor:
        z = self.gate().z
        return self.w if z is None else _scale(self.w, z.view(self.shape))

    def magnitudes(self) -> Tensor:
        return torch.abs(full_tensor(self.w.detach()).float()).flatten()

    def export(self, kept: Tensor, z: Tensor | None) -> Export:
        w = self.w.detach()
        mask = torch.zeros(w.numel(), dtype=torch.bool, device=w.device).index_fill(0, kept, True).view(self.shape)
        w = w if z is None else (w * z.view(self.shape)).to(w.dtype)
        return DenseExport(_like(torch.where(mask, w, 0), self.w))


def factorized_curve(shape: tuple[int, int], rank: int, *, pivot: bool = False) -> CostCurve:
    """A rank-1 component costs O + I, or less in the pivot layout; the whole never costs more than dense."""
    return CostCurve(rank, sum(shape), shape[0] * shape[1], pivot)


def input_gated_curve(shape: tuple[int, int]) -> CostCurve:
    """An input feature costs one column of O weights."""
    return CostCurve(shape[1], shape[0], shape[0] * shape[1])


def masked_curve(shape: tuple[int, int]) -> CostCurve:
    """A component is one non-zero weight."""
    return CostCurve(shape[0] * shape[1], 1, shape[0] * shape[1])


def _scale(x: Tensor, z: Tensor | None) -> Tensor:
    return x if z is None else x * z.to(x.dtype)


def _narrow_parameter(parameter: nn.Parameter, dim: int, kept: Tensor) -> None:
    """Keep these rows or columns of a parameter, and of its gradient, which stays the same object."""
    grad = parameter.grad
    _set_parameter(parameter, parameter.detach().index_select(dim, kept))
    parameter.grad = None if grad is None else grad.index_select(dim, kept)


def _set_parameter(parameter: nn.Parameter, data: Tensor) -> None:
    """Give a parameter values of another shape, and no gradient."""
    data = data.detach()
    parameter.grad = None
    # a loss of the last step may still hold the graph that expects gradients of the old shape; torch makes a new place
    # for gradients when the dtype changes
    parameter.data = data.new_empty(0, dtype=torch.float32 if data.dtype == torch.float64 else torch.float64)
    parameter.data = data


def _like(tensor: Tensor, parameter: nn.Parameter) -> nn.Parameter:
    """A parameter of the compact model, trainable if the gated one is."""
    return nn.Parameter(tensor.detach().clone(memory_format=torch.contiguous_format), parameter.requires_grad)
