"""Budgets: the size asked for, and what a model costs at each choice of ranks.

Paper: section 4.3 (t, the target size) and the compression convention of section 5 (`of="prunable"`).
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from rankwise.errors import BudgetError, InvalidTypeError, OutOfReachError

_Number = TypeVar("_Number", int, Tensor)


def count(model: nn.Module) -> int:
    """The number of parameters of `model`, tied weights once."""
    return sum(parameter.numel() for parameter in model.parameters())


@dataclass(frozen=True)
class CostCurve:
    """Parameters of a matrix exported with k components: k * per_component, never more than `cap` (dense).

    In the pivot layout (`rankwise.core.exports`) k components cost k * (per_component - k): the more there are, the
    less another one costs, and all of them cost as much as the dense matrix.
    """

    num_components: int
    per_component: int
    cap: int
    pivot: bool = False
    multiple: int = 1
    """An export keeps a multiple of this number of components, or all of them."""
    dense_from: int | None = None
    """Parameters from which low rank is slower than dense, so that the matrix is exported dense. Default: `cap`."""
    width: str = ""
    """Matrices with the same word here keep the same number of components, at least the first that is allowed: a width
    that a model's configuration has one number for. Without a word a matrix is on its own and may lose everything."""
    counts: tuple[int, ...] = ()
    """The only numbers of components that an export may keep, ascending. Default: all that `multiple` allows."""

    def __call__(self, k: int) -> int:
        """Parameters of the matrix exported with k components."""
        assert 0 <= k <= self.num_components
        low_rank = self._low_rank(min(k, self._peak))
        return low_rank if low_rank < self.threshold else self.cap

    def costs(self, k: Tensor) -> Tensor:
        """The parameters at each of many numbers of components."""
        low_rank = self._low_rank(k.clamp(max=self._peak))
        return torch.where(low_rank < self.threshold, low_rank, self.cap)

    @property
    def threshold(self) -> int:
        """Parameters of low rank from which the matrix is exported dense."""
        return self.cap if self.dense_from is None else self.dense_from

    @property
    def full(self) -> int:
        """The cost of keeping every component."""
        return self(self.num_components)

    def allowed_counts(self) -> Tensor:
        """The numbers of components that an export may keep, ascending, without zero.

        Between low rank and dense there is none: an allocation takes that step as a whole.
        """
        if self.counts:
            return torch.tensor(self.counts)
        counts = torch.arange(self.multiple, self.num_components + self.multiple, self.multiple)
        counts = counts.clamp(max=self.num_components)
        low_rank = self._low_rank(counts.clamp(max=self._peak))
        between = (low_rank >= self.threshold) & (low_rank < self.cap) & (counts < self.num_components)
        return counts[~between]

    def next_count(self, k: int) -> int:
        """The allowed count after `k`; all components where the matrix becomes dense there."""
        if self.counts:
            return next((count for count in self.counts if count > k), self.counts[-1])
        after = min(k + self.multiple, self.num_components)
        return self.num_components if self(after) == self.cap else after

    def largest_count(self, room: int) -> int:
        """The most components that an export may keep in `room` parameters."""
        counts = self.allowed_counts()
        fitting = counts[self.costs(counts) <= room]
        return int(fitting[-1]) if len(fitting) else 0

    @property
    def least_count(self) -> int:
        """The fewest components that an export keeps."""
        return int(self.allowed_counts()[0]) if self.width else 0

    @property
    def _peak(self) -> int:
        """The number of components beyond which the cost no longer rises."""
        return self.per_component // 2 if self.pivot else self.num_components

    def _low_rank(self, k: _Number) -> _Number:
        """Parameters of k components that are not multiplied out."""
        return k * (self.per_component - k * self.pivot)


