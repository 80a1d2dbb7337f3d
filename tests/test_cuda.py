"""The same promises on a GPU; skipped where there is none."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import rankwise as rw
from rankwise.core.distributed import DistributedGroup
from rankwise.core.exports import BOUND, LARGE, choose_rows
from rankwise.kernels.linear import linear
from tests.methods.rows import METHODS, PRUNING
from tests.models import Spec, batch
from tests.waiting import no_waiting

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("ignore:.* of the gates had not decided"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]


@pytest.mark.parametrize("moved", ["before", "after"])
@pytest.mark.parametrize("method", PRUNING)
def test_a_model_is_pruned_on_the_gpu(method: str, moved: str) -> None:
    spec = Spec(num_words=40, width=16, back="tied", parts=("linear", "nested", "pair", "shared", "shared"))
    model = spec.build()
    budget = rw.Budget(removed=0.1 if method == "np-l0" else 0.5)
    if moved == "before":
        model.cuda()
    pruner = rw.Pruner(model, budget, method.split()[0], **METHODS[method])
    model.cuda()
    optimizer = torch.optim.Adam(pruner.weight_parameters(), lr=1e-2)
    for step in range(10):
        tokens = batch(spec, seed=step).cuda()
        F.cross_entropy(model(tokens).flatten(0, -2), tokens.flatten()).backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()
    small = pruner.compact().eval()
    assert method == "agp" or rw.count(small) <= pruner.limit
    tokens = batch(spec, seed=99).cuda()
    want = model.eval()(tokens)
    assert (small(tokens) - want).abs().max() <= 1e-5 * want.abs().max()


def test_a_step_synchronises_once() -> None:
    model = Spec(width=16).build().cuda()
    pruner = rw.Pruner(model, rw.Budget(removed=0.5), anneal_steps=100)
    tokens = batch(Spec(width=16)).cuda()
    for _ in range(3):
        model(tokens).square().mean().backward()
        pruner.step()
        model.zero_grad()
    model(tokens).square().mean().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        pruner.step()
    waits = [e for e in profile.events() if e.name in ("cudaStreamSynchronize", "cudaDeviceSynchronize")]
    assert len(waits) <= 1


@pytest.mark.parametrize("layout", ["pair", "pivot"])
def test_a_model_is_compressed_on_the_gpu_as_on_a_cpu(layout: Literal["pair", "pivot"]) -> None:
    spec = Spec(num_words=40, width=16, back="tied", parts=("linear", "nested", "pair", "shared", "shared"))
    model, tokens = spec.build(), [batch(spec, seed=seed) for seed in range(4)]

    def compressed(device: str) -> nn.Module:
        data = [window.to(device) for window in tokens]
        return rw.compress(
            copy.deepcopy(model).to(device), rw.Budget(removed=0.4), data,
            loss=lambda logits: logits.square().mean(), layout=layout, target="cpu",
        )  # fmt: skip

    here, there = compressed("cpu"), compressed("cuda")
    assert rw.count(here) == rw.count(there)
    want = here(tokens[0])
    assert (there(tokens[0].cuda()).cpu() - want).abs().max() <= 1e-3 * want.abs().max()


def test_on_the_gpu_ranks_come_in_multiples_by_default() -> None:
    spec = Spec(num_words=40, width=64, inner=96, parts=("linear", "nested", "pair"))
    budget, model = rw.Budget(removed=0.5), spec.build().cuda()
    want = rw.compress(model, budget, target="cuda").state_dict()
    found = rw.compress(model, budget).state_dict()
    assert found.keys() == want.keys() and all(found[name].shape == want[name].shape for name in want)
    pruner = rw.Pruner(model, budget, "fac")
    assert {curve.multiple for curve in pruner.account.curves} == {8}


@pytest.mark.parametrize("outputs", [0, 1, 9, 64])
@pytest.mark.parametrize("inputs", [0, 1, 7, 64])
@pytest.mark.parametrize("bias", [True, False])
def test_products_in_half_precision_are_f_linear(inputs: int, outputs: int, bias: bool) -> None:
    """Also with nothing in them, such as those of a matrix of which no component is left."""
    torch.manual_seed(0)
    x = torch.randn(3, 5, inputs, device="cuda", requires_grad=True)
    weight_OI = torch.randn(outputs, inputs, device="cuda", requires_grad=True)
    bias_O = torch.randn(outputs, device="cuda", requires_grad=True) if bias else None
    given = [tensor for tensor in (x, weight_OI, bias_O) if tensor is not None]
    answers = []
    for product in (linear, F.linear):
        with torch.autocast("cuda", torch.bfloat16):
            y = product(x, weight_OI, bias_O)
        answers.append((y, *torch.autograd.grad(y.float().square().sum(), given)))
    for got, want in zip(*answers, strict=True):
        assert got.shape == want.shape
        torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=2e-1)


def test_averaging_over_ranks_does_not_wait_for_the_gpu(tmp_path: Path) -> None:
    """The steps of other ranks are looked at one step later."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        ranks, flat = DistributedGroup(dist.group.WORLD), torch.arange(5.0, device="cuda")
        ranks.average(flat, 0)
        with no_waiting():
            assert ranks.average(flat, 1).shape == flat.shape
        ranks.check_steps()
        torch.testing.assert_close(ranks.average(flat, 2), flat)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("to_none", [True, False])
def test_a_batch_that_is_thrown_away_leaves_nothing_behind_and_waits_for_nothing(to_none: bool) -> None:
    spec = Spec(num_words=40, width=16, back="tied", parts=("linear", "pair"))
    ends = []
    for factors in ((1.0, 1.0, 1.0), (1.0, float("nan"), 1.0, 3.0, 1.0)):
        torch.manual_seed(0)
        model = spec.build().cuda()
        pruner = rw.Pruner(model, rw.Budget(removed=0.5), anneal_steps=100, open_probability=0.9)
        optimizer = torch.optim.SGD(pruner.weight_parameters(), lr=0.1)
        for i, factor in enumerate(factors):
            for part in range(2):
                tokens = batch(spec, seed=part).cuda()
                loss = F.cross_entropy(model(tokens).flatten(0, -2), tokens.flatten()) * factor
                # the second step looks once whether anything was cleared
                with no_waiting(i > 1):
                    loss.backward()
            if factor == 1.0:
                optimizer.step()
                pruner.step()
            optimizer.zero_grad(set_to_none=to_none)
        ends.append(pruner.state_dict())
    for key, value in ends[0].items():
        torch.testing.assert_close(value, ends[1][key], rtol=1e-4, atol=1e-5)


def test_rows_of_large_factors_are_chosen_on_the_gpu() -> None:
    p = torch.randn(2048, 600, generator=torch.Generator().manual_seed(0)).cuda()
    assert p.numel() >= LARGE
    places, chosen, coefficients = choose_rows(p)
    assert places.is_cuda and float(coefficients.abs().max()) <= BOUND
    rows = torch.cat([p[chosen].double(), coefficients @ p[chosen].double()])
    torch.testing.assert_close(rows[places.long()], p.double(), rtol=1e-4, atol=1e-5)
