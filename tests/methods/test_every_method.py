"""What every method promises, on models of every shape."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import rankwise as rw
from rankwise.core.gates import Gate
from rankwise.core.layers import GatedLayer
from rankwise.methods import METHODS as KNOWN
from tests.methods.rows import LEARNED, METHODS, PRUNING, WIDTHS, nonzeros, pruned, train
from tests.models import Spec, TinyModel, batch, specs

# runs of a few steps, in which no gate can decide; some stop before the target has come down, some models have little
# that can be pruned
pytestmark = [
    pytest.mark.filterwarnings("ignore:.* of the gates had not decided"),
    pytest.mark.filterwarnings("ignore:the ramp has not ended"),
    pytest.mark.filterwarnings(r"ignore:.*\d% of the prunable parameters must go"),
]


def test_every_method_has_a_row() -> None:
    assert {row.split()[0] for row in (*METHODS, *WIDTHS)} == set(KNOWN)


@settings(max_examples=60)
@given(specs, st.sampled_from(PRUNING), st.integers(5, 99), st.sampled_from(["cpu", "cuda"]))
def test_the_exported_size_is_exact(spec: Spec, method: str, percent: int, target: str) -> None:
    """At most the budget, and short of it by less than the cheapest step still available."""
    settings = {**METHODS[method], "target": target}
    model = spec.build()
    dense = rw.count(model)
    try:
        pruner = rw.Pruner(model, rw.Budget(removed=percent / 100), method.split()[0], **settings)
    except rw.BudgetError as error:
        smallest = int(str(error).split("at least ")[1].split(" ")[0].replace(",", ""))
        assert smallest > dense * (100 - percent) // 100
        assert rw.Pruner(model, rw.Budget(params=smallest), method.split()[0], **settings).limit == smallest
        return
    except rw.PlanError:
        assert method == "np-l0"
        return
    train(model, pruner, spec, 3)
    small = pruner.compact()
    counts = list(pruner.ranks().values())
    limit = dense * (100 - percent) // 100
    if method == "agp":
        assert nonzeros(small, pruner) <= limit
        size = pruner.account.size(counts)
    else:
        size = rw.count(small)
    assert size == pruner.size().exported <= limit
    kept = zip(pruner.account.curves, counts, strict=True)
    steps = [c(c.next_count(k)) - c(k) for c, k in kept if k < c.num_components]
    assert not steps or limit - size < min(steps)


@settings(max_examples=60)
@given(specs, st.sampled_from(PRUNING), st.sampled_from([0.1, 0.3, 0.6]), st.sampled_from(["cpu", "cuda"]))
def test_a_compact_model_gives_the_gated_models_outputs(spec: Spec, method: str, removed: float, target: str) -> None:
    try:
        model, pruner = pruned(spec, method, rw.Budget(removed=removed), target=target)
    except (rw.BudgetError, rw.PlanError):
        return
    tokens = batch(spec, seed=99)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        model.to(dtype).eval()
        small = pruner.compact().eval()
        want, got = model(tokens), small(tokens)
        assert (got - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize("method", PRUNING)
@pytest.mark.parametrize("back", ["untied", "tied", "bias-tied", "low-rank"])
def test_a_compact_model_is_made_of_plain_modules(method: str, back: Any) -> None:
    spec = Spec(
        width=16, num_words=40, back=back, parts=("linear", "nested", "pair", "shared", "shared", "conv1d", "norm")
    )
    removed = 0.2 if method == "np-l0" else 0.6
    _, pruner = pruned(spec, method, rw.Budget(removed=removed))
    for module in pruner.compact().modules():
        stock = type(module).__module__.startswith("torch.nn.")
        ours = type(module).__module__ == "rankwise.modules" or isinstance(module, TinyModel)
        assert stock or ours, type(module)


@settings(max_examples=30)
@given(specs, st.sampled_from(["np-l0", "flop-l0", "flop-agp", "agp"]))
def test_with_all_gates_open_the_gated_model_is_the_dense_one(spec: Spec, method: str) -> None:
    model = spec.build().double()
    tokens = batch(spec)
    want = model(tokens)
    try:
        pruner = rw.Pruner(model, rw.Budget(params=rw.count(model)), method.split()[0], **METHODS[method])
    except rw.PlanError:
        return
    for gate in pruner.controller.gates:
        if hasattr(gate, "alpha"):
            gate.alpha.fill_(50.0)
    pruner.controller.invalidate_masks()
    assert (model(tokens) - want).abs().max() <= 1e-10 * want.abs().max()


@pytest.mark.parametrize("method", LEARNED)
def test_gating_leaves_what_the_model_computes_almost_unchanged(method: str) -> None:
    """Right after gating the training loss is within 5% of the dense model's."""
    spec = Spec(num_words=30, width=32, parts=("linear", "nested"))
    model, tokens = spec.build(), batch(spec, size=256)
    # each word is followed by one of two: nothing can predict better than one bit
    targets = (tokens + torch.randint(0, 2, tokens.shape)) % spec.num_words

    def loss() -> torch.Tensor:
        return F.cross_entropy(model(tokens).flatten(0, -2), targets.flatten())

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    dense = loss()
    assert dense < 0.75
    rw.Pruner(model, rw.Budget(removed=0.2), method.split()[0], **METHODS[method])
    assert loss() <= 1.05 * dense


