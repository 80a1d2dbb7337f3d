"""Compression without training: SVD, whitened where there is calibration data.

Matrix by matrix and in place, so that a model that just fits in memory can be compressed: calibration data run through
the model once for every few matrices, whose moments are all that is held beside it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankwise.adapters import families
from rankwise.adapters.plans import find_plan
from rankwise.blockwise import Blocks, RefinedBlocks, Refinement
from rankwise.both import NeuronsThenRanks, check_share
from rankwise.core.allocation import blended_allocation, global_allocation, uniform_allocation
from rankwise.core.blocks import find_blocks, output_gradients
from rankwise.core.budget import Budget, CostCurve, SizeAccount, count
from rankwise.core.calibrate import count_calls, moment_bytes, output_fisher, second_moments
from rankwise.core.factorize import Moments
from rankwise.core.gates import Gate
from rankwise.core.host_memory import release_freed_memory, release_mapped_pages
from rankwise.core.matrices import FactorizedMatrix
from rankwise.core.plan import (
    LeftOut,
    Plan,
    Site,
    bias_of,
    check_not_empty,
    check_weights,
    get_module,
    listed,
    source,
    words_of,
)
from rankwise.core.targets import Target, find_target
from rankwise.core.verify import Batch, verify_layers
from rankwise.errors import InvalidValueError, RankwiseError
from rankwise.latency import size_for
from rankwise.methods.base import energy_of_source, svd_of_source
from rankwise.methods.svd import Svd
from rankwise.methods.width import Width
from rankwise.narrow import WidthSvd, narrow_all, oneshot_method
from rankwise.sizes import check_arguments, plan_for_method, size_account
from rankwise.split import split
from rankwise.swap import become, copied

Progress = Callable[[str, int, int], None]
Ranks = Literal["global", "even", "blend"]
RANKS: tuple[Ranks, ...] = ("global", "even", "blend")
LARGE = 0.1
"""An embedding is compressed by default if it is at least this share of the model, or tied to an output layer."""
SHARE = 0.08
"""Moments may take this share of the model's memory at a time."""
LEAST_BYTES = 2**24
"""Moments may always take this much memory."""
FISHER_BYTES = 2**32
"""How errors in two outputs of a layer add up is measured for models for which that takes no more memory."""
EMBEDDING = "an embedding, which embeddings=True (--embeddings yes) compresses"
"""Why `default_plan` leaves out a site."""
UNREACHED = (
    "Every matrix of the plan should be reached by a batch of `calibration`, and of `loss_batches` if given, but these "
    "are not: {}. Nothing says what they are worth: add batches that reach them, or exclude them from the plan."
)
ALONE = (
    "These layers are left as they are, and others lose more, because the loss hardly depends on them and they would "
    "have lost everything: {}. Exclude them from the plan if that is right."
)
NO_BLOCKS = (
    "`refinement` needs calibration data and a model of blocks, layers in an `nn.ModuleList` of which each is called "
    "once with the output of the one before, but there are none here. Leave it out."
)


