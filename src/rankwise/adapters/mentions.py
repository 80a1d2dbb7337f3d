"""What the code of a module does with the modules inside it, found in the source of its class.

Variables are followed within a function: `layer = self.layer`, `for layer in self.layers`, `down, up = self.pair`.
What other functions do with a module that is handed to them is not.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, Literal, NamedTuple

from torch import nn

Path = tuple[str, ...]
"""From the module down, part by part, as in `self.layers[0].weight`: ("layers", EACH, "weight")."""
EACH, ALL, HELD = "*", "**", "[]"
"""In a path: any child; anything inside; at the end: a Python collection of what the path before it names."""
LONGEST = 8
"""Parts of a path, for code such as `node = node.next`."""

Manner = Literal["called", "asked", "tested", "held", "handed on"]
"""`asked`: for a type that is no layer's. `tested`: for one that pruning changes. `held`: nothing is done with it."""
TYPES = {"Linear", "Embedding", "Sequential"}
"""What layers are before and after pruning."""
OURS = "rankwise"
"""Our own models hand layers to kernels, which take a pair as one, and know what pruning makes of it."""
NAMING = {"items": "values", "named_children": "children", "named_modules": "modules"}
"""Methods that give names as well."""
HARMLESS = {"len", "hasattr", "type", "id", "print", "bool", "repr", "str"}
_BUILDING = re.compile(r"_?init_weights|_?reset_parameters|_?tie_\w+|from_\w+|resize_\w+|set_\w+")
"""Functions that do not run in training, besides those that `__init__` calls."""
_HOLDING = (
    *(ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.For, ast.comprehension, ast.Return, ast.Expr, ast.Delete),
    *(ast.If, ast.IfExp, ast.While, ast.Assert, ast.UnaryOp, ast.Compare, ast.FormattedValue),
)


class Mention(NamedTuple):
    """A place where code names what is inside a module."""

    path: Path
    manner: Manner


@cache
def mentions(cls: type[nn.Module]) -> list[Mention]:
    """What a class does with the modules inside it, in all functions but those that build it."""
    bases = cls.__mro__[: cls.__mro__.index(nn.Module)]
    bases = tuple(base for base in bases if base.__module__ != nn.Sequential.__module__)
    running, building = _reached(bases, "forward", "__call__"), _reached(bases, "__init__")
    found: set[Mention] = set()
    for base in bases:
        for function in _functions(base):
            runs = function.name in running
            if not _BUILDING.fullmatch(function.name) and (runs or function.name not in building):
                found |= _mentions(base, function, runs=runs)
    return sorted(found)


def _mentions(base: type, function: ast.FunctionDef, *, runs: bool) -> set[Mention]:
    package = base.__module__.partition(".")[0]
    found = _Reading(function, _own(function)).found
    if not runs:
        found = {mention for mention in found if _is_plain(mention)}
    if package == OURS:
        return {Mention(path, "called" if manner == "handed on" else manner) for path, manner in found}
    if runs:
        helpers = _helpers(function, getattr(sys.modules.get(base.__module__), "__dict__", {}), package, set())
        found |= {Mention((ALL,), "tested") for helper in helpers if _Reading(helper, "").tests}
    return found


def _is_plain(mention: Mention) -> bool:
    """Whether a mention counts in any function: one that may mean any layer counts only where it is run."""
    return mention.path[:1] != (EACH,) and ALL not in mention.path and mention.manner != "tested"


@cache
def _functions(cls: type) -> list[ast.FunctionDef]:
    return [node for node in getattr(_parsed(cls), "body", []) if isinstance(node, ast.FunctionDef)]


@cache
def _parsed(thing: type | Callable[..., Any]) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None


def _reached(bases: tuple[type, ...], *first: str) -> set[str]:
    """Names of functions, and of those that they call by name."""
    found: set[str] = set()
    waiting = list(first)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        functions = [function for base in bases for function in _functions(base) if function.name == name]
        for function in functions:
            nodes = (node for node in ast.walk(function) if isinstance(node, ast.Attribute))
            waiting += [node.attr for node in nodes if ast.unparse(node.value) in (_own(function), "super()")]
    return found


def _helpers(function: ast.AST, namespace: dict[str, Any], package: str, seen: set[object]) -> Iterator[ast.AST]:
    """Functions of the same package that a function calls by name, and those that they call."""
    for node in ast.walk(function):
        helper = namespace.get(node.func.id) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
        if not inspect.isfunction(helper) or helper in seen or helper.__module__.partition(".")[0] != package:
            continue
        seen.add(helper)
        tree = _parsed(helper)
        if tree is not None:
            yield tree
            yield from _helpers(tree, helper.__globals__, package, seen)


def _own(function: ast.FunctionDef) -> str:
    return function.args.args[0].arg if function.args.args else "self"


