"""The processes (ranks) of a distributed run: finding their group, averaging gradients, and checking that they agree.

Every process moves its gates by itself, from gradients that are averaged over the group. They stay equal as long as
they start from the same state, so the state is compared at the first step, and the step number at every step.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rankwise.core.sharding import mesh_of, on_all_ranks
from rankwise.errors import InvalidTypeError, RankwiseError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    RequestedGroup: TypeAlias = ProcessGroup | Literal[False] | None

WRAPPERS = ("torch.nn.parallel.", "torch.distributed.fsdp", "torch.distributed._composable.fsdp")
"""The packages of modules that hold a list of a model's parameters, and so must be made after the pruner."""
EXACT = 2**24
"""Whole numbers below this are exact in float32."""


class DistributedGroup:
    """The processes over which the gradients of gates are averaged.

    Args:
        requested: the group; False if this process trains alone; None to use the group of the `DistributedDataParallel`
            through which the model is first called, or the device mesh of sharded parameters (FSDP2).
    """

    def __init__(self, requested: RequestedGroup = None) -> None:
        is_group = isinstance(requested, getattr(dist, "ProcessGroup", ()))
        if requested is not None and requested is not False and not is_group:
            raise InvalidTypeError(
                "`process_group` must be a torch.distributed.ProcessGroup that this process belongs to, False or None, "
                f"but is {requested!r} instead."
            )
        self.requested = requested
        self.groups: tuple[ProcessGroup, ...] = (requested,) if requested else ()
        """One group; where a mesh of several dimensions holds some of all processes, one for each dimension."""
        self.is_wrapped = False
        """Whether a wrapper was found: it may overwrite buffers before every forward pass."""
        self._seen_wrappers: WeakSet[nn.Module] = WeakSet()
        self._agreed = self._warned = False
        self._steps: tuple[Tensor, torch.cuda.Event | None] | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> DistributedGroup:
        # a group cannot be copied, and a copy of the model gets a wrapper of its own
        return DistributedGroup(self.requested)

    def __reduce__(self) -> tuple[Any, ...]:
        return DistributedGroup, (False if self.requested is False else None,)

    @property
    def size(self) -> int:
        """The number of processes; 1 without a group."""
        return math.prod(dist.get_world_size(group) for group in self.groups) if dist.is_initialized() else 1

    @property
    def rank(self) -> int:
        """The place of this process among them."""
        place = 0
        for group in self.groups:
            place = place * dist.get_world_size(group) + dist.get_rank(group)
        return place

    def sum(self, tensor: Tensor) -> None:
        """Add up a tensor over all processes, in place."""
        with on_all_ranks():
            for group in self.groups:
                dist.all_reduce(tensor, group=group)

    def find_wrapper(self, module: nn.Module) -> bool:
        """Look for a `DistributedDataParallel` around `module` during its forward pass; True if a new one was found."""
        wrapper = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
        if wrapper is None or wrapper in self._seen_wrappers:
            return False
        self._seen_wrappers.add(wrapper)
        if not any(inside is module for inside in wrapper.module.modules()):
            return False
        self.is_wrapped = True
        self._check_requested(wrapper.process_group)
        if self.requested is None:
            self.groups, self._agreed, self._steps = (wrapper.process_group,), False, None
        return True

    def _check_requested(self, group: ProcessGroup) -> None:
        """Refuse gates that learn from fewer processes than the weights do, or from others."""
        if self.requested is None:
            return
        ranks = [] if self.requested is False else dist.get_process_group_ranks(self.requested)
        around = dist.get_process_group_ranks(group)
        if len(around) > 1 and not set(around) <= set(ranks):
            asked = "process_group=False" if self.requested is False else f"a `process_group` of ranks {ranks}"
            raise RankwiseError(
                "Gates must be averaged over all processes that train the weights, but the pruner was made with "
                f"{asked}, and `DistributedDataParallel` averages over ranks {around}. Leave `process_group` out: "
                "the group of the wrapper is found."
            )

    def find_mesh(self, parameters: Iterable[nn.Parameter]) -> None:
        """If no group is known, take that of sharded parameters (FSDP2); called between steps."""
        if self.groups or self.requested is False or not (dist.is_available() and dist.is_initialized()):
            return
        mesh = mesh_of(parameters)
        if mesh is not None:
            self.groups = tuple(mesh.get_group(dim) for dim in range(mesh.ndim))
            if mesh.ndim > 1 and mesh.size() == dist.get_world_size() and dist.group.WORLD is not None:
                self.groups = (dist.group.WORLD,)

    def warn_if_alone(self) -> None:
        """Warn once if there are several processes and nothing says whether they train one model."""
        if self._warned or self.groups or self.requested is False:
            return
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._warned = True
            warnings.warn(
                f"This is one of {dist.get_world_size()} processes, but the model was not called through a "
                "`DistributedDataParallel` wrapper or sharded by `fully_shard`, so its gates learn from this process "
                "alone. If you average "
                "gradients in another way, pass `process_group=torch.distributed.group.WORLD` to the pruner; if each "
                "process trains a model of its own, pass `process_group=False`.",
                stacklevel=4,
            )

    def check_agreement(self, fingerprints: Callable[[], Mapping[str, int]], device: torch.device) -> None:
        """Raise if the fingerprints differ between ranks. Done once, because the host waits for the device."""
        if self._agreed:
            return
        own = fingerprints()
        table = torch.zeros(len(own), self.size, dtype=torch.long, device=device)
        table[:, self.rank] = torch.tensor(list(own.values()), device=device)
        self.sum(table)
        for name, values in zip(own, table.tolist(), strict=True):
            check_same(name, values)
        self._agreed = True

    def average(self, flat: Tensor, step: int, weights: Callable[[], Tensor | int] = int) -> Tensor:
        """The mean of `flat` over all ranks, which must be at the same step and have the same `weights`.

        Every rank makes this one collective call in every step, whatever its state, so that no rank waits forever.
        Steps are compared each time, and weights, as a number that the function returns, at steps 1, 2, 4, 8, ...
        """
        told = flat.new_zeros(2, self.size)
        # `fill_` because assignment would wait for the GPU
        told[0, self.rank].fill_(step % EXACT)
        if step & (step - 1) == 0:
            told[1, self.rank].fill_(weights() % EXACT)
        both = torch.cat([flat, told.flatten()])
        self.sum(both)
        flat, told = torch.split(both, [len(flat), told.numel()])
        # on a GPU they are checked one step later, when the copy has long arrived
        on_host = told.view(2, -1).to("cpu", non_blocking=True)
        self._steps = on_host, torch.cuda.current_stream(flat.device).record_event() if flat.is_cuda else None
        if not flat.is_cuda:
            self.check_steps()
        return flat / self.size

    def check_steps(self) -> None:
        """Raise if ranks were at different steps when they last averaged, and warn if they had different weights."""
        if self._steps is None:
            return
        told, event = self._steps
        self._steps = None
        if event is not None:
            event.synchronize()
        steps, weights = told.long().tolist()
        check_same("steps", steps)
        if len(set(weights)) > 1 and not self._warned:
            self._warned = True
            warnings.warn(
                f"All ranks must train the same weights, but those of {_first_two(weights)} differ in step "
                f"{steps[0] + 1:,}: their gradients are not averaged. Call the model through "
                "`DistributedDataParallel`, not the module inside of it; end `no_sync()` before the last "
                "backward pass of a step; begin with the same weights on every rank.",
                stacklevel=6,
            )


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module wraps a model for several devices and holds a list of its parameters."""
    # FSDP2 makes a subclass of each wrapped module's class
    return any(kind.__module__.startswith(WRAPPERS) for kind in type(module).__mro__)


def check_same(name: str, values: Sequence[int]) -> None:
    """Raise if `values`, one per rank, are not all the same."""
    if len(set(values)) == 1:
        return
    if name == "arguments":
        raise RankwiseError(
            "Every rank must make its pruner with the same model and arguments, but "
            f"{_first_two(values)} have different ones. Pass the same `seed`, `budget` and settings on every rank."
        )
    first = ", ".join(map(str, values[:8])) + (", ..." if len(values) > 8 else "")
    they = f"are at steps {first}" if name == "steps" else f"hold different gates ({_first_two(values)})"
    raise RankwiseError(
        f"All ranks must go through the same steps with the same gates, but they {they}. Load a checkpoint on every "
        "rank, or on the first rank before the model is wrapped in `DistributedDataParallel`, which sends it to all; "
        "with FSDP2, `set_model_state_dict` sends it (`broadcast_from_rank0=True`)."
    )


def _first_two(values: Sequence[int]) -> str:
    """The first two ranks whose values differ."""
    other = next(i for i, value in enumerate(values) if value != values[0])
    return f"ranks 0 and {other}"


def bit_sum(weights: Iterable[Tensor]) -> Tensor | int:
    """The sum of the bits of weights as whole numbers, the same in any order; 0 where they are shards."""
    sums: list[Tensor] = []
    for weight in weights:
        if mesh_of([weight]) is not None or not weight.is_floating_point():
            return 0
        whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
        sums.append(weight.detach().contiguous().view(whole).sum(dtype=torch.long))
    return torch.stack([each.to(sums[0].device) for each in sums]).sum() if sums else 0


def checksum(*tensors: Tensor) -> int:
    """A checksum of the contents of tensors; the host waits for the device."""
    value = 0
    for tensor in tensors:
        value = zlib.crc32(tensor.detach().cpu().contiguous().numpy().tobytes(), value)
    return value
