"""Closed components are dropped in place: the run goes on as it would have, with less memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rankwise as rw
from rankwise.core.matrices import FactorizedMatrix

STEPS, RAMP = 14, 8
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=1e-2, amsgrad=True),
    "sgd": lambda weights: torch.optim.SGD(weights, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "adafactor": lambda weights: torch.optim.Adafactor(weights, lr=1e-2),
}


class Words(nn.Module):
    """An embedding that is tied to the output layer, and two layers between."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 16)
        self.first, self.second = nn.Linear(16, 40), nn.Linear(40, 16)
        self.head = nn.Linear(16, 30)
        self.head.weight = self.words.weight

    def forward(self, index: Tensor) -> Tensor:
        y: Tensor = self.head(self.second(torch.tanh(self.first(self.words(index)))))
        return y


def start(method: str = "flop-l0", removed: float = 0.6, **settings: Any) -> tuple[nn.Module, rw.Pruner]:
    torch.manual_seed(0)
    model = Words().double()
    return model, rw.Pruner(model, rw.Budget(removed=removed), method, anneal_steps=RAMP, **settings)


def train(
    model: nn.Module, pruner: rw.Pruner, optimizer: torch.optim.Optimizer, steps: range, drop_at: int | None = None
) -> None:
    for step in steps:
        index = torch.randint(30, (16,), generator=torch.Generator().manual_seed(step))
        loss = F.cross_entropy(model(index), index)
        loss.backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()
        if step + 1 == drop_at:
            # `loss` still holds the graph of this step
            pruner.drop_closed(optimizer)