@dataclass(frozen=True)
class Storage:
    """How a model's tensors are saved, for budgets in megabytes."""

    dtypes: frozenset[torch.dtype] = frozenset({torch.float32})
    """The dtypes of the parameters."""
    buffers: tuple[tuple[int, torch.dtype], ...] = ()
    """The number of elements and the dtype of each saved buffer."""
    overhead: int = 0
    """Bytes that exported matrices save in addition to their parameters, such as the positions of pivots."""

    def itemsize(self, dtype: torch.dtype | None) -> int:
        """Bytes of one parameter exported in `dtype`, or in the model's own dtype if None."""
        if dtype is None and len({own.itemsize for own in self.dtypes}) > 1:
            raise BudgetError(
                "`megabytes` needs one export dtype, but the model's parameters are of "
                f"{', '.join(sorted(map(str, self.dtypes)))}. Pass `dtype`, as in Budget(megabytes=16, "
                "dtype=torch.float16)."
            )
        return (dtype or next(iter(self.dtypes))).itemsize

    def other_bytes(self, dtype: torch.dtype | None) -> int:
        """Bytes of all that is saved besides the parameters."""
        saved = ((n, dtype if dtype is not None and own.is_floating_point else own) for n, own in self.buffers)
        return sum(n * each.itemsize for n, each in saved) + self.overhead


@dataclass(frozen=True)
class SizeAccount:
    """The size of one model: before pruning, and with any number of components kept in each planned matrix."""

    dense: int
    """Parameters of the whole model before pruning."""
    prunable: int
    """The parameters in planned matrices: the paper's reference for *removed*."""
    curves: tuple[CostCurve, ...]
    """What each planned matrix costs."""
    storage: Storage | None = Storage()
    """None if sizes count non-zero weights: matrices keep their shape then, and files do not shrink."""
    left_out: str = ""
    """What the plan leaves out, as text for error messages."""

    @property
    def fixed(self) -> int:
        """Parameters outside of planned matrices, which stay."""
        return self.dense - self.prunable

    @property
    def smallest(self) -> int:
        """The size with the fewest components that an export keeps."""
        return self.size([curve.least_count for curve in self.curves])

    def size(self, counts: Sequence[int]) -> int:
        """The exported size with `counts[i]` components of matrix i kept."""
        return self.fixed + sum(curve(k) for curve, k in zip(self.curves, counts, strict=True))


