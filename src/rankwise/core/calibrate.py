"""Calibration: statistics of each planned matrix on sample data, for the whitened SVD.

There are two: the second moments of the inputs of a matrix, and how much the loss depends on its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rankwise.core.blocks import StopForward
from rankwise.core.factorize import Moments
from rankwise.core.plan import Plan, Site, Use, get_module, words_of
from rankwise.core.sampled import sampled_loss
from rankwise.errors import DataError
from rankwise.measure import call_model, evaluating
from rankwise.modules import scale_of

Loss = Callable[[Any], Tensor] | Literal["sampled"]
"""The loss of what a model returns for a batch; "sampled" is that of its own answers (`sampled_loss`)."""
FISHER_BYTES = 2**32
"""How errors in two outputs of a layer add up is measured where that takes no more memory for all layers at hand."""


def second_moments(
    model: nn.Module,
    plan: Plan,
    batches: Iterable[Any],
    *,
    last_calls: Sequence[tuple[str, int] | None] | None = None,
    dtype: torch.dtype = torch.float64,
    run: Callable[[nn.Module, Any], Any] = call_model,
) -> dict[str, Moments]:
    """Run `batches` through `model` and average the second moments of each site's inputs, by the site's name.

    A batch is a tensor, a tuple of positional arguments or a mapping of keyword arguments.

    Args:
        last_calls: for each batch, the name of the use that the plan needs last, and the number of that call
            (`count_calls`); the forward pass stops there. None: every forward pass runs to its end.
        dtype: the dtype of the sums.
        run: calls the model, or the part of it that the plan is of, with a batch.
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
                run(model, batch)
    if not number:
        raise DataError("`calibration` must hold at least one batch, but is empty.")
    moments = {name: total.moments() for name, total in sums.items()}
    for name, moment in moments.items():
        if not _is_finite(moment):
            raise DataError(f"`calibration` must give finite activations, but the inputs of {name!r} are not.")
    return moments


def _is_finite(moments: Moments) -> bool:
    """Whether all numbers are. Of a sum of x x^T the diagonal tells, which has its largest."""
    diagonal = None if moments.inputs_II is None else moments.inputs_II.diagonal()
    return all(bool(torch.isfinite(t).all()) for t in (diagonal, moments.rows_O) if t is not None)


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


def loss_weights(model: nn.Module, plan: Plan, batches: Iterable[Any], loss: Loss) -> dict[str, Moments]:
    """`output_fisher` by a loss that may be "sampled", of pairs of outputs where memory allows."""
    whole, drawn = has_room(plan.sites), loss == "sampled"
    return output_fisher(model, plan, batches, loss_of(model, loss), whole=whole, drawn=drawn)


def loss_of(model: nn.Module, loss: Loss) -> Callable[[Any], Tensor]:
    """The loss itself, which may be "sampled"."""
    if loss != "sampled":
        return loss
    return sampled_loss(num_words=getattr(getattr(model, "config", None), "num_words", None))


def has_room(sites: Sequence[Site], share: float = 1) -> bool:
    """Whether it is measured how errors in two outputs of these sites add up, by a share of the memory for that."""
    return 4 * sum(site.shape[0] ** 2 for site in sites if not site.has_embedding) <= share * FISHER_BYTES


def weighed(moments: Moments, weights: Moments | None) -> Moments:
    """The moments of a site with the weights of its outputs (`output_fisher`), where the loss depends on them."""
    if weights is None or weights.rows_O is None:
        return moments
    inputs_II = moments.inputs_II
    if weights.inputs_II is not None:
        inputs_II = weights.inputs_II if inputs_II is None else inputs_II + weights.inputs_II
    return replace(moments, inputs_II=inputs_II, rows_O=weights.rows_O, outputs_OO=weights.outputs_OO)