def assert_same(small: nn.Module, other: nn.Module) -> None:
    found, wanted = small.state_dict(), other.state_dict()
    assert found.keys() == wanted.keys()
    for name in found:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("settings", [{}, {"rank_multiple": 4}, {"target": "size"}], ids=["free", "4s", "pivots"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("method", ["flop-l0", "flop-agp"])
def test_the_exported_model_is_that_of_a_run_that_dropped_nothing(
    method: str, optimizer: str, settings: dict[str, Any]
) -> None:
    exported, ranks = [], []
    for drop_at in (None, RAMP + 1):
        model, pruner = start(method, **settings)
        train(model, pruner, OPTIMIZERS[optimizer](pruner.weight_parameters()), range(STEPS), drop_at)
        exported.append(pruner.compact())
        ranks.append(pruner.ranks())
    assert ranks[0] == ranks[1]
    assert rw.count(exported[0]) == rw.count(exported[1]) <= pruner.limit
    assert_same(*exported)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_gates_and_state_hold_the_kept_components_alone(optimizer: str) -> None:
    model, pruner = start()
    opt = OPTIMIZERS[optimizer](pruner.weight_parameters())
    train(model, pruner, opt, range(RAMP))
    before, size, held = pruner.ranks(), rw.count(model), {id(p) for p in model.parameters()}
    dropped = pruner.drop_closed(opt)
    assert dropped == size - rw.count(model) > 0
    assert pruner.ranks() == before and {id(p) for p in model.parameters()} == held
    for matrix, rank in zip(pruner.controller.matrices, before.values(), strict=True):
        assert isinstance(matrix, FactorizedMatrix)
        assert matrix.p.shape[1] == matrix.q.shape[0] == matrix.gate.num_components == rank
        for weight in (matrix.p, matrix.q):
            for value in opt.state[weight].values():
                if isinstance(value, Tensor) and value.dim() == 2:
                    assert torch.broadcast_shapes(value.shape, weight.shape) == weight.shape
    assert pruner.drop_closed(opt) == 0
    train(model, pruner, opt, range(RAMP, STEPS))
    assert all(weight.isfinite().all() for weight in model.parameters())


def test_a_dropped_run_resumes_from_its_state_dict() -> None:
    model, pruner = start()
    optimizer = OPTIMIZERS["adamw"](pruner.weight_parameters())
    train(model, pruner, optimizer, range(RAMP + 2), drop_at=RAMP + 1)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, pruner, optimizer, range(RAMP + 2, STEPS))
    again, other = start()
    resumed = OPTIMIZERS["adamw"](other.weight_parameters())
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert rw.count(again) == rw.count(model) and other.steps == RAMP + 2
    train(again, other, resumed, range(RAMP + 2, STEPS))
    assert_same(again, model)
    assert_same(other.compact(), pruner.compact())


def test_an_optimizer_whose_state_was_loaded_is_needed_before_its_first_step_too() -> None:
    model, pruner = start()
    optimizer = OPTIMIZERS["adamw"](pruner.weight_parameters())
    train(model, pruner, optimizer, range(RAMP + 1))
    again, other = start()
    again.load_state_dict(model.state_dict())
    resumed = OPTIMIZERS["adamw"](other.weight_parameters())
    resumed.load_state_dict(optimizer.state_dict())
    with pytest.raises(rw.RankwiseError, match=r"needs all optimizers .* was not passed \(AdamW\)"):
        other.drop_closed()
    assert other.drop_closed(resumed) > 0
    train(again, other, resumed, range(RAMP + 1, STEPS))


@pytest.mark.parametrize("method", ["flop-l0", "flop-agp"])
def test_a_checkpoint_from_before_is_taken_back_by_a_dropped_model(method: str) -> None:
    model, pruner = start(method)
    optimizer = OPTIMIZERS["adamw"](pruner.weight_parameters())
    train(model, pruner, optimizer, range(RAMP))
    saved, index = copy.deepcopy(model.state_dict()), torch.arange(30)
    model.eval()
    want, ranks, export = model(index), pruner.ranks(), pruner.compact()
    model.train()
    train(model, pruner, optimizer, range(RAMP, STEPS), drop_at=RAMP + 2)
    assert pruner.controller.is_narrowed
    model.load_state_dict(saved)
    assert not pruner.controller.is_narrowed
    assert_same(model, start_from(saved, method))
    assert torch.equal(model.eval()(index), want) and pruner.ranks() == ranks
    assert_same(pruner.compact(), export)
    with pytest.raises(rw.RankwiseError, match=r"needs all optimizers .* was not passed \(AdamW\)"):
        pruner.drop_closed()
    assert pruner.drop_closed(optimizer) > 0


def start_from(state: dict[str, Tensor], method: str) -> nn.Module:
    model, _ = start(method)
    model.load_state_dict(state)
    return model


def test_more_components_than_there_ever_were_are_refused() -> None:
    model, pruner = start()
    train(model, pruner, OPTIMIZERS["sgd"](pruner.weight_parameters()), range(RAMP + 1), drop_at=RAMP + 1)
    state = start()[0].state_dict()
    name = next(name for name in state if name.endswith(".q"))
    state[name] = torch.zeros(17, *state[name].shape[1:])
    with pytest.raises(RuntimeError, match=r"size mismatch .*\[17, "):
        model.load_state_dict(state)


@pytest.mark.filterwarnings("ignore:.*prunable parameters must go")
def test_a_matrix_may_lose_everything() -> None:
    exported = []
    for drop_at in (None, RAMP + 1):
        model, pruner = start(removed=0.92)
        train(model, pruner, OPTIMIZERS["adamw"](pruner.weight_parameters()), range(STEPS), drop_at)
        exported.append(pruner.compact())
    assert 0 in pruner.ranks().values()
    assert_same(*exported)


def test_a_copy_of_a_dropped_model_gives_the_same_outputs() -> None:
    model, pruner = start()
    train(model, pruner, OPTIMIZERS["sgd"](pruner.weight_parameters()), range(RAMP + 1), drop_at=RAMP + 1)
    index = torch.arange(30)
    assert torch.equal(copy.deepcopy(model)(index), model(index))
    want = pruner.compact()(index)
    torch.testing.assert_close(model.eval()(index), want)


def test_a_smaller_export_is_still_possible_and_a_larger_one_refused() -> None:
    model, pruner = start()
    optimizer = OPTIMIZERS["sgd"](pruner.weight_parameters())
    train(model, pruner, optimizer, range(RAMP + 1))
    want = pruner.compact(rw.Budget(removed=0.8))
    pruner.drop_closed(optimizer)
    assert_same(pruner.compact(rw.Budget(removed=0.8)), want)
    with pytest.raises(rw.RankwiseError, match=f"at most the {pruner.limit:,} parameters .* a larger budget before"):
        pruner.compact(rw.Budget(removed=0.2))


def test_gates_that_still_move_are_refused() -> None:
    model, pruner = start()
    optimizer = OPTIMIZERS["sgd"](pruner.weight_parameters())
    with pytest.raises(rw.RankwiseError, match=f"this is step 0, and the ramp has {RAMP}"):
        pruner.drop_closed(optimizer)
    model, pruner = start(recipe="published")
    train(model, pruner, OPTIMIZERS["sgd"](pruner.weight_parameters()), range(RAMP + 1))
    with pytest.raises(rw.RankwiseError, match="gates never stay"):
        pruner.drop_closed()


def test_what_is_no_optimizer_is_refused() -> None:
    _, pruner = start()
    with pytest.raises(TypeError, match="takes optimizers, but got a list"):
        pruner.drop_closed([])  # type: ignore[arg-type]


def test_a_checkpoint_of_a_dropped_run_is_refused_along_the_ramp() -> None:
    model, pruner = start()
    train(model, pruner, OPTIMIZERS["sgd"](pruner.weight_parameters()), range(RAMP + 1), drop_at=RAMP + 1)
    torch.manual_seed(0)
    other = Words().double()
    rw.Pruner(other, rw.Budget(removed=0.6), anneal_steps=5 * RAMP)
    with pytest.warns(UserWarning, match=rf"other arguments: anneal_steps \({RAMP} there, {5 * RAMP} here\)"):
        other.load_state_dict(model.state_dict())
    with pytest.raises(rw.RankwiseError, match=f"this pruner is at step {RAMP + 1} of {5 * RAMP}"):
        other(torch.arange(30))


@pytest.mark.filterwarnings("ignore:.*had not decided")
@pytest.mark.parametrize("method", ["np-l0", "agp"])
def test_what_cannot_be_dropped_stays(method: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 12))
    pruner = rw.Pruner(model, rw.Budget(removed=0.5), method, anneal_steps=RAMP)
    optimizer = torch.optim.SGD(pruner.weight_parameters(), lr=1e-2)
    for _ in range(RAMP + 1):
        model(torch.randn(4, 12)).square().mean().backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()
    want = pruner.compact()
    assert pruner.drop_closed(optimizer) == 0
    assert_same(pruner.compact(), want)


def test_a_wrapped_model_is_refused(tmp_path: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        model, pruner = start()
        optimizer = OPTIMIZERS["sgd"](pruner.weight_parameters())
        train(DistributedDataParallel(model), pruner, optimizer, range(RAMP + 1))
        with pytest.raises(rw.RankwiseError, match="wrap the model then"):
            pruner.drop_closed(optimizer)
    finally:
        dist.destroy_process_group()
