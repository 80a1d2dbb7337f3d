"""Calibration: what a model's data says of each planned matrix, for the whitened SVD."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.core.factorize import Moments
from rankwise.core.plan import Plan, Site, Use, get_module
from rankwise.errors import DataError


def second_moments(model: nn.Module, plan: Plan, batches: Iterable[Any]) -> dict[str, Moments]:
    """Run `batches` through `model` and sum up what reaches each site, by the site's name.

    A batch is a tensor, a tuple of positional arguments or a mapping of keyword arguments.
    """
    sums = {site.name: _Sums(site) for site in plan.sites}
    handles = [
        get_module(model, use).register_forward_pre_hook(sums[site.name].hook(use), prepend=True, with_kwargs=True)
        for site in plan.sites
        for use in site.uses
    ]
    modes = [(module, module.training) for module in model.modules()]
    number = 0
    try:
        model.eval()
        with torch.no_grad():
            for batch in batches:
                number += 1
                _call(model, batch)
    finally:
        for module, training in modes:
            module.training = training
        for handle in handles:
            handle.remove()
    if not number:
        raise DataError("`calibration` must hold at least one batch, but is empty.")
    moments = {name: total.moments() for name, total in sums.items()}
    for name, moment in moments.items():
        if any(t is not None and not torch.isfinite(t).all() for t in (moment.inputs_II, moment.rows_O)):
            raise DataError(f"`calibration` must give finite activations, but the inputs of {name!r} are not.")
    return moments


def _call(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, tuple | list):
        model(*batch)
    else:
        model(batch)


class _Sums:
    """Running sums of one site: x x^T where it is a linear layer, look-ups where it is an embedding."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.inputs_II: Tensor | None = None
        self.rows_O: Tensor | None = None
        self.num_inputs = 0

    def hook(self, use: Use) -> Any:
        def look_up(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            index = next(iter((*args, *kwargs.values())))
            counts = torch.bincount(index.flatten(), minlength=self.site.shape[0]).double()
            self.rows_O = counts if self.rows_O is None else self.rows_O + counts

        def multiply(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            x = next(iter((*args, *kwargs.values()))).reshape(-1, self.site.shape[1]).double()
            self.inputs_II = x.t() @ x if self.inputs_II is None else self.inputs_II.addmm_(x.t(), x)
            self.num_inputs += len(x)

        return look_up if use.is_embedding else multiply

    def moments(self) -> Moments:
        inputs, rows = self.inputs_II, self.rows_O
        return Moments(
            None if inputs is None else inputs / max(self.num_inputs, 1),
            None if rows is None else rows / rows.sum().clamp(min=1),
        )
