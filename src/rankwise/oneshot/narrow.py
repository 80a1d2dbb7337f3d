"""One-shot pruning of widths: whole neurons and heads are left out, and those that stay take over what they can."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from rankwise.adapters.widths import update_config
from rankwise.core.budget import Budget, SizeAccount, count
from rankwise.core.eliminate import replaced
from rankwise.core.factorize import Moments
from rankwise.core.host_memory import release_freed_memory
from rankwise.core.plan import bias_of, get_module, source
from rankwise.core.widths import WidthSite, features, narrowed
from rankwise.errors import InvalidValueError, RankwiseError
from rankwise.methods.svd import Svd
from rankwise.methods.width import Width
from rankwise.modules import linear
from rankwise.oneshot.data import CalibrationData
from rankwise.oneshot.ranks import Ranks, allocated
from rankwise.swap import become


@dataclass(frozen=True, kw_only=True)
class WidthSvd(Svd):
    """Fewer neurons and heads, then low rank (`rankwise.oneshot.both`): sizes are counted as for low rank."""

    name = "width+svd"

    def check_budget(self, budget: Budget) -> None:
        Width().check_budget(budget)


def oneshot_method(
    method: str, budget: Budget, layout: Literal["pair", "pivot"], *, low_rank_only: bool = False
) -> Svd | Width:
    """The method of that name; `low_rank_only` if there are settings that only low rank has."""
    kinds: dict[str, Svd | Width] = {made.name: made for made in (Svd(layout=layout), Width(), WidthSvd(layout=layout))}
    if not isinstance(method, str) or method not in kinds:
        names = ", ".join(f'"{name}"' for name in kinds)
        raise InvalidValueError(f"`method` must be one of {names}, but is {method!r} instead.")
    found = kinds[method]
    found.check_budget(budget)
    if isinstance(found, Width) and low_rank_only:
        raise RankwiseError(
            "`layout` and `embeddings` are settings of low rank, and so are `refinement` (--refine) and `anchor`. "
            'Leave them out with method="width".'
        )
    return found


def narrow_all(data: CalibrationData, account: SizeAccount, limit: int, ranks: Ranks) -> None:
    """Choose one number of neurons and one of heads for all layers, and leave out the others, in place.

    Args:
        ranks: "even": neurons and heads lose the same share; "global": what costs least; "blend": between the two.
    """
    model, progress = data.model, data.progress
    method = Width()
    sites, num = data.plan.sites, len(data.plan.sites)
    curves = {site.name: curve for site, curve in zip(sites, account.curves, strict=True)}
    order: dict[str, Tensor] = {}
    scores: dict[str, Tensor] = {}
    for done, (site, moments) in enumerate(data.moments(dense=True), 1):
        weight_OI = source(model, site).weight_OI
        assert weight_OI is not None
        order[site.name], scores[site.name] = method.ranking(
            weight_OI, moments, curves[site.name], comparable=bool(data.weights)
        )
        release_freed_memory()
        progress("widths", done, num)
    room = limit - account.fixed
    in_order = [scores[site.name] for site in sites]
    counts = allocated(ranks, in_order, account.curves, room)
    kept = {site.name: order[site.name][:k].sort().values for site, k in zip(sites, counts, strict=True)}
    for done, (site, moments) in enumerate(data.moments(), 1):
        assert isinstance(site, WidthSite)
        if len(kept[site.name]) < site.num_components:
            _narrow(model, site, kept[site.name], moments)
        progress("narrowing", done, num)
    update_config(model)
    assert count(model) == account.size(counts) <= limit


def _narrow(model: nn.Module, site: WidthSite, kept: Tensor, moments: Moments | None) -> None:
    """Keep only these components of a block."""
    (use,) = site.uses
    last = get_module(model, use)
    assert isinstance(last, nn.Linear)
    columns = features(kept, site.shape[1] // site.num_components)
    weight = last.weight.detach()
    with torch.no_grad():
        if moments is None or moments.inputs_II is None:
            small = weight.index_select(1, columns)
        else:
            small = replaced(weight, moments.inputs_II, columns)
    become(last, linear(nn.Parameter(small, last.weight.requires_grad), bias_of(last, use)))
    for layer in site.feeding(model):
        become(layer.module, narrowed(layer, kept))
    release_freed_memory()
