"""Where the blocks of a model lie: on disk, one at a time on the device, or on several devices, layer after layer.

In both cases the model is called as before: hooks of its blocks fetch what they need.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from rankwise.core.blocks import NOT_A_CHAIN, Chain
from rankwise.core.host_memory import release_mapped_pages
from rankwise.errors import RankwiseError
from rankwise.files import write_tensors

PLACED = "_rankwise_offload"
"""The attribute of a model whose blocks are on disk."""
MOST_OUTSIDE = 0.5
"""A model is offloaded if no larger share of it lies outside its blocks."""


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers of a module, each once."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def num_bytes(module: nn.Module) -> int:
    """The memory of a module's parameters and buffers."""
    return sum(tensor.nbytes for _, tensor in tensors_of(module))


def block_names(model: nn.Module) -> list[str]:
    """The names of the modules in the `nn.ModuleList` that holds most of the model; empty if there is none."""
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 1}
    if not lists:
        return []
    # of a list in a list the outer one, which comes first
    largest = max(lists, key=lambda name: num_bytes(lists[name]))
    return [f"{largest}.{key}" for key in lists[largest]._modules]


def offload_of(model: nn.Module) -> Offload | None:
    """How the blocks of a model are kept on disk; None if they are not."""
    found: Offload | None = vars(model).get(PLACED)
    return found


def device_of(model: nn.Module) -> torch.device:
    """The device on which a model computes; the first one, if there are several."""
    placed = offload_of(model)
    return next(model.parameters()).device if placed is None else placed.device


