"""Which layers' weights are read behind their back, found in the source of a model's classes.

`nn.MultiheadAttention` and the fast path of `nn.TransformerEncoderLayer` do so: `F.linear(x, self.layer.weight)`. Such
layers must stay what they are. Code that reaches a weight through a variable is not seen. Code that only asks for a
weight's dtype or device (T5: `x.to(self.wo.weight.dtype)`) does no harm, as long as there is something to ask.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from torch import nn

_WEIGHT = re.compile(r"self\.([\w.]+)(\[.+\])?\.(?:weight|bias)")
_ASKED = re.compile(r"self\.([\w.]+)(\[.+\])?\.weight")
_ITEM = re.compile(r"self\.([\w.]+)\[.+\]")
_BUILDING = re.compile(r"__init__|_?init_weights|_?reset_parameters|_?tie_\w+|from_\w+|resize_\w+")
"""Functions that do not run in training, where reading a weight does no harm."""


@dataclass(frozen=True)
class _Code:
    """Every `self.x...` and `self.x[...]` in the code that a class runs after it is built, as text."""

    used: frozenset[str]
    asked: frozenset[str]
    """Those that are only asked for their dtype, device or type."""


def readers(model: nn.Module) -> dict[int, str]:
    """Modules whose weight or bias another module reads when it runs, by identity, and the class that does."""
    found: dict[int, str] = {}
    for module in model.modules():
        for text in _code(type(module)).used:  # type: ignore[arg-type]
            found |= {id(each): type(module).__name__ for each in _named(module, _WEIGHT.fullmatch(text))}
    return found


def answer(model: nn.Module) -> None:
    """Give a compact layer that has no weight of its own one of no elements, where the model asks for dtype or device.

    It moves and is cast with the layer, is not saved, and cannot be mistaken for the weight: it has no data.
    """
    for module in list(model.modules()):
        for text in _code(type(module)).asked:  # type: ignore[arg-type]
            for child in _named(module, _ASKED.fullmatch(text)):
                if not hasattr(child, "weight"):
                    child.register_buffer("weight", next(child.parameters()).detach().new_empty(0), persistent=False)


def indexed(model: nn.Module) -> set[int]:
    """Modules of which another module takes a single item when it runs, by identity."""
    found: set[int] = set()
    for module in model.modules():
        for text in _code(type(module)).used:  # type: ignore[arg-type]
            match = _ITEM.fullmatch(text)
            if match and (child := _child(module, match[1])) is not None:
                found.add(id(child))
    return found


def _named(module: nn.Module, match: re.Match[str] | None) -> Iterator[nn.Module]:
    """The modules whose weight a text names: `self.x.weight`, or every item where it is `self.x[i].weight`."""
    child = _child(module, match[1]) if match else None
    if match and child is not None:
        yield from child.children() if match[2] else [child]


def _child(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


@cache
def _code(cls: type[nn.Module]) -> _Code:
    used: set[str] = set()
    asked: set[str] = set()
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and not _BUILDING.fullmatch(function.name):
                for text, is_asked in _texts(function):
                    (asked if is_asked else used).add(text)
    return _Code(frozenset(used), frozenset(asked - used))


def _texts(function: ast.FunctionDef) -> Iterator[tuple[str, bool]]:
    """What the code names, and whether it only asks what that is."""
    own = function.args.args[0].arg if function.args.args else "self"
    for parent in ast.walk(function):
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.Attribute | ast.Subscript) and (text := ast.unparse(node)).startswith(own + "."):
                yield "self" + text.removeprefix(own), _asks(parent)


def _asks(parent: ast.AST) -> bool:
    if isinstance(parent, ast.Call):
        return isinstance(parent.func, ast.Name) and parent.func.id == "isinstance"
    return isinstance(parent, ast.Attribute) and parent.attr in ("dtype", "device")
