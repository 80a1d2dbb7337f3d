"""Compression without training: SVD, whitened where there is calibration data.

Matrix by matrix and in place, so that a model that just fits in memory can be compressed: calibration data run through
the model once for every few matrices, whose moments are all that is held beside it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from rankwise.adapters import families
from rankwise.adapters.plans import find_plan
from rankwise.core.allocation import global_allocation, uniform_allocation
from rankwise.core.budget import Budget, CostCurve, count
from rankwise.core.calibrate import count_calls, moment_bytes, output_fisher, second_moments
from rankwise.core.copies import copied
from rankwise.core.factorize import Moments
from rankwise.core.gates import Gate
from rankwise.core.host_memory import release_freed_memory, release_mapped_pages
from rankwise.core.matrices import FactorizedMatrix
from rankwise.core.plan import Plan, Site, bias_of, check_weights, get_module, pair, source
from rankwise.core.targets import Target, find_target
from rankwise.core.verify import Batch, verify_layers
from rankwise.errors import InvalidValueError, RankwiseError
from rankwise.methods.base import svd_of_source
from rankwise.methods.svd import Svd
from rankwise.pruner import check_arguments, plan_for_method, size_account
from rankwise.split import split
from rankwise.swap import become

Progress = Callable[[str, int, int], None]
SHARE = 0.08
"""Moments may take this share of the model's memory at a time."""
LEAST_BYTES = 2**24
"""Nor are they held to less than this."""


def compress(
    model: nn.Module,
    budget: Budget,
    calibration: Iterable[Any] | None = None,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    loss_batches: Iterable[Any] | None = None,
    plan: Plan | None = None,
    layout: Literal["pair", "pivot"] | None = None,
    rank_multiple: int | None = None,
    target: str | Target | None = None,
    example: Any = None,
    in_place: bool = False,
    ranks: Literal["global", "even"] = "global",
    progress: Progress | None = None,
) -> nn.Module:
    """A model of the size asked for, at once.

    Ranks are shared out over the whole model: the components are kept whose loss would cost most per parameter. A layer
    on which the loss does not depend is left as it is, and the others lose more, as long as they have anything left.
    So is one that would lose every component, unless another one would then.

    Args:
        model: stays as it is, unless `in_place` is set.
        budget: the size of the new model.
        calibration: batches of input for `model`; outputs are then measured on those data.
        loss: with `calibration`, a loss of what the model returns for a batch. Errors of all matrices are then weighed
            by what they cost it; without it by the share of their matrix's output.
        loss_batches: batches for `loss`, by default those of `calibration`. Short ones take less memory.
        plan: which matrices are compressed; by default every linear layer and embedding.
        layout: how a matrix of low rank is stored (`rankwise.methods.representations.Factorized`). By default "pair",
            which is fast everywhere; "pivot" is smaller, and slower than dense on GPUs and in ONNX Runtime.
        rank_multiple: keep ranks at multiples of this number; by default those that `target` wants.
        target: where the model will run, "cuda", "cpu" or "size" (the smallest file, in the pivot layout; see
            `rankwise.core.targets`); by default the device that it is on.
        example: a batch of input for `model`, on which its code is checked to do with layers of low rank what it does
            with stock ones. Default: the first batch of `calibration`.
        in_place: `model` itself becomes small, in little more memory than it takes already.
        ranks: "global" as above, or "even": the same share of every matrix's rank.
        progress: called with what is being done, how many batches or matrices are done, and of how many.
    """
    if ranks not in ("global", "even"):
        raise InvalidValueError(f'`ranks` must be "global" or "even", but is {ranks!r} instead.')
    progress = progress or (lambda what, done, total: None)
    init: Literal["svd", "whitened"] = "svd" if calibration is None else "whitened"
    check_arguments(model, budget, init, calibration, rank_multiple, seed=0)
    if loss is not None and calibration is None:
        raise RankwiseError(
            "`loss` must go with `calibration`, but there is none. Pass batches of input for the model."
        )
    where = find_target(target, model)
    method = Svd(layout=layout or where.layout)
    # before the copy, which loses what `from_pretrained` notes of weights that it loaded
    plan = plan_for_method(model, plan or find_plan(model), method)
    check_weights(model, plan)
    account = size_account(model, plan, method, where, rank_multiple, trained=True)
    limit = budget.resolve(account)
    model = model if in_place else copied(model)
    split(model, [use.name for site in plan.sites for use in site.uses])

    data = _Data(model, plan, None if calibration is None else list(calibration))
    if loss is not None:
        shown = list(loss_batches or data.batches or [])
        weights = output_fisher(model, plan, _counted(shown, partial(progress, "gradients")), loss)
        data.weights = {name: rows_O for name, rows_O in weights.items() if rows_O.any()}
        data.unreached = {site.name for site in plan.sites if site.name not in weights}
        release_freed_memory()
    curves = dict(zip((site.name for site in plan.sites), account.curves, strict=True))
    scores = None if ranks == "even" else _scores(model, method, curves, data, progress)
    chosen = _choose(curves, scores, limit - account.fixed, _unseen(data))
    _warn_of_unreached([site for site in plan.sites if site.name in data.unreached])
    _warn_of_alone([site for site in plan.sites if site.name in chosen.alone - data.unreached])
    for done, (site, moments) in enumerate(data.moments(), 1):
        if site.name not in chosen.alone:
            _shrink(model, site, curves[site.name], chosen.counts[site.name], moments, budget.dtype)
        progress("factors", done, len(plan.sites))
    families.changed(model)
    verify_layers(model, Batch(example if example is not None else next(iter(data.batches or ()), None)))
    # less where pivots would have suffered in half precision
    assert count(model) <= account.size([chosen.counts[site.name] for site in plan.sites]) <= limit
    return model if budget.dtype is None else model.to(budget.dtype)


