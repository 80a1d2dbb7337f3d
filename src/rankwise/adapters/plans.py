"""A plan for an `nn.Module`: every linear layer and embedding found, tied weights once.

What cannot be gated is left out, with a reason. Layers are chosen by name: `find_plan`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence

from torch import nn
from torch.nn.utils import parametrize

from rankwise import split
from rankwise.core.layers import gated_layers
from rankwise.core.plan import LeftOut, Plan, Site, Use, UseKind, get_module, pair
from rankwise.errors import InvalidTypeError, PlanError, nearest
from rankwise.modules import LowRankEmbedding, LowRankHead, LowRankLinear, PivotLinear, runs_in_order, scale_of
from rankwise.split import all_split
from rankwise.swap import own_class

Pattern = str | Sequence[str]
"""A regular expression that a module's whole name must match, or names: each matches itself and as a last part."""
ALL_LINEAR = "all-linear"
WHOLES: tuple[UseKind, ...] = ("linear-pair", "embedding-pair", "low-rank-head")
"""Kinds of use whose children are part of them."""

_TASK = re.compile(r".*For(Sequence|Token|Image|Audio)Classification|.*For(QuestionAnswering|MultipleChoice)")
_MARK = "_is_hf_initialized"


def find_plan(model: nn.Module, include: Pattern | None = None, exclude: Pattern = ()) -> Plan:
    """Plan every linear layer, embedding and low-rank pair of `model` whose name fits.

    A string is a regular expression for a module's whole name; of a list, each name matches itself and as a last part.
    What matches no layer means all layers inside of the modules that it matches; what matches nothing is refused. Heads
    that did not come with a pretrained model's checkpoint are left out, unless `include` names them.

    Args:
        model: any module; it stays as it is.
        include: which layers are pruned, by default all that can be; "all-linear" as in PEFT: every linear layer but
            the output layer and fresh heads.
        exclude: which of them are not.
    """
    return _find_plan(model, {"include": include}, {"exclude": exclude})


def peft_plan(
    model: nn.Module,
    target_modules: Pattern | None = None,
    exclude_modules: Pattern | None = None,
    modules_to_save: Sequence[str] | None = None,
) -> Plan:
    """`find_plan` in PEFT's words: `target_modules` is `include`, the other two are `exclude`."""
    excluded = {"exclude_modules": exclude_modules or (), "modules_to_save": modules_to_save or ()}
    return _find_plan(model, {"target_modules": target_modules}, excluded)


def _find_plan(model: nn.Module, include: dict[str, Pattern | None], exclude: dict[str, Pattern]) -> Plan:
    """The arguments come by the names that the user knows them by."""
    check_ungated(model)
    with all_split(model):
        layers = layer_names(model)
        ((word, pattern),) = include.items()
        included: set[str] | None = None
        if pattern is not None:
            included = _linear_layers(model) if pattern == ALL_LINEAR else _chosen(model, word, pattern, layers)
        excluded = {name for each, names in exclude.items() for name in _chosen(model, each, names, layers)}
        uses, refused = _uses(model, included, excluded)
        sites, unsafe = _sites(model, uses, refused)
        reasons = {**refused, **unsafe}
        sizes = {name: sum(p.numel() for p in model.get_submodule(name).parameters()) for name in reasons}
        return Plan(tuple(sites), tuple(LeftOut(name, sizes[name], reason) for name, reason in reasons.items()))


def _linear_layers(model: nn.Module) -> set[str]:
    # a method of transformers' models
    output: Callable[[], nn.Module | None] = getattr(model, "get_output_embeddings", lambda: None)
    unwanted = {id(output()), *_fresh(model)}
    linear = ("linear", "conv1d", "linear-pair")
    found = {n for n, module in model.named_modules() if kind_of(module) in linear and id(module) not in unwanted}
    if not found:
        raise PlanError(f"{ALL_LINEAR!r} must match linear layers, but {type(model).__name__} has no linear layer.")
    return found


def _chosen(model: nn.Module, word: str, pattern: Pattern, known: Collection[str]) -> set[str]:
    """The `known` names that the user's argument `word` means; each of its names must mean one."""
    is_name = not isinstance(pattern, str)
    words = [pattern] if isinstance(pattern, str) else pattern
    if not isinstance(words, Iterable) or not all(isinstance(each, str) for each in words):
        raise InvalidTypeError(f"`{word}` must be a string or a list of names, but is {pattern!r} instead.")
    every = [name for name, _ in model.named_modules(remove_duplicate=False)]
    found: set[str] = set()
    for asked in words:
        try:
            fitting = [name for name in every if (_ends(name, asked) if is_name else re.fullmatch(asked, name))]
        except re.error as error:
            raise PlanError(
                f"`{word}` must be a regular expression, but is {asked!r}: {error}. "
                "Write '.*' for any text, or give a list of names."
            ) from None
        meant = set(fitting).intersection(known)
        if not meant:
            meant = {name for name in known if any(name.startswith(f"{whole}.") for whole in fitting)}
        if not meant:
            hint = _hint(asked, fitting, known, is_name=is_name)
            raise PlanError(f"`{word}` must name layers of the model, but {asked!r} matches none.{hint}")
        found |= meant
    return found


