"""A plan for an `nn.Module`: every linear layer and embedding found, tied weights once.

What cannot be gated safely is left out, with a word.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from torch import nn

from rankwise.adapters.heads import fresh
from rankwise.adapters.kinds import WHOLES, kind_of, matrix_key, site_of, why_not
from rankwise.adapters.names import Pattern, chosen
from rankwise.adapters.readers import only_called, readers
from rankwise.core.layers import GatedLayer
from rankwise.core.plan import LeftOut, Plan, Site, Use, get_module
from rankwise.errors import InvalidTypeError, PlanError
from rankwise.modules import LowRankHead


def find_plan(model: nn.Module, include: Pattern | None = None, exclude: Pattern = ()) -> Plan:
    """Plan every linear layer, embedding and low-rank pair of `model` whose name fits.

    A string is a regular expression for a module's whole name; of a list, each name matches itself and as a last part.
    What matches no layer is refused. Heads that did not come with a pretrained model's checkpoint are left out, unless
    `include` names them.
    """
    check_ungated(model)
    layers = layer_names(model)
    included = None if include is None else chosen(model, "include", include, layers)
    return plan_by_name(model, included, chosen(model, "exclude", exclude, layers))


def plan_by_name(model: nn.Module, included: Collection[str] | None, excluded: Collection[str]) -> Plan:
    """Plan the layers whose name is in `included` (None: all) and not in `excluded`."""
    uses, refused = _uses(model, included, excluded)
    sites, unsafe = _sites(model, uses, refused)
    reasons = {**refused, **unsafe}
    sizes = {name: sum(p.numel() for p in model.get_submodule(name).parameters()) for name in reasons}
    return Plan(tuple(sites), tuple(LeftOut(name, sizes[name], reason) for name, reason in reasons.items()))


def check_ungated(model: nn.Module) -> None:
    """Refuse what is no model, a model that has nothing to prune, and one that is being pruned already."""
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(f"`model` must be a torch.nn.Module, but is a {type(model).__name__} instead.")
    if next(model.parameters(), None) is None:
        raise PlanError(f"The model must have parameters, but {type(model).__name__} has none.")
    if any(isinstance(module, GatedLayer) for module in model.modules()):
        raise PlanError("The model must not be gated yet, but is. Use the pruner that gated it, or plan a fresh model.")


def check_plan(model: nn.Module, plan: Plan) -> None:
    """Refuse a plan that was made from another model."""
    check_ungated(model)
    for site in plan.sites:
        modules = [get_module(model, use) for use in site.uses]
        kinds = [kind_of(module) for module in modules]
        if kinds != [use.kind for use in site.uses]:
            raise PlanError(f"{site}: must be as the plan says, but is {kinds[0]}. Make the plan from this model.")
        if len({matrix_key(module, use.kind) for module, use in zip(modules, site.uses, strict=True)}) > 1:
            raise PlanError(f"{site}: must share one matrix, but do not. Make the plan from this model.")
        if (found := site_of(modules[0], site.uses)) != site:
            raise PlanError(f"{site}: must be {site.shape}, but is {found.shape}. Make the plan from this model.")


def layer_names(model: nn.Module) -> list[str]:
    """The names of all layers that hold weights, pruned or not: every name that a layer has."""
    parts = _parts(model)
    return [
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if not _is_inside(module, parts) and (kind_of(module) or _holds_weights(module))
    ]


def _holds_weights(module: nn.Module) -> bool:
    """Whether a module has weights, and no layers inside it that have others."""
    own = list(module.parameters(recurse=False))
    return isinstance(module, nn.Linear | nn.Embedding) or (bool(own) and len(own) == len(list(module.parameters())))


def _uses(
    model: nn.Module, included: Collection[str] | None, excluded: Collection[str]
) -> tuple[list[Use], dict[str, str]]:
    """Modules that can be gated, and why the others with weights cannot."""
    uses: list[Use] = []
    refused: dict[str, str] = {}
    names: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        names[id(module)].append(name)
    parts = _parts(model)
    read = readers(model)
    random = fresh(model) if included is None else {}
    for name, module in model.named_modules():
        kind = kind_of(module)
        if _is_inside(module, parts):
            continue
        if kind is None:
            reason = why_not(module)
        elif included is not None and not any(each in included for each in names[id(module)]):
            reason = "not in `include`"
        elif any(each in excluded for each in names[id(module)]):
            reason = "in `exclude`"
        elif id(module) in read:
            reason = read[id(module)]
        elif any(parameter.numel() == 0 for parameter in module.parameters()):
            reason = "it is empty"
        elif id(module) in random:
            reason = random[id(module)]
        else:
            uses.append(Use(name, kind))
            continue
        if reason is not None:
            refused[name] = reason
    return uses, refused


def _parts(model: nn.Module) -> set[int]:
    """Modules that belong to a larger one: the two layers of a pair, what makes a parametrized weight."""
    parents: dict[int, set[int]] = defaultdict(set)
    for module in model.modules():
        for child in module.children():
            parents[id(child)].add(id(module))
    parts: set[int] = set()
    called = only_called(model)
    heads = {matrix_key(module, "low-rank-head") for module in model.modules() if isinstance(module, LowRankHead)}
    for module in model.modules():
        inside = [id(each) for each in module.modules() if each is not module]
        kind = kind_of(module)
        # a head that multiplies by the product says that a pair is one
        tied = kind == "embedding-pair" and matrix_key(module, kind) in heads
        whole = tied or isinstance(module, LowRankHead | nn.Linear | nn.Embedding)
        # code between its layers, or one that is also used outside, makes a pair two layers like any others
        pair = kind in WHOLES and id(module) in called
        if whole or (pair and all(len(parents[part]) == 1 for part in inside)):
            parts.update(inside)
    return parts


def _is_inside(module: nn.Module, parts: set[int]) -> bool:
    """Whether a module is part of a layer, or a pair no more, whose two layers stand for themselves."""
    apart = kind_of(module) in WHOLES and any(id(child) not in parts for child in module.children())
    return id(module) in parts or apart


def _sites(model: nn.Module, uses: list[Use], refused: dict[str, str]) -> tuple[list[Site], dict[str, str]]:
    """Group uses by the parameters they share; leave out a group that something outside the plan shares too."""
    names = {id(module): name for name, module in model.named_modules()}
    owners: dict[int, set[int]] = defaultdict(set)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)].add(id(module))
    groups: dict[tuple[int, ...], list[Use]] = defaultdict(list)
    for use in uses:
        groups[matrix_key(model.get_submodule(use.name), use.kind)].append(use)

    sites: list[Site] = []
    unsafe: dict[str, str] = {}
    for key, group in groups.items():
        modules = [model.get_submodule(use.name) for use in group]
        inside = {id(part) for module in modules for part in (module, *module.children())}
        others = sorted(names[owner] for parameter in key for owner in owners[parameter] - inside)
        kinds = {use.kind for use in group}
        if others:
            whole = others[0].rpartition(".")[0]
            why = refused.get(others[0]) or refused.get(whole, "it uses the weight in a way of its own")
            unsafe |= {use.name: f"tied to {others[0] or '(model)'}, which is left out: {why}" for use in group}
        elif kinds == {"low-rank-head"}:
            unsafe |= {use.name: "its embedding is not part of a pair in the model" for use in group}
        elif "conv1d" in kinds and len(kinds) > 1:
            unsafe |= {use.name: "tied to a layer that stores the weight transposed" for use in group}
        else:
            # the use that holds the parameters comes first
            group.sort(key=lambda use: use.kind == "low-rank-head")
            sites.append(site_of(model.get_submodule(group[0].name), tuple(group)))
    return sites, unsafe


def split_pairs(plan: Plan) -> Plan:
    """The plan with each low-rank pair as two matrices of their own; one in the pivot layout cannot be split."""
    sites: list[Site] = []
    left_out: list[LeftOut] = []
    for site in plan.sites:
        if site.pivot:
            left_out.append(LeftOut(site.name, site.params, "half of its second matrix is not stored (pivot layout)"))
            continue
        if site.pair_rank is None:
            sites.append(site)
            continue
        (rows, columns), rank = site.shape, site.pair_rank
        shapes = ((rows, rank), (columns, rank)) if site.has_embedding else ((rank, columns), (rows, rank))
        halves = zip(*(_halves(use) for use in site.uses), strict=True)
        sites += [Site(uses, shape) for uses, shape in zip(halves, shapes, strict=True)]
    return Plan(tuple(sites), (*plan.left_out, *left_out))


def _halves(use: Use) -> tuple[Use, Use]:
    """The two layers of a low-rank pair, as uses of their own."""
    prefix = f"{use.name}." if use.name else ""
    first, second = ("embedding", "projection") if use.kind == "low-rank-head" else ("0", "1")
    return Use(prefix + first, "linear" if use.kind == "linear-pair" else "embedding"), Use(prefix + second, "linear")
