"""Budgets: the size asked for, and the books that are kept of a model's size.

Paper: section 4.3 (t, the target size) and the compression convention of section 5 (`of="prunable"`).
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor, nn

from rankwise.errors import BudgetError, InvalidTypeError, OutOfReachError


def count(model: nn.Module) -> int:
    """The number of parameters of `model`, tied weights once."""
    return sum(parameter.numel() for parameter in model.parameters())


@dataclass(frozen=True)
class CostCurve:
    """Parameters of a matrix exported with k components: k * per_component, never more than `cap` (dense).

    In the pivot layout (`rankwise.core.pivot`) k components cost k * (per_component - k): the more there are, the less
    a further one costs, and all of them cost what the dense matrix does.
    """

    num_components: int
    per_component: int
    cap: int
    pivot: bool = False
    multiple: int = 1
    """An export keeps a multiple of so many components, or all of them."""
    dense_from: int | None = None
    """Parameters from which low rank does not pay, and the matrix is exported dense. Default: `cap`."""

    def __call__(self, k: int) -> int:
        assert 0 <= k <= self.num_components
        if self.pivot:
            # at the top of the parabola the cap is reached
            k = min(k, self.per_component // 2)
        low_rank = k * (self.per_component - k * self.pivot)
        return low_rank if low_rank < self.threshold else self.cap

    def costs(self, k: Tensor) -> Tensor:
        """The cost of each of many ranks."""
        low_rank = self._low_rank(k)
        return torch.where(low_rank < self.threshold, low_rank, self.cap)

    @property
    def threshold(self) -> int:
        """Parameters of low rank from which the matrix is dense."""
        return self.cap if self.dense_from is None else self.dense_from

    def stops(self) -> Tensor:
        """The numbers of components that an export may keep, ascending, zero not among them.

        A step to the next one is what a choice takes or leaves: from low rank to dense it is a single one.
        """
        stops = torch.arange(self.multiple, self.num_components + self.multiple, self.multiple)
        stops = stops.clamp(max=self.num_components)
        low_rank = self._low_rank(stops)
        between = (low_rank >= self.threshold) & (low_rank < self.cap) & (stops < self.num_components)
        return stops[~between]

    def next_stop(self, k: int) -> int:
        """The least number of components beyond `k`, a stop, at which all that cost nothing more are kept."""
        after = min(k + self.multiple, self.num_components)
        return self.num_components if self(after) == self.cap else after

    def most(self, room: int) -> int:
        """The most components that an export may keep in `room` parameters."""
        stops = self.stops()
        fitting = stops[self.costs(stops) <= room]
        return int(fitting[-1]) if len(fitting) else 0

    def _low_rank(self, k: Tensor) -> Tensor:
        """Parameters of k components that are not multiplied out."""
        if not self.pivot:
            return k * self.per_component
        k = k.clamp(max=self.per_component // 2)
        return k * (self.per_component - k)

    @property
    def full(self) -> int:
        """The cost of keeping everything."""
        return self(self.num_components)


@dataclass(frozen=True)
class Storage:
    """What a model's tensors are saved as."""

    dtypes: frozenset[torch.dtype] = frozenset({torch.float32})
    """Of the parameters."""
    buffers: tuple[tuple[int, torch.dtype], ...] = ()
    """Number of elements and dtype of each."""
    overhead: int = 0
    """Bytes that exported matrices save beside their parameters."""

    def itemsize(self, dtype: torch.dtype | None) -> int:
        """Bytes of one parameter exported in `dtype`, or in its own."""
        if dtype is None and len({own.itemsize for own in self.dtypes}) > 1:
            raise BudgetError(
                "`megabytes` needs one export dtype, but the model's parameters are of "
                f"{', '.join(sorted(map(str, self.dtypes)))}. Pass `dtype`, as in Budget(megabytes=16, "
                "dtype=torch.float16)."
            )
        return (dtype or next(iter(self.dtypes))).itemsize

    def beside(self, dtype: torch.dtype | None) -> int:
        """Bytes of what is saved beside the parameters."""
        sizes = (
            n * (dtype if dtype is not None and own.is_floating_point else own).itemsize for n, own in self.buffers
        )
        return sum(sizes) + self.overhead


@dataclass(frozen=True)
class Account:
    """The books of one model: what it held before pruning, and what each planned matrix costs at each rank."""

    dense: int
    """Parameters of the whole model before pruning."""
    prunable: int
    """Those of them that stand in planned matrices: the paper's reference for *removed*."""
    curves: tuple[CostCurve, ...]
    storage: Storage | None = Storage()
    """None where sizes count non-zero weights: matrices keep their shape, and bytes do not shrink."""
    left_out: str = ""
    """What the plan leaves out, for the message about a size that cannot be reached."""

    @property
    def fixed(self) -> int:
        """Parameters that no choice of components can remove."""
        return self.dense - self.prunable

    def size(self, counts: Sequence[int]) -> int:
        """The exported size with `counts[i]` components of matrix i kept."""
        return self.fixed + sum(curve(k) for curve, k in zip(self.curves, counts, strict=True))


