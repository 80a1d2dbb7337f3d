"""Blocks: the layers of a model that are called one after the other, each with the output of the one before.

They allow a model to be worked on one block at a time: what a block reads is all that has to be kept of what comes
before it. Nothing is assumed about the model; a forward pass shows which modules form such a chain.
Shapes: B = batch, T = tokens, D = width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.measure import call_model, evaluating


class StopForward(Exception):  # noqa: N818 - no error
    """Ends a forward pass when everything that is needed has been seen."""


CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")
"""Arguments by which blocks of transformers remember earlier calls; without them a call can be repeated."""


@dataclass(frozen=True)
class Call:
    """What a block is called with, besides the hidden states that come first."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        kept = {name: None if name in CACHES else value for name, value in kwargs.items()}
        return cls(args[1:], {**kept, "use_cache": False} if "use_cache" in kept else kept)

    def __call__(self, block: nn.Module, x_BTD: Tensor) -> Tensor:
        return first_tensor(block(x_BTD, *self.args, **self.kwargs))


@dataclass(frozen=True)
class _Seen:
    """A call of a block in a forward pass."""

    name: str
    given: object
    call: Call
    output: object


@torch.no_grad()
def find_blocks(model: nn.Module, batch: Any) -> list[str]:
    """The names of the blocks of `model`, in the order in which `batch` passes through them; empty if there are none.

    They are the modules of an `nn.ModuleList`, the largest one, of which each is called once, is given as its first
    argument what the one before has returned, and gives the same again when it is called again.
    """
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 1}
    seen: dict[str, list[_Seen]] = {name: [] for name in lists}
    with ExitStack() as stack:
        for name, blocks in lists.items():
            for i, block in enumerate(blocks):
                hook = _note_call(seen[name], f"{name}.{i}")
                stack.callback(block.register_forward_hook(hook, with_kwargs=True).remove)
        with evaluating(model):
            call_model(model, batch)

    def size(name: str) -> int:
        return sum(p.numel() for p in lists[name].parameters())

    for name in sorted((name for name in lists if _is_chain(seen[name], len(lists[name]))), key=size, reverse=True):
        with evaluating(model):
            if all(_repeats(model.get_submodule(each.name), each) for each in seen[name]):
                return [each.name for each in seen[name]]
    return []


def _note_call(calls: list[_Seen], name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        # only hidden states that come as the first positional argument can be given again
        calls.append(_Seen(name, args[0] if args else None, Call.of(args, kwargs), _first(output)))

    return hook


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
