"""The controller: moves all gates of a model together, once per training step, and makes their masks.

Paper: section 4.3 (one mask per batch, drawn for the whole model).

The forward pass is a deterministic function of (weights, gate state, step), because masks are made here, once per step
and for all gates. The state of a controller is in buffers, so a checkpoint of `model.state_dict()` resumes a run, and
all ranks of a distributed run make the same masks without communication (`rankwise.core.distributed`).
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.core.budget import SizeAccount
from rankwise.core.distributed import DistributedGroup, bit_sum, checksum
from rankwise.core.gates import SELECT_UP_TO, FixedDtypeModule, Gate, Mask
from rankwise.core.loading import ARGUMENTS, MADE_WITH, check_arguments
from rankwise.core.loop_checks import ZeroGradDetector
from rankwise.core.matrices import GatedMatrix
from rankwise.core.optim import linear
from rankwise.errors import InvalidValueError, RankwiseError

GPU_RANK_MULTIPLE = 16
"""On a GPU the number of multiplied components is a multiple of this."""


class FlatLayout:
    """Where the components of each gate are in one flat vector over all gates."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        *self.starts, self.total = accumulate(self.sizes, initial=0)
        # both are made when they are first needed, because unstructured pruning has very many components
        self.rows: Tensor | None = None
        """A row of indices per gate, padded with the index of a zero, so that sums have a fixed order on any device."""
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
        """The component indices of each gate in its part of a flat vector, open ones before closed ones, in order."""
        if self.start_of is None or self.start_of.device != z.device:
            starts = torch.tensor(self.starts, dtype=torch.int32)
            self.start_of = starts.repeat_interleave(torch.tensor(self.sizes, dtype=torch.long)).to(z.device)
        # a sort, because `nonzero` would make the host wait for the GPU
        index = (2 * self.start_of + (z == 0)).argsort(stable=True)
        out = index if out is None or out.device != z.device else out
        return torch.sub(index, self.start_of, out=out)

    def scatter(self, flat: Tensor, parts: Sequence[Tensor]) -> None:
        """Copy each gate's part of a flat vector into `parts`."""
        torch._foreach_copy_(list(parts), torch.split(flat, self.sizes))