class _Data:
    """What calibration says of each site, a few sites at a time and in the order in which data reach them."""

    def __init__(self, model: nn.Module, plan: Plan, batches: Sequence[Any] | None) -> None:
        self.model, self.plan, self.batches = model, plan, batches
        self.weights: dict[str, Tensor] = {}
        """Of the sites on which the loss depends; empty without a loss."""
        self.unreached: set[str] = set()
        self.calls = [count_calls(model, plan, batch) for batch in (batches or [])[:1]]
        """Of the first batch, and of the others where they are needed."""
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        self.room = max(int(SHARE * size), LEAST_BYTES)

    def moments(self) -> Iterator[tuple[Site, Moments | None]]:
        """Every site once; what a caller does to a site, the data of the next group have gone through."""
        if self.batches is None:
            yield from ((site, None) for site in self.plan.sites)
            return
        groups = list(self._groups())
        if len(groups) > 1:
            self.calls += [count_calls(self.model, self.plan, batch) for batch in self.batches[len(self.calls) :]]
        for group in groups:
            stops = self._stops(group) if len(groups) > 1 else None
            found = second_moments(self.model, Plan(tuple(group)), self.batches, last_calls=stops, dtype=torch.float32)
            for site in group:
                moments = found.pop(site.name)
                if moments.inputs_II is None and moments.rows_O is None:
                    self.unreached.add(site.name)
                if site.name in self.weights:
                    moments = replace(moments, rows_O=self.weights[site.name])
                yield site, moments
            release_freed_memory()

    def _stops(self, group: Sequence[Site]) -> list[tuple[str, int] | None]:
        """For each batch the call behind which it may stop; None if it does not call all uses, and may yet."""
        uses = {use.name for site in group for use in site.uses}
        return [
            next(call for call in reversed(seen.items()) if call[0] in uses) if uses <= seen.keys() else None
            for seen in self.calls
        ]

    def _groups(self) -> Iterator[list[Site]]:
        place = {name: i for i, name in enumerate(self.calls[0] if self.calls else ())}

        def last_place(site: Site) -> int:
            return max((place[use.name] for use in site.uses if use.name in place), default=len(place))

        order = sorted(self.plan.sites, key=last_place)
        group: list[Site] = []
        for site in order:
            if group and moment_bytes([*group, site], torch.float32) > self.room:
                yield group
                group = []
            group.append(site)
        if group:
            yield group


def _counted(batches: Sequence[Any], progress: Callable[[int, int], None]) -> Iterator[Any]:
    for done, batch in enumerate(batches):
        progress(done, len(batches))
        yield batch
    progress(len(batches), len(batches))


def _scores(
    model: nn.Module, method: Svd, curves: Mapping[str, CostCurve], data: _Data, progress: Progress
) -> dict[str, Tensor]:
    """What each component of each site is worth."""
    scores: dict[str, Tensor] = {}
    for done, (site, moments) in enumerate(data.moments(), 1):
        curve = curves[site.name]
        if data.weights and site.name not in data.weights:
            energy = torch.zeros(curve.num_components, dtype=torch.float64)
        else:
            energy = svd_of_source(source(model, site), curve.num_components, moments).energy_R
        scores[site.name] = method.scores(site, energy, curve, comparable=bool(data.weights))
        release_freed_memory()
        progress("ranks", done, len(curves))
    return scores


