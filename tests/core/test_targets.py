"""Targets: ranks in multiples where a GPU will multiply, dense where a pair would not pay, and the budget kept."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import rankwise as rw
from rankwise.core.targets import TARGETS, device_target, find_target
from rankwise.modules import PivotLinear
from tests.models import Spec, batch

# runs of a few steps, in which no gate can decide
pytestmark = pytest.mark.filterwarnings("ignore:.* of the gates had not decided")

DECODER = Spec(num_words=200, width=64, inner=176, parts=("linear", "linear", "nested", "linear", "nested", "pair"))
CUDA = TARGETS["cuda"]
METHODS: dict[str, dict[str, Any]] = {
    "fac": {},
    "flop-l0": {"anneal_steps": 3, "gate_lr": 9.0},
    "flop-agp": {"anneal_steps": 3, "mask_every": 1},
    "svd": {},
}


@given(st.integers(0, 10**5))
def test_a_multiple_is_a_power_of_two_and_a_small_step(full_rank: int) -> None:
    multiple = CUDA.rank_multiple(full_rank)
    assert multiple & (multiple - 1) == 0 and 1 <= multiple <= 64
    assert multiple <= max(full_rank / 4, 1)
    assert multiple >= 8 or full_rank < 32
    assert multiple <= max(full_rank / 32, 8)
    # half of the greatest that these allow is less than any of them
    assert 2 * multiple > min(64, max(full_rank / 32, 8), full_rank / 4)
    on_cpu = TARGETS["cpu"].rank_multiple(full_rank)
    assert TARGETS["size"].rank_multiple(full_rank) == on_cpu
    assert on_cpu == 1 if full_rank < 64 else on_cpu == 8 if full_rank >= 256 else on_cpu in (2, 4)


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_keeps_the_budget_and_its_own_ranks(name: str) -> None:
    target, model = TARGETS[name], DECODER.build()
    plan, limit = rw.find_plan(model), round(0.6 * rw.count(model))
    small = rw.compress(model, rw.Budget(params=limit), plan=plan, target=name)
    assert 0.97 * limit < rw.count(small) <= limit
    found = list(low_ranks(small, plan))
    assert found
    for shape, full_rank, rank in found:
        assert rank % target.rank_multiple(full_rank) == 0 or rank == full_rank
        dense = shape[0] * shape[1]
        assert target.layout == "pivot" or rank * sum(shape) < target.faster_below * dense or rank == full_rank


def low_ranks(model: nn.Module, plan: rw.Plan) -> Iterator[tuple[tuple[int, int], int, int]]:
    """The shape, the full rank and the rank of every planned matrix that is a pair."""
    for site in plan.sites:
        module = model.get_submodule(site.name)
        if isinstance(module, nn.Sequential):
            yield site.shape, site.pair_rank or min(site.shape), module[1].in_features


def assert_for_cuda(small: nn.Module, plan: rw.Plan, limit: int) -> None:
    assert rw.count(small) <= limit
    found = list(low_ranks(small, plan))
    assert found
    for shape, full_rank, rank in found:
        assert rank % CUDA.rank_multiple(full_rank) == 0 or rank == full_rank
        assert rank == full_rank or rank * sum(shape) < CUDA.faster_below * shape[0] * shape[1]


@pytest.mark.parametrize("removed", [0.1, 0.3, 0.6])
@pytest.mark.parametrize("calibrated", [False, True])
def test_a_decoder_is_compressed_for_a_gpu(removed: float, calibrated: bool) -> None:
    torch.manual_seed(0)
    model, data = DECODER.build(), [batch(DECODER)] if calibrated else None
    small = rw.compress(model, rw.Budget(removed=removed), data, target="cuda")
    assert_for_cuda(small, rw.find_plan(model), int(rw.count(model) * (1 - removed)) + 1)


@pytest.mark.parametrize("init", ["svd", "random"])
@pytest.mark.parametrize("removed", [0.1, 0.3, 0.6])
@pytest.mark.parametrize("method", METHODS)
def test_a_decoder_is_pruned_for_a_gpu(method: str, removed: float, init: Any) -> None:
    torch.manual_seed(0)
    model = DECODER.build()
    plan = rw.find_plan(model)
    pruner = rw.Pruner(model, rw.Budget(removed=removed), method, init=init, target="cuda", **METHODS[method])
    for step in range(4):
        model(batch(DECODER, seed=step)).square().mean().backward()
        pruner.step()
        model.zero_grad()
    assert_for_cuda(pruner.compact(), plan, pruner.limit)


def test_input_features_come_in_multiples_too() -> None:
    model = nn.Sequential(nn.Linear(64, 40), nn.Tanh(), nn.Linear(40, 96))
    pruner = rw.Pruner(model, rw.Budget(removed=0.4), "np-l0", target="cuda", anneal_steps=3, gate_lr=9.0)
    assert all(k % 8 == 0 for k in pruner.ranks().values())


def test_single_weights_do_not() -> None:
    """Their matrices keep their shapes, so the budget is kept to a weight."""
    pruner = rw.Pruner(make(), rw.Budget(removed=0.4), "agp", target="cuda", anneal_steps=3)
    assert pruner.size().exported == pruner.limit


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 48))


def test_what_is_asked_for_wins_over_the_target() -> None:
    for given_, want in ((1, 1), (5, 5), (None, 8)):
        pruner = rw.Pruner(make(), rw.Budget(removed=0.5), "fac", target="cuda", rank_multiple=given_)
        assert {curve.multiple for curve in pruner.account.curves} == {want}
        small = rw.compress(make(), rw.Budget(removed=0.5), target="cuda", rank_multiple=given_)
        for _, full_rank, rank in low_ranks(small, rw.find_plan(make())):
            assert rank % want == 0 or rank == full_rank


def test_by_default_a_model_is_for_the_device_that_it_is_on() -> None:
    assert find_target(None, make()).name == "cpu"
    assert device_target(torch.device("cuda:1")) is CUDA
    assert device_target(torch.device("mps")) is device_target(torch.device("meta")) is TARGETS["cpu"]
    left = rw.compress(make(), rw.Budget(removed=0.4)).state_dict()
    right = rw.compress(make(), rw.Budget(removed=0.4), target="cpu", rank_multiple=1, layout="pair").state_dict()
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_compact_model_for_another_target_leaves_the_pruner_as_it_is() -> None:
    model, plan = make(), rw.find_plan(make())
    pruner = rw.Pruner(model, rw.Budget(removed=0.45), "svd")
    before, books = pruner.compact().state_dict(), pruner.account
    assert_for_cuda(pruner.compact(target="cuda"), plan, pruner.limit)
    assert pruner.account == pruner.controller.account == books
    after = pruner.compact().state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_the_smallest_file_is_in_the_pivot_layout() -> None:
    def pivots(model: nn.Module) -> bool:
        return any(isinstance(module, PivotLinear) for module in model.modules())

    budget = rw.Budget(removed=0.4)
    assert pivots(rw.compress(make(), budget, target="size"))
    assert pivots(rw.Pruner(make(), budget, "svd", target="size").compact())
    assert not pivots(rw.compress(make(), budget, target="size", layout="pair"))
    assert not pivots(rw.Pruner(make(), budget, "svd", target="size", layout="pair").compact())
    assert not pivots(rw.compress(make(), budget))


@pytest.mark.parametrize(
    "enter", [rw.compress, rw.Pruner, lambda m, b, target: rw.Pruner(m, b, "svd").compact(target=target)]
)
def test_a_target_that_does_not_exist_is_refused(enter: Any) -> None:
    rule = f"`target` must be one of {', '.join(TARGETS)}, but is 'gpu' instead."
    with pytest.raises(rw.RankwiseError, match=f"{rule} Leave it out to compress for the device"):
        enter(make(), rw.Budget(removed=0.4), target="gpu")


def test_a_low_rank_that_does_not_pay_is_a_dense_matrix() -> None:
    """Two like matrices, and room for one of them whole and seven eighths of the other, as which it would be slower."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False))
    original = copy.deepcopy(model)
    small = rw.compress(model, rw.Budget(removed=0.06), target="cuda")
    dense = [layer for layer in small if isinstance(layer, nn.Linear)]
    assert len(dense) == 1 and any(torch.equal(dense[0].weight, original[i].weight) for i in (0, 2))
    assert_for_cuda(small, rw.find_plan(original), int(0.94 * rw.count(original)))
    whole = rw.compress(model, rw.Budget(removed=0.06), target="cpu")
    assert rw.count(whole) > rw.count(small)
