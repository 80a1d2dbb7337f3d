"""Which layers' weights are read behind their back, found in the source of a model's classes.

`nn.MultiheadAttention` and the fast path of `nn.TransformerEncoderLayer` do so: `F.linear(x, self.layer.weight)`. Such
layers must stay what they are. Code that reaches a weight through a variable is not seen.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from functools import cache

from torch import nn

_WEIGHT = re.compile(r"self\.([\w.]+)(\[.+\])?\.(?:weight|bias)")
_ITEM = re.compile(r"self\.([\w.]+)\[.+\]")
_BUILDING = re.compile(r"__init__|_?init_weights|_?reset_parameters|_?tie_\w+|from_\w+")
"""Functions that run before training, when reading a weight does no harm."""


def readers(model: nn.Module) -> dict[int, str]:
    """Modules whose weight or bias another module reads when it runs, by identity, and the class that does."""
    found: dict[int, str] = {}
    for module in model.modules():
        for text in _attributes(type(module)):  # type: ignore[arg-type]
            match = _WEIGHT.fullmatch(text)
            read = _child(module, match[1]) if match else None
            if match and read is not None:
                found |= {id(each): type(module).__name__ for each in (read.children() if match[2] else [read])}
    return found


def indexed(model: nn.Module) -> set[int]:
    """Modules of which another module takes a single item when it runs, by identity."""
    found: set[int] = set()
    for module in model.modules():
        for text in _attributes(type(module)):  # type: ignore[arg-type]
            match = _ITEM.fullmatch(text)
            if match and (child := _child(module, match[1])) is not None:
                found.add(id(child))
    return found


def _child(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


@cache
def _attributes(cls: type[nn.Module]) -> frozenset[str]:
    """Every `self.x...` and `self.x[...]` in the code that a class runs after it is built, as text."""
    found: set[str] = set()
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and not _BUILDING.fullmatch(function.name):
                found |= _texts(function)
    return frozenset(found)


def _texts(function: ast.FunctionDef) -> set[str]:
    own = function.args.args[0].arg if function.args.args else "self"
    nodes = (node for node in ast.walk(function) if isinstance(node, ast.Attribute | ast.Subscript))
    texts = (ast.unparse(node) for node in nodes)
    return {"self" + text.removeprefix(own) for text in texts if text.startswith(own + ".")}
