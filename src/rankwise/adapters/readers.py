"""Layers of a model that must stay what they are, because code around them reads more than what they give.

`nn.MultiheadAttention` and the fast path of `nn.TransformerEncoderLayer` do so: `F.linear(x, self.layer.weight)`. Code
that only asks for a weight's dtype or device (T5: `x.to(self.wo.weight.dtype)`) does no harm, as long as there is
something to ask. Code that does one thing with an `nn.Linear` and another with other modules does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from rankwise.adapters.kinds import WHOLES, kind_of
from rankwise.adapters.mentions import ALL, EACH, HELD, Manner, Path, mentions

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class _Found(NamedTuple):
    """A module that code inside another one names."""

    by: nn.Module
    way: tuple[nn.Module, ...]
    """Modules that lie between the two."""
    module: nn.Module
    rest: Path
    """What is wanted of it."""
    manner: Manner


def readers(model: nn.Module) -> dict[int, str]:
    """Layers that another module reads when it runs, by identity, and how."""
    found: dict[int, str] = {}
    for by, _, module, rest, manner in _named(model):
        name = type(by).__name__
        if manner == "tested" and not rest:
            found[id(module)] = f"{name} asks for its type"
        elif rest[:1] in (("weight",), ("bias",)) and not _asks(rest, manner):
            found[id(module)] = f"{name} reads its weight itself"
    return found


def answer(model: nn.Module) -> None:
    """Give a compact layer that has no weight of its own one of no elements, where the model asks for dtype or device.

    It moves and is cast with the layer, is not saved, and cannot be mistaken for the weight: it has no data.
    """
    for _, _, module, rest, manner in list(_named(model)):
        if _asks(rest, manner) and kind_of(module) in WHOLES and not hasattr(module, "weight"):
            module.register_buffer("weight", next(module.parameters()).detach().new_empty(0), persistent=False)


def only_called(model: nn.Module) -> set[int]:
    """Modules that are seen to be called, and of which nothing else is made, by identity."""
    called = {id(model)}
    other: set[int] = set()
    for _, way, module, rest, manner in _named(model):
        other.update(map(id, way))
        if rest in (("forward",), ("__call__",)) or (manner == "called" and not rest):
            called.add(id(module))
        elif not rest and manner == "tested":
            other.add(id(module))
        elif not rest and manner == "handed on":
            other.update(map(id, _items(module)))
    for module in model.modules():
        # a sequence calls its children; those of a list that is the whole model are called by someone outside
        passes_on = type(module) in CONTAINERS or type(module).forward is nn.Sequential.forward
        if id(module) in called and passes_on:
            called.update(map(id, module.children()))
    # T5 holds its table of words under a name that no code calls, and under others that it does
    pairs = {id(module): _weights(module) for module in model.modules() if type(module) is nn.Sequential}
    known = {pairs[key] for key in called & pairs.keys()}
    called.update(key for key, weights in pairs.items() if weights in known)
    return called - other


def _weights(module: nn.Module) -> frozenset[int]:
    return frozenset(map(id, module.parameters()))


def _items(module: nn.Module) -> Iterator[nn.Module]:
    """The module itself, and what a container holds."""
    yield module
    if isinstance(module, CONTAINERS):
        for child in module.children():
            yield from _items(child)


def _asks(rest: Path, manner: Manner) -> bool:
    """Whether only the kind of a weight is wanted."""
    return rest[:1] == ("weight",) and (rest[1:2] in (("dtype",), ("device",)) or (manner == "asked" and not rest[1:]))


def _named(model: nn.Module) -> Iterator[_Found]:
    for module in model.modules():
        for path, manner in mentions(type(module)):  # type: ignore[arg-type]
            for way, rest in _along((), module, path):
                if way:
                    yield _Found(module, way[:-1], way[-1], rest, manner)


def _along(way: tuple[nn.Module, ...], module: nn.Module, path: Path) -> Iterator[tuple[tuple[nn.Module, ...], Path]]:
    """The modules that a path leads through, and what is left of it behind the last of them."""
    first, rest = path[:1], path[1:]
    if first in ((EACH,), (ALL,)):
        children = list(module.children())
    elif first and (child := module._modules.get(first[0])) is not None:
        children = [child]
    else:
        yield way, tuple(part for part in path if part != HELD)
        return
    for child in children:
        yield from _along((*way, child), child, rest)
        if first == (ALL,):
            yield from _along((*way, child), child, path)