def _unseen(data: _Data) -> set[str]:
    """Sites on which the loss does not depend."""
    return {site.name for site in data.plan.sites if site.name not in data.weights} if data.weights else set()


class _Chosen(NamedTuple):
    counts: dict[str, int]
    """Components that are kept, by site."""
    alone: set[str]
    """Sites that stay as they are, because nothing says what they are worth, or they would lose everything."""


def _choose(
    curves: Mapping[str, CostCurve], scores: Mapping[str, Tensor] | None, room: int, unseen: set[str]
) -> _Chosen:
    """How many components of each site are kept: the best of all of them, or without `scores` the same share of each.

    A layer of rank 0 says the same to every input, which no error of second order foresees. So it is better left alone,
    as long as no other layer comes to that instead; what is `unseen`, as long as others have anything left.
    """

    def choose(alone: set[str]) -> dict[str, int] | None:
        rest = [name for name in curves if name not in alone]
        left = room - sum(curves[name].full for name in alone)
        if left < 0:
            return None
        few = [curves[name] for name in rest]
        found = (
            uniform_allocation(few, left)
            if scores is None
            else global_allocation([scores[name] for name in rest], few, left)
        )
        return {**{name: curves[name].num_components for name in alone}, **dict(zip(rest, found, strict=True))}

    def empty(counts: Mapping[str, int]) -> set[str]:
        return {name for name, k in counts.items() if k == 0}

    plain = choose(set())
    assert plain is not None
    for alone, most in ((unseen | empty(plain), 0), (unseen, len(curves) - len(unseen) - 1)):
        counts = choose(alone)
        if counts is not None and len(empty(counts)) <= most:
            return _Chosen(counts, alone)
    return _Chosen(plain, set())


def _named(sites: Sequence[Site]) -> str:
    more = f" and {len(sites) - 8} more" if len(sites) > 8 else ""
    return ", ".join(str(site) for site in sites[:8]) + more


def _warn_of_unreached(sites: Sequence[Site]) -> None:
    if sites:
        warnings.warn(
            "Every matrix of the plan should be reached by a batch of `calibration`, and of `loss_batches` if given, "
            f"but these are not: {_named(sites)}. Nothing says what they are worth: add batches that reach them, or "
            "exclude them from the plan.",
            stacklevel=3,
        )


def _warn_of_alone(sites: Sequence[Site]) -> None:
    if sites:
        warnings.warn(
            "These layers are left as they are, and others lose more, because the loss hardly depends on them and they "
            f"would have lost everything: {_named(sites)}. Exclude them from the plan if that is right.",
            stacklevel=3,
        )


def _shrink(
    model: nn.Module, site: Site, curve: CostCurve, rank: int, moments: Moments | None, dtype: torch.dtype | None
) -> None:
    """Let every use of `site` be a plain layer of that rank, unless it is what it would become."""
    if curve(rank) == site.params and rank == curve.num_components and site.uses[0].kind != "conv1d":
        return
    found = source(model, site)
    factors = svd_of_source(found, rank, moments)
    p, q = (nn.Parameter(factor, found.requires_grad) for factor in (factors.p_OR, factors.q_RI))
    curve = replace(curve, num_components=rank)
    matrix = FactorizedMatrix(p, q, Gate(rank), curve)
    kept = torch.arange(rank, device=p.device)
    if matrix.pivots_lose_precision(kept, None, dtype, by_columns=site.has_embedding):
        # as many components, most first, as a pair of no more parameters has
        matrix.cost_curve = replace(curve, pivot=False)
        kept = kept[: matrix.cost_curve.largest_count(curve(rank))]
    export = matrix.export(kept, None)
    old = found.tensors
    del found, factors, matrix
    # an output layer is tied to its embedding, so that one is made first
    for use in sorted(site.uses, key=lambda use: not use.is_embedding):
        module = get_module(model, use)
        if use.is_embedding:
            words = module if use.kind == "embedding" else pair(module)[0]
            assert isinstance(words, nn.Embedding)
            become(module, export.as_embedding(words.padding_idx, words))
        else:
            become(module, export.as_linear(bias_of(module, use)))
    for tensor in old:
        release_mapped_pages(tensor)
    del old
    release_freed_memory()
