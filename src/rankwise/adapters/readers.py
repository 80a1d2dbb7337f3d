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
_BUILDING = re.compile(r"__init__|_?init_weights|_?reset_parameters|_?tie_\w+|from_\w+")
"""Functions that run before training, when reading a weight does no harm."""


def readers(model: nn.Module) -> dict[int, str]:
    """Modules whose weight or bias another module reads when it runs, by identity, and the class that does."""
    found: dict[int, str] = {}
    for module in model.modules():
        for path, indexed in _read_by(type(module)):  # type: ignore[arg-type]
            try:
                read = module.get_submodule(path)
            except AttributeError:
                continue
            for each in read.children() if indexed else [read]:
                found[id(each)] = type(module).__name__
    return found


@cache
def _read_by(cls: type[nn.Module]) -> frozenset[tuple[str, bool]]:
    """The x of every `self.x.weight`, and whether it is an item of x, in code that runs after a class is built."""
    found: set[tuple[str, bool]] = set()
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and not _BUILDING.fullmatch(function.name):
                texts = (ast.unparse(node) for node in ast.walk(function) if isinstance(node, ast.Attribute))
                found |= {(match[1], bool(match[2])) for text in texts if (match := _WEIGHT.fullmatch(text))}
    return frozenset(found)