def _ends(name: str, asked: str) -> bool:
    return name == asked or name.endswith("." + asked)


def _hint(asked: str, fitting: list[str], known: Collection[str], *, is_name: bool) -> str:
    """What may have been meant."""
    if fitting:
        whole = [name for name in known if fitting[0].startswith(f"{name}.")]
        return f" It is a part of {whole[0]!r}: name that." if whole else f" {fitting[0]!r} has no weights."
    if not is_name and any(_ends(name, asked) for name in known):
        return f" A string is a regular expression for whole names: give a list, [{asked!r}]."
    return nearest(asked, sorted({name.rpartition(".")[2] for name in known}))


def check_ungated(model: nn.Module) -> None:
    """Refuse what is no model, a model that has nothing to prune, and one that is being pruned already."""
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(f"`model` must be a torch.nn.Module, but is a {type(model).__name__} instead.")
    if next(model.parameters(), None) is None:
        raise PlanError(f"The model must have parameters, but {type(model).__name__} has none.")
    if gated_layers(model):
        raise PlanError("The model must not be gated yet, but is. Use the pruner that gated it, or plan a fresh model.")


def check_plan(model: nn.Module, plan: Plan) -> None:
    """Refuse a plan that was made from another model."""
    check_ungated(model)
    with all_split(model):
        for site in plan.sites:
            modules = [get_module(model, use) for use in site.uses]
            kinds = [kind_of(module) for module in modules]
            is_as_planned = (
                kinds == [use.kind for use in site.uses]
                and len({_matrix_key(module, use.kind) for module, use in zip(modules, site.uses, strict=True)}) == 1
                and _site_of(modules[0], site.uses) == site
            )
            if not is_as_planned:
                raise PlanError(
                    f"{site}: must be one {site.uses[0].kind} matrix of {site.shape}, as the plan says, but is another "
                    f"one here, or none ({modules[0]}). Make the plan from this model."
                )


def kind_of(module: nn.Module) -> UseKind | None:
    """The kind of use that a module is, or None."""
    if isinstance(module, LowRankHead):
        return "low-rank-head"
    if isinstance(module, nn.Sequential) and runs_in_order(module) and len(module) == 2:
        first, second = module
        if (kind_of(second) != "linear" and not isinstance(second, PivotLinear)) or first is second:
            return None
        if kind_of(first) == "embedding":
            return "embedding-pair" if second.bias is None else None
        return "linear-pair" if kind_of(first) == "linear" and first.bias is None else None
    if _refusal(module) is not None:
        return None
    if isinstance(module, nn.Linear):
        return "linear"
    return "embedding" if isinstance(module, nn.Embedding) else "conv1d"


def _why_not(module: nn.Module) -> str | None:
    """Why a module that holds matrices of its own cannot be gated; None where it holds none."""
    if isinstance(module, nn.Linear | nn.Embedding) or any(p.dim() >= 2 for p in module.parameters(recurse=False)):
        return _refusal(module)
    return None


def _refusal(module: nn.Module) -> str | None:
    """Why a module is not used as a plain linear layer or embedding; None where it is."""
    name = own_class(module).__name__
    if isinstance(module, PivotLinear):
        return "the pair that it is half of is no LowRankLinear"
    if split.form_of(module) is not None:
        return split.refusal(module) or "it shares a packed weight with another module"
    conv1d = name == "Conv1D" and hasattr(module, "nf") and getattr(module.weight, "ndim", 0) == 2
    if not isinstance(module, nn.Linear | nn.Embedding) and not conv1d:
        return f"{name} is not a linear layer or an embedding"
    if parametrize.is_parametrized(module):
        return "its weight is parametrized"
    stock = nn.Linear if isinstance(module, nn.Linear) else nn.Embedding
    plain = conv1d or type(module).forward is stock.forward
    if "forward" in module.__dict__ or not (plain or isinstance(module, nn.Embedding)):
        return f"{name} has a forward of its own"
    # a scaled table may hold its scale
    more = any(plain or buffer is None or buffer.numel() > 1 for buffer in module._buffers.values())
    if not set(module._parameters) <= {"weight", "bias"} or more or module._modules:
        return f"{name} holds more than a weight and a bias"
    if not isinstance(module._parameters.get("weight"), nn.Parameter):
        return "its weight is made from something else"
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse or module.scale_grad_by_freq):
        return "an embedding with `max_norm` or `sparse` or `scale_grad_by_freq` treats its rows in a way of its own"
    if isinstance(module, nn.Embedding) and scale_of(module) is None:
        return f"{name} has a forward of its own, which does more than scale rows"
    return None