class Controller(FixedDtypeModule, ABC):
    """Moves the gates of `matrices` until the model has at most `limit` parameters.

    `schedule(k, m)` is the share of the way that the target size has gone after k of m = `anneal_steps` steps.
    """

    steps: Tensor
    made_with: Tensor
    starts_by_worth = False  # by what components are worth, and not open
    learns = True
    """Whether training steps are needed before an export makes sense."""

    def __init__(
        self,
        matrices: Sequence[GatedMatrix],
        account: SizeAccount,
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
        self.register_buffer(MADE_WITH, torch.zeros(len(ARGUMENTS), dtype=torch.long))
        self.layout = FlatLayout([matrix.gate.num_components for matrix in matrices])
        self._step, self._known_steps, self._device = 0, self._steps_version(), self.steps.device
        self._has_train_masks = self._has_eval_masks = False
        self.is_narrowed = False
        """Whether closed components were dropped."""
        self.is_loaded = False
        """Whether a checkpoint was loaded."""
        self._index: Tensor | None = None
        """The components in the order of `FlatLayout.open_first`, always in the same memory."""
        self.distributed = DistributedGroup()
        self.zero_grad_detector = ZeroGradDetector()
        self.modules_of_model: Callable[[], Iterable[nn.Module]] = partial(tuple, matrices)
        """The modules of the model; the pruner sets it, and without one it is the matrices."""

    @property
    def gates(self) -> list[Gate]:
        return [matrix.gate for matrix in self.matrices]

    def arguments(self) -> list[int]:
        """The arguments that a resumed run must repeat, as `ARGUMENTS` names them."""
        settings = zlib.crc32(repr((getattr(self, "settings", None), self.starts_by_worth)).encode())
        return [self.limit, self.anneal_steps, getattr(self, "seed", 0) % 2**62, settings]

    def note_arguments(self) -> None:
        """Have a checkpoint hold them, so that a run with others can be told apart."""
        self.made_with.copy_(torch.tensor(self.arguments()))

    @property
    def step(self) -> int:
        """The number of training steps taken."""
        return self._step

    def target_size(self) -> int:
        """The size asked for at this step, in parameters of the whole model."""
        start = self.account.dense
        return max(self.limit, round(start + (self.limit - start) * self.schedule(self._step, self.anneal_steps)))

    @property
    def is_frozen(self) -> bool:
        """Whether masks no longer change."""
        return False

    @property
    def has_committed(self) -> bool:
        """Whether the components that are closed now stay closed."""
        return self.is_frozen

    @abstractmethod
    def expected_size(self) -> float:
        """The expected size under the current gates, in parameters of the whole model."""

    @abstractmethod
    def num_kept(self, limit: int) -> list[int]:
        """The number of components of each matrix in an export of at most `limit` parameters."""

    @abstractmethod
    def best_first(self, i: int) -> Tensor:
        """The components of matrix i, from the one to keep longest to the one to drop first."""

    def export_values(self, i: int) -> Tensor | None:
        """The deterministic z by which an export multiplies the components of matrix i; None if it is one."""
        return None

    def open_fractions(self) -> list[Tensor] | None:
        """How far the components of each matrix are open, from 0 to 1; None if no gate is learned."""
        return None

    def draw_masks(self) -> None:
        """Make the training masks of the current step."""

    @property
    def uses_gradient(self) -> bool:
        """Whether this step moves gates by the gradient of the loss."""
        return False

    def update(self, grad: Tensor) -> None:
        """Move the gates by dL/dz of all gates, a flat vector; called only if `uses_gradient`."""

    def advance(self, grad_scale: float = 1.0) -> None:
        """One training step: move the gates, then the target size, then draw new masks."""
        if not (grad_scale > 0):
            raise InvalidValueError(f"`grad_scale` must be positive, but is {grad_scale} instead.")
        self.ensure_masks(evaluation=False)
        was_frozen, uses_gradient = self.is_frozen, self.uses_gradient
        self.distributed.find_mesh(weight for matrix in self.matrices for weight in matrix.parameters())
        if uses_gradient:
            self.distributed.warn_if_alone()
        # averaged even if it is not used: a rank at another step must not leave the others waiting
        if uses_gradient or (self.learns and self.distributed.size > 1):
            grad = self.gradient(grad_scale)
            if uses_gradient:
                self.update(grad)
        self.clear_gradients()
        self._step += 1
        self.steps.fill_(self._step)
        self._known_steps = self._steps_version()
        if not was_frozen:
            self._has_train_masks = self._has_eval_masks = False
        self.ensure_masks(evaluation=False)

    def clear_gradients(self) -> None:
        """Clear what backward passes have collected in `z.grad`."""
        for gate in self.gates:
            if gate.z is not None:
                gate.z.grad = None

    def kept_components(self, limit: int) -> list[Tensor]:
        """The components of each matrix in an export of at most `limit` parameters, in ascending order."""
        return [self.best_first(i)[:k].sort().values for i, k in enumerate(self.num_kept(limit))]

    def ensure_masks(self, *, evaluation: bool) -> None:
        """Make the masks for training or evaluation, unless they are up to date."""
        is_new = self.distributed.find_wrapper(self)
        # Averages of weights overwrite buffers in place. So does DistributedDataParallel: at first with the state of
        # rank 0, and then before every step with what all ranks already hold, where the host must not wait for a GPU.
        is_overwritten = self._steps_version() != self._known_steps
        # FSDP2 moves buffers to a GPU, but knows nothing of masks
        is_moved = self.steps.device != self._device
        if is_moved or (is_overwritten and (evaluation or is_new or not self.distributed.is_wrapped)):
            self.invalidate_masks()
        if self.has_masks(evaluation=evaluation):
            return
        if self.is_narrowed and not self.has_committed:
            raise RankwiseError(
                "A checkpoint whose closed components were dropped must continue after the ramp, but this pruner is at "
                f"step {self._step:,} of {self.anneal_steps:,}. Make it with the arguments of the run that was saved."
            )
        # a later backward pass could not use tensors that were made in inference mode
        with torch.inference_mode(False), torch.no_grad():
            for gate in self.gates:
                gate.move_mask(self.steps.device)
            if evaluation:
                self._has_eval_masks = True
                self._make_eval_masks()
            else:
                self._has_train_masks = True
                self.draw_masks()
                self.zero_grad_detector.register_hooks(self)

    # what `torch.compiler.assume_constant_result` sets, without importing the compiler: the call is made when a model
    # is traced, and is not part of its graph
    ensure_masks._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def has_masks(self, *, evaluation: bool) -> bool:
        """Whether the masks for training or evaluation are up to date."""
        return self._has_eval_masks if evaluation else self._has_train_masks

    def train(self, mode: bool = True) -> Any:
        """As for any module; the masks of the mode are made immediately, so that a compiled model finds them."""
        super().train(mode)
        if not self.steps.is_meta:
            self.ensure_masks(evaluation=not mode)
        return self

    def narrow(self, kept: Sequence[Tensor]) -> None:
        """Take over the sizes of gates that were narrowed to the components `kept`."""
        moments = self._buffers.get("moments")
        if moments is not None and moments.shape[1]:
            flat = torch.cat([index + start for index, start in zip(kept, self.layout.starts, strict=True)])
            self._buffers["moments"] = moments.index_select(1, flat)
        self.invalidate_masks()

    def resize(self, sizes: Sequence[int]) -> None:
        """Set the numbers of components of all gates."""
        self.layout, self._index = FlatLayout(sizes), None
        curves = zip(self.account.curves, sizes, strict=True)
        resized = tuple(replace(curve, num_components=size) for curve, size in curves)
        self.account = replace(self.account, curves=resized)
        self.is_narrowed = any(gate.num_components < gate.most_components for gate in self.gates)

    def invalidate_masks(self) -> None:
        """Forget every mask, because the state that it was made from was loaded, moved or changed."""
        sizes = [gate.num_components for gate in self.gates]
        if sizes != self.layout.sizes:
            self.resize(sizes)
        self._has_train_masks = self._has_eval_masks = False
        self._known_steps, self._device = self._steps_version(), self.steps.device
        if not self.steps.is_meta:
            self._step = int(self.steps)

    def _steps_version(self) -> tuple[int, int]:
        """Changes when the buffer is written to; that of a copy counts its own writes from 0, so it is told apart."""
        return id(self.steps), self.steps._version

    def _make_eval_masks(self) -> None:
        """Evaluation uses what would be exported at the current target size."""
        for i, kept in enumerate(self.kept_components(self.target_size())):
            gate = self.matrices[i].gate
            z = torch.zeros(gate.num_components, device=kept.device)
            values = self.export_values(i)
            z[kept] = 1.0 if values is None else values[kept]
            gate.eval_mask = Mask(z, kept if len(kept) <= SELECT_UP_TO * gate.num_components else None)

    def mask_signature(self) -> Hashable:
        """What the host knows of the masks: while it stays the same, so do the kernels of a step and their memory."""
        learns = [gate.z is not None and gate.z.requires_grad for gate in self.gates]
        return tuple((gate.num_active, gate.is_binary, each) for gate, each in zip(self.gates, learns, strict=True))

    def gradient(self, grad_scale: float) -> Tensor:
        """dL/dz of all gates as one flat vector: averaged over ranks, divided by the loss scale, zero if not finite."""
        num_ranks = self.distributed.size
        masks = [gate.z for gate in self.gates if gate.z is not None]
        # one rank of several may have had no batch; it must not leave the others waiting
        if num_ranks == 1 and all(z.grad is None for z in masks):
            raise RankwiseError(
                "`pruner.step()` needs the gradient of the loss, but no gate has one. Call `loss.backward()` before "
                "it, with the model in training mode."
            )
        if num_ranks > 1:
            self.distributed.check_steps()
            self.distributed.check_agreement(self._fingerprints, self.steps.device)
        pieces = [torch.zeros_like(z) if z.grad is None else z.grad for z in masks]
        flat = torch.cat(pieces or [self.steps.new_zeros(0, dtype=torch.float)]) / grad_scale
        if num_ranks > 1:
            flat = self.distributed.average(flat, self._step, partial(bit_sum, self._trained()))
        return torch.where(torch.isfinite(flat).all(), flat, 0.0)

    def _trained(self) -> list[nn.Parameter]:
        return [weight for matrix in self.matrices for weight in matrix.parameters() if weight.requires_grad]

    def _fingerprints(self) -> dict[str, int]:
        """Numbers that must be the same on all ranks."""
        settings = getattr(self, "settings", None), getattr(self, "seed", None)
        arguments = repr((type(self).__name__, self.account.curves, self.limit, self.anneal_steps, *settings))
        state = [tensor for module in (self, *self.gates) for tensor in module._buffers.values() if tensor is not None]
        return {"arguments": zlib.crc32(arguments.encode()), "steps": self._step, "gates": checksum(*state)}

    def set_masks(self, z: Tensor, num_open: Sequence[int] | None = None, *, is_binary: bool = False) -> None:
        """Give each gate its part of a flat z, with the indices of its open components if they are few.

        Args:
            num_open: an upper bound on the open components of each gate; None to count them, which makes the host wait.
            is_binary: z is 0 or 1, and `num_open` is exact.
        """
        self.layout.scatter(z, [gate.z for gate in self.gates if gate.z is not None])
        if num_open is None:
            num_open = self.layout.sums((z != 0).long()).tolist()
        self._index = self.layout.open_first(z, self._index)
        sizes, starts = self.layout.sizes, self.layout.starts
        ranks = [n if n <= SELECT_UP_TO * size else None for n, size in zip(num_open, sizes, strict=True)]
        if z.is_cuda:
            ranks = padded_ranks(num_open, sizes, [gate.num_active for gate in self.gates], exact=is_binary)
        for gate, size, start, number, rank in zip(self.gates, sizes, starts, num_open, ranks, strict=True):
            gate.active = None if rank is None else self._index[start : start + rank]
            gate.is_binary = is_binary and number == (size if rank is None else rank)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # the checkpoint of a model whose closed components were dropped, or one from before they were
        moments, saved = self._buffers.get("moments"), state_dict.get(f"{prefix}moments")
        if moments is not None and isinstance(saved, Tensor) and saved.shape[-1] != moments.shape[1]:
            self._buffers["moments"] = moments.new_zeros(saved.shape)
        if self._loaded is not args[2]:
            check_arguments(state_dict, prefix, self.arguments())
        state_dict[f"{prefix}{MADE_WITH}"] = self.made_with.clone()
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.is_loaded = True
        self.invalidate_masks()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.invalidate_masks()
        return self


def padded_ranks(
    num_open: Sequence[int], sizes: Sequence[int], before: Sequence[int | None], *, exact: bool
) -> list[int | None]:
    """The number of components of each gate that a GPU multiplies: open ones, padded with closed ones.

    None if most of a gate is open, so that all of it is multiplied. Products of odd ranks are slow, and a new rank
    needs a new CUDA graph of the step. So the ranks of `before` stay as long as all of them fit. If one does not, all
    ranks are set again, with some room unless the numbers are `exact` and will not change.
    """
    multiple = GPU_RANK_MULTIPLE
    room = 0 if exact else multiple // 2
    new: list[int | None] = []
    for number, size in zip(num_open, sizes, strict=True):
        rank = min(-(-(number + room) // multiple) * multiple, size)
        new.append(rank if rank <= SELECT_UP_TO * size else None)

    def fits(number: int, old_rank: int | None, new_rank: int | None) -> bool:
        return new_rank is None if old_rank is None else old_rank - 3 * multiple < number <= old_rank

    return list(before) if not exact and all(map(fits, num_open, before, new)) else new


class FixedController(Controller):
    """The controller of methods that learn nothing about gates: all gates are open, and ranks are known beforehand."""

    learns = False

    @property
    def is_frozen(self) -> bool:
        return True

    def expected_size(self) -> float:
        return self.account.size(self.num_kept(self.limit))

    def best_first(self, i: int) -> Tensor:
        return torch.arange(self.matrices[i].gate.num_components, device=self.steps.device)
