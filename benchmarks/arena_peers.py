"""Peers of one-shot compression, written from their papers: their ideas, with settings that were not searched for.

Each takes a model, what is removed of it, and calibration batches, and gives a small model of low-rank pairs. Blocks
may then be refined by their plain squared error, for as many steps as ours.
"""

from __future__ import annotations

import copy
import heapq
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rankwise as rw
from rankwise.core.blocks import find_blocks, record_calls
from rankwise.core.calibrate import second_moments
from rankwise.core.factorize import Factors, Moments, svd
from rankwise.core.plan import Plan
from rankwise.modules import linear
from rankwise.oneshot import Refinement, default_plan
from rankwise.oneshot.blockwise import refine


def uniform_rank(plan: Plan, dense: int, removed: float, shape: tuple[int, int]) -> int:
    kept = 1 - math.ceil(removed * dense) / plan.params
    return int(kept * math.prod(shape) / sum(shape))


def asvd(model: nn.Module, removed: float, data: list[Any], refinement: Refinement, *, power: float = 0.5) -> nn.Module:
    """The SVD of W S with S = diag(mean |x|)^power, the same share of every layer."""
    small = copy.deepcopy(model)
    plan = default_plan(small, embeddings=False)
    sizes: dict[str, list[Tensor]] = {site.name: [] for site in plan.sites}
    handles = [
        small.get_submodule(name).register_forward_pre_hook(
            lambda _, args, to=found: to.append(args[0].abs().flatten(0, -2).mean(0))
        )
        for name, found in sizes.items()
    ]
    with torch.no_grad():
        for batch in data:
            small(**batch)
    for handle in handles:
        handle.remove()
    found: dict[str, Factors] = {}
    for site in plan.sites:
        layer: Any = small.get_submodule(site.name)
        scale = torch.stack(sizes[site.name]).mean(0).clamp(min=1e-6).pow(power)
        rank = uniform_rank(plan, rw.count(model), removed, site.shape)
        found[site.name] = svd(layer.weight, rank, Moments(torch.diag(scale.square())), damping=1e-12)
    return _made_of(small, found, data, refinement)


def zs_svd(model: nn.Module, removed: float, data: list[Any], refinement: Refinement) -> nn.Module:
    """Components are dropped over the whole model by the first-order change of the loss, whose sum stays near zero.

    The loss is that of the calibration text's own next words.
    """
    small = copy.deepcopy(model)
    plan = default_plan(small, embeddings=False)
    for batch in data:
        # a few windows at a time: logits with gradients take much memory
        for window in batch["input_ids"].split(4):
            logits = small(input_ids=window).logits[:, :-1].flatten(0, 1)
            F.cross_entropy(logits.float(), window[:, 1:].flatten(), reduction="sum").backward()
    moments = second_moments(small, plan, data, dtype=torch.float32)
    whole: dict[str, Factors] = {}
    change: dict[str, list[float]] = {}
    for site in plan.sites:
        layer: Any = small.get_submodule(site.name)
        whole[site.name] = svd(layer.weight, None, moments.pop(site.name))
        # dropping component i changes W by -p_i q_i
        p_OR, q_RI = whole[site.name].p_OR, whole[site.name].q_RI
        change[site.name] = (-(layer.weight.grad @ q_RI.t()) * p_OR).sum(0).tolist()
    small.zero_grad()
    counts = _zero_sum(plan, change, math.ceil(removed * rw.count(model)))
    found = {
        site.name: Factors(whole[site.name].p_OR[:, :k], whole[site.name].q_RI[:k], whole[site.name].energy_R[:k])
        for site in plan.sites
        if (k := counts[site.name]) * sum(site.shape) < math.prod(site.shape)
    }
    return _made_of(small, found, data, refinement)


def _made_of(small: nn.Module, found: Mapping[str, Factors], data: list[Any], refinement: Refinement) -> nn.Module:
    """The model with these factors; its blocks are refined by their plain squared error."""
    if not refinement.steps:
        for name, factors in found.items():
            _replace(small, name, factors)
        return small
    names = find_blocks(small, data[0])
    inputs, calls = record_calls(small, names, data)
    dense = inputs
    for name, given in zip(names, calls, strict=True):
        block = small.get_submodule(name)
        with torch.no_grad():
            dense = [call(block, x) for call, x in zip(given, dense, strict=True)]
            for site in (site for site in found if site.startswith(f"{name}.")):
                _replace(small, site, found[site])
        refine(block, given, inputs, dense, None, refinement)
        with torch.no_grad():
            inputs = [call(block, x) for call, x in zip(given, inputs, strict=True)]
    return small


def _zero_sum(plan: Plan, change: dict[str, list[float]], wanted: int) -> dict[str, int]:
    """Components kept of each matrix: the last ones go first, those that bring the sum of all changes to zero."""
    shapes = {site.name: site.shape for site in plan.sites}
    counts = {name: len(values) for name, values in change.items()}
    heaps: dict[bool, list[tuple[float, str]]] = {True: [], False: []}

    def offer(name: str) -> None:
        if counts[name] > 1:
            value = change[name][counts[name] - 1]
            heapq.heappush(heaps[value > 0], (abs(value), name))

    def saved(name: str) -> int:
        return max(0, math.prod(shapes[name]) - counts[name] * sum(shapes[name]))

    for name in counts:
        offer(name)
    total, done = 0.0, 0
    while done < wanted and (heaps[True] or heaps[False]):
        wants_positive = total <= 0
        heap = heaps[wants_positive] or heaps[not wants_positive]
        _, name = heapq.heappop(heap)
        before = saved(name)
        total += change[name][counts[name] - 1]
        counts[name] -= 1
        done += saved(name) - before
        offer(name)
    return counts


def _replace(model: nn.Module, name: str, factors: Factors) -> None:
    layer: Any = model.get_submodule(name)
    bias = layer.bias
    pair = [
        linear(nn.Parameter(factors.q_RI.contiguous()), None),
        linear(nn.Parameter(factors.p_OR.contiguous()), bias),
    ]
    model.set_submodule(name, nn.Sequential(*pair))
