"""Products: the fast ways give what `F.linear` gives, and step aside where they do not apply."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from rankwise.kernels.linear import MIN_ROWS, linear


@settings(max_examples=30, deadline=None)
@given(
    steps=st.sampled_from([1, 3, MIN_ROWS, 2 * MIN_ROWS + 1]),
    batch=st.integers(1, 3),
    inputs=st.sampled_from([0, 1, 7, 64]),
    outputs=st.sampled_from([0, 1, 9, 130]),
    bias=st.booleans(),
    turned=st.booleans(),
)
def test_inference_is_f_linear(steps: int, batch: int, inputs: int, outputs: int, bias: bool, turned: bool) -> None:
    x = torch.randn(batch, steps, inputs).transpose(0, 1) if turned else torch.randn(steps, batch, inputs)
    weight_OI, bias_O = torch.randn(outputs, inputs), torch.randn(outputs) if bias else None
    with torch.inference_mode():
        got = linear(x, weight_OI, bias_O)
    assert got.shape == (steps, batch, outputs)
    torch.testing.assert_close(got, F.linear(x, weight_OI, bias_O), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_stay_what_they_are(dtype: torch.dtype) -> None:
    x, weight_OI = torch.randn(2 * MIN_ROWS, 5, dtype=dtype), torch.randn(4, 5, dtype=dtype)
    with torch.inference_mode():
        assert linear(x, weight_OI).dtype == dtype


def test_training_has_gradients() -> None:
    weight_OI = torch.randn(4, 5, requires_grad=True)
    linear(torch.randn(2 * MIN_ROWS, 5), weight_OI).sum().backward()
    assert weight_OI.grad is not None