def compress(
    model: nn.Module,
    budget: Budget,
    calibration: Iterable[Any] | None = None,
    *,
    method: Literal["svd", "width", "width+svd"] = "svd",
    width_share: float | None = None,
    loss: Callable[[Any], Tensor] | Literal["sampled"] | None = "sampled",
    loss_batches: Iterable[Any] | None = None,
    plan: Plan | None = None,
    embeddings: bool | None = None,
    layout: Literal["pair", "pivot"] | None = None,
    rank_multiple: int | None = None,
    target: str | Target | None = None,
    example: Any = None,
    in_place: bool = False,
    ranks: Ranks = "global",
    anchor: bool = False,
    refinement: Refinement | None = None,
    refined: RefinedBlocks | None = None,
    progress: Progress | None = None,
) -> nn.Module:
    """A model of the size asked for, without training; the defaults are those of `rankwise compress`.

    Args:
        calibration: batches of input for `model`, on which outputs are measured; without it the SVD of the weights.
        method: "svd", low rank; "width", fewer neurons and heads of a decoder, which stock tools load; or "width+svd",
            the one and then the other in one budget.
        width_share: with "width+svd", the share of the removed parameters that goes with neurons and heads. Default:
            several are tried on batches of `calibration` that are kept back, in the memory of a second model.
        loss: with `calibration`, of what the model returns for a batch: errors of all matrices are weighed by what they
            cost it. "sampled" needs no labels (`sampled_loss`). None: each matrix by its own output alone.
        loss_batches: batches for `loss`, by default those of `calibration`. Short ones take less memory.
        plan: which matrices are compressed; by default every linear layer, and embeddings by `embeddings`.
        embeddings: whether embeddings are compressed; by default those that are tied to an output layer, or large.
        layout: "pair", fast everywhere, or "pivot", smaller; by default that of `target`.
        rank_multiple: keep ranks at multiples of this number; by default those that `target` wants.
        target: where the model will run, as for `Pruner`; by default the device that it is on.
        example: a batch on which the model's code is checked, and timed for a latency; by default from `calibration`.
        in_place: change `model` itself, in little more memory than it takes already; else a copy.
        ranks: "global": the best components of the whole model; "even": the same share of every matrix's rank; or
            "blend": between the two.
        anchor: with `calibration` and in a model of blocks, fit matrices to the outputs of the dense model, whose
            inputs differ from those that they read once layers before them are compressed. Better on the text of
            the calibration where very much is removed, worse on others (docs/log/one-shot.md).
        refinement: with `calibration`, train every block for some steps towards the outputs of the dense block; this
            takes a batch a step, and as much text as there is.
        refined: keeps blocks that were refined, so that a call that was stopped can go on.
        progress: called with what is being done, how many batches or matrices are done, and of how many.
    """
    batches = None if calibration is None else list(calibration)
    _check(model, budget, batches, rank_multiple, loss, ranks)
    example = batches[0] if example is None and batches else example
    where = find_target(target, model)
    how = oneshot_method(method, budget, layout or where.layout, low_rank_only=layout is not None or bool(embeddings))
    if isinstance(how, Svd):
        plan = plan or default_plan(model, embeddings=embeddings)
        budget, plan = size_for(model, budget, plan, example, rank_multiple)
    # before the copy, which loses what `from_pretrained` notes of weights that it loaded
    plan = plan_for_method(model, plan, how)
    check_weights(model, plan)
    account = size_account(model, plan, how, where, rank_multiple, trained=True)
    limit = budget.resolve(account)
    check_share(width_share, both=isinstance(how, WidthSvd))
    if isinstance(how, WidthSvd):
        plan_for_method(model, plan, Width())
        shared = {"loss": loss, "target": where, "example": example, "ranks": ranks, "progress": progress}
        low_rank = {"layout": how.layout, "rank_multiple": rank_multiple, "anchor": anchor, "refinement": refinement}
        both = NeuronsThenRanks(compress, plan, limit, shared, low_rank)
        given = list(loss_batches or batches or ())
        share = both.best_share(model, batches, given) if width_share is None else width_share
        model = both(model if in_place else copied(model), share, calibration=batches, loss_batches=given)
        return model if budget.dtype is None else model.to(budget.dtype)
    model = model if in_place else copied(model)
    split(model, [use.name for site in plan.sites for use in site.uses])
    refinement = refinement or Refinement(steps=0)
    data = _Data(model, plan, batches, progress, in_blocks=isinstance(how, Svd), refined=refinement.steps > 0)
    if refinement.steps and not data.blocks:
        raise RankwiseError(NO_BLOCKS)
    if loss is not None and batches:
        data.weigh(loss, list(loss_batches or batches))
    if not isinstance(how, Svd):
        narrow_all(data, account, limit, even=ranks == "even")
    else:
        shrink = _Shrink(data, account, limit, how, ranks, budget.dtype)
        shrink.all(anchor=anchor, refinement=refinement, refined=refined)
    families.changed(model)
    verify_layers(model, Batch(example))
    return model if budget.dtype is None else model.to(budget.dtype)


