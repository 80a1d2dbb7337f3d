"""Plans: which matrices of a model are pruned, where each is used, and what is left out and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor, nn

from rankwise.core.sharding import are_finite, full_tensor, is_sharded
from rankwise.errors import PlanError
from rankwise.modules import LowRankHead, PivotLinear
from rankwise.split import all_split

UseKind = Literal["linear", "conv1d", "embedding", "linear-pair", "embedding-pair", "low-rank-head"]
"""`conv1d` is a linear layer that stores its weight as inputs x outputs. A pair already is a factorization:
`LowRankLinear`, `LowRankEmbedding`, or the `nn.Sequential` of an embedding that a `LowRankHead` is tied to.
"""


@dataclass(frozen=True)
class Use:
    """A module that uses a planned matrix."""

    name: str
    """Dotted name in the model; empty for the model itself."""
    kind: UseKind

    @property
    def is_embedding(self) -> bool:
        return self.kind in ("embedding", "embedding-pair")


@dataclass(frozen=True)
class Site:
    """One matrix of a model and every module that uses it: tied layers are one site."""

    uses: tuple[Use, ...]
    shape: tuple[int, int]
    """Outputs x inputs; words x width for an embedding."""
    pair_rank: int | None = None
    """Rank of the low-rank pair that the model holds instead of a plain matrix."""
    pivot: bool = False
    """Whether that pair is in the pivot layout (its second layer is a `PivotLinear`)."""

    @property
    def name(self) -> str:
        return self.uses[0].name

    @property
    def params(self) -> int:
        """Parameters before pruning."""
        out_features, in_features = self.shape
        if self.pair_rank is None:
            return out_features * in_features
        return self.pair_rank * (out_features + in_features - self.pair_rank * self.pivot)

    @property
    def has_embedding(self) -> bool:
        return any(use.is_embedding for use in self.uses)

    def __str__(self) -> str:
        return " = ".join(use.name or "(model)" for use in self.uses)


@dataclass(frozen=True)
class LeftOut:
    """A module with weights that the plan does not touch."""

    name: str
    params: int
    reason: str


@dataclass(frozen=True)
class Plan:
    """Which matrices are pruned, and what is left out and why."""

    sites: tuple[Site, ...]
    left_out: tuple[LeftOut, ...] = ()

    @property
    def params(self) -> int:
        """Parameters in planned matrices."""
        return sum(site.params for site in self.sites)

    def only(self, sites: Sequence[Site], left_out: Sequence[LeftOut]) -> Plan:
        """This plan with fewer sites."""
        return Plan(tuple(sites), (*self.left_out, *left_out))


@dataclass(frozen=True)
class Source:
    """The parameters of a site as the model holds them: one matrix, or the two of a pair."""

    weight_OI: Tensor | None
    p_OR: Tensor | None = None
    q_RI: Tensor | None = None
    requires_grad: bool = True

    @property
    def tensors(self) -> list[Tensor]:
        return [t for t in (self.weight_OI, self.p_OR, self.q_RI) if t is not None]

    def gathered(self) -> Source:
        """The whole parameters where these are sharded."""

        def whole(tensor: Tensor | None) -> Tensor | None:
            if tensor is None or not is_sharded(tensor):
                return tensor
            return nn.Parameter(full_tensor(tensor.detach()).contiguous(), self.requires_grad)

        return replace(self, weight_OI=whole(self.weight_OI), p_OR=whole(self.p_OR), q_RI=whole(self.q_RI))


def source(model: nn.Module, site: Site) -> Source:
    """Read the parameters of `site` from `model`."""
    use = site.uses[0]
    module = get_module(model, use)
    if use.kind in ("linear-pair", "embedding-pair"):
        first, second = pair(module)
        if use.kind == "linear-pair":
            return Source(None, second.weight, first.weight, first.weight.requires_grad)
        q_RI = nn.Parameter(second.weight.detach().t().contiguous(), second.weight.requires_grad)
        return Source(None, first.weight, q_RI, first.weight.requires_grad)
    weight = module.weight
    assert isinstance(weight, Tensor)
    return Source(weight.t() if use.kind == "conv1d" else weight, requires_grad=weight.requires_grad)


def refusal(model: nn.Module, site: Site) -> str | None:
    """Why the weights of `site` cannot be pruned together, or None if they can."""
    found = source(model, site)
    if found.p_OR is None or found.q_RI is None or found.p_OR.requires_grad == found.q_RI.requires_grad:
        return None
    return "one of its two layers is frozen, and components have a part in both: freeze both, or neither"


def get_module(model: nn.Module, use: Use) -> nn.Module:
    """The module of `model` that `use` names."""
    try:
        return model.get_submodule(use.name)
    except AttributeError:
        raise PlanError(
            f"The plan names a module {use.name!r}, but the model has none of that name. Make the plan from this model."
        ) from None


def pair(module: nn.Module) -> tuple[nn.Linear | nn.Embedding, nn.Linear | PivotLinear]:
    """The two layers of a low-rank pair."""
    assert isinstance(module, nn.Sequential) and len(module) == 2
    first, second = module
    assert isinstance(first, nn.Linear | nn.Embedding) and isinstance(second, nn.Linear | PivotLinear)
    return first, second


def words_of(module: nn.Module) -> nn.Embedding:
    """The table of an embedding, or of the low-rank pair in its place."""
    words = module[0] if isinstance(module, nn.Sequential) else module
    assert isinstance(words, nn.Embedding)
    return words


def bias_of(module: nn.Module, use: Use) -> nn.Parameter | None:
    """The bias that is added after the matrix, if any."""
    if use.kind == "linear-pair":
        return pair(module)[1].bias
    assert isinstance(module, nn.Linear | LowRankHead) or use.kind == "conv1d"
    bias = module.bias
    assert bias is None or isinstance(bias, nn.Parameter)
    return bias


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first few of many names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(name or "(model)" for name in names[:most]) + more


def left_out(model: nn.Module, plan: Plan) -> tuple[float, str]:
    """The share of the model's parameters in layers that `plan` leaves out; which these are, and why."""
    sizes: dict[str, int] = {}
    names: dict[str, list[str]] = {}
    with all_split(model):
        planned = {get_module(model, use) for site in plan.sites for use in site.uses}
        counted = {id(p) for module in planned for p in module.parameters()}
        modules = {item.name: model.get_submodule(item.name) for item in plan.left_out}
        # of a module around planned ones, such as a model with a matrix of its own, only what it holds itself
        whole = {name for name, module in modules.items() if planned.isdisjoint(module.modules())}
        for item in plan.left_out:
            own = {id(p): p.numel() for p in modules[item.name].parameters(recurse=item.name in whole)}
            size = sum(own[i] for i in own.keys() - counted)
            counted |= own.keys()
            sizes[item.reason] = sizes.get(item.reason, 0) + size
            # a part of a module that is left out goes without saying
            if size and not any(item.name.startswith(f"{name}.") for name in whole):
                names.setdefault(item.reason, []).append(item.name)
        share = sum(sizes.values()) / max(sum(p.numel() for p in model.parameters()), 1)
        told = sorted(names, key=lambda reason: -sizes[reason])[:3]
        return share, "; ".join(f"{listed(names[reason])} ({reason})" for reason in told)


def check_not_empty(plan: Plan) -> None:
    """Refuse a plan without a single matrix."""
    if not plan.sites:
        reasons = "".join(f"\n  {item.name}: {item.reason}" for item in plan.left_out[:8])
        raise PlanError(
            "The plan must hold at least one matrix, but matches no module of the model. Widen `include`, or narrow "
            f"`exclude`.{' Left out:' + reasons if reasons else ''}"
        )


def check_weights(model: nn.Module, plan: Plan) -> None:
    """Refuse weights that cannot be factorized; changes nothing."""
    with all_split(model):
        tensors = [(site, tensor) for site in plan.sites for tensor in source(model, site).tensors]
        for site, tensor in tensors:
            if tensor.is_meta:
                raise PlanError(f"{site}: weights must hold data, but are on the meta device. Load the model first.")
            if not tensor.is_floating_point():
                raise PlanError(f"{site}: weights must be floating point, but are {tensor.dtype}. Exclude this module.")
        for (site, _), finite in zip(tensors, are_finite([tensor for _, tensor in tensors]), strict=True):
            if not finite:
                raise PlanError(f"{site}: weights must be finite, but hold NaN or infinity. Repair or exclude them.")
