"""Two ranks agree on every mask, and give what one rank gives on the same batch.

Both ranks run once for the whole module: starting a process costs more than the steps it takes.
"""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rankwise as rw
from tests.models import Spec, batch

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


def make(method: str = "flop-l0", seed: int = 0, **extra: Any) -> rw.Pruner:
    torch.manual_seed(seed)
    return rw.Pruner(SPEC.build().double(), rw.Budget(removed=0.4), method, **METHODS[method], **extra)


def train(
    pruner: rw.Pruner, call: Any, steps: range, share: tuple[int, int] = (0, 1), first: int = 0, parts: int = 1
) -> State:
    """Steps on a share of every batch; the end state. Gradients are averaged by hand where no wrapper does it."""
    optimizer = torch.optim.SGD(pruner.weight_parameters(), lr=0.1)
    for step in steps:
        tokens = batch(SPEC, size=8, seed=first + step).chunk(share[1])[share[0]]
        for part in tokens.chunk(parts):
            (F.cross_entropy(call(part).flatten(0, -2), part.flatten()) / parts).backward()
        if call is pruner.model and share[1] > 1:
            for parameter in pruner.weight_parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= share[1]
        optimizer.step()
        optimizer.zero_grad()
        pruner.step()
    weights = {key: getattr(value, "full_tensor", value.clone)() for key, value in pruner.model.named_parameters()}
    return {**state_of(pruner), **{key: value.detach() for key, value in weights.items()}}


ALONE = range(4)
"""Steps of processes that train a model of their own each, or the same one by other means."""
LOADED = {"flop-l0": 3, "flop-l0 at the end": 7, "flop-agp": 3, "agp": 3}
"""After so many steps one rank alone loads a checkpoint."""


def alone(rank: int, **extra: Any) -> State:
    pruner = make(seed=rank, **extra)
    return train(pruner, pruner.model, ALONE, first=100 * rank)


def checkpoint(name: str) -> State:
    """The state of a run on one process, after some steps."""
    pruner = make(name.split()[0], process_group=False)
    train(pruner, pruner.model, range(LOADED[name]))
    return copy.deepcopy(pruner.state_dict())


def loaded(name: str, rank: int) -> State:
    """The first rank goes on from a checkpoint, and the wrapper sends it to the other."""
    pruner = make(name.split()[0])
    # masks are drawn for what the second rank no longer holds when it is wrapped
    pruner.model.train()
    if rank == 0:
        pruner.load_state_dict(checkpoint(name))
    wrapped = DistributedDataParallel(pruner.model)
    return train(pruner, wrapped, range(LOADED[name], STEPS), (rank, RANKS))


@contextlib.contextmanager
def told(messages: list[str]) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    texts = [str(one.message) for one in caught]
    messages += [text for text in texts if "processes" in text or "the same weights" in text]


def refused(case: str, rank: int) -> str:
    """What a rank is told that differs from the other."""
    world = dist.group.WORLD
    pruner = make(seed=0, process_group=None if case == "later" else world)
    call: nn.Module = pruner.model
    try:
        if case == "seed":
            pruner = rw.Pruner(SPEC.build(), rw.Budget(removed=0.4), seed=rank, process_group=world, anneal_steps=100)
            call = pruner.model
        elif case == "steps" and rank == 0:
            pruner.load_state_dict(checkpoint("flop-l0 at the end"))
        elif case == "gates" and rank == 0:
            pruner.controller.gates[0].alpha[0] += 1.0
        elif case == "budget":
            pruner = rw.Pruner(SPEC.build(), rw.Budget(removed=0.4 + rank / 10), "agp", **METHODS["agp"])
            call = DistributedDataParallel(pruner.model)
        elif case == "gates alone":
            pruner = make(process_group=False)
            call = DistributedDataParallel(pruner.model)
        elif case == "gates in a subgroup":
            pruner = make(process_group=[dist.new_group([other]) for other in range(RANKS)][rank])
            call = DistributedDataParallel(pruner.model)
        elif case == "later":
            call = DistributedDataParallel(pruner.model)
            train(pruner, call, range(2), (rank, RANKS))
            if rank == 0:
                pruner.load_state_dict(checkpoint("flop-l0 at the end"))
        train(pruner, call, range(2, 4), (rank, RANKS))
    except rw.RankwiseError as error:
        return str(error)
    return ""


def apart(case: str, rank: int) -> list[str]:
    """What a rank is told whose weights are trained without the other's."""
    pruner, messages = make(process_group=dist.group.WORLD), list[str]()
    wrapped = DistributedDataParallel(pruner.model)

    def unsynchronized(tokens: Tensor) -> Tensor:
        with wrapped.no_sync():
            return wrapped(tokens)  # type: ignore[no-any-return]

    calls = {"the module inside": lambda tokens: pruner.model(tokens), "no_sync": unsynchronized}
    with told(messages):
        train(pruner, calls[case], ALONE, (rank, RANKS))
    return messages


