"""Windows: every token its turn, in order, and the same again after a restart."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankwise.errors import DataError
from rankwise.lab.data import IGNORED, Evaluation, Windows

sizes = st.tuples(st.integers(1, 7), st.integers(1, 9), st.integers(0, 200), st.integers(0, 3))


def windows_of(size: tuple[int, int, int, int]) -> Windows:
    batch, unroll, more, seed = size
    # the tokens are their own positions
    return Windows(np.arange(batch * unroll + more, dtype=np.int32), batch=batch, unroll=unroll, seed=seed)


@given(size=sizes, steps=st.integers(1, 40))
def test_after_any_step_no_token_is_ahead_of_another_by_more_than_one(size, steps):
    windows = windows_of(size)
    n = len(windows.tokens)
    seen = Counter(token for step in range(steps) for token in windows.at(step)[1].flatten().tolist())
    share = steps * windows.batch * windows.unroll / n
    assert {seen[token] for token in range(n)} <= {int(np.floor(share)), int(np.ceil(share))}


@given(batch=st.integers(1, 6), unroll=st.integers(1, 8), steps=st.integers(1, 6), seed=st.integers(0, 9))
def test_an_epoch_of_whole_windows_has_every_token_exactly_once(batch, unroll, steps, seed):
    windows = Windows(np.arange(batch * unroll * steps), batch=batch, unroll=unroll, seed=seed)
    for side in (0, 1):
        seen = torch.cat([windows.at(step)[side].flatten() for step in range(steps)])
        assert sorted(seen.tolist()) == list(range(len(windows.tokens)))


@given(size=sizes, step=st.integers(0, 10**12))
def test_windows_follow_each_other_in_every_stream(size, step):
    windows = windows_of(size)
    x, y = windows.at(step)
    next_x, _ = windows.at(step + 1)
    assert x.shape == y.shape == (windows.batch, windows.unroll)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(y, (x + 1) % len(windows.tokens))
    assert torch.equal(next_x[:, 0], y[:, -1])


def test_resuming_equals_going_on_whatever_came_before():
    tokens = np.random.default_rng(0).integers(0, 50, 1000).astype(np.uint8)
    going_on = Windows(tokens, batch=3, unroll=7, seed=5)
    past = [going_on.at(step) for step in range(100)]
    for step in (99, 40, 0):
        resumed = Windows(tokens, batch=3, unroll=7, seed=5).at(step)
        assert all(torch.equal(a, b) for a, b in zip(past[step], resumed, strict=True))


def test_the_seed_turns_the_ring():
    tokens = np.arange(10_000)
    assert len({int(Windows(tokens, batch=2, unroll=4, seed=seed).at(0)[0][0, 0]) for seed in range(8)}) == 8


@given(
    size=sizes,
    steps=st.integers(1, 40),
    parts=st.integers(1, 3),
    limits=st.tuples(st.integers(0, 5), st.integers(0, 5)).map(sorted),
)
def test_no_batch_has_more_of_a_range_of_tokens_than_the_most(size, steps, parts, limits):
    batch, unroll, more, seed = size
    batch *= parts
    tokens = np.random.default_rng(seed).integers(0, 5, batch * unroll + more).astype(np.uint8)
    windows = Windows(tokens, batch=batch, unroll=unroll, seed=seed)
    low, high = limits
    counts = [
        int(((part >= low) & (part < high)).sum())
        for step in range(steps)
        for side in windows.at(step)
        for part in side.chunk(parts)
    ]
    assert windows.most(low, high, steps=steps, parts=parts) == max(counts)


def test_a_text_shorter_than_one_window_is_refused():
    remedy = r"Give it more text, a smaller batch \(--both.batch_size\) or a shorter window \(--both.window\)."
    with pytest.raises(DataError, match=f"at least one window of 4 x 8 tokens, but has 31. {remedy}"):
        Windows(np.zeros(31, np.uint8), batch=4, unroll=8)


@pytest.mark.parametrize("batch, unroll", [(0, 4), (4, 0)])
def test_an_empty_window_is_refused(batch, unroll):
    with pytest.raises(ValueError, match=f"must be positive, but are {batch} and {unroll}"):
        Windows(np.zeros(31, np.uint8), batch=batch, unroll=unroll)


def test_a_step_before_the_first_is_refused():
    with pytest.raises(ValueError, match="`step` must not be negative, but is -1"):
        Windows(np.zeros(31, np.uint8), batch=1, unroll=1).at(-1)


@given(n=st.integers(2, 700), unroll=st.integers(1, 20), streams=st.integers(1, 64))
def test_evaluation_has_every_token_but_the_first_as_target_exactly_once(n, unroll, streams):
    evaluation = Evaluation(np.arange(n, dtype=np.uint16), unroll=unroll, streams=streams)
    windows = list(evaluation)
    assert len(windows) == len(evaluation)
    assert evaluation.streams <= streams
    targets = torch.cat([y.flatten() for _, y in windows])
    assert sorted(targets[targets != IGNORED].tolist()) == list(range(1, n))
    assert evaluation.num_targets == n - 1
    for x, y in windows:
        assert torch.equal(y[y != IGNORED], x[y != IGNORED] + 1)
    # only the very last column may lack targets
    for _, y in windows[:-1]:
        assert (y != IGNORED).all()
    assert (windows[-1][1][:, :-1] != IGNORED).all()


@given(n=st.integers(2, 700), unroll=st.integers(1, 20))
def test_evaluation_windows_follow_each_other(n, unroll):
    windows = list(Evaluation(np.arange(n), unroll=unroll))
    for (_, y), (next_x, _) in pairwise(windows):
        assert torch.equal(y[:, -1], next_x[:, 0])


def test_evaluation_of_a_single_token_is_refused():
    with pytest.raises(DataError, match="at least two tokens, but has 1"):
        Evaluation(np.zeros(1, np.uint8), unroll=4)


@pytest.mark.parametrize("streams", [0, 65])
def test_evaluation_in_too_few_or_too_many_streams_is_refused(streams):
    with pytest.raises(ValueError, match=f"`streams` must be from 1 to 64, but is {streams}"):
        Evaluation(np.zeros(9, np.uint8), unroll=4, streams=streams)


@given(parts=st.integers(1, 4), each=st.integers(1, 3), step=st.integers(0, 50))
def test_shares_of_streams_are_together_all_streams(parts: int, each: int, step: int) -> None:
    batch = parts * each
    windows = Windows(np.arange(200), batch=batch, unroll=5, seed=3)
    shares = [windows.share(range(i * each, (i + 1) * each)).at(step) for i in range(parts)]
    for whole, *own in zip(windows.at(step), *shares, strict=True):
        assert torch.equal(torch.cat(own), whole)
