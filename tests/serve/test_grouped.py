"""The product of a group of matrices is that of each, multiplied out; without vLLM the plugin does nothing."""

from __future__ import annotations

import subprocess
import sys

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rankwise.serve.grouped import Second, fused_group, grouped_pair

SIZES = st.tuples(st.sampled_from(["dense", "pair", "pivot"]), st.integers(1, 7), st.integers(0, 7))


def part(form: str, outputs: int, rank: int, inputs: int) -> tuple[Tensor, Second, Tensor]:
    """The first factor, the second, and the whole matrix."""
    rank = min(rank, outputs)
    if form == "dense":
        whole = torch.randn(outputs, inputs, dtype=torch.float64)
        return whole, Second(outputs), whole
    q_KI = torch.randn(rank, inputs, dtype=torch.float64)
    p_OK = torch.randn(outputs - rank if form == "pivot" else outputs, rank, dtype=torch.float64)
    if form == "pair":
        return q_KI, Second(rank, p_OK), p_OK @ q_KI
    places = torch.randperm(outputs).int()
    rows = torch.cat([q_KI, p_OK @ q_KI])
    return q_KI, Second(rank, p_OK, places), torch.stack([rows[place] for place in places.tolist()])


@given(st.lists(SIZES, min_size=1, max_size=4), st.integers(1, 5), st.sampled_from([(3,), (1, 2), (0,)]), st.booleans())
def test_a_group_is_the_product_with_each_matrix(
    forms: list[tuple[str, int, int]], inputs: int, batch: tuple[int, ...], bias: bool
) -> None:
    firsts, seconds, wholes = zip(*(part(*form, inputs) for form in forms), strict=True)
    x = torch.randn(*batch, inputs, dtype=torch.float64)
    whole = torch.cat(wholes)
    b = torch.randn(len(whole), dtype=torch.float64) if bias else None
    y = grouped_pair(x, torch.cat(firsts), seconds, b)
    torch.testing.assert_close(y, torch.nn.functional.linear(x, whole, b))
    torch.testing.assert_close(fused_group(torch.cat(firsts), seconds)(x), torch.nn.functional.linear(x, whole))


def test_neither_rankwise_nor_the_entry_point_imports_vllm() -> None:
    code = "import sys, rankwise, rankwise.serve; assert not [name for name in sys.modules if name.startswith('vllm')]"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_vllm_the_plugin_says_so_and_raises_nothing() -> None:
    code = "import sys; sys.modules['vllm'] = None; import rankwise.serve; rankwise.serve.register()"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert "must be served by vLLM 0.32 or newer" in line