UNITS = ("params", "removed", "megabytes", "latency_ms")
"""The fields of a budget of which exactly one is given."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The size asked for, by exactly one of `params`, `removed`, `megabytes` and `latency_ms`."""

    params: int | None = None
    """Parameters of the exported model."""
    removed: float | None = None
    """Fraction of the parameters to remove, in (0, 1)."""
    of: Literal["model", "prunable"] = "model"
    """What `removed` is a fraction of: the whole model, or its planned matrices (the paper's convention)."""
    megabytes: float | None = None
    """10^6 bytes of saved tensors in the export dtype."""
    dtype: torch.dtype | None = None
    """With `megabytes`: the export dtype, to which `compact()` casts. Default: the model's own."""
    latency_ms: float | None = None
    """Milliseconds of one call on this machine; `Pruner` and `compress` find its size, given an `example`."""

    def __post_init__(self) -> None:
        given = {name: value for name in UNITS if (value := getattr(self, name)) is not None}
        if len(given) != 1:
            *first, last = (f"`{name}`" for name in UNITS)
            raise BudgetError(
                f"A budget takes exactly one of {', '.join(first)} and {last}, but got "
                f"{' and '.join(f'`{name}`' for name in given) or 'none'}. Example: Budget(removed=0.8)."
            )
        ((name, value),) = given.items()
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise InvalidTypeError(f"`{name}` must be a number, but is {value!r} instead.")
        # numpy's numbers have another repr, which `resolve` reads
        value = int(value) if isinstance(value, numbers.Integral) else float(value)
        object.__setattr__(self, name, value)
        if name == "removed" and not 0 < value < 1:
            is_percentage = 5 <= value < 100
            hint = f"Did you mean removed={value / 100:g}?" if is_percentage else "Example: removed=0.8 keeps a fifth."
            raise BudgetError(f"`removed` must be a fraction in (0, 1), but is {value} instead. {hint}")
        if name != "removed" and not (math.isfinite(value) and value > 0):
            raise BudgetError(f"`{name}` must be positive and finite, but is {value} instead.")
        if name == "params" and value != int(value):
            raise BudgetError(f"`params` must be a whole number, but is {value} instead.")
        if self.of not in ("model", "prunable"):
            raise BudgetError(f'`of` must be "model" or "prunable", but is {self.of!r} instead.')
        if self.of == "prunable" and name != "removed":
            raise BudgetError(f'`of="prunable"` goes with `removed`, but the budget names `{name}`. Leave `of` out.')
        if self.dtype is not None and (name != "megabytes" or not self.dtype.is_floating_point):
            raise BudgetError(
                f"`dtype` must be a floating type and goes with `megabytes`, but is {self.dtype} beside `{name}`."
            )

    def resolve(self, account: SizeAccount) -> int:
        """The number of parameters that the exported model may have; raises if it cannot be reached."""
        if self.latency_ms is not None:
            raise BudgetError(
                f"A budget must be a size here, but is `latency_ms` ({self.latency_ms:g}), which depends on inputs and "
                "machine. Find the size first: rankwise.deploy.meet_latency(model, budget, example_inputs).budget."
            )
        if self.removed is not None:
            whole = account.dense if self.of == "model" else account.prunable
            # exact decimals: 1 - 0.8 in floating point is sometimes one parameter off
            limit = account.dense - math.ceil(Fraction(repr(self.removed)) * whole)
        elif self.megabytes is not None:
            if account.storage is None:
                raise BudgetError(
                    "`megabytes` needs matrices that shrink, but this method keeps their shape and counts non-zero "
                    "weights. Ask for those with `params` or `removed`, or choose another method."
                )
            saved = math.floor(Fraction(repr(self.megabytes)) * 10**6)
            limit = (saved - account.storage.other_bytes(self.dtype)) // account.storage.itemsize(self.dtype)
        else:
            assert self.params is not None
            limit = int(self.params)
        if limit < account.smallest:
            raise OutOfReachError(self._too_small(limit, account))
        return limit

    def _too_small(self, limit: int, account: SizeAccount) -> str:
        floor = account.smallest
        widths = {curve.width: curve.least_count for curve in account.curves if curve.width}
        kept = "".join(f", and {n} {width} of every layer" for width, n in widths.items())
        text = (
            f"The budget must be at least {floor:,} parameters (what is not in the plan{kept}), "
            f"but asks for {max(limit, 0):,} of {account.dense:,}. "
        )
        if account.left_out:
            text += f"Left out are {account.left_out}. "
        if (storage := account.storage) is not None and self.megabytes is not None:
            smallest = (floor * storage.itemsize(self.dtype) + storage.other_bytes(self.dtype)) / 10**6
            return text + f"The smallest size is megabytes={smallest:g}; raise the budget or add modules to the plan."
        removed = math.floor((1 - floor / account.dense) * 10**4) / 10**4
        return text + f"Remove at most {removed:g} of the model, or add modules to the plan."


@dataclass(frozen=True)
class SizeReport:
    """The sizes of a model that is being pruned, in parameters."""

    dense: int
    """The size before pruning."""
    budget: int
    """The most that the exported model may have."""
    expected: float
    """The expected size under the gates as training has moved them, s(alpha) in the paper."""
    exported: int
    """The size of what `compact()` would return now."""
    prunable: int
    """The part of `dense` that is in planned matrices."""
    nonzeros: bool = False
    """Whether sizes count non-zero weights, because the method cannot shrink a matrix (AGP)."""

    @classmethod
    def of(cls, small: nn.Module, account: SizeAccount, budget: Budget) -> SizeReport:
        """The report for a model that is already compact, whose size no gate changes any more."""
        size = count(small)
        return cls(account.dense, budget.resolve(account), size, size, account.prunable)

    @property
    def removed(self) -> float:
        """Fraction of the whole model that the export removes."""
        return 1 - self.exported / self.dense

    @property
    def removed_of_prunable(self) -> float:
        """Fraction of the planned matrices that the export removes: the paper's convention."""
        return (self.dense - self.exported) / self.prunable if self.prunable else 0.0

    def __str__(self) -> str:
        unit = "non-zero parameters (the matrices keep their shape)" if self.nonzeros else "parameters"
        sizes = {name: getattr(self, name) for name in ("dense", "budget", "expected", "exported")}
        lines = [f"{name:<9}{value:>16,.0f}  {1 - value / self.dense:7.2%} removed" for name, value in sizes.items()]
        lines.append(f"in {unit}; {self.prunable:,} can be pruned, {self.removed_of_prunable:.2%} of them are removed")
        return "\n".join(lines)
