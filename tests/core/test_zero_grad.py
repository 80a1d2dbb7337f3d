"""A batch that is thrown away leaves nothing behind: a run ends as the run without it, bit for bit."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rankwise as rw
from tests.models import Spec, batch

pytestmark = pytest.mark.filterwarnings("ignore:.* of the gates had not decided")

SPEC = Spec(width=12, num_words=20, back="tied", parts=("linear", "pair"))
METHODS: dict[str, dict[str, Any]] = {
    "np-l0": {"anneal_steps": 6, "gate_lr": 4.0, "open_probability": 0.9},
    "flop-agp": {"anneal_steps": 6, "mask_every": 2, "diagonal_lr": 0.02},
    "flop-l0": {"anneal_steps": 6, "gate_lr": 4.0, "open_probability": 0.9},
}
Order = Literal["before forward", "before backward", "after step", "before pruner"]
"""When a loop clears the gradients of weights: all are common."""
ORDERS: tuple[Order, ...] = ("before forward", "before backward", "after step", "before pruner")


def make(method: str = "flop-l0", spec: Spec = SPEC) -> rw.Pruner:
    torch.manual_seed(0)
    return rw.Pruner(spec.build(), rw.Budget(removed=0.3), method, **METHODS[method])


def state(pruner: rw.Pruner) -> dict[str, Tensor]:
    masks = {f"z.{i}": gate.z.detach() for i, gate in enumerate(pruner.controller.gates) if gate.z is not None}
    return {**pruner.state_dict(), **masks}


def assert_same(one: rw.Pruner, other: rw.Pruner) -> None:
    for key, value in state(one).items():
        assert torch.equal(value, state(other)[key]), key


class Loop:
    """A training loop, in which batches may be thrown away after their backward passes."""

    def __init__(
        self,
        pruner: rw.Pruner,
        order: Order = "after step",
        *,
        to_none: bool = True,
        accumulate: int = 1,
        trained: Iterable[nn.Parameter] | None = None,
        call: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.pruner, self.order, self.to_none, self.accumulate = pruner, order, to_none, accumulate
        self.call = pruner.model if call is None else call
        self.optimizer = torch.optim.SGD(pruner.weight_parameters() if trained is None else trained, lr=0.1)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=self.to_none)

    def step(self, seed: int, skip: bool = False, factor: float = 1.0) -> None:
        """One batch in `accumulate` parts."""
        for part in range(self.accumulate):
            tokens = batch(SPEC, size=4, seed=10 * seed + part)
            if part == 0 and self.order == "before forward":
                self.zero_grad()
            loss = F.cross_entropy(self.call(tokens).flatten(0, -2), tokens.flatten()) * factor
            if part == 0 and self.order == "before backward":
                self.zero_grad()
            loss.backward()
        if not skip:
            self.optimizer.step()
            if self.order == "before pruner":
                self.zero_grad()
            self.pruner.step()
        if self.order in ("after step", "before pruner"):
            self.zero_grad()

    def run(self, skips: bool, factor: float = float("nan"), steps: int = 4) -> rw.Pruner:
        for seed in range(steps):
            if skips and seed != 2:
                self.step(50 + seed, skip=True, factor=factor)
            self.step(seed)
        return self.pruner


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("to_none", [True, False], ids=["to none", "to zero"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_batch_that_is_thrown_away_leaves_nothing_behind(order: Order, to_none: bool, accumulate: int) -> None:
    """Before the first step, between steps, and after one without."""
    for factor in (float("nan"), 3.0):
        clean, skipping = (Loop(make(), order, to_none=to_none, accumulate=accumulate) for _ in range(2))
        assert_same(skipping.run(skips=True, factor=factor), clean.run(skips=False))


@pytest.mark.parametrize("to_none", [True, False], ids=["to none", "to zero"])
@pytest.mark.parametrize("method", METHODS)
def test_with_every_method(method: str, to_none: bool) -> None:
    clean, skipping = (Loop(make(method), to_none=to_none, accumulate=2) for _ in range(2))
    assert_same(skipping.run(skips=True), clean.run(skips=False))


def test_parts_of_a_batch_add_up() -> None:
    """Whatever the order, the gates learn from the sum of the parts, so all orders give the same run."""
    runs = [
        Loop(make(), order, to_none=to_none, accumulate=3).run(skips=False)
        for order in ORDERS
        for to_none in (True, False)
    ]
    for other in runs[1:]:
        assert_same(runs[0], other)


def test_z_collects_the_sum_over_backward_passes() -> None:
    pruner = make()
    tokens = [batch(SPEC, size=4, seed=seed) for seed in range(3)]
    grads = []
    for part in tokens:
        F.cross_entropy(pruner.model(part).flatten(0, -2), part.flatten()).backward()
        grads.append([gate.z.grad.clone() for gate in pruner.controller.gates])
        pruner.zero_grad()
        pruner.model.zero_grad()
        assert all(gate.z.grad is None for gate in pruner.controller.gates)
    for part in tokens:
        F.cross_entropy(pruner.model(part).flatten(0, -2), part.flatten()).backward()
    for gate, *parts in zip(pruner.controller.gates, *grads, strict=True):
        torch.testing.assert_close(gate.z.grad, sum(parts))


@pytest.mark.parametrize("trained", ["others", "frozen", "some"])
def test_an_optimizer_may_hold_other_parameters(trained: str) -> None:
    """Those outside of gated matrices alone, with the rest frozen or left to itself; or those of some matrices."""

    def loop() -> Loop:
        pruner = make(spec=Spec(width=12, num_words=20, parts=("linear", "norm", "pair")))
        own = {id(p) for matrix in pruner.controller.matrices for p in matrix.parameters()}
        others = [p for p in pruner.model.parameters() if id(p) not in own]
        if trained == "frozen":
            for parameter in pruner.model.parameters():
                parameter.requires_grad_(id(parameter) not in own)
        if trained == "some":
            others += pruner.controller.matrices[1].parameters()
        return Loop(pruner, trained=others, accumulate=2)

    clean = loop().run(skips=False)
    skipping = loop()
    # what is left to itself is known after a step
    skipping.step(0)
    for seed in range(1, 4):
        skipping.step(50 + seed, skip=True)
        skipping.step(seed)
    assert_same(skipping.pruner, clean)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradients_that_a_hook_takes_away_are_not_a_batch_thrown_away(use_reentrant: bool) -> None:
    """An optimizer that steps within the backward pass, with activation checkpointing: many backward passes in one."""

    def run(in_backward: bool) -> rw.Pruner:
        pruner = make()
        model = pruner.model
        for part in model.body:
            plain = part.forward
            part.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=use_reentrant)
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def apply(parameter: Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        if in_backward:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(apply)
        for seed in range(3):
            tokens = batch(SPEC, size=4, seed=seed)
            F.cross_entropy(model(tokens).flatten(0, -2), tokens.flatten()).backward()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    apply(parameter)
            pruner.step()
        return pruner

    within, after = run(in_backward=True), run(in_backward=False)
    for one, other in zip(within.controller.gates, after.controller.gates, strict=True):
        torch.testing.assert_close(one.alpha, other.alpha)


def test_in_a_compiled_model_too() -> None:
    def loop() -> Loop:
        torch.compiler.reset()
        pruner = make()
        return Loop(pruner, call=torch.compile(pruner.model, backend="aot_eager", fullgraph=True), accumulate=2)

    assert_same(loop().run(skips=True), loop().run(skips=False))


def test_a_copy_watches_its_own_gradients() -> None:
    pruner = make()
    Loop(pruner).run(skips=False, steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(pruner.model, io.BytesIO())
        clean, skipping = (Loop(copy.deepcopy(pruner)) for _ in range(2))
    assert_same(skipping.run(skips=True), clean.run(skips=False))
