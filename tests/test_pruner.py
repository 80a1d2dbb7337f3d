"""What a training loop may do around the pruner. What every method promises is in tests/methods."""

from __future__ import annotations

import copy
import inspect
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rankwise as rw
from tests.methods.rows import pruned, train
from tests.models import Spec, batch

# runs of a few steps, in which no gate can decide; some stop before the target has come down, some models have little
# that can be pruned
pytestmark = [
    pytest.mark.filterwarnings("ignore:.* of the gates had not decided"),
    pytest.mark.filterwarnings("ignore:the ramp has not ended"),
    pytest.mark.filterwarnings(r"ignore:.*\d% of the prunable parameters must go"),
]


def test_the_example_of_the_docstring_runs() -> None:
    code = re.search(r"```python\n(.*?)```", inspect.getdoc(rw.Pruner) or "", re.DOTALL)
    assert code is not None
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    batches = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(2)]
    names = {"rw": rw, "torch": torch, "model": model, "batches": batches, "criterion": F.mse_loss}
    dense = rw.count(model)
    exec(code[1], names)
    assert rw.count(names["small"]) <= 0.2 * dense


def test_shared_and_tied_layers_stay_so() -> None:
    spec = Spec(width=16, num_words=40, back="bias-tied", parts=("shared", "linear", "shared"))
    _, pruner = pruned(spec, "flop-l0", rw.Budget(removed=0.5))
    small = pruner.compact()
    assert small.body[0] is small.body[2]
    assert small.head.embedding.weight is small.front[0].weight
    assert small.head.projection.weight is small.front[1].weight


def test_frozen_weights_stay_frozen() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model[0].weight.requires_grad_(False)
    pruner = rw.Pruner(model, rw.Budget(removed=0.3), anneal_steps=2)
    model(torch.randn(4, 8)).sum().backward()
    pruner.step()
    for stage in (model, pruner.compact()):
        frozen = [p for p in stage[0].parameters() if p.dim() == 2]
        assert frozen
        assert not any(p.requires_grad for p in frozen)
        assert all(p.requires_grad for p in stage[2].parameters())


def test_a_root_layer_is_gated_in_place() -> None:
    model = nn.Linear(12, 12)
    x = torch.randn(3, 12)
    want = model(x)
    seen = []
    model.register_forward_hook(lambda *_: seen.append(1))
    pruner = rw.Pruner(model, rw.Budget(removed=0.4), anneal_steps=1)
    model.eval()
    torch.testing.assert_close(model(x), want, rtol=0.05, atol=0.05)
    assert seen
    model.train()
    model(x).sum().backward()
    pruner.step()
    assert rw.count(pruner.compact()) <= 0.6 * (12 * 12 + 12)


def test_clipping_decay_and_optimizers_over_all_parameters_leave_the_gates_alone() -> None:
    spec = Spec()
    model = spec.build()
    pruner = rw.Pruner(model, rw.Budget(removed=0.4), anneal_steps=5)
    alpha = [gate.alpha.clone() for gate in pruner.controller.gates]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.5)
    F.cross_entropy(model(batch(spec)).flatten(0, -2), batch(spec).flatten()).backward()
    grads = [gate.z.grad.clone() for gate in pruner.controller.gates]
    nn.utils.clip_grad_norm_(model.parameters(), 1e-9)
    optimizer.step()
    optimizer.zero_grad()
    assert all(torch.equal(a, gate.alpha) for a, gate in zip(alpha, pruner.controller.gates, strict=True))
    assert all(torch.equal(g, gate.z.grad) for g, gate in zip(grads, pruner.controller.gates, strict=True))


def test_accumulated_gradients_are_those_of_the_whole_batch() -> None:
    def alphas(parts: int) -> torch.Tensor:
        torch.manual_seed(0)
        spec = Spec()
        model = spec.build().double()
        pruner = rw.Pruner(model, rw.Budget(removed=0.4), anneal_steps=5)
        for tokens in batch(spec, size=16).chunk(parts):
            (F.cross_entropy(model(tokens).flatten(0, -2), tokens.flatten()) / parts).backward()
        gradient = pruner.controller.gradient(1.0)
        return gradient

    torch.testing.assert_close(alphas(4), alphas(1), rtol=1e-4, atol=1e-7)