def _check(
    model: nn.Module, budget: Budget, batches: Sequence[Any] | None, rank_multiple: int | None, loss: object, ranks: str
) -> None:
    check_arguments(model, budget, "svd" if batches is None else "whitened", batches, rank_multiple, seed=0)
    if ranks not in RANKS:
        raise InvalidValueError(f'`ranks` must be "global", "even" or "blend", but is {ranks!r} instead.')
    if not callable(loss) and loss not in ("sampled", None):
        raise InvalidValueError(f'`loss` must be a function, "sampled" or None, but is {loss!r} instead.')
    if callable(loss) and batches is None:
        raise RankwiseError(
            "`loss` must go with `calibration`, but there is none. Pass batches of input for the model."
        )


def default_plan(model: nn.Module, *, embeddings: bool | None = None, exclude: Sequence[str] = ()) -> Plan:
    """Every linear layer, and embeddings, but those whose names are in `exclude`.

    With `embeddings` None, an embedding that is tied to an output layer, or a large one; otherwise all or none.
    """
    plan = find_plan(model, exclude=list(exclude))
    if embeddings is not True:
        most = LARGE * count(model)
        out = [
            site
            for site in plan.sites
            if site.has_embedding
            and (embeddings is False or (site.params < most and all(use.is_embedding for use in site.uses)))
        ]
        left_out = [LeftOut(site.name, site.params, EMBEDDING) for site in out]
        plan = plan.only([site for site in plan.sites if site not in out], left_out)
    check_not_empty(plan)
    return plan


def sampled_loss(seed: int = 0, num_words: int | None = None) -> Callable[[Any], Tensor]:
    """The loss of answers that the model itself gives at random: its gradients tell what changes those answers.

    Their second moments are the Fisher information, with no need of labels. `logits`, and an output over `num_words`,
    are choices among classes; any other output is taken as numbers, with the squared error as their loss.
    """
    generator = torch.Generator().manual_seed(seed)

    def loss(output: Any) -> Tensor:
        logits = getattr(output, "logits", None)
        answer = logits if logits is not None else _first_tensor(output)
        if answer.shape[-1] == num_words or (logits is not None and answer.shape[-1] > 1):
            return loss_of_choices(answer, generator)
        return (answer * torch.randn(answer.shape, generator=generator).to(answer)).sum()

    return loss


def _first_tensor(output: Any) -> Tensor:
    if isinstance(output, Mapping):
        output = next(iter(output.values()), None)
    elif isinstance(output, tuple | list) and output:
        output = output[0]
    if not isinstance(output, Tensor) or not output.is_floating_point():
        raise RankwiseError(
            "A model must return a tensor of numbers first to be compressed by its own answers, but returns "
            f"{type(output).__name__}. Pass `loss`, a function of what it returns, or loss=None."
        )
    return output


def loss_of_choices(logits: Tensor, generator: torch.Generator) -> Tensor:
    """The loss of choices that are drawn from the logits, over their last dimension.

    The generator, which may be that of another device, draws one number for each choice: its place among the running
    sums of the probabilities says what is chosen.
    """
    logits = logits.reshape(-1, logits.shape[-1])
    with torch.no_grad():
        sums = logits.float().softmax(-1).cumsum(-1)
        drawn = torch.rand(len(logits), 1, generator=generator, device=generator.device).to(logits.device)
        answers = torch.searchsorted(sums, drawn * sums[:, -1:], right=True).flatten().clamp(max=logits.shape[-1] - 1)
    return F.cross_entropy(logits, answers, reduction="sum")


