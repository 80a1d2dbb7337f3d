"""A plan for any `nn.Module`: every linear layer and embedding found, tied weights once.

What cannot be gated safely is left out, with a word.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from functools import cache

from torch import nn
from torch.nn.utils import parametrize

from rankwise.core.layers import GatedLayer
from rankwise.core.plan import LeftOut, Plan, Site, Use, UseKind, pair
from rankwise.errors import PlanError
from rankwise.modules import LowRankHead

Pattern = str | Sequence[str]
"""A regular expression that a module's whole name must match, or names: each matches itself and as a last part."""

_WHOLES: tuple[UseKind, ...] = ("linear-pair", "embedding-pair", "low-rank-head")
_WEIGHT = re.compile(r"self\.([\w.]+)\.(?:weight|bias)")
_NOT_FORWARD = re.compile(r"__init__|_?init_weights|_?reset_parameters|_?tie_\w+|from_\w+")


def find_plan(model: nn.Module, include: Pattern | None = None, exclude: Pattern = ()) -> Plan:
    """Plan every linear layer, embedding and low-rank pair of `model` whose name fits."""
    if next(model.parameters(), None) is None:
        raise PlanError(f"The model must have parameters, but {type(model).__name__} has none.")
    if any(isinstance(module, GatedLayer) for module in model.modules()):
        raise PlanError("The model must not be gated yet, but is. Use the pruner that gated it, or plan a fresh model.")
    uses, refused = _uses(model, include, exclude)
    sites, unsafe = _sites(model, uses, refused)
    left_out = [LeftOut(n, _params(model.get_submodule(n)), reason) for n, reason in {**refused, **unsafe}.items()]
    return Plan(tuple(sites), tuple(left_out))


def _uses(model: nn.Module, include: Pattern | None, exclude: Pattern) -> tuple[list[Use], dict[str, str]]:
    """Modules that can be gated, and why the others with weights cannot."""
    uses: list[Use] = []
    refused: dict[str, str] = {}
    kinds = {name: _kind(module) for name, module in model.named_modules()}
    wholes = [model.get_submodule(name) for name, kind in kinds.items() if kind in _WHOLES]
    parts = {id(child) for whole in wholes for child in whole.children()}
    readers = _readers(model)
    for name, kind in kinds.items():
        module = model.get_submodule(name)
        if id(module) in parts:
            continue
        if kind is None:
            if any(p.dim() >= 2 for p in module.parameters(recurse=False)):
                refused[name] = _unknown(module)
        elif include is not None and not matches(name, include):
            refused[name] = "not in `include`"
        elif matches(name, exclude):
            refused[name] = "in `exclude`"
        elif id(module) in readers:
            refused[name] = f"{readers[id(module)]} reads its weight itself"
        elif any(parameter.numel() == 0 for parameter in module.parameters()):
            refused[name] = "it is empty"
        else:
            uses.append(Use(name, kind))
    return uses, refused


def _kind(module: nn.Module) -> UseKind | None:
    """How a module uses a matrix, if it does so as PyTorch's own layers do."""
    if isinstance(module, LowRankHead):
        return "low-rank-head"
    if _is_pair(module):
        return "embedding-pair" if isinstance(pair(module)[0], nn.Embedding) else "linear-pair"
    if parametrize.is_parametrized(module):
        return None
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return "linear"
    if isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward:
        return "embedding" if module.max_norm is None and not module.sparse else None
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf") and getattr(module.weight, "ndim", 0) == 2:
        return "conv1d"
    return None


def _is_pair(module: nn.Module) -> bool:
    if type(module) is not nn.Sequential or len(module) != 2:
        return False
    first, second = module
    if _kind(second) != "linear":
        return False
    if _kind(first) == "embedding":
        return second.bias is None
    return _kind(first) == "linear" and first.bias is None


def _unknown(module: nn.Module) -> str:
    if parametrize.is_parametrized(module):
        return "its weight is parametrized"
    if isinstance(module, nn.Linear):
        return f"{type(module).__name__} has a forward of its own"
    if isinstance(module, nn.Embedding):
        return "an embedding with `max_norm` or `sparse` changes rows outside autograd"
    return f"{type(module).__name__} is not a linear layer or an embedding"


def matches(name: str, pattern: Pattern) -> bool:
    """Whether a module's name fits a pattern."""
    if isinstance(pattern, str):
        return re.fullmatch(pattern, name) is not None
    return any(name == word or name.endswith("." + word) for word in pattern)


