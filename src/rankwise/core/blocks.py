"""Blocks: the layers of a model that are called one after the other, each with the output of the one before.

They allow a model to be worked on one block at a time: what a block reads is all that has to be kept of what comes
before it. Nothing is assumed about the model; a forward pass shows which modules form such a chain.
Shapes: B = batch, T = tokens, D = width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from rankwise.errors import RankwiseError
from rankwise.measure import call_model, evaluating


class StopForward(Exception):  # noqa: N818 - no error
    """Ends a forward pass when everything that is needed has been seen."""


CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")
"""Arguments by which blocks of transformers remember earlier calls; without them a call can be repeated."""

NOT_A_CHAIN = (
    'A model is compressed block by block from disk if {}. Use --offload none (offload="none") with a device on which '
    "it fits, such as cpu."
)


@dataclass(frozen=True)
class Call:
    """What a block is called with, besides the hidden states that come first."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        kept = {name: None if name in CACHES else value for name, value in kwargs.items()}
        # some blocks get what `CACHES` name by position
        rest = tuple(None if hasattr(value, "get_seq_length") else value for value in args[1:])
        return cls(rest, {**kept, "use_cache": False} if "use_cache" in kept else kept)

    def __call__(self, block: nn.Module, x_BTD: Tensor) -> Tensor:
        return first_tensor(block(x_BTD, *self.args, **self.kwargs))


@dataclass(frozen=True)
class _Seen:
    """A call of a block in a forward pass."""

    name: str
    given: object
    call: Call
    returned: Any

    @property
    def output(self) -> object:
        return _first(self.returned)


def find_blocks(model: nn.Module, batch: Any) -> list[str]:
    """The names of the blocks of `model`, in the order in which `batch` passes through them; empty if there are none.

    They are the modules of an `nn.ModuleList`, the largest one, of which each is called once, is given as its first
    argument what the one before has returned, and gives the same again when it is called again.
    """
    return [each.name for each in _find_calls(model, batch)]


@torch.no_grad()
def _find_calls(model: nn.Module, batch: Any) -> list[_Seen]:
    """The call of each block."""
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 1}
    seen: dict[str, list[_Seen]] = {name: [] for name in lists}
    with ExitStack() as stack:
        for name, blocks in lists.items():
            for i, block in enumerate(blocks):
                before, after = _note_call(seen[name], f"{name}.{i}")
                # before inputs are moved to another device
                stack.callback(block.register_forward_pre_hook(before, with_kwargs=True, prepend=True).remove)
                stack.callback(block.register_forward_hook(after).remove)
        with evaluating(model):
            call_model(model, batch)

    def size(name: str) -> int:
        return sum(p.numel() for p in lists[name].parameters())

    for name in sorted((name for name in lists if _is_chain(seen[name], len(lists[name]))), key=size, reverse=True):
        with evaluating(model):
            if all(_repeats(model.get_submodule(each.name), each) for each in seen[name]):
                return seen[name]
    return []


