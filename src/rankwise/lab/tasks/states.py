"""What a language model carries from window to window: kept, saved, and shared out among ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from rankwise.lab.training.ranks import Ranks

State = Tensor | tuple[Tensor, ...]
"""What a model carries from window to window: the SRU a tensor, Transformer-XL one a layer. The
streams are in the second dimension of a single tensor, and in the first of each of several."""


def carry(before: State | None, after: State) -> State:
    """`after`, detached; in the memory of `before` if the shapes are the same."""
    if isinstance(after, Tensor):
        if not isinstance(before, Tensor) or before.shape != after.shape or before.dtype != after.dtype:
            return after.detach()
        return before.copy_(after.detach())
    parts = before if isinstance(before, tuple) and len(before) == len(after) else (None,) * len(after)
    return tuple(cast(Tensor, carry(old, new)) for old, new in zip(parts, after, strict=True))


def shape_of(state: State | None) -> Hashable:
    """The shapes of the tensors of a state."""
    return tuple(part.shape for part in ((state,) if isinstance(state, Tensor) else state or ()))


def state_tensors(states: Sequence[State | None], name: str) -> dict[str, Tensor]:
    """`<name>.<part of the batch>`, or `<name>.<part>.<i>` where a state is several tensors."""
    tensors = {}
    for part, state in enumerate(states):
        if isinstance(state, Tensor):
            tensors[f"{name}.{part}"] = state
        elif state is not None:
            tensors.update({f"{name}.{part}.{i}": tensor for i, tensor in enumerate(state)})
    return tensors


def load_states(tensors: Mapping[str, Tensor], num_parts: int, device: torch.device, name: str) -> list[State | None]:
    """Restore what `state_tensors` returned."""
    states: list[State | None] = []
    for part in range(num_parts):
        if f"{name}.{part}" in tensors:
            states.append(tensors[f"{name}.{part}"].to(device))
            continue
        length = sum(key.startswith(f"{name}.{part}.") for key in tensors)
        states.append(tuple(tensors[f"{name}.{part}.{i}"].to(device) for i in range(length)) or None)
    return states


def gather_states(states: Sequence[State | None], ranks: Ranks) -> Sequence[State | None]:
    """The states of the streams of all ranks, in as many parts as one process would have."""
    return states if ranks.count == 1 else _reshared(states, lambda own, dim: torch.cat(ranks.gather(own), dim))


def own_states(states: Sequence[State | None], ranks: Ranks) -> list[State | None]:
    """The states of this rank's streams, of those of all."""

    def share(whole: Tensor, dim: int) -> Tensor:
        places = ranks.share(whole.shape[dim])
        return whole.narrow(dim, places.start, len(places))

    return list(states) if ranks.count == 1 else _reshared(states, share)


def _reshared(states: Sequence[State | None], change: Callable[[Tensor, int], Tensor]) -> list[State | None]:
    """States of all parts of a batch with other streams, in as many parts."""

    def parts(tensors: Sequence[Tensor], dim: int) -> list[Tensor]:
        return [part.contiguous() for part in change(torch.cat(list(tensors), dim), dim).chunk(len(states), dim)]

    if any(state is None for state in states):
        return list(states)
    if isinstance(states[0], Tensor):
        return list(parts(cast(list[Tensor], states), 1))
    layers = zip(*cast(list[tuple[Tensor, ...]], states), strict=True)
    return list(zip(*(parts(layer, 0) for layer in layers), strict=True))