class _Shrink:
    """Chooses ranks, and compresses every site in place."""

    def __init__(
        self,
        data: _Data,
        account: SizeAccount,
        limit: int,
        method: Svd,
        ranks: Ranks,
        dtype: torch.dtype | None,
    ) -> None:
        self.data, self.account, self.limit, self.dtype = data, account, limit, dtype
        self.sites, self.done = data.plan.sites, 0
        self.curves = dict(zip((site.name for site in self.sites), account.curves, strict=True))
        scores = None if ranks == "even" else _scores(data, method, self.curves)
        unseen = (self.curves.keys() - data.weights.keys() if data.weights else set()) | data.unreached
        self.counts, self.alone = _choose(self.curves, scores, limit - account.fixed, unseen, blend=ranks == "blend")
        _warn_about([site for site in self.sites if site.name in data.unreached], UNREACHED)
        _warn_about([site for site in self.sites if site.name in self.alone - data.unreached], ALONE)

    def all(self, *, anchor: bool, refinement: Refinement, refined: RefinedBlocks | None) -> None:
        """Compress every site: block by block where the model has blocks, else in the order of calls."""
        data = self.data
        if not data.blocks:
            self._plain(self.sites)
        else:
            assert data.batches is not None
            blocks = Blocks(data.model, data.blocks, data.batches, anchor=anchor)
            before, after = data.around_blocks()
            self._plain(before)
            if before:
                blocks.start()
            for number, name in enumerate(data.blocks):

                def shrink(site: Site, moments: Moments) -> None:
                    if moments.inputs_II is None:
                        data.unreached.add(site.name)
                    self._one(site, data.weighed(site, moments))

                def step(done: int, number: int = number) -> None:
                    data.progress("refining", number * refinement.steps + done, len(data.blocks) * refinement.steps)

                sites = blocks.sites(number, self.sites)
                weights_DD = data.block_weights.get(name)
                blocks.compress(number, sites, shrink, weights_DD, refinement, refined, step)
                release_freed_memory()
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


