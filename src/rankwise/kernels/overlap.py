"""Gradients of weights on a second CUDA stream, beside the backward pass.

Nobody waits for them until the optimizer does, and the products that make them are bound by arithmetic where the
recurrence of the layer below is bound by memory. Within `overlapping`, a backward pass hands their computation to
`weight_gradients`, which puts the results into `.grad` itself: so no kernel of the first stream touches them before the
streams meet again, at the end of the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

OVERLAPS = True
"""Whether there is a second stream at all."""

Gradients: TypeAlias = tuple[Tensor | None, ...]


class _Side:
    """The second stream during one backward pass."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.is_used = False
        self.kept: list[Tensor | None] = []
        """What it reads: memory that the first stream must not use again before they meet."""
        self.guards: list[RemovableHandle] = []

    def meet(self) -> None:
        """The current stream waits for all that was issued here."""
        if self.is_used:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    def guard(self, leaf: Tensor) -> None:
        """Where autograd has a gradient for `leaf` too, as that of tied weights, it must not add to it before."""
        handle = leaf.register_hook(lambda gradient: None if gradient is None else self.meet())  # type: ignore[no-untyped-call]
        self.guards.append(handle)

    def close(self) -> None:
        """The end of the backward pass."""
        self.meet()
        for guard in self.guards:
            guard.remove()


_streams: dict[torch.device, torch.cuda.Stream] = {}
_side: _Side | None = None


@contextmanager
def overlapping(device: torch.device) -> Iterator[None]:
    """A block that calls `backward()`: after it every gradient is in its `.grad`, and nobody may read one within."""
    global _side
    if not OVERLAPS or device.type != "cuda":
        yield
        return
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    # not by thread: autograd runs a backward pass in one of its own
    _side = side = _Side(_streams[device])
    try:
        yield
    finally:
        _side = None
        side.close()


def weight_gradients(
    leaves: Sequence[Tensor | None],
    needed: Sequence[bool],
    read: Sequence[Tensor | None],
    make: Callable[[], Gradients],
) -> Gradients:
    """What a backward pass returns for `leaves`: the gradients that `make` finds, or None for those put into `.grad`.

    Args:
        leaves: the inputs as autograd saved them.
        needed: which of them need a gradient.
        read: tensors that `make` reads; nobody may write to them afterwards.
    """
    side = _side
    if side is None:
        return make()
    if not all(_is_free(leaf, needs) for leaf, needs in zip(leaves, needed, strict=True)):
        # autograd will add to what may be in the making there
        side.meet()
        return make()
    side.stream.wait_stream(torch.cuda.current_stream(side.stream.device))
    side.is_used = True
    side.kept.extend(read)
    with torch.cuda.stream(side.stream):
        gradients = make()
    for leaf, needs, gradient in zip(leaves, needed, gradients, strict=True):
        if leaf is not None and needs:
            leaf.grad = gradient
            side.guard(leaf)
    return (None,) * len(leaves)


def _is_free(leaf: Tensor | None, needs: bool) -> bool:
    """Whether the gradient is the first for a parameter that nobody watches, or not needed at all."""
    if leaf is None or not needs:
        return True
    is_watched = bool(leaf._backward_hooks) or bool(getattr(leaf, "_post_accumulate_grad_hooks", None))
    is_first = leaf.is_leaf and leaf.requires_grad and leaf.grad is None
    # autograd would give the gradient the strides of the parameter
    return is_first and not is_watched and leaf.is_contiguous()
