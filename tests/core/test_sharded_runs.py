"""Around the steps of a sharded run: meshes, checkpoints, ranks that die, and mistakes that get a sentence."""

from __future__ import annotations

import copy
import multiprocessing
import os
import re
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import rankwise as rw
from tests.core.test_sharding import (
    STEPS,
    TRUTH,
    Share,
    build,
    loss_of,
    outcome,
    prune,
    shard,
    tied,
    tokens_of,
    train,
)
from tests.ranks import join, run_ranks, run_ranks_once

pytestmark = [
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
    pytest.mark.filterwarnings("ignore:.* of the gates had not decided"),
    pytest.mark.filterwarnings("ignore:gates cannot decide"),
]

SAVED_AT = 3
"""A checkpoint is taken after this step."""


def adam_run(pruner: rw.Pruner, steps: range, share: Share, folder: Path | None = None, resume: bool = False) -> Any:
    """A run with an optimizer that has state, which a checkpoint holds too; its outcome."""
    model = pruner.model
    optimizer = torch.optim.AdamW(pruner.weight_parameters(), lr=1e-2)
    if resume:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    for step in steps:
        loss_of(model, share.of(tokens_of(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
        pruner.step()
        if step + 1 == SAVED_AT and folder is not None and not resume:
            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    return outcome(pruner, [torch.zeros(())])


def sharded(mesh: DeviceMesh, name: str = "tied", method: str = "flop-l0", **policy: Any) -> rw.Pruner:
    pruner = prune(build(name), method)
    shard(pruner.model, mesh, **policy)
    return pruner


def on_four(rank: int, count: int, folder: Path) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    grid, seen = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), {}
    pruner = sharded(grid)
    seen["hybrid"] = outcome(pruner, train(pruner, range(STEPS), Share(rank, 4)))
    # two models, each on a grid of its own
    rows = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("model", "replicate", "shard"))
    model = build("tied")
    with torch.no_grad():
        model.head.bias += rank // 2
    pruner = prune(model)
    shard(model, rows["replicate", "shard"])
    seen["rows"] = outcome(pruner, train(pruner, range(STEPS), Share(rank % 2, 2)))
    seen["groups"] = torch.tensor([dist.get_world_size(group) for group in pruner.controller.distributed.groups])
    for method in SAVED:
        pruner = sharded(init_device_mesh("cpu", (4,)), method=method)
        seen[method] = adam_run(pruner, range(STEPS), Share(rank, 4), folder / method)
    return seen


SAVED = ("flop-l0", "flop-agp", "agp")


def on_two(rank: int, count: int, folder: Path, saved: Path) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    mesh, share, seen = init_device_mesh("cpu", (2,)), Share(rank, 2), {}
    for method in SAVED:
        pruner = sharded(mesh, method=method)
        seen[method] = adam_run(pruner, range(SAVED_AT, STEPS), share, saved / method, resume=True)
    pruner = prune(build("transformer"))
    for i, block in enumerate(pruner.model.blocks):
        pruner.model.blocks[i] = checkpoint_wrapper(block)
    shard(pruner.model, mesh)
    seen["recomputed"] = outcome(pruner, train(pruner, range(STEPS), share))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    pruner = prune(build("tied").float())
    shard(pruner.model, mesh, mp_policy=half)
    seen["half"] = outcome(pruner, train(pruner, range(STEPS), share))
    seen["warmed up"] = warmed_up(share, mesh)
    for method in ("flop-l0", "np-l0"):
        seen[f"compact {method}"] = trained_on(share, mesh, method)
    for case, load in {"dense": load_dense, "gated": load_gated}.items():
        pruner = load(rank, mesh, saved)
        done = pruner.steps
        seen[f"{case} on the first"] = outcome(pruner, train(pruner, range(done, STEPS), share))
    seen["told"] = {name: told(make, rank, mesh) for name, (make, _) in MISTAKES.items()}
    return seen


def warmed_up(share: Share, mesh: DeviceMesh | None) -> dict[str, Any]:
    """A run whose model was trained and evaluated before it was gated."""
    model = build("tied")
    if mesh is not None:
        shard(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, share.of(tokens_of(50))).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(tokens_of(51))
    pruner = prune(model)
    return outcome(pruner, train(pruner, range(STEPS), share))


def trained_on(share: Share, mesh: DeviceMesh | None, method: str) -> torch.Tensor:
    """What the compact model gives after another step; on several ranks it is sharded again."""
    pruner = prune(build("tied"), method) if mesh is None else sharded(mesh, method=method)
    train(pruner, range(STEPS), share)
    small = pruner.compact()
    if mesh is not None:
        state = small.state_dict() if share.rank == 0 else {}
        shard(small, mesh)
        small.to_empty(device="cpu")
        set_model_state_dict(small, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    optimizer = torch.optim.SGD(small.parameters(), lr=0.1)
    loss_of(small, share.of(tokens_of(60))).backward()
    optimizer.step()
    with torch.no_grad():
        given: torch.Tensor = small(tokens_of(61))
    return given


def load_dense(rank: int, mesh: DeviceMesh, folder: Path) -> rw.Pruner:
    """From the meta device: shard, load on the first rank alone, gate."""
    state = build("tied").state_dict() if rank == 0 else {}
    with torch.device("meta"):
        model = tied().double()
    shard(model, mesh)
    model.to_empty(device="cpu")
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return prune(model)


def load_gated(rank: int, mesh: DeviceMesh, folder: Path) -> rw.Pruner:
    """A checkpoint of one process, which the first rank sends to the others."""
    state: dict[str, Any] = {}
    if rank == 0:
        pruner = prune(build("tied"), process_group=False)
        train(pruner, range(SAVED_AT), Share())
        state = copy.deepcopy(pruner.state_dict())
    pruner = sharded(mesh)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(pruner.model, state, options=options)
    return pruner


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    return run_ranks_once(tmp_path_factory, "runs-4", on_four, 4)


@pytest.fixture(scope="module")
def two(four: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks_once(tmp_path_factory, "runs-2", on_two, 2, four[1])[0]


def alone(name: str, **change: Any) -> dict[str, Any]:
    key = name, str(change)
    if key not in TRUTH:
        model = build(name)
        if change:
            with torch.no_grad():
                model.head.bias += change["bias"]
        pruner = prune(model)
        TRUTH[key] = outcome(pruner, train(pruner, range(STEPS), Share()))
    return TRUTH[key]


def assert_close(found: dict[str, Any], expected: dict[str, Any], without: tuple[str, ...] = ()) -> None:
    for name in {"losses", "state", "masks", "evaluated", "given", "small"} - set(without):
        torch.testing.assert_close(
            found[name], expected[name], rtol=1e-4, atol=1e-5, msg=lambda text, at=name: f"{at}: {text}"
        )


def test_a_mesh_that_shards_and_replicates_gives_what_one_process_gives(four: Any) -> None:
    assert_close(four[0][0]["hybrid"], alone("tied"))


def test_ranks_that_train_two_models_do_not_mix_them(four: Any) -> None:
    """The first rank of each group gets the compact model of its own."""
    results = four[0]
    for row, first in enumerate((0, 2)):
        assert_close(results[first]["rows"], alone("tied", bias=row))
        assert not results[first + 1]["rows"]["small"]
        assert results[first]["groups"].tolist() == [1, 2]


@pytest.mark.parametrize("method", SAVED)
def test_a_sharded_checkpoint_loads_on_another_number_of_ranks(four: Any, two: Any, method: str) -> None:
    """Saved by four, with the optimizer's moments; continued by two and by one."""
    uninterrupted = adam_run(prune(build("tied"), method), range(STEPS), Share())
    assert_close(four[0][0][method], uninterrupted)
    assert_close(two[0][method], uninterrupted)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        single = adam_run(prune(build("tied"), method), range(SAVED_AT, STEPS), Share(), four[1] / method, resume=True)
    assert_close(single, uninterrupted)


@pytest.mark.parametrize("case", ["dense on the first", "gated on the first"])
def test_what_the_first_rank_alone_loads_reaches_all(two: Any, case: str) -> None:
    """Dense weights into a model from the meta device that is gated afterwards; a checkpoint into a gated one."""
    assert_close(two[0][case], alone("tied"), () if case.startswith("dense") else ("losses",))


def test_a_sharded_model_may_be_trained_and_evaluated_before_it_is_gated(two: Any) -> None:
    assert_close(two[0]["warmed up"], warmed_up(Share(), None))


@pytest.mark.parametrize("method", ["flop-l0", "np-l0"])
def test_a_compact_model_may_be_sharded_and_trained_on(two: Any, method: str) -> None:
    expected = trained_on(Share(), None, method)
    for results in two:
        torch.testing.assert_close(results[f"compact {method}"], expected, rtol=1e-4, atol=1e-5)


def test_activations_may_be_recomputed(two: Any) -> None:
    """The compact model holds no trace of it."""
    expected = alone("transformer")
    found = two[0]["recomputed"]
    assert found["sizes"] == expected["sizes"]
    assert_close(found, expected, without=("state",))


def test_weights_may_be_gathered_in_half_precision(two: Any) -> None:
    """Gates and export stay in float32, and near what float32 gives."""
    expected, found = alone("tied"), two[0]["half"]
    assert (found["losses"] - expected["losses"]).abs().max() < 0.1
    assert all(torch.isfinite(value).all() for value in found["state"].values())
    assert {value.dtype for name, value in found["small"].items() if "weight" in name} == {torch.float32}
    given, evaluated = found["given"].double(), found["evaluated"].double()
    assert (given - evaluated).norm() < 0.05 * evaluated.norm()


def killed(rank: int, folder: str, when: str) -> None:
    """Take a checkpoint, then lose the second rank before a step of the pruner, or before `compact()`."""
    join(rank, 2, folder)
    warnings.simplefilter("ignore")
    pruner = sharded(init_device_mesh("cpu", (2,)))
    call = getattr(pruner, when)

    def dies() -> Any:
        if rank == 1 and pruner.steps > SAVED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        return call()

    setattr(pruner, when, dies)
    try:
        adam_run(pruner, range(STEPS), Share(rank, 2), Path(folder) / "saved")
    except rw.RankwiseError as error:
        (Path(folder) / "word").write_text(str(error))


def resumed(rank: int, count: int, folder: Path, saved: Path) -> Any:
    warnings.simplefilter("ignore")
    pruner = sharded(init_device_mesh("cpu", (2,)))
    return adam_run(pruner, range(SAVED_AT, STEPS), Share(rank, 2), saved, resume=True)


@pytest.mark.parametrize("when", ["step", "compact"])
def test_if_a_rank_is_killed_the_others_stop_and_the_job_resumes(tmp_path: Path, when: str) -> None:
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=killed, args=(rank, str(tmp_path), when)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, -signal.SIGKILL]
    assert "one has died or does something else" in (tmp_path / "word").read_text()
    if when == "step":
        again = run_ranks(resumed, 2, tmp_path / "again", tmp_path / "saved")
        assert_close(again[0], adam_run(prune(build("tied")), range(STEPS), Share()))


# what a user does, and what he is told
def told(make: Callable[[int, DeviceMesh], None], rank: int, mesh: DeviceMesh) -> str:
    # a mistake may have left the ranks apart
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", ".*(decide|left out|leaves out|deprecated|returned a view tensor)")
        try:
            make(rank, mesh)
        except (rw.RankwiseError, UserWarning) as error:
            return str(error)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def two_steps(pruner: rw.Pruner, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.SGD(pruner.weight_parameters(), lr=0.1)
    for step in range(2):
        loss_of(pruner.model, tokens_of(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        pruner.step()


def wrapped_first(rank: int, mesh: DeviceMesh) -> None:
    prune(DistributedDataParallel(build("tied")))


def fsdp1_first(rank: int, mesh: DeviceMesh) -> None:
    prune(FullyShardedDataParallel(build("tied"), device_id=torch.device("cpu")))


def fsdp1_afterwards(rank: int, mesh: DeviceMesh) -> None:
    pruner = prune(build("tied"))
    pruner.model.body[0] = FullyShardedDataParallel(pruner.model.body[0], device_id=torch.device("cpu"))
    two_steps(pruner)


def tensor_parallel(rank: int, mesh: DeviceMesh) -> None:
    prune(parallelize_module(build("transformer"), mesh, {"head": ColwiseParallel()}))


def tensor_parallel_too(rank: int, mesh: DeviceMesh) -> None:
    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(build("transformer"), grid["tensor"], {"head": ColwiseParallel()})
    shard(model, grid["data"])
    prune(model)


SPLIT = {"blocks.0.linear1": ColwiseParallel(), "blocks.0.linear2": RowwiseParallel()}


def tensor_parallel_afterwards(rank: int, mesh: DeviceMesh) -> None:
    model = build("transformer")
    pruner = prune(model, plan=rw.find_plan(model, exclude=["linear1", "linear2"]))
    parallelize_module(pruner.model, mesh, SPLIT)
    two_steps(pruner)


def tensor_parallel_of_gates(rank: int, mesh: DeviceMesh) -> None:
    parallelize_module(prune(build("transformer")).model, mesh, SPLIT)


def optimizer_before_shards(rank: int, mesh: DeviceMesh) -> None:
    pruner = prune(build("tied"))
    optimizer = torch.optim.SGD(pruner.weight_parameters(), lr=0.1)
    shard(pruner.model, mesh)
    two_steps(pruner, optimizer)


def optimizer_before_gates(rank: int, mesh: DeviceMesh) -> None:
    model = build("tied")
    shard(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    two_steps(prune(model), optimizer)


def ties_in_two_groups(rank: int, mesh: DeviceMesh) -> None:
    pruner = prune(build("tied"))
    fully_shard(pruner.model.front, mesh=mesh)
    fully_shard(pruner.model, mesh=mesh)
    two_steps(pruner)


def layer_alone(rank: int, mesh: DeviceMesh) -> None:
    sharded(mesh).model.body[4][1](torch.zeros(1, 12, dtype=torch.double))


def weight_alone(rank: int, mesh: DeviceMesh) -> None:
    (sharded(mesh).model.head.weight + 0).sum()


def drop_closed(rank: int, mesh: DeviceMesh) -> None:
    pruner = sharded(mesh)
    train(pruner, range(STEPS), Share())
    pruner.drop_closed()


def calibration(rank: int, mesh: DeviceMesh) -> None:
    model = build("tied")
    shard(model, mesh)
    prune(model, init="whitened", calibration=[tokens_of(0)])


def latency(rank: int, mesh: DeviceMesh) -> None:
    model = build("tied")
    shard(model, mesh)
    rw.Pruner(model, rw.Budget(latency_ms=1.0), anneal_steps=100, example=tokens_of(0))


def no_values(rank: int, mesh: DeviceMesh) -> None:
    with torch.device("meta"):
        model = tied()
    shard(model, mesh)
    prune(model)


def other_weights(rank: int, mesh: DeviceMesh) -> None:
    model = build("tied")
    if rank:
        nn.init.normal_(model.head.weight)
    pruner = prune(model)
    shard(model, mesh)
    two_steps(pruner)


def other_seed(rank: int, mesh: DeviceMesh) -> None:
    pruner = prune(build("tied"), seed=rank)
    shard(pruner.model, mesh)
    two_steps(pruner)


def loaded_on_one(rank: int, mesh: DeviceMesh) -> None:
    pruner = sharded(mesh)
    if rank == 0:
        state = pruner.state_dict()
        pruner.load_state_dict({name: value + 1 if "alpha" in name else value for name, value in state.items()})
    two_steps(pruner)


def root_forgotten(rank: int, mesh: DeviceMesh) -> None:
    pruner = prune(build("tied"))
    for block in pruner.model.body:
        fully_shard(block, mesh=mesh)
    two_steps(pruner)


def compact_at_once(rank: int, mesh: DeviceMesh) -> None:
    sharded(mesh).compact()


def gated_twice(rank: int, mesh: DeviceMesh) -> None:
    prune(sharded(mesh).model)


def saved_elsewhere(rank: int, mesh: DeviceMesh) -> None:
    pruner = sharded(mesh)
    train(pruner, range(STEPS), Share())
    small = pruner.compact()
    if rank:
        rw.save(small, "/nonexistent/small")
    else:
        raise rw.RankwiseError("on the meta device")


MISTAKES: dict[str, tuple[Callable[[int, DeviceMesh], None], str]] = {
    "gate a model in DDP": (
        wrapped_first,
        "must be gated before it is wrapped for several devices, but it is a Distri",
    ),
    "gate a model in FSDP1": (fsdp1_first, "must be gated before it is wrapped for several devices, but it is a Fully"),
    "put a gated model into FSDP1": (fsdp1_afterwards, r"body.0 is a FullyShardedDataParallel \(FSDP1\)"),
    "gate a model in tensor parallelism": (tensor_parallel, "as tensor parallelism does. Prune it without"),
    "gate one in both": (tensor_parallel_too, "as tensor parallelism does. Prune it without"),
    "tensor parallelism afterwards": (
        tensor_parallel_afterwards,
        "linear1.weight is placed as .* as tensor parallelism",
    ),
    "tensor parallelism of gated layers": (tensor_parallel_of_gates, "cannot be split by tensor parallelism"),
    "build the optimizer before fully_shard": (
        optimizer_before_shards,
        "that `fully_shard` replaced .* Build the optimizer after the Pruner, and",
    ),
    "build it before the pruner": (
        optimizer_before_gates,
        "that the pruner replaced .* Build the optimizer after the Pruner",
    ),
    # torch's own word, in which there is no tie
    "shard tied layers apart": (ties_in_two_groups, "Error: "),
    "call a layer by itself": (layer_alone, "one of 12 x 12 is used outside of it"),
    "read a weight between steps": (weight_alone, "one of 20 x 12 is used outside of it"),
    "drop closed components": (drop_closed, "needs a model that no DistributedDataParallel or FSDP has wrapped"),
    "calibrate a sharded model": (calibration, "`calibration` needs a model that one rank can run, but it is sharded"),
    "time a sharded model": (latency, r"Budget\(latency_ms=...\) needs a model that one rank can run"),
    "gate without values": (no_values, "must hold data, but are on the meta device"),
    "gate other weights on each rank": (other_weights, "they began with different values of front.matrix"),
    "another seed on each rank": (other_seed, "ranks 0 and 1 have different ones. Pass the same `seed`"),
    "load on one rank": (loaded_on_one, "hold different gates .* `set_model_state_dict` sends it"),
    "forget the root": (root_forgotten, "was not applied to all of the model: front.matrix.p"),
    "gate twice": (gated_twice, "must not be gated yet, but is"),
    "compact before a step": (compact_at_once, "needs gates that have learned something"),
    "save on another rank": (saved_elsewhere, "on the meta device"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_a_sentence(two: Any, name: str) -> None:
    """On every rank that makes it."""
    for results in two:
        assert re.search(MISTAKES[name][1], results["told"][name]), results["told"][name]
