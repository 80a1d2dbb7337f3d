"""Two ranks agree on every mask, and give what one rank gives on the same batch.

Both ranks run once for the whole module: starting a process costs more than the steps it takes.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from models import Spec, batch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rankwise as rw

pytestmark = [
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
    # runs of a few steps, in which no gate can decide
    pytest.mark.filterwarnings("ignore:.* of the gates had not decided"),
]

RANKS, STEPS = 2, 9
SPEC = Spec(width=12, num_words=20, back="bias-tied", parts=("linear", "pair", "conv1d", "norm"))
METHODS: dict[str, dict[str, Any]] = {
    "flop-l0": {"anneal_steps": 6, "gate_lr": 4.0, "open_probability": 0.9},
    "flop-agp": {"anneal_steps": 6, "mask_every": 2, "diagonal_lr": 0.02, "l1": 1e-3},
    "agp": {"anneal_steps": 6, "mask_every": 2},
}
OVERFLOW_AT = 3
"""At this step one rank's loss overflows in the run named "overflow"."""
RUNS = {**METHODS, "overflow": METHODS["flop-l0"]}

State = dict[str, Tensor]


def state_of(pruner: rw.Pruner) -> State:
    """Gates, masks, multipliers and moments."""
    controller = pruner.controller
    state = {f"controller.{name}": value.clone() for name, value in controller.named_buffers(recurse=False)}
    for i, gate in enumerate(controller.gates):
        state |= {f"{i}.{name}": value.clone() for name, value in gate.named_buffers(recurse=False)}
        if gate.z is not None:
            state[f"{i}.z"] = gate.z.detach().clone()
    return state


def run(name: str, rank: int, ranks: int) -> list[State]:
    """The state after each step on a share of every batch; last the weights."""
    torch.manual_seed(0)
    model = SPEC.build().double()
    method = "flop-l0" if name == "overflow" else name
    pruner = rw.Pruner(model, rw.Budget(removed=0.4), method, **RUNS[name])
    wrapped: nn.Module = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.SGD(pruner.weight_parameters(), lr=0.1)
    states = []
    for step in range(STEPS):
        tokens = batch(SPEC, size=8, seed=step).chunk(ranks)[rank]
        loss = F.cross_entropy(wrapped(tokens).flatten(0, -2), tokens.flatten())
        overflows = name == "overflow" and step == OVERFLOW_AT
        (loss * float("inf") if overflows and rank == ranks - 1 else loss).backward()
        # as a gradient scaler does: what overflowed is not applied
        if not overflows:
            optimizer.step()
        optimizer.zero_grad()
        pruner.step()
        states.append(state_of(pruner))
    states.append({key: value.clone() for key, value in model.named_parameters()})
    return states


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    try:
        torch.save({name: run(name, rank, RANKS) for name in RUNS}, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[State]]]:
    """What each rank saw; a failure of either comes with its traceback."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    mp.spawn(worker, args=(str(folder),), nprocs=RANKS, join=True)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


@pytest.mark.parametrize("name", RUNS)
def test_all_ranks_hold_the_same_gates_masks_and_multipliers(ranks: Any, name: str) -> None:
    """Bit for bit, at every step."""
    for step, (first, second) in enumerate(zip(*(results[name] for results in ranks), strict=True), 1):
        assert first.keys() == second.keys()
        for key, value in first.items():
            assert torch.equal(value, second[key]), f"{key} after step {step}"


@pytest.mark.parametrize("name", METHODS)
def test_two_ranks_give_what_one_gives_on_the_whole_batch(ranks: Any, name: str) -> None:
    for step, (ours, truth) in enumerate(zip(ranks[0][name], run(name, 0, 1), strict=True), 1):
        assert ours.keys() == truth.keys()
        for key, value in truth.items():
            torch.testing.assert_close(
                ours[key], value, rtol=1e-4, atol=1e-5, msg=lambda text, at=f"{key} after step {step}": f"{at}: {text}"
            )


@pytest.mark.parametrize("name", RUNS)
def test_the_runs_go_through_all_that_can_differ(ranks: Any, name: str) -> None:
    """Gates moved, some of them closed, and stayed finite."""
    first, *_, last, weights = ranks[0][name]
    moved = [key for key in first if not torch.equal(first[key], last[key])]
    assert any(key.endswith("kept" if name.endswith("agp") else "alpha") for key in moved)
    closed = [value for key, value in last.items() if key.endswith("kept" if name.endswith("agp") else "z")]
    assert 0 < sum(int((value == 0).sum()) for value in closed) < sum(value.numel() for value in closed)
    assert all(torch.isfinite(value).all() for value in {**last, **weights}.values())


def test_an_overflow_on_one_rank_is_dropped_on_all(ranks: Any) -> None:
    """The step moves the gates by the penalty alone, so the run is not the one without an overflow."""
    before, after = ranks[0]["overflow"][OVERFLOW_AT - 1 : OVERFLOW_AT + 1]
    assert not torch.equal(before["0.alpha"], after["0.alpha"])
    assert torch.equal(ranks[0]["flop-l0"][OVERFLOW_AT - 1]["0.alpha"], before["0.alpha"])
    assert not torch.equal(ranks[0]["flop-l0"][OVERFLOW_AT]["0.alpha"], after["0.alpha"])
