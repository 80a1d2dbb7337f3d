"""Groups of low-rank layers: one input, two products, and what each layer gives by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rankwise.kernels.low_rank import LowRankGroup, Part, low_rank_group
from tests.lab.kernels.triton_cases import DEVICE, GPU, by_interpreter, kernels, poison, run_by_interpreter  # noqa: F401

pytestmark = pytest.mark.usefixtures("poison")

GROUPS = {
    "one pair": [(7, 33, False)],
    "one pivot": [(8, 21, True)],
    "pairs": [(7, 33, False), (16, 40, False), (20, 65, False)],
    "pivots": [(7, 33, True), (16, 16, True), (1, 70, True)],
    "mixed": [(7, 33, True), (0, 5, False), (20, 65, False), (130, 140, True)],
}
"""Rank, outputs and whether its layout is the pivot's, for each layer of a group."""


def make(name: str, inputs: int, *, bias: bool, dtype: torch.dtype = torch.float32) -> tuple[LowRankGroup, list[Part]]:
    def draw(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns) / max(columns, 1) ** 0.5).to(DEVICE, dtype)

    parts = [
        Part(draw(rank, inputs), draw(outputs - rank, rank), torch.randperm(outputs).to(DEVICE))
        if pivot
        else Part(draw(rank, inputs), draw(outputs, rank))
        for rank, outputs, pivot in GROUPS[name]
    ]
    sizes = [outputs for _, outputs, _ in GROUPS[name]]
    return LowRankGroup(parts, torch.randn(sum(sizes)).to(DEVICE, dtype) if bias else None), parts


def one_by_one(parts: list[Part], bias_O: Tensor | None, x_BI: Tensor) -> Tensor:
    """Every layer by itself, in double precision."""
    found = []
    for q_RI, p_NR, places_O in parts:
        h_BR = x_BI.double() @ q_RI.double().t()
        y_BN = h_BR @ p_NR.double().t()
        found.append(y_BN if places_O is None else torch.cat([h_BR, y_BN], -1)[..., places_O])
    y_BO = torch.cat(found, -1)
    return y_BO if bias_O is None else y_BO + bias_O.double()


@by_interpreter
def test_the_kernels_by_the_interpreter() -> None:
    run_by_interpreter(__file__)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [(), (1,), (1, 1), (3,), (2, 40)])
@pytest.mark.parametrize("name", GROUPS)
def test_a_group_gives_what_its_layers_give(name: str, rows: tuple[int, ...], bias: bool) -> None:
    group, parts = make(name, 12, bias=bias)
    x_BI = torch.randn(*rows, 12, device=DEVICE)
    torch.testing.assert_close(group(x_BI).double(), one_by_one(parts, group.bias, x_BI), rtol=1e-4, atol=1e-5)


@kernels
@pytest.mark.parametrize("rows", [1, 2, 17, 64])
@pytest.mark.parametrize("inputs", [1, 100, 5000] if GPU else [1, 100])
@pytest.mark.parametrize("name", GROUPS)
def test_the_kernels_give_what_its_layers_give(name: str, inputs: int, rows: int) -> None:
    from rankwise.kernels.low_rank_kernels import second_of_rows, single_row

    group, parts = make(name, inputs, bias=True)
    x_MI, outputs = torch.randn(rows, inputs, device=DEVICE), sum(group.outputs)
    if rows == 1:
        y = single_row(x_MI[0], group.q_RI, group.p, group.tiles, group.targets, group.bias, outputs)[None]
    else:
        y = second_of_rows(x_MI @ group.q_RI.t(), group.p, group.large_tiles, group.targets, group.bias, outputs)
    torch.testing.assert_close(y.double(), one_by_one(parts, group.bias, x_MI), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [(3,), (4, 30)])
@pytest.mark.parametrize("name", GROUPS)
def test_outputs_by_layer_are_those_of_the_group(name: str, rows: tuple[int, ...], bias: bool) -> None:
    group, parts = make(name, 12, bias=bias)
    x_BI = torch.randn(*rows, 12, device=DEVICE)
    found = group.outputs_of(x_BI)
    assert [y.shape[-1] for y in found] == group.outputs
    torch.testing.assert_close(torch.cat(found, -1).double(), one_by_one(parts, group.bias, x_BI), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not GPU, reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 5, 100])
def test_half_precision_and_graphs_on_a_gpu(rows: int, dtype: torch.dtype) -> None:
    group, parts = make("mixed", 1000, bias=True, dtype=dtype)
    x_MI = torch.randn(rows, 1000, device="cuda", dtype=dtype)
    want = one_by_one(parts, group.bias, x_MI)

    def error() -> float:
        return float((y_MO.double() - want).norm() / want.norm())

    y_MO = group(x_MI)
    assert error() < 8e-3
    y_MO = torch.compile(group, fullgraph=True)(x_MI)
    assert error() < 8e-3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y_MO = group(x_MI)
    y_MO.fill_(torch.nan)
    graph.replay()
    assert error() < 8e-3


def test_the_operation_is_a_good_citizen_of_torch() -> None:
    group, _ = make("mixed", 12, bias=True)
    given = (group.q_RI, group.p, group.tiles, group.large_tiles, group.targets, group.bias)
    sizes = (group.ranks, group.rows, sum(group.outputs))
    torch.library.opcheck(low_rank_group, (torch.randn(2, 12, device=DEVICE), *given, *sizes))


def test_a_group_cannot_be_trained_by_mistake() -> None:
    group, _ = make("pairs", 12, bias=False)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        group(torch.randn(2, 12, device=DEVICE, requires_grad=True)).sum().backward()
