"""The last product and the recurrence in one kernel give what they give one after the other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rankwise.deploy.quantize import int8
from rankwise.kernels import native
from rankwise.kernels.int8 import Int8Linear
from rankwise.lab.kernels.sru import cpu, reference
from rankwise.lab.models.sru import SRULayer

READY = native.is_ready(cpu._PROJECTED_SOURCE, "the SRU")
HAS_BYTES = READY and bool(native.library(cpu._PROJECTED_SOURCE).sru_projected_has_bytes())
pytestmark = [
    pytest.mark.skipif(not READY, reason="needs a C compiler"),
    pytest.mark.filterwarnings("ignore:This processor has no instructions"),
]
sizes = st.integers(1, 150)


def some(T: int, B: int, R: int, D: int, K: int) -> tuple[Tensor, nn.Linear, list[Tensor | None]]:
    """Input, layer, and what the recurrence takes: highway, weights and biases of the gates, first state."""
    torch.manual_seed(T + B + R + D + K)
    factor = nn.Linear(R, K * D, bias=False).requires_grad_(False)
    highway_TBD = torch.randn(T, B, D) if K == 3 else None
    return torch.randn(T, B, R), factor, [highway_TBD, torch.randn(2, D), torch.randn(2, D), torch.randn(B, D)]


def one_after_the_other(
    x_TBR: Tensor, factor: nn.Module, given: list[Tensor | None], scale: float
) -> tuple[Tensor, Tensor]:
    highway, weight_c, bias, c0_BD = given
    assert c0_BD is not None
    u_TBKD = factor(x_TBR).view(*x_TBR.shape[:2], -1, c0_BD.shape[1])
    return reference.sru(u_TBKD, highway, weight_c, bias, c0_BD, None, scale)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(T=st.integers(1, 230), B=st.integers(1, 3), R=sizes, D=sizes, K=st.sampled_from([3, 4]), scale=st.floats(0.5, 2))
def test_floats(T: int, B: int, R: int, D: int, K: int, scale: float) -> None:
    x_TBR, factor, given = some(T, B, R, D, K)
    got = cpu.projected_sru(x_TBR, factor, *given, scale)  # type: ignore[arg-type]
    double = nn.Linear(R, K * D, bias=False, dtype=torch.float64)
    double.weight.data.copy_(factor.weight)
    doubles = [None if tensor is None else tensor.double() for tensor in given]
    want = one_after_the_other(x_TBR.double(), double, doubles, scale)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours.double(), theirs.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(
    not native.is_ready(cpu._PROJECTED_SOURCE, "the SRU")
    or not native.library(cpu._PROJECTED_SOURCE).sru_projected_has_bytes(),
    reason="needs a processor that multiplies bytes",
)
@settings(max_examples=40, deadline=None)
@given(T=st.integers(1, 230), B=st.integers(1, 3), R=sizes, D=sizes, K=st.sampled_from([3, 4]))
def test_bytes(T: int, B: int, R: int, D: int, K: int) -> None:
    x_TBR, plain, given = some(T, B, R, D, K)
    factor = Int8Linear(plain)
    got = cpu.projected_sru(x_TBR, factor, *given)  # type: ignore[arg-type]
    want = one_after_the_other(x_TBR, factor, given, 1.0)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_number_of_threads_changes_no_bit() -> None:
    x_TBR, factor, given = some(150, 2, 40, 300, 3)
    before, found = torch.get_num_threads(), []
    for num_threads in (1, 2, 5):
        torch.set_num_threads(num_threads)
        found.append(cpu.projected_sru(x_TBR, factor, *given))  # type: ignore[arg-type]
    torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def make_layer(kind: str) -> SRULayer:
    torch.manual_seed(0)
    layer = SRULayer(30, 30 if "highway" in kind else 50, rank=None if "plain" in kind else 9, layer_norm=True).eval()
    if kind == "nested":
        layer.projection = nn.Sequential(
            layer.projection[0], nn.Sequential(nn.Linear(9, 7), nn.Linear(7, 200, bias=False))
        )  # type: ignore[index]
    return layer


@pytest.mark.parametrize("make", [lambda layer: layer, int8], ids=["floats", "int8"])
@pytest.mark.parametrize("kind", ["plain", "pair", "pair highway", "nested"])
def test_a_layer_gives_without_gradients_what_it_gives_with_them(kind: str, make: object) -> None:
    layer: SRULayer = make(make_layer(kind))  # type: ignore[operator]
    x_TBN, c0_BD = torch.randn(60, 2, 30), torch.randn(2, layer.width)
    assert cpu.split_projection(layer.projection, x_TBN) is None, "gradients are asked for"
    want = layer(x_TBN, c0_BD)
    with torch.no_grad():
        assert (cpu.split_projection(layer.projection, x_TBN) is not None) == (HAS_BYTES or make is not int8)
        got = layer(x_TBN, c0_BD)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_it_stays_away_where_it_must() -> None:
    x_TBN, pair = torch.randn(100, 1, 30), make_layer("pair").projection
    assert cpu.split_projection(pair, x_TBN) is not None
    assert cpu.split_projection(pair, x_TBN[:5]) is None, "a few rows"
    assert cpu.split_projection(pair, x_TBN.double()) is None
    assert cpu.split_projection(nn.Linear(30, 200), x_TBN) is None, "a bias"
    called = []
    pair[-1].register_forward_hook(lambda *_: called.append(1))  # type: ignore[index]
    assert cpu.split_projection(pair, x_TBN) is None, "a hook"


@torch.no_grad()
def test_dropout_is_drawn_without_gradients_too() -> None:
    layer = SRULayer(30, 30, rank=9, dropout=0.5).train()
    x_TBN = torch.randn(100, 1, 30)
    assert not torch.equal(layer(x_TBN)[0], layer(x_TBN)[0])
