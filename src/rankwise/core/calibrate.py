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

from rankwise.core.blocks import StopForward
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
                raise StopForward

    number = 0
    with _watching(model, plan, on_call), torch.no_grad():
        for batch in batches:
            num_calls, last_call = 0, None if last_calls is None else last_calls[number]
            number += 1
            with suppress(StopForward):
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
    model: nn.Module,
    plan: Plan,
    batches: Iterable[Any],
    loss: Callable[[Any], Tensor],
    *,
    whole: bool = False,
    drawn: bool = False,
) -> dict[str, Moments]:
    """How much the loss depends on the outputs y of each site that is reached, by the site's name.

    To second order, an error e of the outputs raises the loss by half of the sum of e^T G e over calls, where G is the
    sum of g g^T for g = dL/dy: the Fisher information, with inputs and gradients taken as independent. It makes errors
    of all matrices comparable. With outputs taken as independent too, its diagonal is enough, `rows_O`.

    The rows of an embedding are looked up, so that all features of a row err together: an error e of row w costs
    n_w e^T G e, with n_w the number of look-ups and G = E[g g^T] of the gradients g of what they give. Of an embedding
    that is an output layer too, the output layer's row weights f say how often words occur, those that the
    calibration text lacks included; its `inputs_II` is then G sum(n) / sum(f), which adds to the second moments of the
    output layer's inputs.

    Args:
        loss: the loss of what the model returns for a batch.
        whole: measure all of G, not only its diagonal, except for sites with an embedding.
        drawn: whether the loss is the summed cross entropy of answers that were drawn at random (`_probabilities`).
    """
    outputs: dict[str, _Outputs] = {}
    lookups: dict[str, _Lookups] = {}
    without_grad: set[str] = set()

    def sums(site: Site, use: Use, like: Tensor) -> _Lookups | _Outputs:
        if use.is_embedding:
            return lookups.setdefault(site.name, _Lookups(site, like))
        # made once: a site may be called many times
        if site.name not in outputs:
            outputs[site.name] = _Outputs(site, like, whole=whole and not site.has_embedding, drawn=drawn)
        return outputs[site.name]

    handles = [
        get_module(model, use).register_forward_hook(_watch_gradients(site, use, sums, without_grad), with_kwargs=True)
        for site in plan.sites
        for use in site.uses
    ]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        with evaluating(model), torch.enable_grad():
            for batch in batches:
                found = loss(call_model(model, batch))
                if found.requires_grad:
                    found.backward()  # type: ignore[no-untyped-call]
    finally:
        for parameter in trained:
            parameter.requires_grad_()
        for handle in handles:
            handle.remove()
    if unseen := sorted(without_grad - outputs.keys() - lookups.keys()):
        raise DataError(
            "`loss` must have a gradient at every matrix of the plan, but the model calls these under "
            f"`torch.no_grad()`: {', '.join(unseen)}. Exclude them from the plan, or leave `loss` out."
        )
    weights = {name: seen.weights() for name, seen in outputs.items()}
    weights |= {name: seen.weights(weights.get(name, Moments()).rows_O) for name, seen in lookups.items()}
    return _checked(weights)


def _checked(weights: dict[str, Moments]) -> dict[str, Moments]:
    """Refuse weights that are not finite or all zero; those of sites that the loss does not depend on are left out."""
    for name, seen in weights.items():
        if not all(torch.isfinite(t).all() for t in (seen.rows_O, seen.inputs_II) if t is not None):
            raise DataError(f"`loss` must have finite gradients, but that of the outputs of {name!r} is not.")
    if not any(_depends(seen) for seen in weights.values()):
        raise DataError(
            "`loss` must depend on the matrices of the plan, but no batch gives any of them a gradient. Check what it "
            "is computed from, or leave it out."
        )
    return {name: seen if _depends(seen) else Moments() for name, seen in weights.items()}