def _note_call(calls: list[_Seen], name: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """Hooks before and after a block."""
    given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given.append((args, kwargs))

    def after(module: nn.Module, _: tuple[Any, ...], output: Any) -> None:
        args, kwargs = given.pop()
        # only hidden states that come as the first positional argument can be given again
        calls.append(_Seen(name, args[0] if args else None, Call.of(args, kwargs), output))

    return before, after


def _is_chain(calls: Sequence[_Seen], number: int) -> bool:
    """Whether each of `number` blocks was called once, with the output of the one before."""
    if len(calls) != number or len({each.name for each in calls}) != number:
        return False
    if not all(isinstance(each.given, Tensor) and isinstance(each.output, Tensor) for each in calls):
        return False
    return all(after.given is before.output for before, after in pairwise(calls))


def _repeats(block: nn.Module, seen: _Seen) -> bool:
    """Whether a block gives the same again."""
    assert isinstance(seen.given, Tensor) and isinstance(seen.output, Tensor)
    try:
        again = seen.call(block, seen.given)
    # a block that needs what was left out of its arguments fails in a way of its own
    except Exception:
        return False
    size = float(seen.output.abs().max())
    return again.shape == seen.output.shape and torch.allclose(again, seen.output, rtol=1e-2, atol=1e-2 * size)


def _first(output: object) -> object:
    return output[0] if isinstance(output, tuple | list) and output else output


def first_tensor(output: Any) -> Tensor:
    """The hidden states among what a block returns."""
    found = _first(output)
    assert isinstance(found, Tensor)
    return found


@torch.no_grad()
def record_calls(
    model: nn.Module, names: Sequence[str], batches: Sequence[Any]
) -> tuple[list[Tensor], list[list[Call]]]:
    """What the first block reads of each batch, and for each block and batch what else it is called with."""
    inputs: list[Tensor] = []
    calls: list[list[Call]] = [[] for _ in names]

    def hook(number: int) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if number == 0:
                inputs.append(args[0].detach())
            calls[number].append(Call.of(args, kwargs))
            if number == len(names) - 1:
                raise StopForward

        return note

    with ExitStack() as stack:
        for number, name in enumerate(names):
            block = model.get_submodule(name)
            stack.callback(block.register_forward_pre_hook(hook(number), with_kwargs=True).remove)
        with evaluating(model):
            for batch in batches:
                with suppress(StopForward):
                    call_model(model, batch)
    return inputs, calls


@contextmanager
def inputs_of(block: nn.Module, names: Sequence[str], *, last: str | None = None) -> Iterator[dict[str, Tensor]]:
    """Notes what the layers `names` of a block read in each call of it; a call stops at the layer `last`."""
    found: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found[name] = next(iter((*args, *kwargs.values())))
            if name == last:
                raise StopForward

        return note

    with ExitStack() as stack:
        for name in names:
            layer = block.get_submodule(name)
            stack.callback(layer.register_forward_pre_hook(hook(name), prepend=True, with_kwargs=True).remove)
        yield found


@contextmanager
def output_gradients(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Adds up g g^T of the gradients g of each block's outputs over the backward passes inside, by the block's name."""
    sums: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        def add(grad: Tensor) -> None:
            g_BD = grad.detach().float().flatten(0, -2)
            sums[name] = sums[name].addmm_(g_BD.t(), g_BD) if name in sums else g_BD.t() @ g_BD

        def watch(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            states = first_tensor(output)
            if states.requires_grad:
                states.register_hook(add)  # type: ignore[no-untyped-call]

        return watch

    with ExitStack() as stack:
        for name in names:
            stack.callback(model.get_submodule(name).register_forward_hook(hook(name)).remove)
        yield sums


class Chain:
    """The blocks of a model, which are run one at a time over many batches, and what is around them.

    To run what comes before and after them, other modules stand in for the blocks: they do nothing. So each block is
    needed only once for all batches, which counts where it has to be fetched first.

    Args:
        batch: one that shows the blocks; without any, or with blocks that hand on more than hidden states, the model
            is refused.
    """

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self.model = model
        seen = _find_calls(model, batch)
        self.names = [each.name for each in seen]
        self.lengths = [len(each.returned) if isinstance(each.returned, tuple) else None for each in seen]
        _, calls = self.start([batch])
        if not seen or any(not _same(call, each.call) for (call,), each in zip(calls, seen, strict=True)):
            rule = "its blocks, the layers of an `nn.ModuleList`, hand each other hidden states and nothing else"
            raise RankwiseError(NOT_A_CHAIN.format(f"{rule}, but those of {type(model).__name__} do not"))

    def start(self, batches: Sequence[Any]) -> tuple[list[Tensor], list[list[Call]]]:
        """What the first block reads of each batch, and for each block and batch what else it is called with."""
        with self.without_blocks():
            return record_calls(self.model, self.names, batches)

    def entry(self, batch: Any) -> tuple[Tensor, Call]:
        """What the first block reads of a batch, with its history, and what else it is called with."""
        found: list[tuple[Tensor, Call]] = []

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.append((args[0], Call.of(args, kwargs)))
            raise StopForward

        with self.without_blocks():
            self.model.get_submodule(self.names[0]).register_forward_pre_hook(note, with_kwargs=True)
            with suppress(StopForward):
                call_model(self.model, batch)
        return found[0]

    @contextmanager
    def without_blocks(self, lasts: Sequence[Tensor] | None = None) -> Iterator[None]:
        """Leave out the blocks; the last one gives one of `lasts` at each call, in their order, over and over."""
        given = cycle(lasts) if lasts is not None else None
        with ExitStack() as stack:
            for name, length in zip(self.names, self.lengths, strict=True):
                parent, key = self.model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
                block = parent._modules[key]
                assert block is not None
                is_last = name == self.names[-1]
                parent._modules[key] = _StandIn(block, length, given if is_last else None)
                stack.callback(parent._modules.__setitem__, key, block)
            yield

    @torch.no_grad()
    def run(self, batches: Sequence[Any]) -> list[Tensor]:
        """What the last block gives for each batch."""
        states, calls = self.start(batches)
        with evaluating(self.model):
            for name, some in zip(self.names, calls, strict=True):
                block = self.model.get_submodule(name)
                states = [call(block, x_BTD) for call, x_BTD in zip(some, states, strict=True)]
        return states


class _StandIn(nn.Module):
    """In the place of a block, gives what it reads, or the next of `outputs`."""

    def __init__(self, block: nn.Module, length: int | None, outputs: Iterator[Tensor] | None) -> None:
        super().__init__()
        # not as a child
        vars(self)["of"] = (block,)
        self.length, self.outputs = length, outputs

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # models may ask a block what it is
            return getattr(self.of[0], name)

    def forward(self, x_BTD: Tensor, *args: Any, **kwargs: Any) -> Any:
        x_BTD = x_BTD if self.outputs is None else next(self.outputs)
        return x_BTD if self.length is None else (x_BTD, *([None] * (self.length - 1)))


def _same(one: Call, other: Call) -> bool:
    """Whether two calls have the same arguments."""
    if one.kwargs.keys() != other.kwargs.keys() or len(one.args) != len(other.args):
        return False
    found, wanted = (tree_leaves((call.args, dict(call.kwargs))) for call in (one, other))
    return len(found) == len(wanted) and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b or a == b
        for a, b in zip(found, wanted, strict=True)
    )
