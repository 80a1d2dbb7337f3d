"""Compression without training: SVD, whitened where there is calibration data.

Matrix by matrix and in place, so that a model that just fits in memory can be compressed: calibration data run through
the model once for every few matrices, whose moments are all that is held beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rankwise.adapters import families
from rankwise.adapters.plans import find_plan
from rankwise.core.blocks import find_blocks
from rankwise.core.budget import Budget, SizeAccount, count
from rankwise.core.calibrate import has_room
from rankwise.core.optimizer_checks import check_mode
from rankwise.core.placement import offload_of
from rankwise.core.plan import LeftOut, Plan, check_not_empty, check_weights
from rankwise.core.sampled import loss_of_choices, sampled_loss
from rankwise.core.targets import Target, find_target
from rankwise.errors import InvalidTypeError, InvalidValueError, PlanError, RankwiseError
from rankwise.latency import size_for
from rankwise.methods.svd import Svd
from rankwise.methods.width import Width
from rankwise.oneshot.blockwise import RefinedBlocks, Refinement
from rankwise.oneshot.both import NeuronsThenRanks, check_share
from rankwise.oneshot.data import CalibrationData, Progress, Smoothing
from rankwise.oneshot.narrow import WidthSvd, narrow_all, oneshot_method
from rankwise.oneshot.ranks import RANKS, Ranks, Shrink
from rankwise.oneshot.streamed import StreamedData
from rankwise.sizes import check_arguments, check_batches, check_loss, plan_for_method, size_account
from rankwise.split import split
from rankwise.swap import copied

__all__ = [
    "RANKS",
    "Progress",
    "Ranks",
    "RefinedBlocks",
    "Refinement",
    "Smoothing",
    "compress",
    "default_plan",
    "loss_of_choices",
    "oneshot_method",
    "sampled_loss",
]

LARGE = 0.1
"""An embedding is compressed by default if it is at least this share of the model, or tied to an output layer."""
EMBEDDING = "an embedding, which embeddings=True (--embeddings yes) compresses"
"""Why `default_plan` leaves out a site."""
NO_BLOCKS = (
    "`refinement` and `anchor` need a model of blocks, layers in an `nn.ModuleList` of which each is called once with "
    "the output of the one before, but there are none here. Leave them out."
)

ON_DISK = (
    'A model whose blocks are on disk is compressed in place, by method="svd" and with calibration data. Pass '
    'these, or use --offload none (offload="none") with a device on which it fits, such as cpu.'
)


# what is made in inference mode could not be trained
@torch.inference_mode(False)
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
    smoothing: Smoothing | None = None,
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
            "blend": between the two. With "width" likewise for neurons and heads.
        anchor: with `calibration` and in a model of blocks, fit matrices to the outputs of the dense model, whose
            inputs differ from those that they read once layers before them are compressed. Better on the text of
            the calibration where very much is removed, worse on others (docs/log/one-shot.md).
        smoothing: with `calibration`, how far it is taken as less special than it is, for the sake of other texts.
        refinement: with `calibration`, train every block for some steps towards the outputs of the dense block; this
            takes a batch a step, and as much text as there is.
        refined: keeps blocks that were refined, so that a call that was stopped can go on.
        progress: called with what is being done, how many batches or matrices are done, and of how many.
    """
    check_batches("loss_batches", loss_batches)
    of_data = {"anchor": anchor, "smoothing": smoothing, "refinement": refinement}
    _check(model, budget, calibration, rank_multiple, loss, ranks, of_data)
    batches = None if calibration is None else list(calibration)
    if offload_of(model) is not None and (method != "svd" or not batches or not in_place):
        raise RankwiseError(ON_DISK)
    example = batches[0] if example is None and batches else example
    where, refinement = find_target(target, model), refinement or Refinement(steps=0)
    low_rank_only = layout is not None or bool(embeddings) or anchor or refinement.steps > 0
    how = oneshot_method(method, budget, layout or where.layout, low_rank_only=low_rank_only)
    check_share(width_share, both=isinstance(how, WidthSvd))
    budget, plan, account = _sizes(model, budget, plan, how, where, example, rank_multiple, embeddings)
    limit = budget.resolve(account)
    given = list(loss_batches or batches or ())
    if isinstance(how, WidthSvd):
        if (anchor or refinement.steps) and batches and not find_blocks(model, batches[0]):
            # before neurons are gone
            raise RankwiseError(NO_BLOCKS)
        shared = {"loss": loss, "target": where, "example": example, "ranks": ranks, "progress": progress}
        shared["smoothing"] = smoothing
        # with a dtype, so that none of its pivots suffers in half precision
        low_rank: dict[str, Any] = {"budget": budget if budget.dtype else Budget(params=limit), "layout": how.layout}
        low_rank |= {"rank_multiple": rank_multiple, "anchor": anchor, "refinement": refinement}
        both = NeuronsThenRanks(compress, plan, limit, shared, low_rank)
        share = both.best_share(model, batches, given) if width_share is None else width_share
        data_of_both = {"calibration": batches, "loss_batches": given, "refined": refined}
        model = both(model if in_place else copied(model), share, **data_of_both)
    else:
        model = model if in_place else copied(model)
        data = _data(model, plan, batches, progress, how, refined=refinement.steps > 0, anchored=anchor)
        data.smoothing = smoothing or data.smoothing
        if loss is not None and batches:
            data.weigh(loss, given)
        if isinstance(how, Svd):
            shrink = Shrink(data, account, limit, how, ranks, budget.dtype)
            shrink.all(anchor=anchor, refinement=refinement, refined=refined)
        else:
            narrow_all(data, account, limit, ranks)
        families.changed(model)
        data.verify(example)
    return model if budget.dtype is None else model.to(budget.dtype)


