"""The flat layout of all gates, and the ranks at which gated pairs are multiplied on a GPU."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rankwise.core.controller import GPU_RANK_MULTIPLE, FlatLayout, padded_ranks
from rankwise.core.gates import SELECT_UP_TO

Gates = list[tuple[int, int, int | None]]
"""Size, open components, and the rank before."""


@st.composite
def gates(draw: st.DrawFn) -> Gates:
    found = []
    for _ in range(draw(st.integers(1, 5))):
        size = draw(st.integers(1, 600))
        number = draw(st.integers(0, size))
        multiples = st.integers(0, size // GPU_RANK_MULTIPLE).map(lambda n: n * GPU_RANK_MULTIPLE)
        found.append((size, number, draw(st.none() | multiples)))
    return found


@given(gates(), st.booleans())
def test_all_that_is_open_is_multiplied_and_a_rank_that_fits_goes_on(found: Gates, exact: bool) -> None:
    sizes, numbers, before = (list(column) for column in zip(*found, strict=True))
    ranks = padded_ranks(numbers, sizes, before, exact=exact)
    for size, number, rank in zip(sizes, numbers, ranks, strict=True):
        assert rank is None or number <= rank <= size
        assert rank is None or rank % GPU_RANK_MULTIPLE == 0 or rank == size
        if rank is None:
            assert number + GPU_RANK_MULTIPLE > SELECT_UP_TO * size - GPU_RANK_MULTIPLE
        elif exact:
            assert rank < number + GPU_RANK_MULTIPLE
        else:
            assert rank < number + 3 * GPU_RANK_MULTIPLE
    assert padded_ranks(numbers, sizes, ranks, exact=exact) == ranks


@given(gates())
def test_a_new_rank_has_room(found: Gates) -> None:
    sizes, numbers, _ = (list(column) for column in zip(*found, strict=True))
    # no rank fits, so all are new
    ranks = padded_ranks(numbers, sizes, [10**6] * len(sizes), exact=False)
    more = [min(number + GPU_RANK_MULTIPLE // 2, size) for number, size in zip(numbers, sizes, strict=True)]
    if None not in ranks:
        assert padded_ranks(more, sizes, ranks, exact=False) == ranks


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 10**6))
def test_a_layout_sums_and_scatters_per_gate(sizes: list[int], seed: int) -> None:
    values = torch.rand(sum(sizes), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    parts = values.split(sizes)
    layout = FlatLayout(sizes)
    torch.testing.assert_close(layout.sums(values), torch.stack([part.sum() for part in parts]))
    copies = [torch.zeros(size, dtype=torch.float64) for size in sizes]
    layout.scatter(values, copies)
    assert all(torch.equal(a, b) for a, b in zip(copies, parts, strict=True))


@given(st.lists(st.integers(0, 7), min_size=1, max_size=5))
def test_sums_are_those_of_the_parts(sizes: list[int]) -> None:
    flat = torch.arange(1.0, sum(sizes) + 1)
    assert FlatLayout(sizes).sums(flat).tolist() == [float(part.sum()) for part in flat.split(sizes)]


def test_a_layout_of_single_weights_takes_no_memory_of_their_number() -> None:
    # a row of indices as long as the largest matrix for every one would be 8 TB
    assert FlatLayout([10**9, *[1] * 999]).total == 10**9 + 999
