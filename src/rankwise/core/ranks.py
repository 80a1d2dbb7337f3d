"""The processes that train one model together: who they are, and whether they agree.

Each moves its gates by itself, from gradients that are averaged over all of them. That holds them together for as
long as they start from the same state, so the state is compared at the first step, and the number of steps at each.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rankwise.errors import InvalidTypeError, RankwiseError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    AskedGroup: TypeAlias = ProcessGroup | Literal[False] | None

EXACT = 2**24
"""Whole numbers below this are exact in float32."""


class Ranks:
    """The process group over which gradients are averaged.

    Args:
        asked: that group; False for a process on its own; None for the group of the `DistributedDataParallel` that
            wraps the model, found when the model is first called through it, or for that of sharded parameters.
    """

    def __init__(self, asked: AskedGroup = None) -> None:
        if asked is not None and asked is not False and not isinstance(asked, getattr(dist, "ProcessGroup", ())):
            raise InvalidTypeError(
                "`process_group` must be a torch.distributed.ProcessGroup that this process belongs to, False or None, "
                f"but is {asked!r} instead."
            )
        self.asked = asked
        self.group: ProcessGroup | None = asked or None
        self.wrapped = False
        """Whether a wrapper was found: it may overwrite buffers before every forward pass."""
        self._seen: WeakSet[nn.Module] = WeakSet()
        self._agreed = self._warned = False
        self._steps: tuple[Tensor, torch.cuda.Event | None] | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> Ranks:
        # a group cannot be copied, and a copy of the model is wrapped anew
        return Ranks(self.asked)

    def __reduce__(self) -> tuple[Any, ...]:
        return Ranks, (False if self.asked is False else None,)

    @property
    def size(self) -> int:
        """How many processes average their gradients."""
        return 1 if self.group is None or not dist.is_initialized() else dist.get_world_size(self.group)

    def meet(self, module: nn.Module) -> bool:
        """Look for a wrapper around `module`; call it in the forward pass. Whether a new one was found."""
        wrapper = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
        if wrapper is None or wrapper in self._seen:
            return False
        self._seen.add(wrapper)
        if not any(inside is module for inside in wrapper.module.modules()):
            return False
        self.wrapped = True
        if self.asked is None:
            self.group, self._agreed, self._steps = wrapper.process_group, False, None
        return True

    def find_mesh(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take the group from sharded parameters (FSDP2), where none is known; call it between two steps."""
        if self.group is not None or self.asked is False or not (dist.is_available() and dist.is_initialized()):
            return
        for mesh in (getattr(parameter, "device_mesh", None) for parameter in parameters):
            if mesh is not None:
                is_world = mesh.size() == dist.get_world_size()
                self.group = dist.group.WORLD if is_world else mesh.get_group() if mesh.ndim == 1 else None
            return

    def warn_if_alone(self) -> None:
        """Once: this process is one of several, and nothing says whether they train one model."""
        if self._warned or self.group is not None or self.asked is False:
            return
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._warned = True
            warnings.warn(
                f"This is one of {dist.get_world_size()} processes, but the model was not called through a "
                "`DistributedDataParallel` wrapper, so its gates learn from this process alone. If you average "
                "gradients in another way, pass `process_group=torch.distributed.group.WORLD` to the pruner; if each "
                "process trains a model of its own, pass `process_group=False`.",
                stacklevel=4,
            )

    def compare(self, find: Callable[[], Mapping[str, int]], device: torch.device) -> None:
        """Once: refuse ranks whose facts differ. The host waits for it."""
        if self._agreed:
            return
        facts = find()
        table = torch.zeros(len(facts), self.size, dtype=torch.long, device=device)
        table[:, dist.get_rank(self.group)] = torch.tensor(list(facts.values()), device=device)
        dist.all_reduce(table, group=self.group)
        for name, values in zip(facts, table.tolist(), strict=True):
            check_same(name, values)
        self._agreed = True

    def average(self, flat: Tensor, step: int) -> Tensor:
        """The mean of `flat` over all ranks, which must be at the same step.

        One call to the others, whatever the state of this rank, so that none waits for one that is elsewhere.
        """
        steps = flat.new_zeros(self.size)
        # not by assignment, for which a GPU is waited for
        steps[dist.get_rank(self.group)].fill_(step % EXACT)
        both = torch.cat([flat, steps])
        dist.all_reduce(both, group=self.group)
        flat, steps = torch.split(both, [len(flat), self.size])
        # on a GPU they are looked at one step later, when they have long arrived
        there = steps.to("cpu", non_blocking=True)
        self._steps = there, torch.cuda.current_stream(flat.device).record_event() if flat.is_cuda else None
        if not flat.is_cuda:
            self.check_steps()
        return flat / self.size

    def check_steps(self) -> None:
        """Refuse ranks that were at different steps when they last averaged."""
        if self._steps is None:
            return
        steps, event = self._steps
        self._steps = None
        if event is not None:
            event.synchronize()
        check_same("steps", [int(step) for step in steps])


def check_same(name: str, values: Sequence[int]) -> None:
    """Refuse ranks that differ in what `values` holds, one of each."""
    if len(set(values)) == 1:
        return
    if name == "arguments":
        raise RankwiseError(
            "Every rank must make its pruner with the same model and arguments, but "
            f"{_groups(values)} have different ones. Pass the same `seed`, `budget` and settings on every rank."
        )
    first = ", ".join(map(str, values[:8])) + (", ..." if len(values) > 8 else "")
    they = f"are at steps {first}" if name == "steps" else f"hold different gates ({_groups(values)})"
    raise RankwiseError(
        f"All ranks must go through the same steps with the same gates, but they {they}. Load a checkpoint on every "
        "rank, or on the first rank before the model is wrapped in `DistributedDataParallel`, which sends it to all."
    )


def _groups(values: Sequence[int]) -> str:
    other = next(i for i, value in enumerate(values) if value != values[0])
    return f"ranks 0 and {other}"


def checksum(*tensors: Tensor) -> int:
    """A number that differs where tensors do; the host waits for it."""
    value = 0
    for tensor in tensors:
        value = zlib.crc32(tensor.detach().cpu().contiguous().numpy().tobytes(), value)
    return value