GOALS = ("params", "removed", "megabytes", "latency_ms")
"""What a budget may name."""


def _listed(names: Sequence[str]) -> str:
    *first, last = (f"`{name}`" for name in names)
    return f"{', '.join(first)} and {last}"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The size asked for: exactly one of `params`, `removed`, `megabytes` and `latency_ms`."""

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
    """Milliseconds of one answer on this machine. `rankwise.deploy.latency.meet_latency` finds the size for it."""

    def __post_init__(self) -> None:
        given = {n: v for n in GOALS if (v := getattr(self, n)) is not None}
        if len(given) != 1:
            said = " and ".join(f"`{name}`" for name in given) or "none"
            raise BudgetError(
                f"A budget takes exactly one of {_listed(GOALS)}, but got {said}. Example: Budget(removed=0.8)."
            )
        ((name, value),) = given.items()
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise InvalidTypeError(f"`{name}` must be a number, but is {value!r} instead.")
        # numbers of numpy are written in other ways
        value = int(value) if isinstance(value, numbers.Integral) else float(value)
        object.__setattr__(self, name, value)
        if name == "removed" and not 0 < value < 1:
            hint = (
                f" Did you mean removed={value / 100:g}?"
                if 5 <= value < 100
                else " Example: removed=0.8 keeps a fifth."
            )
            raise BudgetError(f"`removed` must be a fraction in (0, 1), but is {value} instead.{hint}")
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

    def resolve(self, account: Account) -> int:
        """The number of parameters the exported model may have; refuses what cannot be reached."""
        if self.latency_ms is not None:
            raise BudgetError(
                f"A budget must be a size here, but is `latency_ms` ({self.latency_ms:g}), which depends on inputs and "
                "machine. Find the size first: rankwise.deploy.latency.meet_latency(model, budget, example_inputs)."
            )
        if self.removed is not None:
            whole = account.dense if self.of == "model" else account.prunable
            # as a decimal: 1 - 0.8 in floating point would lose a parameter now and then
            limit = account.dense - math.ceil(Fraction(repr(self.removed)) * whole)
        elif self.megabytes is not None:
            saved = math.floor(Fraction(repr(self.megabytes)) * 10**6)
            storage = self._storage(account)
            limit = (saved - storage.beside(self.dtype)) // storage.itemsize(self.dtype)
        else:
            assert self.params is not None
            limit = int(self.params)
        if limit < account.fixed:
            raise OutOfReachError(self._too_small(limit, account))
        return limit

    def _storage(self, account: Account) -> Storage:
        if account.storage is None:
            raise BudgetError(
                "`megabytes` needs matrices that shrink, but this method keeps their shape and counts non-zero "
                "weights. Ask for those with `params` or `removed`, or choose another method."
            )
        return account.storage

    def _too_small(self, limit: int, account: Account) -> str:
        floor = account.fixed
        text = (
            f"The budget must be at least {floor:,} parameters (what is not in the plan), "
            f"but asks for {max(limit, 0):,} of {account.dense:,}. "
        )
        if account.left_out:
            text += f"Left out are {account.left_out}. "
        if self.megabytes is not None:
            storage = self._storage(account)
            smallest = (floor * storage.itemsize(self.dtype) + storage.beside(self.dtype)) / 10**6
            return text + f"The smallest size is megabytes={smallest:g}; raise the budget or add modules to the plan."
        removed = math.floor((1 - floor / account.dense) * 10**4) / 10**4
        return text + f"Remove at most {removed:g} of the model, or add modules to the plan."


@dataclass(frozen=True)
class SizeReport:
    """Where a model stands: four sizes in parameters."""

    dense: int
    """Before pruning."""
    budget: int
    """What the exported model may have."""
    expected: float
    """Under the gates as they stand in training, s(alpha) in the paper."""
    exported: int
    """What `compact()` would give now."""
    prunable: int
    """Of `dense`, what stands in planned matrices."""
    nonzeros: bool = False
    """Whether sizes count non-zero weights, because the method cannot shrink a matrix (AGP)."""

    @classmethod
    def of(cls, small: nn.Module, account: Account, budget: Budget) -> SizeReport:
        """Of a model that is small already: no gate moves its size any more."""
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
        rows = [
            ("dense", self.dense),
            ("budget", self.budget),
            ("expected", self.expected),
            ("exported", self.exported),
        ]
        lines = [f"{name:<9}{value:>16,.0f}  {1 - value / self.dense:7.2%} removed" for name, value in rows]
        lines.append(f"in {unit}; {self.prunable:,} can be pruned, {self.removed_of_prunable:.2%} of them are removed")
        return "\n".join(lines)
