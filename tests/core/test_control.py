"""Where components lie in one flat vector, and the ranks at which gated pairs are multiplied on a GPU."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rankwise.core.control import RANKS, Layout, filled
from rankwise.core.gates import FEW

Gates = list[tuple[int, int, int | None]]
"""Size, open components, and the rank before."""


@st.composite
def gates(draw: st.DrawFn) -> Gates:
    found = []
    for _ in range(draw(st.integers(1, 5))):
        size = draw(st.integers(1, 600))
        number = draw(st.integers(0, size))
        found.append((size, number, draw(st.none() | st.integers(0, size // RANKS).map(lambda n: n * RANKS))))
    return found


@given(gates(), st.booleans())
def test_all_that_is_open_is_multiplied_and_a_rank_that_fits_goes_on(found: Gates, exact: bool) -> None:
    sizes, numbers, before = (list(column) for column in zip(*found, strict=True))
    ranks = filled(numbers, sizes, before, exact=exact)
    for size, number, rank in zip(sizes, numbers, ranks, strict=True):
        assert rank is None or number <= rank <= size
        assert rank is None or rank % RANKS == 0 or rank == size
        if rank is None:
            assert number + RANKS > FEW * size - RANKS
        elif exact:
            assert rank < number + RANKS
        else:
            assert rank < number + 3 * RANKS
    assert filled(numbers, sizes, ranks, exact=exact) == ranks


@given(gates())
def test_a_rank_set_anew_has_room(found: Gates) -> None:
    sizes, numbers, _ = (list(column) for column in zip(*found, strict=True))
    # no rank fits, so all are set anew
    ranks = filled(numbers, sizes, [10**6] * len(sizes), exact=False)
    more = [min(number + RANKS // 2, size) for number, size in zip(numbers, sizes, strict=True)]
    if None not in ranks:
        assert filled(more, sizes, ranks, exact=False) == ranks


@given(st.lists(st.integers(0, 7), min_size=1, max_size=5))
def test_sums_are_those_of_the_parts(sizes: list[int]) -> None:
    flat = torch.arange(1.0, sum(sizes) + 1)
    assert Layout(sizes).sums(flat).tolist() == [float(part.sum()) for part in flat.split(sizes)]


def test_a_layout_of_single_weights_takes_no_memory_of_their_number() -> None:
    # a row of indices as long as the largest matrix for every one would be 8 TB
    assert Layout([10**9, *[1] * 999]).total == 10**9 + 999
