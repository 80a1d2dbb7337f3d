"""Parameters that lie in shards on several ranks (FSDP2): whole tensors, one at a time, and shards of new ones.

A sharded parameter is a DTensor between forward passes; within one, `fully_shard` has put the whole tensor in its
place. Gates are not sharded: their buffers are the same on all ranks. Whatever gathers here is a collective call, which
every rank of the mesh must make.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankwise.errors import PlanError, RankwiseError
from rankwise.swap import is_fully_sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def is_sharded(tensor: Tensor) -> bool:
    """Whether only a part of this tensor may be on this rank: it is a DTensor."""
    # by name, because importing the package takes long
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: Tensor) -> Tensor:
    """The tensor itself, or the whole of a sharded one."""
    if not is_sharded(tensor):
        return tensor
    device = tensor.device_mesh.device_type  # type: ignore[attr-defined]
    # offloaded shards are on the host, where a GPU's group cannot gather them
    tensor = tensor if tensor.device.type in (device, "meta") else tensor.to(device)
    with on_all_ranks():
        gathered: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return gathered


@contextmanager
def on_all_ranks() -> Iterator[None]:
    """Say what it means if a collective call fails."""
    try:
        yield
    except RuntimeError as error:
        raise RankwiseError(
            "All ranks must take part in the steps of a pruner, and in gating, evaluating and compacting a sharded "
            "model, but one has died or does something else. Make these calls on every rank, as in "
            "`small = pruner.compact()`; if a rank died, start all of them again from the last checkpoint."
        ) from error


def are_finite(tensors: Sequence[Tensor]) -> list[bool]:
    """Whether each tensor is finite, and all shards of it."""
    mesh = mesh_of(tensors)
    if mesh is None:
        return [bool(torch.isfinite(tensor).all()) for tensor in tensors]
    local: list[Tensor] = [tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors]  # type: ignore[attr-defined]
    bad = torch.stack([(~torch.isfinite(part)).any() for part in local]).int().to(mesh.device_type)
    with on_all_ranks():
        for dim in range(mesh.ndim):
            dist.all_reduce(bad, group=mesh.get_group(dim))
    return [not each for each in bad.tolist()]


def is_one_of_several() -> bool:
    """Whether this process is, or may become, one of several that train together."""
    return dist.is_available() and (dist.is_initialized() or dist.is_torchelastic_launched())


def make_shardable(module: nn.Module) -> None:
    """Store parameters row by row, as `fully_shard` wants them, if this process is one of several."""
    if is_one_of_several():
        for parameter in module.parameters():
            parameter.data = parameter.data.contiguous()


def mesh_of(parameters: Iterable[Tensor]) -> DeviceMesh | None:
    """The mesh of ranks over which parameters are sharded; None if they are not."""
    return next((parameter.device_mesh for parameter in parameters if is_sharded(parameter)), None)  # type: ignore[attr-defined]


def is_first_rank(mesh: DeviceMesh) -> bool:
    """Whether this rank is the first of a mesh: that of a compact model."""
    return int(mesh.mesh.flatten()[0]) == dist.get_rank()


def reshard(model: nn.Module) -> None:
    """Let every parameter be a shard again; after an evaluation those of the root still are whole."""
    for module in model.modules():
        if is_fully_sharded(module):
            module.reshard()  # type: ignore[operator]


def check_shards(model: nn.Module) -> None:
    """Refuse parameters that are sharded in other ways than by `fully_shard`."""
    by_fsdp = any(map(is_fully_sharded, model.modules()))
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise PlanError(
                f"`model` may be sharded by `fully_shard` (FSDP2) alone, but {name or 'it'} is a "
                "FullyShardedDataParallel (FSDP1), which takes weights apart. Use `fully_shard`, or `fsdp_version: 2` "
                "in Accelerate."
            )
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            *outer, last = parameter.placements  # type: ignore[attr-defined]
            if not (by_fsdp and last.is_shard() and all(each.is_replicate() for each in outer)):
                raise PlanError(
                    f"`model` may be sharded by `fully_shard` alone, but {name} is placed as "
                    f"{tuple(parameter.placements)}, as tensor parallelism does. Prune it without tensor parallelism, "  # type: ignore[attr-defined]
                    "and let the engine that serves the compact model split it."
                )


def unsharded(model: nn.Module) -> list[str]:
    """The names of trained parameters that are not sharded in a model of which others are."""
    if mesh_of(model.parameters()) is None:
        return []
    return [name for name, each in model.named_parameters() if each.requires_grad and not is_sharded(each)]


class StartingWeights:
    """What the weights of a model were when it was gated: all ranks must have begun with the same.

    `fully_shard` takes a part of each rank's weights and compares nothing. If a rank has other ones, because only the
    first has loaded a checkpoint or because its SVD has other signs, the parts do not fit together.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names: list[str] = []
        self.sums: list[Tensor] = []
        if is_one_of_several() and mesh_of(model.parameters()) is None:
            for name, parameter in model.named_parameters():
                self.names.append(name)
                values, dtype = parameter.detach(), torch.float64
                norm = torch.linalg.vector_norm(values, dtype=dtype)
                self.sums.append(torch.stack([values.sum(dtype=dtype), norm]).cpu())

    def differing(self, mesh: DeviceMesh) -> list[str]:
        """The names of parameters that other ranks of the mesh began with other values of."""
        if not self.names:
            return []
        own = torch.stack(self.sums).to(mesh.device_type)
        self.names, names, self.sums = [], self.names, []
        low, high = own.clone(), own.clone()
        with on_all_ranks():
            for dim in range(mesh.ndim):
                dist.all_reduce(low, dist.ReduceOp.MIN, group=mesh.get_group(dim))
                dist.all_reduce(high, dist.ReduceOp.MAX, group=mesh.get_group(dim))
        # rounding of an SVD is no difference
        is_other = ((high - low) > 1e-3 * high[:, 1:]).any(1)
        return [name for name, other in zip(names, is_other.tolist(), strict=True) if other]