def _depends(weights: Moments) -> bool:
    """Whether the loss depends on the outputs of a site at all."""
    assert weights.rows_O is not None
    return bool(weights.rows_O.any()) and (weights.inputs_II is None or bool(weights.inputs_II.any()))


class _Outputs:
    """The sum of g g^T, or its diagonal, of the gradients g of a layer's outputs."""

    def __init__(self, site: Site, like: Tensor, *, whole: bool, drawn: bool) -> None:
        self.drawn = drawn
        self.sums = like.new_zeros((site.shape[0],) * (2 if whole else 1), dtype=torch.float32)

    def add(self, args: tuple[Any, ...], kwargs: dict[str, Any], grad: Tensor) -> None:
        g_BO = grad.detach().reshape(-1, grad.shape[-1]).float()
        p_BO = _probabilities(g_BO) if self.drawn else None
        if self.sums.dim() == 1:
            self.sums += (g_BO.square() if p_BO is None else p_BO * (1 - p_BO)).sum(0)
        elif p_BO is None:
            self.sums.addmm_(g_BO.t(), g_BO)
        else:
            self.sums.addmm_(p_BO.t(), p_BO, alpha=-1)
            self.sums.diagonal().add_(p_BO.sum(0))

    def weights(self) -> Moments:
        if self.sums.dim() == 1:
            return Moments(rows_O=self.sums)
        return Moments(rows_O=self.sums.diagonal().clone(), outputs_OO=self.sums)


class _Lookups:
    """How often each row of an embedding was looked up, and the sum of g g^T of the gradients g of what that gave."""

    def __init__(self, site: Site, like: Tensor) -> None:
        self.number_O = like.new_zeros(site.shape[0], dtype=torch.float32)
        self.gradients_II = like.new_zeros(site.shape[1], site.shape[1], dtype=torch.float32)

    def add(self, args: tuple[Any, ...], kwargs: dict[str, Any], grad: Tensor) -> None:
        self.number_O += torch.bincount(_first(args, kwargs).flatten(), minlength=len(self.number_O))
        g = grad.detach().reshape(-1, grad.shape[-1]).float()
        self.gradients_II.addmm_(g.t(), g)

    def weights(self, rows_O: Tensor | None) -> Moments:
        """Weights of rows and of features, for a site whose output layer, if it has one, has weights `rows_O`."""
        total = self.number_O.sum().clamp(min=1)
        if rows_O is None or not rows_O.any():
            return Moments(self.gradients_II / total, self.number_O)
        return Moments(self.gradients_II / rows_O.sum(), rows_O)


def _watch_gradients(
    site: Site, use: Use, sums: Callable[[Site, Use, Tensor], _Lookups | _Outputs], without_grad: set[str]
) -> Callable[..., Tensor]:
    """A forward hook that adds what the gradients of a use's outputs say to the sums of its site.

    Sites that are called under `torch.no_grad()` are added to `without_grad`.
    """

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        if not output.numel():
            return output
        if not torch.is_grad_enabled():
            without_grad.add(site.name)
            return output
        scale = (scale_of(words_of(module)) or 1.0) if use.is_embedding else 1.0
        found = sums(site, use, output)
        # no parameter requires a gradient, so the first outputs start the graph; a clone may be changed in place
        output = output if output.requires_grad else output.requires_grad_().clone()
        output.register_hook(lambda grad: found.add(args, kwargs, grad * scale))  # type: ignore[no-untyped-call]
        return output

    return hook


def _probabilities(g_BO: Tensor) -> Tensor | None:
    """The probabilities p of all answers, where the gradients are those of logits by the answers drawn; else None.

    The gradient of the cross entropy of answer y is p - 1[y], negative at y alone. The mean of its outer product over
    all answers is diag(p) - p p^T, which weighs words that were never drawn too.
    """
    is_drawn = g_BO < 0
    # other outputs have gradients of any sign
    if bool((is_drawn.sum(1) == 1).all()) and bool((g_BO.sum(1).abs() < 1e-2).all()):
        return g_BO + is_drawn.float()
    return None


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
