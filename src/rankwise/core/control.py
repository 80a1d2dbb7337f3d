"""Controllers: what moves all gates of a model together, once per training step.

Paper: section 4.3 (one mask per batch, drawn for the whole model).

The forward pass is a deterministic function of (weights, gate state, step): masks are made here, once per step,
for all gates. A controller's state lies in buffers, so a checkpoint of `model.state_dict()` resumes a run, and
every rank of a distributed run makes the same masks without talking (`rankwise.core.ranks`).
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.core.budget import Account
from rankwise.core.discards import Discards
from rankwise.core.gates import FEW, Gate, Mask, State
from rankwise.core.matrices import GatedMatrix
from rankwise.core.ranks import Ranks, checksum
from rankwise.core.schedules import linear
from rankwise.errors import InvalidValueError, RankwiseError

RANKS = 16
"""A GPU multiplies a multiple of so many components."""


class Layout:
    """Where the components of each gate lie in one flat vector over all gates."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.total = sum(self.sizes)
        self.starts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        # both are made when they are asked for, as single weights are many
        self.rows: Tensor | None = None
        """A row of indices per gate, filled up with that of a zero: sums in a fixed order on every device."""
        self.start_of: Tensor | None = None
        """The start of each component's gate."""

    def sums(self, flat: Tensor) -> Tensor:
        """The sum over each gate's components."""
        if self.rows is None or self.rows.device != flat.device:
            widest = torch.arange(max(self.sizes, default=0))
            rows = torch.tensor(self.starts).unsqueeze(1) + widest
            self.rows = torch.where(widest < torch.tensor(self.sizes).unsqueeze(1), rows, self.total).to(flat.device)
        return torch.cat([flat, flat.new_zeros(1)])[self.rows].sum(1)

    def open_first(self, z: Tensor, out: Tensor | None) -> Tensor:
        """The components of each gate in its part of a flat vector, open ones before closed ones, both in order."""
        if self.start_of is None or self.start_of.device != z.device:
            starts = torch.tensor(self.starts, dtype=torch.int32)
            self.start_of = starts.repeat_interleave(torch.tensor(self.sizes, dtype=torch.long)).to(z.device)
        # a sort, because `nonzero` would make the host wait
        index = (2 * self.start_of + (z == 0)).argsort(stable=True)
        out = index if out is None or out.device != z.device else out
        return torch.sub(index, self.start_of, out=out)

    def scatter(self, flat: Tensor, parts: Sequence[Tensor]) -> None:
        """Copy each gate's part of a flat vector into `parts`."""
        torch._foreach_copy_(list(parts), torch.split(flat, self.sizes))


