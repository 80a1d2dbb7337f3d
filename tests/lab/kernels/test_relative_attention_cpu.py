"""Attention for inference on a CPU gives what the reference gives, by C and by torch, for every way to cut it up."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rankwise.kernels import native
from rankwise.lab.kernels.relative_attention import cpu, reference

WAYS = ["torch", "c"]
shapes = st.tuples(
    st.integers(1, 2), st.integers(1, 210), st.integers(0, 200), st.integers(1, 3), st.integers(1, 130)
)  # B, T, M, H, E
reaches = st.one_of(st.none(), st.integers(1, 400))


def some_inputs(B: int, T: int, M: int, H: int, E: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """content, position, k, v and r as views of what a model makes, scores of the order of one."""
    qkv_BSJHE = torch.randn(B, M + T, 3, H, E, dtype=dtype)
    q_BTHE, k_BSHE, v_BSHE = (x[:, -T:] if i == 0 else x for i, x in enumerate(qkv_BSJHE.unbind(2)))
    bias_2HE, r_LHE = torch.randn(2, H, E, dtype=dtype), torch.randn(M + T + 1, H, E, dtype=dtype)
    return [q_BTHE + bias_2HE[0], q_BTHE + bias_2HE[1], k_BSHE, v_BSHE, r_LHE]


def truth(inputs: list[Tensor], reach: int | None) -> Tensor:
    """The reference in float64, whose one query with two biases is our two queries."""
    content_BTHE, position_BTHE, k_BSHE, v_BSHE, r_LHE = (x.double() for x in inputs)
    size_T = content_BTHE.shape[1]
    rows = []
    for b, i in ((b, i) for b in range(k_BSHE.shape[0]) for i in range(size_T)):
        # one query at a time: then a bias can make the second query out of the first
        last = k_BSHE.shape[1] - size_T + i + 1
        q_SHE = torch.zeros_like(k_BSHE[b, :last])
        qkv_BSJHE = torch.stack([q_SHE, k_BSHE[b, :last], v_BSHE[b, :last]], 1)[None]
        rows.append(
            reference.relative_attention(qkv_BSJHE, r_LHE[-last:], content_BTHE[b, i], position_BTHE[b, i], 1, reach)
        )
    return torch.cat(rows).view(content_BTHE.shape)


def run(way: str, inputs: list[Tensor], reach: int | None, dtype: torch.dtype | None = None) -> Tensor:
    many = cpu.MANY
    cpu.MANY = 0 if way == "c" else 10**9
    try:
        return cpu.relative_attention(*inputs, reach, dtype)
    finally:
        cpu.MANY = many


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    if request.param == "c" and not native.is_ready(cpu._SOURCE, "relative attention"):
        pytest.skip("needs a C compiler")
    return str(request.param)


@settings(max_examples=25, deadline=None)
@given(shape=shapes, reach=reaches)
def test_every_query_gets_what_the_reference_gives(way: str, shape: tuple[int, ...], reach: int | None) -> None:
    inputs = some_inputs(*shape)
    want = truth(inputs, reach)
    # scores are sums of 2 E products, and a softmax makes of their error a relative one
    tolerance = 3e-7 * math.sqrt(shape[-1]) * max(float(inputs[0].abs().max()), 1) ** 2
    torch.testing.assert_close(run(way, inputs, reach).double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(not cpu._can_run_c(torch.bfloat16), reason="needs a processor that multiplies bfloat16")
@settings(max_examples=10, deadline=None)
@given(shape=shapes, reach=reaches)
def test_in_bfloat16_the_kernel_is_no_worse_than_torch(shape: tuple[int, ...], reach: int | None) -> None:
    inputs = some_inputs(*shape)
    want = truth(inputs, reach)
    error = {way: (run(way, inputs, reach, torch.bfloat16) - want).norm() for way in WAYS}
    assert error["c"] <= 1.1 * error["torch"]
    assert error["c"] <= 0.02 * want.norm()


def test_inputs_of_bfloat16_give_bfloat16(way: str) -> None:
    inputs = [x.bfloat16() for x in some_inputs(1, 40, 9, 2, 16)]
    got = run(way, inputs, None)
    assert got.dtype == torch.bfloat16
    assert (got - truth(inputs, None)).norm() <= 0.02 * got.norm()


def test_scores_may_be_as_large_as_they_like(way: str) -> None:
    inputs = some_inputs(1, 50, 20, 2, 8)
    inputs[0] *= 1e6
    want = truth(inputs, None)
    torch.testing.assert_close(run(way, inputs, None).double(), want, rtol=1e-4, atol=1e-4)


def test_what_is_no_number_stays_in_its_head(way: str) -> None:
    inputs = some_inputs(2, 100, 30, 2, 16)
    clean = run(way, inputs, None)
    inputs[3] = inputs[3].clone()
    inputs[3][1, 90, 0, 5] = math.nan  # seen by query 60 and those after it
    got = run(way, inputs, None)
    assert got[1, 60:, 0, 5].isnan().all()
    # earlier ones of the same head may get it too: zero times NaN
    got[1, :, 0, 5] = clean[1, :, 0, 5]
    torch.testing.assert_close(got, clean)


def test_the_number_of_threads_changes_no_bit() -> None:
    inputs = some_inputs(2, 150, 77, 3, 24)
    before = torch.get_num_threads()
    got = []
    for num_threads in (1, 2, 5):
        torch.set_num_threads(num_threads)
        got.append(run("c", inputs, 90))
    torch.set_num_threads(before)
    assert torch.equal(got[0], got[1]) and torch.equal(got[0], got[2])


def test_strides_do_not_matter(way: str) -> None:
    inputs = some_inputs(2, 40, 30, 3, 12)
    turned = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in inputs]
    torch.testing.assert_close(run(way, turned, None), run(way, inputs, None))