def _readers(model: nn.Module) -> dict[int, str]:
    """Modules whose weight another module reads when it runs, by identity, and the class that does."""
    found: dict[int, str] = {}
    for module in model.modules():
        for path in _weights_read_by(type(module)):  # type: ignore[arg-type]
            try:
                found[id(module.get_submodule(path))] = type(module).__name__
            except AttributeError:
                continue
    return found


@cache
def _weights_read_by(cls: type[nn.Module]) -> frozenset[str]:
    """The x of every `self.x.weight` or `self.x.bias` in the code that a class runs after it is built."""
    found: set[str] = set()
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and not _NOT_FORWARD.fullmatch(function.name):
                texts = (ast.unparse(node) for node in ast.walk(function) if isinstance(node, ast.Attribute))
                found |= {match[1] for text in texts if (match := _WEIGHT.fullmatch(text))}
    return frozenset(found)


def _sites(model: nn.Module, uses: list[Use], refused: dict[str, str]) -> tuple[list[Site], dict[str, str]]:
    """Group uses by the parameters they share; leave out a group that something outside the plan shares too."""
    names = {id(module): name for name, module in model.named_modules()}
    owners: dict[int, set[int]] = defaultdict(set)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)].add(id(module))
    groups: dict[tuple[int, ...], list[Use]] = defaultdict(list)
    for use in uses:
        groups[_matrix_key(model.get_submodule(use.name), use)].append(use)

    sites: list[Site] = []
    unsafe: dict[str, str] = {}
    for key, group in groups.items():
        modules = [model.get_submodule(use.name) for use in group]
        inside = {id(part) for module in modules for part in (module, *module.children())}
        others = sorted(names[owner] for parameter in key for owner in owners[parameter] - inside)
        kinds = {use.kind for use in group}
        if others:
            why = refused.get(others[0], "it uses the weight in a way of its own")
            unsafe |= {use.name: f"tied to {others[0]}, which is left out: {why}" for use in group}
        elif kinds == {"low-rank-head"}:
            unsafe |= {use.name: "its embedding is not part of a pair in the model" for use in group}
        elif "conv1d" in kinds and len(kinds) > 1:
            unsafe |= {use.name: "tied to a layer that stores the weight transposed" for use in group}
        else:
            # the use that holds the parameters comes first
            group.sort(key=lambda use: use.kind == "low-rank-head")
            sites.append(_site(model.get_submodule(group[0].name), tuple(group)))
    return sites, unsafe


def _matrix_key(module: nn.Module, use: Use) -> tuple[int, ...]:
    if use.kind == "low-rank-head":
        assert isinstance(module, LowRankHead)
        return id(module.embedding.weight), id(module.projection.weight)
    if use.kind.endswith("pair"):
        first, second = pair(module)
        return id(first.weight), id(second.weight)
    return (id(module.weight),)


def _site(module: nn.Module, uses: tuple[Use, ...]) -> Site:
    kind = uses[0].kind
    if kind == "linear-pair":
        first, second = pair(module)
        return Site(uses, (second.weight.shape[0], first.weight.shape[1]), first.weight.shape[0])
    if kind == "embedding-pair":
        words, projection = pair(module)
        return Site(uses, (words.weight.shape[0], projection.weight.shape[0]), words.weight.shape[1])
    rows, columns = module.weight.shape  # type: ignore[misc]
    return Site(uses, (columns, rows) if kind == "conv1d" else (rows, columns))


def _params(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def split_pairs(plan: Plan) -> Plan:
    """The plan with each low-rank pair as two matrices of their own."""
    sites: list[Site] = []
    for site in plan.sites:
        if site.pair_rank is None:
            sites.append(site)
            continue
        name, rank = site.name, site.pair_rank
        (rows, columns), prefix = site.shape, f"{name}." if name else ""
        if site.has_embedding:
            sites += [
                Site((Use(prefix + "0", "embedding"),), (rows, rank)),
                Site((Use(prefix + "1", "linear"),), (columns, rank)),
            ]
        else:
            sites += [
                Site((Use(prefix + "0", "linear"),), (rank, columns)),
                Site((Use(prefix + "1", "linear"),), (rows, rank)),
            ]
    return Plan(tuple(sites), plan.left_out)