@pytest.mark.parametrize("method", PRUNING)
def test_compact_leaves_the_gated_model_as_it_is(method: str) -> None:
    spec = Spec(parts=("linear", "shared", "shared"))
    model, pruner = pruned(spec, method, rw.Budget(removed=0.2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    small = pruner.compact()
    for parameter in small.parameters():
        nn.init.zeros_(parameter)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(isinstance(module, Gate | GatedLayer) for module in small.modules())
    assert any(isinstance(module, GatedLayer) for module in model.modules())


@pytest.mark.parametrize("method", LEARNED)
def test_one_run_gives_many_sizes(method: str) -> None:
    spec = Spec(width=12, num_words=20)
    _, pruner = pruned(spec, method, rw.Budget(removed=0.4))
    sizes = []
    for removed in (0.2, 0.4, 0.45):
        small = pruner.compact(rw.Budget(removed=removed))
        sizes.append(nonzeros(small, pruner) if method == "agp" else rw.count(small))
        assert sizes[-1] <= (1 - removed) * pruner.account.dense
    assert sizes == sorted(sizes, reverse=True)


def test_diverged_training_still_exports_the_size_asked_for() -> None:
    spec = Spec(width=12)
    for method in LEARNED:
        model, pruner = pruned(spec, method, rw.Budget(removed=0.2))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        if "l0" in method:
            pruner.controller.gates[0].alpha.fill_(float("nan"))
        with pytest.warns(UserWarning, match="hold NaN or infinity: training has diverged"):
            small = pruner.compact()
        assert rw.count(small) <= 0.8 * pruner.account.dense or method == "agp"


@pytest.mark.parametrize("method", LEARNED)
def test_evaluation_is_deterministic_and_stands_at_the_current_target(method: str) -> None:
    spec = Spec(width=12, num_words=20)
    model, pruner = pruned(spec, method, rw.Budget(removed=0.4), steps=3)
    target = pruner.controller.target_size()
    assert pruner.limit < target < pruner.account.dense
    model.eval()
    tokens = batch(spec)
    assert torch.equal(model(tokens), model(tokens))
    at_target = pruner.compact(rw.Budget(params=target)).eval()
    torch.testing.assert_close(model(tokens), at_target(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_model(method: str) -> None:
    def weights() -> list[torch.Tensor]:
        torch.manual_seed(0)
        spec = Spec()
        model = spec.build()
        budget = rw.Budget(params=rw.count(model)) if method == "dense" else rw.Budget(removed=0.2)
        pruner = rw.Pruner(model, budget, method.split()[0], seed=3, **METHODS[method])
        train(model, pruner, spec, 8)
        return list(pruner.compact().parameters())

    for a, b in zip(weights(), weights(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stop", [1, 4, 7])
def test_a_run_resumed_from_any_checkpoint_ends_with_the_same_weights(method: str, stop: int) -> None:
    """Bit for bit: the model's own state dict carries gates, multipliers, moments and step."""
    spec = Spec(back="tied")

    def fresh() -> tuple[TinyModel, rw.Pruner]:
        torch.manual_seed(0)
        model = spec.build()
        budget = rw.Budget(params=rw.count(model)) if method == "dense" else rw.Budget(removed=0.15)
        return model, rw.Pruner(model, budget, method.split()[0], **METHODS[method])

    model, pruner = fresh()
    train(model, pruner, spec, 10)
    other, other_pruner = fresh()
    train(other, other_pruner, spec, stop)
    state = copy.deepcopy(other.state_dict())
    resumed, resumed_pruner = fresh()
    resumed.load_state_dict(state)
    if method != "dense":
        assert resumed_pruner.steps == stop
    train(resumed, resumed_pruner, spec, 10 - stop, start=stop)
    for name, value in model.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    for a, b in zip(pruner.compact().parameters(), resumed_pruner.compact().parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("multiple", [2, 4])
def test_ranks_come_in_multiples(multiple: int) -> None:
    spec = Spec(width=16, num_words=32, parts=("linear", "nested", "pair"))
    for method in ("fac", "flop-l0", "svd", "fac pivot", "flop-l0 pivot", "svd pivot"):
        _, pruner = pruned(spec, method, rw.Budget(removed=0.5), rank_multiple=multiple)
        full = {s.name: c.num_components for s, c in zip(pruner.plan.sites, pruner.account.curves, strict=True)}
        assert all(k % multiple == 0 or k == full[name] for name, k in pruner.ranks().items())
        assert rw.count(pruner.compact()) <= pruner.limit


@pytest.mark.parametrize("method", [name for name in PRUNING if name != "agp"])
def test_megabytes_are_those_of_the_saved_tensors(method: str) -> None:
    spec = Spec(width=16, num_words=32, parts=("linear", "norm"))
    model = nn.Sequential(spec.build(), nn.BatchNorm1d(5))
    budget = rw.Budget(megabytes=0.0048, dtype=torch.float16) if method != "np-l0" else rw.Budget(megabytes=0.008)
    pruner = rw.Pruner(model, budget, method.split()[0], **METHODS[method])
    model(batch(spec)).square().sum().backward()
    pruner.step()
    state = pruner.compact().state_dict()
    tensors = {t.data_ptr() or id(t): t for t in state.values()}
    assert sum(t.numel() * t.element_size() for t in tensors.values()) <= budget.megabytes * 1e6
