"""Calibration: what a model's data says of each planned matrix, for the whitened SVD.

Two things: the second moments of what reaches a matrix, and how much the loss depends on what leaves it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.core.factorize import Moments
from rankwise.core.plan import Plan, Site, Use, get_module
from rankwise.errors import DataError
from rankwise.measure import call_model, evaluating
from rankwise.modules import scale_of


def second_moments(
    model: nn.Module,
    plan: Plan,
    batches: Iterable[Any],
    *,
    stops: Sequence[tuple[str, int] | None] | None = None,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Moments]:
    """Run `batches` through `model` and sum up what reaches each site, by the site's name.

    A batch is a tensor, a tuple of positional arguments or a mapping of keyword arguments.

    Args:
        stops: for each batch, the use that it calls last of the plan's, and how often (`calls`); what comes after that
            call is not computed. None: all is.
        dtype: of the sums.
    """
    sums = {site.name: _Sums(site, dtype) for site in plan.sites}
    uses = {use.name: sums[site.name].hook(use) for site in plan.sites for use in site.uses}

    seen, stop = 0, None

    def see(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal seen
        uses[name](_first(args, kwargs))
        if stop is not None and name == stop[0]:
            seen += 1
            if seen == stop[1]:
                raise _Enough

    number = 0
    with _watching(model, plan, see), torch.no_grad():
        for batch in batches:
            seen, stop = 0, None if stops is None else stops[number]
            number += 1
            try:
                call_model(model, batch)
            except _Enough:
                continue
    if not number:
        raise DataError("`calibration` must hold at least one batch, but is empty.")
    moments = {name: total.moments() for name, total in sums.items()}
    for name, moment in moments.items():
        if any(t is not None and not torch.isfinite(t).all() for t in (moment.inputs_II, moment.rows_O)):
            raise DataError(f"`calibration` must give finite activations, but the inputs of {name!r} are not.")
    return moments


def calls(model: nn.Module, plan: Plan, batch: Any) -> dict[str, int]:
    """How often a batch calls each use of the plan, by name, in the order of their last calls."""
    seen: dict[str, int] = {}

    def see(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen[name] = seen.pop(name, 0) + 1

    with _watching(model, plan, see), torch.no_grad():
        call_model(model, batch)
    return seen


def output_weights(
    model: nn.Module, plan: Plan, batches: Iterable[Any], loss: Callable[[Any], Tensor]
) -> dict[str, Tensor]:
    """How much the loss depends on each output of each site that batches reach: E[(dL/dy)^2], by the site's name.

    In the second order, with outputs taken as independent, an error e of the outputs raises the loss by half of
    sum_o E[(dL/dy_o)^2] e_o^2: the diagonal of the Fisher information. So errors of all matrices are in one unit.

    Args:
        loss: of what the model returns for a batch.
    """
    words: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    hidden: set[str] = set()
    handles = [
        get_module(model, use).register_forward_hook(
            _weighing(site, use, words if use.is_embedding else outputs, hidden), with_kwargs=True
        )
        for site in plan.sites
        for use in site.uses
    ]
    wanted = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in wanted:
            parameter.requires_grad_(False)
        with evaluating(model), torch.enable_grad():
            for batch in batches:
                value = loss(call_model(model, batch))
                if value.requires_grad:
                    value.backward()  # type: ignore[no-untyped-call]
    finally:
        for parameter, asked in wanted:
            parameter.requires_grad_(asked)
        for handle in handles:
            handle.remove()
    if unseen := sorted(hidden - outputs.keys() - words.keys()):
        raise DataError(
            "`loss` must have a gradient at every matrix of the plan, but the model calls these under "
            f"`torch.no_grad()`: {', '.join(unseen)}. Exclude them from the plan, or leave `loss` out."
        )
    # a table of words that is an output layer too is weighed as that, if the loss depends on it there
    weights = {**outputs, **words, **{name: rows for name, rows in outputs.items() if rows.any()}}
    for name, rows in weights.items():
        if not torch.isfinite(rows).all():
            raise DataError(f"`loss` must have finite gradients, but that of the outputs of {name!r} is not.")
    if not any(rows.any() for rows in weights.values()):
        raise DataError(
            "`loss` must depend on the matrices of the plan, but no batch gives any of them a gradient. Check what it "
            "is computed from, or leave it out."
        )
    return weights


def _weighing(site: Site, use: Use, sums: dict[str, Tensor], hidden: set[str]) -> Callable[..., Tensor]:
    """A hook that adds the squared gradients of what a use gives to those of its site, which begin as zeros.

    Sites that are called where no gradient can come to are put into `hidden`.
    """

    def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        if not output.numel():
            return output
        table = module[0] if use.kind == "embedding-pair" and isinstance(module, nn.Sequential) else module
        scale = (scale_of(table) if isinstance(table, nn.Embedding) else None) or 1.0
        if not torch.is_grad_enabled():
            hidden.add(site.name)
            return output
        sums.setdefault(site.name, output.new_zeros(site.shape[0], dtype=torch.float32))

        def add(grad: Tensor) -> None:
            squares = grad.detach().reshape(-1, grad.shape[-1]).float().square()
            if use.is_embedding:
                words = _first(args, kwargs).flatten()
                rows = squares.mean(1) * scale**2
                sums[site.name] += squares.new_zeros(site.shape[0]).index_add_(0, words, rows)
            else:
                sums[site.name] += squares.sum(0)

        # the first ones begin the graph, since no parameter asks for a gradient; a copy may be changed in place
        output = output if output.requires_grad else output.requires_grad_().clone()
        output.register_hook(add)  # type: ignore[no-untyped-call]
        return output

    return see


class _Enough(Exception):  # noqa: N818 - no error
    """All that was asked for has been seen."""


@contextmanager
def _watching(
    model: nn.Module, plan: Plan, see: Callable[[str, tuple[Any, ...], dict[str, Any]], None]
) -> Iterator[None]:
    """Let `see` be told of each use's inputs; the model is left as it was."""

    def hook(name: str) -> Callable[..., None]:
        return lambda module, args, kwargs: see(name, args, kwargs)

    handles = [
        get_module(model, use).register_forward_pre_hook(hook(use.name), prepend=True, with_kwargs=True)
        for site in plan.sites
        for use in site.uses
    ]
    try:
        with evaluating(model):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What a layer is called with, by place or by name."""
    first: Tensor = next(iter((*args, *kwargs.values())))
    return first


class _Sums:
    """Running sums of one site: x x^T where it is a linear layer, look-ups where it is an embedding."""

    def __init__(self, site: Site, dtype: torch.dtype) -> None:
        self.site = site
        self.dtype = dtype
        self.inputs_II: Tensor | None = None
        self.rows_O: Tensor | None = None
        self.num_inputs = 0

    def hook(self, use: Use) -> Callable[[Tensor], None]:
        return self._look_up if use.is_embedding else self._multiply

    def _look_up(self, index: Tensor) -> None:
        counts = torch.bincount(index.flatten(), minlength=self.site.shape[0]).double()
        self.rows_O = counts if self.rows_O is None else self.rows_O + counts

    def _multiply(self, x: Tensor) -> None:
        x = x.reshape(-1, self.site.shape[1]).to(self.dtype)
        self.inputs_II = x.t() @ x if self.inputs_II is None else self.inputs_II.addmm_(x.t(), x)
        self.num_inputs += len(x)

    def moments(self) -> Moments:
        inputs, rows = self.inputs_II, self.rows_O
        return Moments(
            inputs.div_(self.num_inputs) if inputs is not None and self.num_inputs else None,
            rows / rows.sum() if rows is not None and rows.any() else None,
        )


def moment_bytes(sites: Sequence[Site], dtype: torch.dtype) -> int:
    """Memory that `second_moments` takes for these sites."""
    return sum(dtype.itemsize * site.shape[1] ** 2 for site in sites)