def output_fisher(
    model: nn.Module,
    plan: Plan,
    batches: Iterable[Any],
    loss: Callable[[Any], Tensor],
    *,
    whole: bool = False,
    drawn: bool = False,
) -> dict[str, Moments]:
    """How much the loss depends on the outputs of each site that is reached, by the site's name: `OutputFisher`.

    Args:
        loss: the loss of what the model returns for a batch.
        whole: measure all of G, not only its diagonal, except for sites with an embedding.
        drawn: whether the loss is the summed cross entropy of answers that were drawn at random (`_probabilities`).
    """
    fisher = OutputFisher(model, plan, whole=whole, drawn=drawn)
    with fisher.watching():
        for batch in batches:
            found = loss(call_model(model, batch))
            if found.requires_grad:
                found.backward()  # type: ignore[no-untyped-call]
    return check_depends(fisher.weights())


class OutputFisher:
    """How much a loss depends on the outputs y of each site, from the backward passes inside `watching`.

    To second order, an error e of the outputs raises the loss by half of the sum of e^T G e over calls, where G is the
    sum of g g^T for g = dL/dy: the Fisher information, with inputs and gradients taken as independent. It makes errors
    of all matrices comparable. With outputs taken as independent too, its diagonal is enough, `rows_O`.

    The rows of an embedding are looked up, so that all features of a row err together: an error e of row w costs
    n_w e^T G e, with n_w the number of look-ups and G = E[g g^T] of the gradients g of what they give. Of an embedding
    that is an output layer too, the output layer's row weights f say how often words occur, those that the
    calibration text lacks included; its `inputs_II` is then G sum(n) / sum(f), which adds to the second moments of the
    output layer's inputs.
    """

    def __init__(self, model: nn.Module, plan: Plan, *, whole: bool = False, drawn: bool = False) -> None:
        self.model, self.plan, self.whole, self.drawn = model, plan, whole, drawn
        self.outputs: dict[str, _Outputs] = {}
        self.lookups: dict[str, _Lookups] = {}
        self.without_grad: set[str] = set()

    def _sums(self, site: Site, use: Use, like: Tensor) -> _Lookups | _Outputs:
        # made once: a site may be called many times
        if use.is_embedding:
            if site.name not in self.lookups:
                self.lookups[site.name] = _Lookups(site, like)
            return self.lookups[site.name]
        if site.name not in self.outputs:
            whole = self.whole and not site.has_embedding
            self.outputs[site.name] = _Outputs(site, like, whole=whole, drawn=self.drawn)
        return self.outputs[site.name]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Evaluation mode with gradients, but none of parameters; the model is left as it was."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        with ExitStack() as stack:
            for site in self.plan.sites:
                for use in site.uses:
                    hook = _watch_gradients(site, use, self._sums, self.without_grad)
                    stack.enter_context(get_module(self.model, use).register_forward_hook(hook, with_kwargs=True))
            for parameter in trained:
                stack.callback(parameter.requires_grad_)
                parameter.requires_grad_(False)
            stack.enter_context(evaluating(self.model))
            stack.enter_context(torch.enable_grad())
            yield
        if unseen := sorted(self.without_grad - self.outputs.keys() - self.lookups.keys()):
            raise DataError(
                "`loss` must have a gradient at every matrix of the plan, but the model calls these under "
                f"`torch.no_grad()`: {', '.join(unseen)}. Exclude them from the plan, or leave `loss` out."
            )

    def weights(self) -> dict[str, Moments]:
        """The weights of each site that was reached; empty ones where the loss does not depend on its outputs."""
        weights = {name: seen.weights() for name, seen in self.outputs.items()}
        weights |= {name: seen.weights(weights.get(name, Moments()).rows_O) for name, seen in self.lookups.items()}
        for name, seen in weights.items():
            if not _is_finite(seen):
                raise DataError(f"`loss` must have finite gradients, but that of the outputs of {name!r} is not.")
        return {name: seen if _depends(seen) else Moments() for name, seen in weights.items()}


def check_depends(weights: dict[str, Moments]) -> dict[str, Moments]:
    """Refuse weights of a whole plan that are all zero."""
    if all(seen.rows_O is None for seen in weights.values()):
        raise DataError(
            "`loss` must depend on the matrices of the plan, but no batch gives any of them a gradient. Check what it "
            "is computed from, or leave it out."
        )
    return weights


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