class _Data:
    """Calibration data of each site, a few sites at a time and in the order in which a batch reaches them."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        batches: Sequence[Any] | None,
        progress: Progress | None,
        *,
        in_blocks: bool = False,
        refined: bool = False,
    ) -> None:
        self.model, self.plan, self.batches, self.refined = model, plan, batches, refined
        self.progress: Progress = progress or (lambda what, done, total: None)
        self.weights: dict[str, Moments] = {}
        """What the loss depends on (`output_fisher`), for the sites that it depends on; empty without a loss."""
        self.unreached: set[str] = set()
        self.calls = [count_calls(model, plan, batch) for batch in (batches or [])[:1]]
        """Calls of the first batch, and of the others where they are needed."""
        self.blocks = self._find_blocks() if in_blocks and batches else []
        """Names of blocks that are compressed one after the other; empty if the model has none."""
        self.block_weights: dict[str, Tensor] = {}
        """How much the loss depends on the outputs of each block."""
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        self.room = max(int(SHARE * size), LEAST_BYTES)

    def weigh(self, loss: Callable[[Any], Tensor] | Literal["sampled"], batches: Sequence[Any]) -> None:
        """Weigh the outputs of every site by how much `loss` depends on them."""
        drawn = loss == "sampled"
        if loss == "sampled":
            loss = sampled_loss(num_words=getattr(getattr(self.model, "config", None), "num_words", None))

        def counted() -> Iterator[Any]:
            for done, batch in enumerate(batches):
                self.progress("gradients", done, len(batches))
                yield batch
            self.progress("gradients", len(batches), len(batches))

        squares = sum(site.shape[0] ** 2 for site in self.plan.sites if not site.has_embedding)
        whole = 4 * squares <= FISHER_BYTES
        with output_gradients(self.model, self.blocks if self.refined else []) as self.block_weights:
            weights = output_fisher(self.model, self.plan, counted(), loss, whole=whole, drawn=drawn)
        self.weights = {name: found for name, found in weights.items() if found.rows_O is not None}
        self.unreached = {site.name for site in self.plan.sites if site.name not in weights}
        release_freed_memory()

    def _find_blocks(self) -> list[str]:
        """The blocks of the model, if every site in them is called once for each batch."""
        assert self.batches
        names = find_blocks(self.model, self.batches[0])
        for site in self.plan.sites:
            inside = [use for use in site.uses if use.name.startswith(tuple(f"{name}." for name in names))]
            if inside and (len(site.uses) > 1 or self.calls[0].get(site.name, 1) > 1):
                return []
        return names

    def around_blocks(self) -> tuple[list[Site], list[Site]]:
        """Sites that are called before the first block, and those after the last one."""
        inside = tuple(f"{name}." for name in self.blocks)
        order = list(self.calls[0])
        first = next((i for i, name in enumerate(order) if name.startswith(inside)), len(order))
        early = set(order[:first])
        outside = [site for site in self.plan.sites if site.has_embedding or not site.name.startswith(inside)]
        before = [site for site in outside if any(use.name in early or use.is_embedding for use in site.uses)]
        return before, [site for site in outside if site not in before]

    def moments(self, sites: Sequence[Site] | None = None) -> Iterator[tuple[Site, Moments | None]]:
        """Every site once. The moments of later groups are of the model as the caller has changed it by then."""
        sites = self.plan.sites if sites is None else sites
        if self.batches is None:
            yield from ((site, None) for site in sites)
            return
        groups = list(self._groups(sites))
        if len(groups) > 1:
            self.calls += [count_calls(self.model, self.plan, batch) for batch in self.batches[len(self.calls) :]]
        for group in groups:
            stops = self._stops(group) if len(groups) > 1 else None
            found = second_moments(self.model, Plan(tuple(group)), self.batches, last_calls=stops, dtype=torch.float32)
            for site in group:
                moments = found.pop(site.name)
                if moments.inputs_II is None and moments.rows_O is None:
                    self.unreached.add(site.name)
                yield site, self.weighed(site, moments)
            release_freed_memory()

    def weighed(self, site: Site, moments: Moments) -> Moments:
        """The moments of a site with the weights of its outputs."""
        if (weights := self.weights.get(site.name)) is None:
            return moments
        inputs_II = moments.inputs_II
        if weights.inputs_II is not None:
            inputs_II = weights.inputs_II if inputs_II is None else inputs_II + weights.inputs_II
        return replace(moments, inputs_II=inputs_II, rows_O=weights.rows_O, outputs_OO=weights.outputs_OO)

    def _stops(self, group: Sequence[Site]) -> list[tuple[str, int] | None]:
        """For each batch the call behind which it may stop; None if it does not call all uses, and may yet."""
        uses = {use.name for site in group for use in site.uses}
        return [
            next(call for call in reversed(seen.items()) if call[0] in uses) if uses <= seen.keys() else None
            for seen in self.calls
        ]

    def _groups(self, sites: Sequence[Site]) -> Iterator[list[Site]]:
        place = {name: i for i, name in enumerate(self.calls[0] if self.calls else ())}

        def last_place(site: Site) -> int:
            return max((place[use.name] for use in site.uses if use.name in place), default=len(place))

        order = sorted(sites, key=last_place)
        group: list[Site] = []
        for site in order:
            if group and moment_bytes([*group, site], torch.float32) > self.room:
                yield group
                group = []
            group.append(site)
        if group:
            yield group


def _scores(data: _Data, method: Svd, curves: Mapping[str, CostCurve]) -> dict[str, Tensor]:
    """What each component of each site is worth."""
    scores: dict[str, Tensor] = {}
    for done, (site, moments) in enumerate(data.moments(), 1):
        curve = curves[site.name]
        if data.weights and site.name not in data.weights:
            energy = torch.zeros(curve.num_components, dtype=torch.float64)
        else:
            energy = energy_of_source(source(data.model, site), curve.num_components, moments)
        scores[site.name] = method.scores(site, energy, curve, comparable=bool(data.weights))
        release_freed_memory()
        data.progress("ranks", done, len(curves))
    return scores


def _choose(
    curves: Mapping[str, CostCurve],
    scores: Mapping[str, Tensor] | None,
    room: int,
    unseen: set[str],
    *,
    blend: bool = False,
) -> tuple[dict[str, int], set[str]]:
    """How many components of each site are kept: the best of all of them, or without `scores` the same share of each.

    With `blend`, a number between the two.

    A layer of rank 0 has the same output for every input, which no error of second order foresees. So such a layer is
    left as it is, as long as no other one gets rank 0 instead; `unseen` ones, on which the loss does not depend, as
    long as others have any rank left. The second result are the sites that are left as they are.
    """

    def choose(alone: set[str]) -> dict[str, int] | None:
        rest = [name for name in curves if name not in alone]
        left = room - sum(curves[name].full for name in alone)
        if left < 0:
            return None
        few = [curves[name] for name in rest]
        if scores is None:
            found = uniform_allocation(few, left)
        else:
            allocate = blended_allocation if blend else global_allocation
            found = allocate([scores[name] for name in rest], few, left)
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
        warnings.warn(text.format(listed([str(site) for site in sites], most=8)), stacklevel=4)


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