APART = ("the module inside", "no_sync")


def cases(rank: int) -> dict[str, Any]:
    """All that a rank sees beside the runs in step with the other."""
    messages: dict[str, list[str]] = {"silent": [], "warned": []}
    seen: dict[str, Any] = {"messages": messages}
    with told(messages["silent"]):
        seen["asked to be alone"] = alone(rank, process_group=False)
        # every process makes all groups
        groups = [dist.new_group([other]) for other in range(RANKS)]
        pruner = make(seed=rank)
        wrapped = DistributedDataParallel(pruner.model, process_group=groups[rank])
        seen["wrapped in a group of its own"] = train(pruner, wrapped, ALONE, first=100 * rank)
        pruner = make(process_group=dist.group.WORLD)
        seen["averaged by hand"] = train(pruner, pruner.model, ALONE, (rank, RANKS))
        pruner = make()
        compiled: Any = torch.compile(DistributedDataParallel(pruner.model), backend="eager")
        seen["compiled"] = train(pruner, compiled, ALONE, (rank, RANKS))
        pruner = make()
        sharded = fully_shard(pruner.model, mesh=init_device_mesh("cpu", (RANKS,)))
        seen["sharded"] = train(pruner, lambda tokens: sharded(tokens), ALONE, (rank, RANKS), parts=2)
        for name in LOADED:
            seen[f"loaded {name}"] = loaded(name, rank)
    with told(messages["warned"]):
        seen["alone"] = alone(rank)
    for case in REFUSED:
        seen[f"refused {case}"] = refused(case, rank)
    for case in APART:
        seen[f"apart {case}"] = apart(case, rank)
    return seen


REFUSED = {
    "steps": "are at steps 7, 0. Load a checkpoint on every rank",
    "gates": "hold different gates",
    "seed": "the same model and arguments",
    "budget": "the same model and arguments",
    "gates alone": "with process_group=False, and `DistributedDataParallel` averages over ranks [0, 1]. Leave",
    "gates in a subgroup": "and `DistributedDataParallel` averages over ranks [0, 1]. Leave `process_group` out",
    "later": "are at steps 7, 2. Load a checkpoint on every rank",
}


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    try:
        torch.save({**{name: run(name, rank, RANKS) for name in RUNS}, **cases(rank)}, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
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


def assert_close(ours: State, truth: State) -> None:
    assert ours.keys() == truth.keys()
    for key, value in truth.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=1e-5, msg=lambda text, at=key: f"{at}: {text}")


@pytest.mark.parametrize("case", ["alone", "asked to be alone", "wrapped in a group of its own"])
def test_processes_that_train_models_of_their_own_do_not_mix_them(ranks: Any, case: str) -> None:
    """Bit for bit what each gives without the other."""
    for rank in range(RANKS):
        truth = alone(rank)
        assert all(torch.equal(ranks[rank][case][key], value) for key, value in truth.items())


def test_a_process_is_told_once_that_its_gates_learn_alone(ranks: Any) -> None:
    for results in ranks:
        (message,) = results["messages"]["warned"]
        assert "one of 2 processes" in message
        assert "process_group=" in message
        assert results["messages"]["silent"] == []


@pytest.mark.parametrize("case", ["averaged by hand", "compiled", "sharded"])
def test_ranks_that_average_in_other_ways_give_what_one_gives(ranks: Any, case: str) -> None:
    pruner = make()
    truth = train(pruner, pruner.model, ALONE)
    for results in ranks:
        assert_close(results[case], truth)


@pytest.mark.parametrize("name", LOADED)
def test_what_the_first_rank_loads_is_taken_up_by_all(ranks: Any, name: str) -> None:
    """They agree bit for bit, and go on as one rank that was never stopped."""
    pruner = make(name.split()[0])
    truth = train(pruner, pruner.model, range(STEPS))
    first, second = (results[f"loaded {name}"] for results in ranks)
    assert all(torch.equal(value, second[key]) for key, value in first.items())
    assert_close(first, truth)


@pytest.mark.parametrize("case", REFUSED)
def test_ranks_that_disagree_are_told_so(ranks: Any, case: str) -> None:
    """All of them, in place of waiting for each other."""
    for results in ranks:
        assert REFUSED[case] in results[f"refused {case}"]


@pytest.mark.parametrize("case", APART)
def test_ranks_whose_weights_go_apart_are_told_so_once(ranks: Any, case: str) -> None:
    for results in ranks:
        (message,) = results[f"apart {case}"]
        assert "All ranks must train the same weights, but those of ranks 0 and 1 differ in step 1" in message


@pytest.mark.parametrize("group", [True, "nccl", -100])
def test_a_process_group_is_one(group: Any) -> None:
    model = SPEC.build()
    with pytest.raises(TypeError, match=f"`process_group` must be .* but is {group!r} instead"):
        rw.Pruner(model, rw.Budget(removed=0.4), anneal_steps=100, process_group=group)
    assert not any("gate" in name for name, _ in model.named_modules())
