"""Windows on a token stream: batches for training, and the whole text once for evaluation.

Shapes: B = streams, T = unroll length.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from rankwise.errors import DataError, InvalidValueError
from rankwise.lab.data.vocabulary import Array

IGNORED = -100
"""The target where there is none; torch's losses leave it out by default."""

MAX_STREAMS = 64


class Windows:
    """Training batches: B streams that read the text as a ring, T tokens a step.

    Stream b starts at b/B of the ring and reads on for ever, so a hidden state can be carried from each step to the
    next. After s steps every token has been a target floor(s B T / n) or ceil(s B T / n) times, n being the length of
    the text: once per epoch. `at(step)` depends on seed and step alone, so a run resumes by its step. The seed turns
    the ring.
    """

    def __init__(self, tokens: Array, *, batch: int, unroll: int, seed: int = 0) -> None:
        if batch < 1 or unroll < 1:
            raise InvalidValueError(f"`batch` and `unroll` must be positive, but are {batch} and {unroll} instead.")
        if len(tokens) < batch * unroll:
            raise DataError(
                f"A training text must hold at least one window of {batch} x {unroll} tokens, but has {len(tokens):,}. "
                "Give it more text, a smaller batch (--both.batch_size) or a shorter window (--both.window)."
            )
        self.tokens = tokens
        self.batch = batch
        self.unroll = unroll
        self.seed = seed
        # a hash: generators of random numbers may change with the version of their library
        turn = int.from_bytes(hashlib.sha256(f"windows {seed}".encode()).digest()[:8], "little") % len(tokens)
        self._starts_B = turn + np.arange(batch, dtype=np.int64) * len(tokens) // batch

    def share(self, places: range) -> Windows:
        """Some of the streams, as they stand among all."""
        own = copy.copy(self)
        own.batch, own._starts_B = len(places), self._starts_B[places.start : places.stop]
        return own

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step, both (B, T) and int64; a target is the token after its input."""
        if step < 0:
            raise InvalidValueError(f"`step` must not be negative, but is {step} instead.")
        # in Python's integers, which do not overflow
        first = step * self.unroll % len(self.tokens)
        positions = (self._starts_B[:, None] + first + np.arange(self.unroll + 1)) % len(self.tokens)
        return _pair(self.tokens[positions])

    def most(self, low: int, high: int, *, steps: int, parts: int = 1) -> int:
        """The largest number of tokens in [low, high) among inputs or targets of any part of a batch, over `steps`."""
        num_tokens = len(self.tokens)
        before = np.zeros(num_tokens + 1, np.int32 if num_tokens < 2**31 else np.int64)
        np.cumsum((self.tokens >= low) & (self.tokens < high), out=before[1:])
        first_S = np.arange(steps, dtype=np.int64) * self.unroll % num_tokens
        most = 0
        for starts in np.array_split(self._starts_B, parts):
            for shift in (0, 1):
                counts_S = np.zeros(steps, np.int64)
                for start in starts:
                    begin_S = (start + first_S + shift) % num_tokens
                    laps_S, end_S = np.divmod(begin_S + self.unroll, num_tokens)
                    counts_S += laps_S * int(before[-1]) + before[end_S] - before[begin_S]
                most = max(most, int(counts_S.max(initial=0)))
        return most


class Evaluation:
    """The whole text once, in order: every token but the first is a target exactly once.

    The text is cut into at most 64 streams of equal length (to within one token), read from an empty state side by
    side, the state carried from window to window. A short text gets fewer streams, so that none is shorter than a
    window. The last window is shorter; where a stream is one token short of the others, its target is `IGNORED`.
    """

    def __init__(self, tokens: Array, *, unroll: int, streams: int = MAX_STREAMS) -> None:
        if unroll < 1:
            raise InvalidValueError(f"`unroll` must be positive, but is {unroll} instead.")
        if not 1 <= streams <= MAX_STREAMS:
            raise InvalidValueError(f"`streams` must be from 1 to {MAX_STREAMS}, but is {streams} instead.")
        if len(tokens) < 2:
            raise DataError(
                f"A text to evaluate on must hold at least two tokens, but has {len(tokens)}. Give it more text."
            )
        self.tokens = tokens
        self.unroll = unroll
        self.num_targets = len(tokens) - 1
        self.streams = max(1, min(streams, self.num_targets // unroll))
        limits = np.arange(self.streams + 1, dtype=np.int64) * self.num_targets // self.streams
        self._starts_B, self._ends_B = limits[:-1], limits[1:]

    def __len__(self) -> int:
        """The number of windows."""
        return -(-self._length // self.unroll)

    @property
    def _length(self) -> int:
        return int((self._ends_B - self._starts_B).max())

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for first in range(0, self._length, self.unroll):
            width = min(self.unroll, self._length - first)
            positions = self._starts_B[:, None] + first + np.arange(width + 1)
            x, y = _pair(self.tokens[np.minimum(positions, self.num_targets)])
            y[torch.from_numpy(positions[:, :-1] >= self._ends_B[:, None])] = IGNORED
            yield x, y


def _pair(window: Array) -> tuple[Tensor, Tensor]:
    tokens = window.astype(np.int64)
    return torch.from_numpy(tokens[:, :-1].copy()), torch.from_numpy(tokens[:, 1:].copy())