class Offload:
    """Keeps the blocks of a model off its device, but for the one that was used last; the rest of it is there.

    Weights that `from_pretrained` and `safetensors` load for a CPU are windows on their files, which take no memory
    until they are read, and give it back. So a model on the CPU is one on disk: a block is copied to the device when
    it is called, or by `fetch`, and the block before it is dropped. A block that was changed is written to a file by
    `keep`.

    Args:
        model: loaded on the CPU.
        device: where it computes. It may be the CPU too: then a block's copy is all that is in memory.
        folder: for files of blocks that were changed, and of activations; `close` removes what is in it.
    """

    def __init__(self, model: nn.Module, device: torch.device, folder: Path) -> None:
        self.model, self.device, self.names = model, device, block_names(model)
        blocks = [model.get_submodule(name) for name in self.names]
        inside = {id(tensor) for block in blocks for _, tensor in tensors_of(block)}
        outside = [tensor for _, tensor in tensors_of(model) if id(tensor) not in inside]
        size = sum(tensor.nbytes for tensor in outside)
        if not blocks or size > MOST_OUTSIDE * num_bytes(model):
            found = f"{type(model).__name__} has {f'{size / 2**20:,.0f} MiB outside of them' if blocks else 'none'}"
            raise RankwiseError(NOT_A_CHAIN.format(f"an `nn.ModuleList` of blocks holds most of it, but {found}"))
        for tensor in outside:
            tensor.data = tensor.data.to(device)
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(dir=folder))
        self.num_bytes = sum(map(num_bytes, blocks))
        """The size of all blocks."""
        self.largest = size + max(map(num_bytes, blocks))
        """Bytes of weights that are on the device at the same time, at most, but for copies."""
        self.current = ""
        """The name of the block on the device."""
        self.fetched = 0
        """Bytes that were copied to the device."""
        self._chain: Chain | None = None
        self._homes: dict[int, Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        for name, block in zip(self.names, blocks, strict=True):
            self._hooks.append(block.register_forward_pre_hook(self._hook(name, block), prepend=True))
        vars(model)[PLACED] = self

    def _hook(self, name: str, block: nn.Module) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            # a copy of a block has the hooks of the block
            if module is block:
                self.fetch(name)

        return hook

    def chain(self, batch: Any) -> Chain:
        """The model's blocks as a chain; `batch` shows it."""
        if self._chain is None:
            self._chain = Chain(self.model, batch)
        return self._chain

    def fetch(self, name: str) -> nn.Module:
        """The block of that name, on the device."""
        block = self.model.get_submodule(name)
        if name == self.current:
            return block
        self.put_back()
        # its weights may be trained later
        with torch.inference_mode(False), torch.no_grad():
            for _, tensor in tensors_of(block):
                self._homes[id(tensor)] = tensor.data
                tensor.data = tensor.data.to(self.device, copy=True)
                self.fetched += tensor.nbytes
        self.current = name
        return block

    def put_back(self) -> None:
        """Drop the copy of a block on the device; what was changed there since `keep` is lost."""
        if self.current:
            for _, tensor in tensors_of(self.model.get_submodule(self.current)):
                tensor.data = self._homes.pop(id(tensor), tensor.data)
                release_mapped_pages(tensor.data)
        self._homes, self.current = {}, ""

    def keep(self) -> None:
        """Write the block on the device to a file, from which it is read from now on."""
        named = dict(tensors_of(self.model.get_submodule(self.current)))
        path = self.folder / f"{self.current}.safetensors"
        # what is mapped from an earlier file stays as it is
        path.unlink(missing_ok=True)
        write_tensors(path, {name: tensor.detach().cpu() for name, tensor in named.items()}, durable=False)
        written = load_file(path)
        self._homes = {id(tensor): written[name] for name, tensor in named.items()}

    def close(self) -> None:
        """Take off the hooks; blocks are as they were kept, and files are removed that no tensor reads any more."""
        self.put_back()
        for hook in self._hooks:
            hook.remove()
        vars(self.model).pop(PLACED, None)
        self._chain = None
        # tensors that are mapped from a file keep it
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def answering(model: nn.Module, batches: Sequence[Any]) -> Iterator[None]:
    """Let `model` be called with `batches` in their order, once or over and over; of a model on disk each block is
    fetched only once for all of them.
    """
    placed = offload_of(model)
    if placed is None:
        yield
        return
    chain = placed.chain(batches[0])
    with chain.without_blocks(chain.run(batches)):
        yield


def spread(model: nn.Module, devices: Sequence[torch.device]) -> list[torch.device]:
    """Put blocks one after the other on several devices, about as many bytes on each; the rest goes to the first.

    What a block reads is moved to its device, and what the last one gives to the first device. Returns the device of
    each block.
    """
    names = block_names(model)
    if len(names) < len(devices):
        raise RankwiseError(
            f"A model on {len(devices)} devices must have as many blocks in an `nn.ModuleList`, but "
            f"{type(model).__name__} has {len(names)}. Give fewer devices."
        )
    blocks = [model.get_submodule(name) for name in names]
    sizes = [num_bytes(block) for block in blocks]
    places = [devices[number] for number in _shares(sizes, len(devices), num_bytes(model) - sum(sizes))]
    inside = {id(tensor): place for block, place in zip(blocks, places, strict=True) for _, tensor in tensors_of(block)}
    for _, tensor in tensors_of(model):
        tensor.data = tensor.data.to(inside.get(id(tensor), devices[0]))
    for block, place in zip(blocks, places, strict=True):
        block.register_forward_pre_hook(_mover(place), with_kwargs=True, prepend=True)
    blocks[-1].register_forward_hook(lambda module, args, output: _moved(output, devices[0]))
    return places


def _shares(sizes: Sequence[int], number: int, filled: int) -> list[int]:
    """For each block the number of its device, of which the first is `filled` already."""
    total, places = filled + sum(sizes), list[int]()
    for i, size in enumerate(sizes):
        last = places[-1] if places else 0
        # the device in whose share the middle of the block falls; none is left out
        fair = min(int(number * (filled + size / 2) / total), last + 1, number - 1)
        places.append(max(fair, last, number - (len(sizes) - i)))
        filled += size
    return places


def _moved(value: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)


def _mover(device: torch.device) -> Any:
    # a plain function, which copies of the block share
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return _moved(args, device), _moved(kwargs, device)

    return hook