class _Reading:
    """A function read: which paths its variables stand for, and what it does with them."""

    def __init__(self, function: ast.AST, own: str) -> None:
        self.own = own
        self.names: dict[str, set[Path]] = defaultdict(set)
        self.found: set[Mention] = set()
        self.tests = False
        nodes = list(ast.walk(function))
        # more than once: a variable may stand for another that is bound further down
        for _ in range(3):
            for node in nodes:
                self._bind(node)
        for node in nodes:
            self._test(node)
            for child in ast.iter_child_nodes(node):
                paths = self.paths(child)
                # what contains it is judged in its place
                if paths and not self.paths(node):
                    self.found |= {Mention(path, _manner(child, node)) for path in paths}

    def paths(self, node: ast.AST) -> set[Path]:
        """What an expression stands for."""
        match node:
            case ast.Name(id=name):
                return {()} if name == self.own else self.names[name]
            case ast.Attribute(value=value, attr=name):
                return self.paths(value) if name == "_modules" else self._longer(self.paths(value), name)
            case ast.Subscript(value=value, slice=ast.Slice()):
                return self.paths(value)
            case ast.Subscript(value=value) | ast.Starred(value=value):
                return self._items(self.paths(value))
            case ast.IfExp(body=body, orelse=other):
                return self.paths(body) | self.paths(other)
            case ast.BoolOp(values=values):
                return self._of_all(values)
            case ast.NamedExpr(value=value):
                return self.paths(value)
            case ast.List(elts=values) | ast.Tuple(elts=values) | ast.Set(elts=values):
                return self._longer(self._of_all(values), HELD)
            case ast.ListComp(elt=value) | ast.GeneratorExp(elt=value):
                return self._longer(self.paths(value), HELD)
            case ast.Call(func=ast.Attribute(value=value, attr=name)):
                return self._given_by(name, self.paths(value))
            case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(name)), *_]):
                return self._longer(self.paths(value), name)
            case ast.Call(func=ast.Name(id=name), args=values):
                return self._made_by(name, self._of_all(values))
        return set()

    def _given_by(self, method: str, paths: set[Path]) -> set[Path]:
        match method:
            case "children" | "values":
                return paths
            case "modules":
                return self._longer(paths, ALL, HELD)
            case _ if method in NAMING:
                return self._longer(self._items(self._given_by(NAMING[method], paths)), HELD, HELD)
            case "get_submodule":
                return self._longer(paths, ALL)
        return set()

    def _made_by(self, function: str, paths: set[Path]) -> set[Path]:
        match function:
            case "list" | "tuple" | "reversed" | "iter" | "sorted":
                return paths
            case "enumerate" | "zip":
                return self._longer(self._items(paths), HELD, HELD)
            case "next" | "getattr":
                return self._items(paths)
        return set()

    def _of_all(self, nodes: Iterable[ast.AST]) -> set[Path]:
        return set().union(*map(self.paths, nodes))

    def _longer(self, paths: set[Path], *parts: str) -> set[Path]:
        named = parts[0] not in (HELD, EACH, ALL)
        return {(*path, *parts) for path in paths if len(path) < LONGEST and not (named and path[-1:] == (HELD,))}

    def _items(self, paths: set[Path]) -> set[Path]:
        whole = {path for path in paths if path[-1:] != (HELD,)}
        items = self._longer(whole, EACH)
        self.found |= {Mention(path, "held") for path in items}
        return items | {path[:-1] for path in paths - whole}

    def _bind(self, node: ast.AST) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._name(target, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
                self._name(target, value)
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                self._loop(target, value)

    def _loop(self, target: ast.AST, value: ast.expr) -> None:
        """A variable stands for what is in a collection."""
        match target, value:
            case ast.Tuple(elts=[_, each]), ast.Call(func=ast.Name(id="enumerate"), args=[inner, *_]):
                self._loop(each, inner)
            case ast.Tuple(elts=targets), ast.Call(func=ast.Name(id="zip"), args=parts) if len(targets) == len(parts):
                for each, part in zip(targets, parts, strict=True):
                    self._loop(each, part)
            case ast.Tuple(elts=[_, each]), ast.Call(func=ast.Attribute(value=inner, attr=name)) if name in NAMING:
                self._stand(each, self._items(self._given_by(NAMING[name], self.paths(inner))))
            case _:
                self._stand(target, self._items(self.paths(value)))

    def _name(self, target: ast.AST, value: ast.expr) -> None:
        match target, value:
            case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
                for each, part in zip(targets, values, strict=True):
                    self._name(each, part)
            case _:
                self._stand(target, self.paths(value))

    def _stand(self, target: ast.AST, paths: set[Path]) -> None:
        match target:
            case ast.Name(id=name):
                self.names[name] |= paths
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                items = self._items(paths)
                for each in targets:
                    if isinstance(each, ast.Starred):
                        self._stand(each.value, self._longer(items, HELD))
                    else:
                        self._stand(each, items)

    def _test(self, node: ast.AST) -> None:
        """Code that does one thing with a layer and another with what takes its place."""
        match node:
            case ast.Call(func=ast.Name(id="isinstance"), args=[subject, types]):
                kinds: list[ast.AST] = [types]
            case ast.Compare(left=ast.Call(func=ast.Name(id="type"), args=[subject]), comparators=types):
                kinds = list(types)
            case ast.Match(subject=subject, cases=cases):
                kinds = [case.pattern for case in cases]
            case _:
                return
        parts = [part for kind in kinds for part in ast.walk(kind)]
        if TYPES & {getattr(part, "attr", getattr(part, "id", None)) for part in parts}:
            self.tests = True
            self.found |= {Mention(path, "tested") for path in self.paths(subject) or {(ALL,)}}


def _manner(node: ast.AST, parent: ast.AST) -> Manner:
    if isinstance(parent, ast.Call):
        if parent.func is node:
            return "called"
        name = parent.func.id if isinstance(parent.func, ast.Name) else ""
        return "asked" if name == "isinstance" else "held" if name in HARMLESS else "handed on"
    return "held" if isinstance(parent, _HOLDING) else "handed on"