def test_a_loss_scale_is_taken_out_again() -> None:
    def alphas(scale: float) -> list[torch.Tensor]:
        torch.manual_seed(0)
        spec = Spec()
        model = spec.build().double()
        pruner = rw.Pruner(model, rw.Budget(removed=0.4), anneal_steps=5)
        (F.cross_entropy(model(batch(spec)).flatten(0, -2), batch(spec).flatten()) * scale).backward()
        pruner.step(grad_scale=scale)
        return [gate.alpha for gate in pruner.controller.gates]

    for a, b in zip(alphas(1024.0), alphas(1.0), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_forgotten_loss_scale_is_refused_at_the_first_step(is_fused: bool) -> None:
    spec = Spec()
    scaler = torch.amp.GradScaler("cpu")

    def make() -> tuple[rw.Pruner, torch.optim.Optimizer]:
        pruner = rw.Pruner(spec.build(), rw.Budget(removed=0.4), anneal_steps=5)
        optimizer = torch.optim.SGD(pruner.weight_parameters(), lr=0.1, fused=is_fused)
        # which puts a function of its own around the optimizer's step
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return pruner, optimizer

    def backward(pruner: rw.Pruner, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        loss = F.cross_entropy(pruner.model(batch(spec)).flatten(0, -2), batch(spec).flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)

    pruner, optimizer = make()
    backward(pruner, scaler, optimizer)
    with pytest.raises(rw.RankwiseError, match="`grad_scale` must be given .* a GradScaler scales them by 65536"):
        pruner.step()
    assert pruner.steps == 0
    # a scaler that calls another model's optimizer, or that is switched off, scales nothing here
    other, others = make()
    backward(other, torch.amp.GradScaler("cpu", enabled=False), others)
    other.step()
    pruner.step(grad_scale=scaler.get_scale())


def test_an_overflowed_gradient_does_not_poison_the_gates() -> None:
    spec = Spec()
    model = spec.build()
    pruner = rw.Pruner(model, rw.Budget(removed=0.4), anneal_steps=5)
    (F.cross_entropy(model(batch(spec)).flatten(0, -2), batch(spec).flatten()) * float("inf")).backward()
    pruner.step()
    assert all(torch.isfinite(gate.alpha).all() for gate in pruner.controller.gates)


def test_checkpointed_segments_see_the_same_mask() -> None:
    from torch.utils.checkpoint import checkpoint

    def grads(use_checkpoint: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        pruner = rw.Pruner(model, rw.Budget(removed=0.3), anneal_steps=5, open_probability=0.5)
        x = torch.randn(4, 8, requires_grad=True)
        out = checkpoint(model, x, use_reentrant=False) if use_checkpoint else model(x)
        out.square().sum().backward()
        return [x.grad, *(p.grad for p in model.parameters()), *(g.z.grad for g in pruner.controller.gates)]

    for a, b in zip(grads(True), grads(False), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_copy_of_a_gated_model_goes_its_own_way() -> None:
    spec = Spec()
    model, pruner = pruned(spec, "flop-l0", rw.Budget(removed=0.4), steps=2)
    twin = copy.deepcopy(model)
    state = {name: value.clone() for name, value in twin.state_dict().items()}
    train(model, pruner, spec, 3)
    assert all(torch.equal(state[name], value) for name, value in twin.state_dict().items())


def test_gates_keep_working_after_the_model_is_cast() -> None:
    spec = Spec(width=16)
    model = spec.build()
    pruner = rw.Pruner(model, rw.Budget(removed=0.4), anneal_steps=4)
    model.bfloat16()
    train(model, pruner, spec, 6)
    small = pruner.compact()
    assert {p.dtype for p in small.parameters()} == {torch.bfloat16}
    model.eval()
    tokens = batch(spec)
    torch.testing.assert_close(small.eval()(tokens), model(tokens), rtol=0.1, atol=0.1)


def test_a_mask_made_in_inference_mode_can_be_trained_with() -> None:
    spec = Spec(width=12, num_words=20)
    model, pruner = pruned(spec, "flop-l0", rw.Budget(removed=0.4))
    model.load_state_dict(model.state_dict())
    for training in (True, False):
        model.train(training)
        with torch.inference_mode():
            model(batch(spec))
        model(batch(spec)).sum().backward()
    assert pruner.steps == 10


def test_a_matrix_starts_with_at_most_max_rank_components() -> None:
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 6, bias=False))
    pruner = rw.Pruner(copy.deepcopy(model), rw.Budget(removed=0.7), max_rank=8, anneal_steps=2)
    assert [matrix.gate.num_components for matrix in pruner.controller.matrices] == [8, 6]
    whole = torch.linalg.svd(model[0].weight.detach())
    want = whole.U[:, :8] @ torch.diag(whole.S[:8]) @ whole.Vh[:8]
    first = pruner.controller.matrices[0]
    torch.testing.assert_close(first.p @ first.q, want, rtol=1e-4, atol=1e-5)
    for _ in range(3):
        pruner.model(torch.randn(4, 40)).sum().backward()
        pruner.step()
        pruner.model.zero_grad()
    assert rw.count(pruner.compact()) <= pruner.limit == pruner.size().budget


@pytest.mark.parametrize(
    "max_rank, method, message",
    [(0, "flop-l0", "at least 1, but is 0"), (2.5, "fac", "but is 2.5"), (4, "np-l0", "'np-l0' does not")],
)
def test_a_max_rank_that_cannot_be_is_refused(max_rank: int, method: str, message: str) -> None:
    settings = {} if method == "fac" else {"anneal_steps": 2}
    with pytest.raises(ValueError, match=message):
        rw.Pruner(nn.Linear(9, 9), rw.Budget(removed=0.5), method, max_rank=max_rank, **settings)