class Controller(State, ABC):
    """Moves the gates of `matrices` towards `limit` parameters.

    `schedule(k, m)` says how far along the target size is after k of m = `anneal_steps` steps.
    """

    steps: Tensor
    learns = True
    """Whether steps are needed before an export makes sense."""

    def __init__(
        self,
        matrices: Sequence[GatedMatrix],
        account: Account,
        limit: int,
        anneal_steps: int = 0,
        schedule: Callable[[int, int], float] = linear,
    ) -> None:
        super().__init__()
        self.matrices = tuple(matrices)
        self.account = account
        self.limit = limit
        self.anneal_steps = anneal_steps
        self.schedule = schedule
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.layout = Layout([matrix.gate.num_components for matrix in matrices])
        self._step, self._version = 0, self.steps._version
        self._drawn = self._standing = False
        self._index: Tensor | None = None
        """The components in the order of `Layout.open_first`, always in the same memory."""
        self.ranks = Ranks()
        self.discards = Discards()
        self.modules_of_model: Callable[[], Iterable[nn.Module]] = partial(tuple, matrices)
        """The model's modules, or those that are known of it."""

    @property
    def gates(self) -> list[Gate]:
        return [matrix.gate for matrix in self.matrices]

    @property
    def step(self) -> int:
        """Training steps taken so far."""
        return self._step

    def target(self) -> int:
        """The size asked for at this step, in parameters of the whole model."""
        start = self.account.dense
        return max(self.limit, round(start + (self.limit - start) * self.schedule(self._step, self.anneal_steps)))

    @property
    def frozen(self) -> bool:
        """Whether masks no longer change."""
        return False

    @abstractmethod
    def expected_size(self) -> float:
        """The expected size under the gates as they stand, in parameters of the whole model."""

    @abstractmethod
    def counts(self, limit: int) -> list[int]:
        """How many components of each matrix an export of at most `limit` parameters keeps."""

    @abstractmethod
    def order(self, i: int) -> Tensor:
        """The components of matrix i, the one to keep longest first."""

    def values(self, i: int) -> Tensor | None:
        """The deterministic z of matrix i's components where they are kept; None where that is one."""
        return None

    def openness(self) -> list[Tensor] | None:
        """How far the components of each matrix are open, from 0 to 1; None where no gate is learned."""
        return None

    @abstractmethod
    def draw(self) -> None:
        """Make the training masks of the current step."""

    @property
    def uses_gradient(self) -> bool:
        """Whether this step moves gates by the gradient of the loss."""
        return False

    @abstractmethod
    def update(self, grad: Tensor) -> None:
        """Move the gates by dL/dz of all of them, a flat vector; called where the gradient is used."""

    def advance(self, grad_scale: float = 1.0) -> None:
        """One training step: move the gates, then the target, then draw new masks."""
        if not (grad_scale > 0):
            raise InvalidValueError(f"`grad_scale` must be positive, but is {grad_scale} instead.")
        self.make_ready(evaluation=False)
        was_frozen, uses_gradient = self.frozen, self.uses_gradient
        self.ranks.find_mesh(weight for matrix in self.matrices for weight in matrix.parameters())
        if uses_gradient:
            self.ranks.warn_if_alone()
        # also where it is of no use: a rank that is at another step must not leave the others waiting
        if uses_gradient or (self.learns and self.ranks.size > 1):
            grad = self.gradient(grad_scale)
            if uses_gradient:
                self.update(grad)
        self.forget_gradients()
        self._step += 1
        self.steps.fill_(self._step)
        self._version = self.steps._version
        if not was_frozen:
            self._drawn = self._standing = False
        self.make_ready(evaluation=False)

    def forget_gradients(self) -> None:
        """Drop what backward passes have collected in `z.grad`."""
        for gate in self.gates:
            if gate.z is not None:
                gate.z.grad = None

    def choose(self, limit: int) -> list[Tensor]:
        """The components each matrix keeps in an export of at most `limit` parameters, in ascending order."""
        counts = self.counts(limit)
        return [self.order(i)[:k].sort().values for i, k in enumerate(counts)]

    def make_ready(self, *, evaluation: bool) -> None:
        """Make the masks that are about to be used, unless they stand already."""
        is_new = self.ranks.meet(self)
        # as averages of weights do. DistributedDataParallel sends the first rank's buffers at first, and then before
        # every step what all ranks hold already, for which a GPU must not be waited for
        is_overwritten = self.steps._version != self._version
        if is_overwritten and (evaluation or is_new or not self.ranks.wrapped):
            self.outdate()
        if self.is_ready(evaluation=evaluation):
            return
        # outside inference mode, whose tensors a later backward pass could not use
        with torch.inference_mode(False), torch.no_grad():
            if evaluation:
                self._standing = True
                self._stand()
            else:
                self._drawn = True
                self.draw()
                self.discards.listen(self)

    # the mark of `torch.compiler.assume_constant_result`, which would import the compiler: called when a model is
    # traced, and no part of its graph
    make_ready._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def is_ready(self, *, evaluation: bool) -> bool:
        """Whether the masks stand that are about to be used."""
        return self._standing if evaluation else self._drawn

    def train(self, mode: bool = True) -> Any:
        """As of any module; masks of the mode are made at once, so that a compiled model finds them."""
        super().train(mode)
        if not self.steps.is_meta:
            self.make_ready(evaluation=not mode)
        return self

    def outdate(self) -> None:
        """Forget every mask: the state they were made from was loaded or moved."""
        self._drawn = self._standing = False
        self._version = self.steps._version
        if not self.steps.is_meta:
            self._step = int(self.steps)

    def _stand(self) -> None:
        """Masks for evaluation: what would be exported at the current target."""
        for i, kept in enumerate(self.choose(self.target())):
            gate = self.matrices[i].gate
            z = torch.zeros(gate.num_components, device=kept.device)
            values = self.values(i)
            z[kept] = 1.0 if values is None else values[kept]
            gate.standing = Mask(z, kept if len(kept) <= FEW * gate.num_components else None)

    def signature(self) -> Hashable:
        """What of the masks the host knows: while it stays the same, so do the kernels of a step and their memory."""
        return tuple(
            (
                None if gate.active is None else len(gate.active),
                gate.binary,
                gate.z is not None and gate.z.requires_grad,
            )
            for gate in self.gates
        )

    def gradient(self, grad_scale: float) -> Tensor:
        """dL/dz of all gates as one flat vector: averaged over ranks, loss scale removed, zero if not finite."""
        ranks = self.ranks.size
        gates = [gate for gate in self.gates if gate.z is not None]
        grads = [None if gate.z is None else gate.z.grad for gate in gates]
        # one rank alone may have had nothing to learn from; it must not leave the others waiting
        if ranks == 1 and all(grad is None for grad in grads):
            raise RankwiseError(
                "`pruner.step()` needs the gradient of the loss, but no gate has one. Call `loss.backward()` before "
                "it, with the model in training mode."
            )
        if ranks > 1:
            self.ranks.check_steps()
            self.ranks.compare(self._facts, self.steps.device)
        zeros = self.steps.new_zeros(sum(gate.num_components for gate in gates), dtype=torch.float)
        pieces = zip(torch.split(zeros, [gate.num_components for gate in gates]), grads, strict=True)
        flat = torch.cat([zero if grad is None else grad for zero, grad in pieces] or [zeros]) / grad_scale
        if ranks > 1:
            flat = self.ranks.average(flat, self._step)
        return torch.where(torch.isfinite(flat).all(), flat, 0.0)

    def _facts(self) -> dict[str, int]:
        """What all ranks must agree in."""
        arguments = (type(self).__name__, self.account.curves, self.limit, self.anneal_steps)
        told = repr((*arguments, getattr(self, "settings", None), getattr(self, "seed", None)))
        state = [tensor for module in (self, *self.gates) for tensor in module._buffers.values() if tensor is not None]
        return {"arguments": zlib.crc32(told.encode()), "steps": self._step, "gates": checksum(*state)}

    def fill(self, z: Tensor, numbers: Sequence[int] | None = None, *, binary: bool = False) -> None:
        """Hand a flat vector of z to the gates, with the indices of its open components where they are few.

        Args:
            numbers: how many components of each gate are open, at most; None to count them, which the host waits for.
            binary: z is 0 or 1, and `numbers` are exact.
        """
        self.layout.scatter(z, [gate.z for gate in self.gates if gate.z is not None])
        if numbers is None:
            numbers = self.layout.sums((z != 0).long()).tolist()
        self._index = self.layout.open_first(z, self._index)
        sizes = self.layout.sizes
        ranks: list[int | None] = [n if n <= FEW * size else None for n, size in zip(numbers, sizes, strict=True)]
        if z.is_cuda:
            before = [None if gate.active is None else len(gate.active) for gate in self.gates]
            ranks = filled(numbers, sizes, before, exact=binary)
        for gate, size, start, number, rank in zip(self.gates, sizes, self.layout.starts, numbers, ranks, strict=True):
            gate.active = None if rank is None else self._index[start : start + rank]
            gate.binary = binary and number == (size if rank is None else rank)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.outdate()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.outdate()
        return self


