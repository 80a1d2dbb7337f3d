"""Which gradients may be put into `.grad` past autograd; that both streams agree is tested on a GPU, with training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rankwise.kernels import overlap


class Ask(torch.autograd.Function):
    """Asks in its backward pass, where a parameter comes back from autograd."""

    answers: list[bool]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        Ask.answers.append(overlap._is_free(x, ctx.needs_input_grad[0]))
        return 2 * dy


def ask(x: Tensor) -> bool:
    Ask.answers = []
    Ask.apply(x).sum().backward()
    return Ask.answers[0]


def make() -> Tensor:
    return torch.ones(3, 2).requires_grad_()


def test_a_first_gradient_of_a_parameter_is_free() -> None:
    assert ask(make())
    assert overlap._is_free(None, False)
    assert overlap._is_free(torch.ones(3), False)


def test_a_second_one_is_not() -> None:
    x = make()
    assert ask(x)
    assert not ask(x)


def test_what_is_computed_or_turned_or_watched_is_not() -> None:
    assert not ask(make() * 2)
    assert not ask(torch.ones(2, 3).t().requires_grad_())
    hooked, watched = make(), make()
    hooked.register_hook(lambda gradient: gradient)
    assert not ask(hooked)
    watched.register_post_accumulate_grad_hook(lambda parameter: None)
    assert not ask(watched)


class Put(torch.autograd.Function):
    """Puts its gradient into `.grad`, as a second stream does, and notes what passes by autograd after that."""

    seen: list[Tensor | None]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> None:
        (x,) = ctx.saved_tensors
        x.grad = 2 * dy
        x.register_hook(Put.seen.append)


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_a_hook_set_in_the_backward_pass_sees_what_autograd_adds_before_it_does(tied: bool) -> None:
    """What the guard of a gradient relies on."""
    x, Put.seen = make(), []
    first = x * 3 if tied else torch.zeros_like(x)
    (Put.apply(x) + first).sum().backward()
    assert sum(gradient is not None for gradient in Put.seen) == (1 if tied else 0)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.full_like(x, 5.0 if tied else 2.0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a second stream")
def test_without_a_gpu_gradients_go_through_autograd() -> None:
    x = make()
    with overlap.overlapping(x.device):
        (gradient,) = overlap.weight_gradients((x,), (True,), (), lambda: (torch.ones_like(x),))
    assert gradient is not None and x.grad is None