def _matrix_key(module: nn.Module, kind: UseKind) -> tuple[int, ...]:
    """The identity of the parameters that make up the matrix of a use."""
    if kind not in WHOLES:
        return (id(module.weight),)
    first, second = (module.embedding, module.projection) if isinstance(module, LowRankHead) else pair(module)
    return id(first.weight), id(second.coefficients if isinstance(second, PivotLinear) else second.weight)


def _site_of(module: nn.Module, uses: tuple[Use, ...]) -> Site:
    """The site of a group of uses; `module` is that of the first, which holds the parameters."""
    kind = uses[0].kind
    if kind in ("linear-pair", "embedding-pair"):
        first, second = pair(module)
        rows, pivot = second.out_features, isinstance(second, PivotLinear)
        if kind == "linear-pair":
            return Site(uses, (rows, first.weight.shape[1]), first.weight.shape[0], pivot)
        return Site(uses, (first.weight.shape[0], rows), first.weight.shape[1], pivot)
    rows, columns = module.weight.shape  # type: ignore[misc]
    return Site(uses, (columns, rows) if kind == "conv1d" else (rows, columns))


def _fresh(model: nn.Module) -> dict[int, str]:
    """Modules of a pretrained model whose weights are most likely random, by identity, and why we think so.

    Nothing says which components of random weights are worth keeping. transformers marks every tensor that a checkpoint
    brought; where no mark is left (a copy, a model built from its configuration), a task head is known by the class of
    its model.
    """

    def without(part: nn.Module, known: set[int]) -> list[int]:
        owned = ((module, [id(p) for p in module.parameters()]) for module in part.modules())
        return [id(module) for module, parameters in owned if parameters and known.isdisjoint(parameters)]

    found: dict[int, str] = {}
    for part in model.modules():
        # a `PreTrainedModel` of transformers, which need not be installed
        if not hasattr(part, "base_model_prefix") or not hasattr(part, "config"):
            continue
        loaded = {id(p) for p in part.parameters() if getattr(p, _MARK, False)}
        if loaded:
            found |= dict.fromkeys(without(part, loaded), "its weights did not come with the checkpoint")
        elif _TASK.fullmatch(type(part).__name__):
            base = getattr(part, str(part.base_model_prefix), None)
            inside = {id(p) for p in base.parameters()} if isinstance(base, nn.Module) else set()
            reason = f"a task head of {type(part).__name__} is most likely fresh; include it by name to prune it"
            found |= dict.fromkeys(without(part, inside) if inside else [], reason)
    return found


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
    random = _fresh(model) if included is None else {}
    for name, module in model.named_modules():
        kind = kind_of(module)
        if _is_inside(module, parts):
            continue
        if kind is None:
            reason = _why_not(module)
        elif included is not None and not any(each in included for each in names[id(module)]):
            reason = "not in `include`"
        elif any(each in excluded for each in names[id(module)]):
            reason = "in `exclude`"
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
    heads = {_matrix_key(module, "low-rank-head") for module in model.modules() if isinstance(module, LowRankHead)}
    for module in model.modules():
        inside = [id(each) for each in module.modules() if each is not module]
        kind = kind_of(module)
        # a head that multiplies by the product says that a pair is one
        tied = kind == "embedding-pair" and _matrix_key(module, kind) in heads
        whole = tied or isinstance(module, LowRankHead | nn.Linear | nn.Embedding)
        # an `nn.Sequential` may be taken apart by the code around it, so its layers stand for themselves; so does a
        # half of a pair that is also used outside
        pair = isinstance(module, LowRankLinear | LowRankEmbedding) and kind is not None
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
        groups[_matrix_key(model.get_submodule(use.name), use.kind)].append(use)

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
            sites.append(_site_of(model.get_submodule(group[0].name), tuple(group)))
    return sites, unsafe


def split_pairs(plan: Plan) -> Plan:
    """The plan with each low-rank pair as two matrices of their own; one in the pivot layout cannot be split."""
    sites: list[Site] = []
    left_out: list[LeftOut] = []
    for site in plan.sites:
        if site.pivot:
            left_out.append(LeftOut(site.name, site.params, "half of its second matrix is not stored (pivot layout)"))
        elif site.pair_rank is None:
            sites.append(site)
        else:
            (rows, columns), rank = site.shape, site.pair_rank
            shapes = ((rows, rank), (columns, rank)) if site.has_embedding else ((rank, columns), (rows, rank))
            halves = zip(*(_halves(use) for use in site.uses), strict=True)
            sites += [Site(uses, shape) for uses, shape in zip(halves, shapes, strict=True)]
    return plan.only(sites, left_out)


def _halves(use: Use) -> tuple[Use, Use]:
    """The two layers of a low-rank pair, as uses of their own."""
    prefix = f"{use.name}." if use.name else ""
    first, second = ("embedding", "projection") if use.kind == "low-rank-head" else ("0", "1")
    return Use(prefix + first, "linear" if use.kind == "linear-pair" else "embedding"), Use(prefix + second, "linear")
