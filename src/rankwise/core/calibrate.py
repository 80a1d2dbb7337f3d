"""Calibration: statistics of each planned matrix on sample data, for the whitened SVD.

There are two: the second moments of the inputs of a matrix, and how much the loss depends on its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.core.factorize import Moments
from rankwise.core.plan import Plan, Site, Use, get_module, words_of
from rankwise.errors import DataError
from rankwise.measure import call_model, evaluating
from rankwise.modules import scale_of


def second_moments(
    model: nn.Module,
    plan: Plan,
    batches: Iterable[Any],
    *,
    last_calls: Sequence[tuple[str, int] | None] | None = None,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Moments]:
    """Run `batches` through `model` and average the second moments of each site's inputs, by the site's name.

    A batch is a tensor, a tuple of positional arguments or a mapping of keyword arguments.

    Args:
        last_calls: for each batch, the name of the use that the plan needs last, and the number of that call
            (`count_calls`); the forward pass stops there. None: every forward pass runs to its end.
        dtype: the dtype of the sums.
    """
    sums = {site.name: _Sums(site, dtype) for site in plan.sites}
    add = {use.name: partial(sums[site.name].add, use) for site in plan.sites for use in site.uses}
    num_calls, last_call = 0, None

    def on_call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal num_calls
        add[name](_first(args, kwargs))
        if last_call is not None and name == last_call[0]:
            num_calls += 1
            if num_calls == last_call[1]:
                raise _StopForward

    number = 0
    with _watching(model, plan, on_call), torch.no_grad():
        for batch in batches:
            num_calls, last_call = 0, None if last_calls is None else last_calls[number]
            number += 1
            with suppress(_StopForward):
                call_model(model, batch)
    if not number:
        raise DataError("`calibration` must hold at least one batch, but is empty.")
    moments = {name: total.moments() for name, total in sums.items()}
    for name, moment in moments.items():
        if any(t is not None and not torch.isfinite(t).all() for t in (moment.inputs_II, moment.rows_O)):
            raise DataError(f"`calibration` must give finite activations, but the inputs of {name!r} are not.")
    return moments


def moment_bytes(sites: Sequence[Site], dtype: torch.dtype) -> int:
    """The memory that `second_moments` takes for these sites."""
    return sum(dtype.itemsize * site.shape[1] ** 2 for site in sites)


def count_calls(model: nn.Module, plan: Plan, batch: Any) -> dict[str, int]:
    """The number of calls that a batch makes to each use of the plan, by name, in the order of their last calls."""
    num_calls: dict[str, int] = {}

    def on_call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # removed and added again, which moves it to the end
        num_calls[name] = num_calls.pop(name, 0) + 1

    with _watching(model, plan, on_call), torch.no_grad():
        call_model(model, batch)
    return num_calls


def output_fisher(
    model: nn.Module, plan: Plan, batches: Iterable[Any], loss: Callable[[Any], Tensor]
) -> dict[str, Tensor]:
    """How much the loss depends on each output of each site that is reached: E[(dL/dy)^2], by the site's name.

    To second order, and with outputs taken as independent, an error e of the outputs raises the loss by half of
    sum_o E[(dL/dy_o)^2] e_o^2. This diagonal of the Fisher information makes errors of all matrices comparable.

    Args:
        loss: the loss of what the model returns for a batch.
    """
    words: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    without_grad: set[str] = set()
    handles = [
        get_module(model, use).register_forward_hook(
            _squared_gradients(site, use, words if use.is_embedding else outputs, without_grad), with_kwargs=True
        )
        for site in plan.sites
        for use in site.uses
    ]
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trainable:
            parameter.requires_grad_(False)
        with evaluating(model), torch.enable_grad():
            for batch in batches:
                value = loss(call_model(model, batch))
                if value.requires_grad:
                    value.backward()  # type: ignore[no-untyped-call]
    finally:
        for parameter in trainable:
            parameter.requires_grad_()
        for handle in handles:
            handle.remove()
    if unseen := sorted(without_grad - outputs.keys() - words.keys()):
        raise DataError(
            "`loss` must have a gradient at every matrix of the plan, but the model calls these under "
            f"`torch.no_grad()`: {', '.join(unseen)}. Exclude them from the plan, or leave `loss` out."
        )
    # an embedding that is tied to an output layer is weighed as that layer, if the loss depends on it there
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


def _squared_gradients(site: Site, use: Use, sums: dict[str, Tensor], without_grad: set[str]) -> Callable[..., Tensor]:
    """A forward hook that adds the squared gradients of a use's outputs to the sum of its site.

    Sites that are called under `torch.no_grad()` are added to `without_grad`.
    """

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        if not output.numel():
            return output
        scale = (scale_of(words_of(module)) or 1.0) if use.is_embedding else 1.0
        if not torch.is_grad_enabled():
            without_grad.add(site.name)
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

        # no parameter requires a gradient, so the first outputs start the graph; a clone may be changed in place
        output = output if output.requires_grad else output.requires_grad_().clone()
        output.register_hook(add)  # type: ignore[no-untyped-call]
        return output

    return hook


class _StopForward(Exception):  # noqa: N818 - no error
    """Ends a forward pass when all inputs that are needed have been seen."""


@contextmanager
def _watching(
    model: nn.Module, plan: Plan, on_call: Callable[[str, tuple[Any, ...], dict[str, Any]], None]
) -> Iterator[None]:
    """In evaluation mode, call `on_call` with the name and inputs of each use; the model is left as it was."""

    def hook(name: str) -> Callable[..., None]:
        return lambda module, args, kwargs: on_call(name, args, kwargs)

    with ExitStack() as stack:
        for use in (use for site in plan.sites for use in site.uses):
            module = get_module(model, use)
            stack.enter_context(module.register_forward_pre_hook(hook(use.name), prepend=True, with_kwargs=True))
        stack.enter_context(evaluating(model))
        yield


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The first argument of a call, positional or by keyword."""
    first: Tensor = next(iter((*args, *kwargs.values())))
    return first


class _Sums:
    """Running sums of one site: x x^T as a linear layer, the number of look-ups as an embedding."""

    def __init__(self, site: Site, dtype: torch.dtype) -> None:
        self.site, self.dtype = site, dtype
        self.inputs_II: Tensor | None = None
        self.rows_O: Tensor | None = None
        self.num_inputs = 0

    def add(self, use: Use, x: Tensor) -> None:
        if use.is_embedding:
            counts = torch.bincount(x.flatten(), minlength=self.site.shape[0]).double()
            self.rows_O = counts if self.rows_O is None else self.rows_O + counts
        else:
            x = x.reshape(-1, self.site.shape[1]).to(self.dtype)
            self.inputs_II = x.t() @ x if self.inputs_II is None else self.inputs_II.addmm_(x.t(), x)
            self.num_inputs += len(x)

    def moments(self) -> Moments:
        inputs, rows = self.inputs_II, self.rows_O
        return Moments(
            inputs.div_(self.num_inputs) if inputs is not None and self.num_inputs else None,
            rows / rows.sum() if rows is not None and rows.any() else None,
        )
