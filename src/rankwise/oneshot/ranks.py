"""Low rank without training: how many components each matrix keeps, and the layers that it becomes."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from rankwise.core.allocation import blended_allocation, global_allocation, uniform_allocation
from rankwise.core.budget import CostCurve, SizeAccount, count
from rankwise.core.factorize import Moments
from rankwise.core.gates import Gate
from rankwise.core.host_memory import release_freed_memory, release_mapped_pages
from rankwise.core.matrices import FactorizedMatrix
from rankwise.core.plan import Site, bias_of, get_module, listed, source, words_of
from rankwise.methods.base import energy_of_source, svd_of_source
from rankwise.methods.svd import Svd
from rankwise.oneshot.blockwise import Blocks, RefinedBlocks, Refinement
from rankwise.oneshot.data import CalibrationData
from rankwise.swap import become

Ranks = Literal["global", "even", "blend"]
RANKS: tuple[Ranks, ...] = ("global", "even", "blend")
UNREACHED = (
    "Every matrix of the plan should be reached by a batch of `calibration`, and of `loss_batches` if given, but these "
    "are not: {}. Nothing says what they are worth: add batches that reach them, or exclude them from the plan."
)
ALONE = (
    "These layers are left as they are, and others lose more, because the loss hardly depends on them and they would "
    "have lost everything: {}. Exclude them from the plan if that is right."
)


class Shrink:
    """Chooses ranks, and compresses every site in place."""

    def __init__(
        self,
        data: CalibrationData,
        account: SizeAccount,
        limit: int,
        method: Svd,
        ranks: Ranks,
        dtype: torch.dtype | None,
    ) -> None:
        self.data, self.account, self.limit, self.dtype = data, account, limit, dtype
        self.sites, self.done = data.plan.sites, 0
        self.curves = dict(zip((site.name for site in self.sites), account.curves, strict=True))
        scores: dict[str, Tensor] = {}
        if ranks != "even":
            scores = _scores(data, method, self.curves)
        elif not data.weights or not data.calls[0].keys() >= {use.name for site in self.sites for use in site.uses}:
            # notes what no batch reaches; those of the loss may be others
            deque(data.moments(dense=True), maxlen=0)
        unseen = (self.curves.keys() - data.weights.keys() if data.weights else set()) | data.unreached
        self.counts, self.alone = _choose(ranks, self.curves, scores, limit - account.fixed, unseen)
        _warn_about([site for site in self.sites if site.name in data.unreached], UNREACHED)
        _warn_about([site for site in self.sites if site.name in self.alone - data.unreached], ALONE)

    def all(self, *, anchor: bool, refinement: Refinement, refined: RefinedBlocks | None) -> None:
        """Compress every site: block by block where the model has blocks, else in the order of calls."""
        data = self.data
        if not data.blocks:
            self._plain(self.sites)
        else:
            assert data.batches is not None
            blocks = Blocks(data.model, data.blocks, data.record, anchor=anchor)
            before, after = data.around_blocks()
            self._plain(before)
            if before:
                blocks.start()
            for number, name in enumerate(data.blocks):

                def shrink(site: Site, moments: Moments) -> None:
                    self._one(site, data.weighed(site, moments))
                    data.forget(site)

                def step(done: int, number: int = number) -> None:
                    data.progress("refining", number * refinement.steps + done, len(data.blocks) * refinement.steps)

                data.recall(number)
                weights_DD, example = data.block_weights.get(name), (blocks.calls[number][0], blocks.inputs[0])
                sites = blocks.sites(number, self.sites)
                blocks.compress(number, sites, shrink, weights_DD, refinement, refined, step)
                data.finish(number, *example)
                release_freed_memory()
            data.lasts = blocks.inputs
            self._plain(after)
        # less where pivots would have suffered in half precision
        counted = self.account.size([self.counts[site.name] for site in self.sites])
        assert count(data.model) <= counted <= self.limit

    def _plain(self, sites: Sequence[Site]) -> None:
        for site, moments in self.data.moments(sites):
            self._one(site, moments)

    def _one(self, site: Site, moments: Moments | None) -> None:
        curve = self.curves[site.name]
        # a pair of the model, counted as what it is at full rank in another layout, becomes that
        if site.name not in self.alone or curve.full < site.params:
            _shrink(self.data.model, site, curve, self.counts[site.name], moments, self.dtype)
        self.done += 1
        self.data.progress("factors", self.done, len(self.sites))


def _scores(data: CalibrationData, method: Svd, curves: Mapping[str, CostCurve]) -> dict[str, Tensor]:
    """What each component of each site is worth."""
    scores: dict[str, Tensor] = {}
    for done, (site, moments) in enumerate(data.moments(dense=True), 1):
        curve = curves[site.name]
        if data.weights and site.name not in data.weights:
            energy = torch.zeros(curve.num_components, dtype=torch.float64)
        else:
            energy = energy_of_source(source(data.model, site), curve.num_components, moments)
        # blocks may be on several devices
        scores[site.name] = method.scores(site, energy, curve, comparable=bool(data.weights)).cpu()
        release_freed_memory()
        data.progress("ranks", done, len(curves))
    return scores


def allocated(ranks: Ranks, scores: Sequence[Tensor], curves: Sequence[CostCurve], room: int) -> list[int]:
    """How many components of each matrix are kept; "even" needs no scores."""
    if ranks == "even":
        return uniform_allocation(curves, room)
    return (blended_allocation if ranks == "blend" else global_allocation)(scores, curves, room)


def _choose(
    ranks: Ranks, curves: Mapping[str, CostCurve], scores: Mapping[str, Tensor], room: int, unseen: set[str]
) -> tuple[dict[str, int], set[str]]:
    """How many components of each site are kept.

    A layer of rank 0 has the same output for every input, which no error of second order foresees. So such a layer is
    left as it is, as long as no other one gets rank 0 instead; `unseen` ones, on which the loss does not depend, as
    long as others have any rank left. The second result are the sites that are left as they are.
    """

    def choose(alone: set[str]) -> dict[str, int] | None:
        rest = [name for name in curves if name not in alone]
        left = room - sum(curves[name].full for name in alone)
        if left < 0:
            return None
        known = [scores[name] for name in rest if name in scores]
        found = allocated(ranks, known, [curves[name] for name in rest], left)
        return {**{name: curves[name].num_components for name in alone}, **dict(zip(rest, found, strict=True))}

    def empty(counts: Mapping[str, int]) -> set[str]:
        return {name for name, k in counts.items() if k == 0}

    plain = choose(set())
    assert plain is not None
    for alone, most in ((unseen | empty(plain), 0), (unseen, len(curves) - len(unseen) - 1)):
        counts = choose(alone)
        if counts is not None and len(empty(counts)) <= most:
            return counts, alone
    return plain, set()


def _warn_about(sites: Sequence[Site], text: str) -> None:
    if sites:
        # of whoever called `compress`, which is wrapped
        warnings.warn(text.format(listed([str(site) for site in sites], most=8)), stacklevel=5)


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
    if matrix.loses_precision(kept, None, dtype, by_columns=site.has_embedding):
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
            words = words_of(module)
            become(module, export.as_embedding(words.padding_idx, words))
        else:
            become(module, export.as_linear(bias_of(module, use)))
    for tensor in old:
        release_mapped_pages(tensor)
    del old
    release_freed_memory()