@contextmanager
def gathered(modules: Iterable[nn.Module], *, to_host: bool = False) -> Iterator[None]:
    """For as long as this lasts, each module holds its own parameters whole: on the device, or on the host."""
    before = [(module, dict(module._parameters)) for module in modules]
    try:
        for module, parameters in before:
            for name, parameter in parameters.items():
                if parameter is not None and is_sharded(parameter):
                    tensor = full_tensor(parameter.detach())
                    tensor = tensor.cpu() if to_host else tensor
                    module._parameters[name] = nn.Parameter(tensor, parameter.requires_grad)
        yield
    finally:
        for module, parameters in before:
            module._parameters.update(parameters)


def host_copies(model: nn.Module, without: Collection[nn.Parameter], *, first: bool) -> dict[int, object]:
    """Whole copies of parameters and buffers, by the id of what they are made of: on the host, or on the meta device.

    Args:
        without: parameters of which no copy is needed.
        first: whether this is the rank that gets the values.
    """
    place, made = "cpu" if first else "meta", dict[int, object]()
    for parameter in model.parameters():
        if parameter not in without:
            tensor = full_tensor(parameter.detach()).to(place, copy=True)
            made[id(parameter)] = nn.Parameter(tensor, parameter.requires_grad)
    made |= {id(buffer): buffer.detach().to(place, copy=True) for buffer in model.buffers()}
    return made


def to_meta(modules: Iterable[nn.Module]) -> None:
    """Let modules hold nothing but shapes, and tensors that they share stay shared."""
    made: dict[int, Any] = {}
    for part in (part for module in modules for part in module.modules()):
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and not tensor.is_meta:
                    meta = tensor.detach().to("meta")
                    is_parameter = isinstance(tensor, nn.Parameter)
                    new = nn.Parameter(meta, tensor.requires_grad) if is_parameter else meta
                    # with the old one, so that no other gets its id
                    tensors[name] = made.setdefault(id(tensor), (new, tensor))[0]


class ShardGroups:
    """The groups in which `fully_shard` gathers the parameters of a model; gating gives them other parameters.

    torch has no public way to do so; what is used here is the same in torch 2.11 and 2.13.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        states = [module._get_fsdp_state() for module in model.modules() if is_fully_sharded(module)]  # type: ignore[operator]
        self.groups: list[Any] = []
        for state in dict.fromkeys(states):
            # one group in torch 2.11, several in 2.13
            several = getattr(state, "_fsdp_param_groups", None)
            groups = several if several is not None else [state._fsdp_param_group]
            self.groups += [group for group in groups if group is not None]
        self._group_of = {id(each.sharded_param): group for group in self.groups for each in group.fsdp_params}

    def replace(self, old: Sequence[Tensor], module: nn.Module) -> None:
        """Shard the parameters of `module` in the group that held the `old` ones, with the values of the first rank."""
        group = next((self._group_of[id(each)] for each in old if id(each) in self._group_of), None)
        if group is None:
            return
        from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ParamModuleInfo

        # a bias stays where it was
        gone = {id(each) for each in old} - {id(each) for each in self.model.parameters()}
        group.fsdp_params = [each for each in group.fsdp_params if id(each.sharded_param) not in gone]
        _send_from_first(group.mesh_info.mesh, [*module.parameters(), *module.buffers()])
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                place = (group.mesh_info, group.post_forward_mesh_info, group.device)
                policies = (group.mp_policy, group.offload_policy)
                made = FSDPParam(parameter, ParamModuleInfo(module, name), *place, None, *policies)
                made.init_dtype_attrs(group.mp_policy)
                group.fsdp_params.append(made)

    def find_again(self) -> None:
        """Look where in the model every parameter is now, because some belong to other modules than before."""
        homes: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in self.model.modules() if self.groups else ():
            for name, parameter in module._parameters.items():
                homes.setdefault(id(parameter), []).append((module, name))
        for group in self.groups:
            group.fsdp_params = [each for each in group.fsdp_params if id(each.sharded_param) in homes]
            for each in group.fsdp_params:
                (module, name), *others = homes[id(each.sharded_param)]
                info = each._module_info
                if info.module is not module or info.param_name != name:
                    each._post_load_hook_handle.remove()
                    register: Any = module.register_load_state_dict_post_hook
                    each._post_load_hook_handle = register(lambda *_, each=each: each.reset_sharded_param())
                each._module_info = replace(
                    info,
                    module=module,
                    param_name=name,
                    shared_modules=[other for other, _ in others],
                    shared_param_names=[other for _, other in others],
                )
            is_used = bool(group._module_to_pre_save_state_dict_hook_handle)
            for handles in (
                group._module_to_pre_save_state_dict_hook_handle,
                group._module_to_pre_load_state_dict_hook_handle,
            ):
                for handle in handles.values():
                    handle.remove()
                handles.clear()
            if is_used:
                group._register_state_dict_hooks()


def _send_from_first(mesh: DeviceMesh, tensors: Sequence[Tensor]) -> None:
    """Give tensors the values that they have on the first rank of the mesh, by one call for each of its dimensions."""
    flat = torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors])
    with on_all_ranks():
        for dim in range(mesh.ndim):
            group = mesh.get_group(dim)
            dist.broadcast(flat, dist.get_global_rank(group, 0), group=group)
    for tensor, part in zip(tensors, torch.split(flat, [tensor.nbytes for tensor in tensors]), strict=True):
        # a part may begin where no number of this dtype can
        tensor.detach().copy_(part.clone().view(tensor.dtype).view(tensor.shape))