def filled(
    numbers: Sequence[int], sizes: Sequence[int], ranks: Sequence[int | None], *, exact: bool
) -> list[int | None]:
    """The ranks at which gates with `numbers` of open components are multiplied on a GPU: closed ones fill them up.

    None where most of a gate is open, and all of it is multiplied. A product of an odd rank is slow, and a new rank is
    a new graph of the step. So `ranks` go on for as long as all fit; when one does not, all are set anew, with some
    room where the numbers go on changing.
    """
    room = 0 if exact else RANKS // 2
    anew: list[int | None] = []
    for number, size in zip(numbers, sizes, strict=True):
        rank = min(-(-(number + room) // RANKS) * RANKS, size)
        anew.append(rank if rank <= FEW * size else None)

    def fits(number: int, rank: int | None, new: int | None) -> bool:
        return new is None if rank is None else rank - 3 * RANKS < number <= rank

    return list(ranks) if not exact and all(map(fits, numbers, ranks, anew)) else anew


class FixedController(Controller):
    """Ranks are chosen beforehand, and the gates stand open: nothing is learned about them."""

    learns = False

    @property
    def frozen(self) -> bool:
        return True

    def expected_size(self) -> float:
        return self.account.size(self.counts(self.limit))

    def order(self, i: int) -> Tensor:
        return torch.arange(self.matrices[i].gate.num_components, device=self.steps.device)

    def draw(self) -> None:
        pass

    def update(self, grad: Tensor) -> None:
        pass
