"""Blocks that are refined on a GPU, by recorded steps; skipped where there is none."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from rankwise.core.blocks import Call
from rankwise.oneshot.blockwise import Refinement, Steps, refine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


class Block(nn.Module):
    """A residual block that is called with angles and a number besides its hidden states."""

    def __init__(self, *, waits: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.waits = nn.Linear(32, 48), nn.Linear(48, 32), waits

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], *, power: float, mask: Tensor | None = None) -> Tensor:
        y = self.down(torch.tanh(self.up(x * angles[0]))) * angles[1] * power
        if self.waits and bool(y.sum() > 1e9):
            return x
        return x + y if mask is None else x + y * mask


def batches(sizes: tuple[int, ...]) -> list[tuple[Tensor, Call, Tensor]]:
    """Of two shapes or more, each with angles of its own."""
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(size: int) -> Tensor:
        return torch.randn(size, 6, 32, generator=generator, device="cuda")

    return [
        (drawn(size), Call(((drawn(size), drawn(size)),), {"power": 0.5 + (size > 3)}), drawn(size)) for size in sizes
    ]


def trained(block: nn.Module, *, by_graph: bool) -> tuple[list[Tensor], int]:
    """The parameters after eight steps on batches of two shapes, and how many graphs were recorded."""
    lr = torch.tensor(1e-2, device="cuda")
    optimizer = torch.optim.AdamW(block.parameters(), lr=lr, fused=True, capturable=True)

    def move(x: Tensor, call: Call, target: Tensor) -> None:
        (call(block, x) - target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    steps = Steps(move)
    for number, batch in enumerate(batches((4, 4, 2, 4, 2, 4, 2, 2))):
        lr.fill_(1e-2 / (number + 1))
        steps.take(*batch) if by_graph else move(*batch)
    return [p.detach().clone() for p in block.parameters()], len(steps.graphs.recorded)


def test_recorded_steps_are_those_that_are_taken_one_by_one() -> None:
    torch.manual_seed(0)
    block = Block().cuda()
    want, none = trained(copy.deepcopy(block), by_graph=False)
    got, recorded = trained(block, by_graph=True)
    assert (none, recorded) == (0, 2)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_what_no_graph_can_hold_is_done_step_by_step() -> None:
    torch.manual_seed(0)
    block = Block(waits=True).cuda()
    want, _ = trained(copy.deepcopy(block), by_graph=False)
    with pytest.warns(UserWarning, match="without a CUDA graph"):
        got, recorded = trained(block, by_graph=True)
    assert recorded == 0
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_values_on_the_host_are_not_recorded() -> None:
    """A graph would keep the first one."""
    block = Block().cuda()
    seen: list[float] = []
    steps = Steps(lambda x, call, target: seen.append(float(call.kwargs["mask"])))
    x = torch.zeros(2, 6, 32, device="cuda")
    for value in (1.0, 2.0, 3.0):
        steps.take(x, Call(((x, x),), {"power": 1.0, "mask": torch.tensor(value)}), x)
    assert seen == [1.0, 2.0, 3.0]
    assert not steps.graphs.recorded
    del block


def test_a_block_is_refined_towards_the_dense_one() -> None:
    torch.manual_seed(0)
    dense = Block().cuda()
    block = copy.deepcopy(dense)
    with torch.no_grad():
        block.up.weight[20:] = 0
    given = batches((4,) * 16 + (2,))
    inputs, calls = [x for x, _, _ in given], [call for _, call, _ in given]
    with torch.no_grad():
        targets = [call(dense, x) for x, call in zip(inputs, calls, strict=True)]
    before, after = refine(block, calls, inputs, targets, None, Refinement(steps=200, learning_rate=1e-2))
    assert after < 0.5 * before