def _check(
    model: nn.Module,
    budget: Budget,
    calibration: Iterable[Any] | None,
    rank_multiple: int | None,
    loss: object,
    ranks: str,
    of_data: Mapping[str, Any],
) -> None:
    check_arguments(model, budget, calibration, rank_multiple, seed=0)
    if calibration is not None:
        check_mode(model)
    if ranks not in RANKS:
        raise InvalidValueError(f'`ranks` must be "global", "even" or "blend", but is {ranks!r} instead.')
    # "sampled" is the default, with or without data
    check_loss(loss, loss == "sampled" or calibration is not None)
    for kind in (Smoothing, Refinement):
        name = kind.__name__.lower()
        if not isinstance(of_data[name], kind | None):
            raise InvalidTypeError(
                f"`{name}` must be a `rankwise.oneshot.{kind.__name__}`, but is {of_data[name]!r} instead."
            )
    for name, asked in of_data.items():
        if calibration is None and asked and asked != Refinement(steps=0):
            raise PlanError(f"`{name}` must go with `calibration`, but there is none. Pass batches, or leave it out.")


def _sizes(
    model: nn.Module,
    budget: Budget,
    plan: Plan | None,
    how: Svd | Width,
    where: Target,
    example: Any,
    rank_multiple: int | None,
    embeddings: bool | None,
) -> tuple[Budget, Plan, SizeAccount]:
    """The budget as a size, the plan that the method can follow, and what it counts; refuses what cannot be."""
    if (offload := offload_of(model)) is not None:
        # layers are found, and split, where they lie
        offload.put_back()
    if isinstance(how, Svd):
        plan = plan or default_plan(model, embeddings=embeddings)
        budget, plan = size_for(model, budget, plan, example, rank_multiple)
    plan = plan_for_method(model, plan, how)
    if isinstance(how, WidthSvd):
        plan_for_method(model, plan, Width())
    # before the copy, which loses what `from_pretrained` notes of weights that it loaded
    check_weights(model, plan)
    return budget, plan, size_account(model, plan, how, where, rank_multiple, trained=True)


def _data(
    model: nn.Module,
    plan: Plan,
    batches: Sequence[Any] | None,
    progress: Progress | None,
    how: Svd | Width,
    *,
    refined: bool,
    anchored: bool,
) -> CalibrationData:
    """Calibration data, block by block where that is needed: for a model on disk, or a large one."""
    split(model, [use.name for site in plan.sites for use in site.uses])
    low_rank, on_disk = isinstance(how, Svd), offload_of(model) is not None
    if batches and low_rank and (on_disk or not has_room(plan.sites)):
        try:
            return StreamedData(model, plan, batches, progress, refined=refined)
        except RankwiseError:
            if on_disk:
                raise
    data = CalibrationData(model, plan, batches, progress, in_blocks=low_rank, refined=refined)
    if (refined or anchored) and not data.blocks:
        raise RankwiseError(NO_BLOCKS)
    return data


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
