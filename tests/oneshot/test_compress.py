"""One-shot compression: what is weighed, in which order, in how much memory, and to which size."""

from __future__ import annotations

import copy
import gc
import warnings
from functools import partial
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rankwise as rw
from rankwise.adapters.plans import find_plan
from rankwise.core import calibrate, factorize
from rankwise.core.allocation import uniform_allocation
from rankwise.core.calibrate import count_calls, output_fisher, second_moments
from rankwise.core.factorize import Moments
from rankwise.modules import PivotLinear
from rankwise.oneshot import RANKS, Ranks, Refinement, Smoothing, default_plan, sampled_loss
from rankwise.oneshot import data as calibration
from tests.models import Spec, batch, specs


def cross_entropy(logits: Tensor) -> Tensor:
    """Of the likeliest answers: a loss that needs no labels."""
    return F.cross_entropy(logits.flatten(0, -2), logits.detach().flatten(0, -2).argmax(1), reduction="sum")


@pytest.mark.filterwarnings("ignore:These layers are left as they are")
@settings(max_examples=40)
@given(specs, st.sampled_from(["pair", "pivot"]), st.booleans(), st.integers(5, 95), st.sampled_from(["cpu", "cuda"]))
def test_any_model_is_compressed_to_the_exact_size(
    spec: Spec, layout: Any, weighed: bool, percent: int, target: str
) -> None:
    model, data = spec.build(), [batch(spec, size=4), batch(spec, size=4, seed=1)]
    budget = rw.Budget(removed=percent / 100)
    limit = rw.count(model) * (100 - percent) // 100
    try:
        loss = cross_entropy if weighed else None
        small = rw.compress(model, budget, data, loss=loss, embeddings=True, layout=layout, target=target)
    except rw.BudgetError:
        return
    assert rw.count(small) <= limit
    # at the least a step of every matrix that has lost one would be too much
    pruner = rw.Pruner(copy.deepcopy(model), budget, "svd", rw.find_plan(model), layout=layout, target=target)
    cheapest = max(
        int(c.costs(torch.cat([torch.zeros(1).long(), c.allowed_counts()])).diff().max()) for c in pruner.account.curves
    )
    everything = pruner.account.size([curve.num_components for curve in pruner.account.curves])
    assert limit - rw.count(small) < cheapest or rw.count(small) == everything
    assert torch.isfinite(small(data[0])).all()


@pytest.mark.parametrize("layout", ["pair", "pivot"])
def test_in_place_the_model_itself_becomes_small(layout: Any) -> None:
    spec = Spec(width=16, num_words=40, back="tied", parts=("linear", "nested", "shared", "shared", "conv1d"))
    model, data = spec.build(), [batch(spec)]
    other = rw.compress(model, rw.Budget(removed=0.5), data, loss=cross_entropy, layout=layout)
    same = rw.compress(model, rw.Budget(removed=0.5), data, loss=cross_entropy, layout=layout, in_place=True)
    assert same is model
    assert not any(p.grad is not None for p in model.parameters())
    assert all(p.requires_grad for p in model.parameters())
    for a, b in zip(same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    assert any(isinstance(module, PivotLinear) for module in model.modules()) == (layout == "pivot")


def test_what_stays_whole_is_not_touched() -> None:
    """A full-rank matrix costs what the dense one costs, so it is the dense one, bit for bit."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    before = copy.deepcopy(model.state_dict())
    rw.compress(model, rw.Budget(params=rw.count(model)), [torch.randn(20, 8)], in_place=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_outputs_on_which_the_loss_hangs_are_kept() -> None:
    """Two matrices of the same weights: only the first decides the answer."""
    torch.manual_seed(0)
    first = nn.Linear(16, 16, bias=False)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heard, self.ignored = copy.deepcopy(first), copy.deepcopy(first)

        def forward(self, x: Tensor) -> Tensor:
            return self.heard(x) + 1e-3 * self.ignored(x)

    model, x = Two(), torch.randn(200, 16)
    budget = rw.Budget(removed=0.4)
    blind, seeing = (rw.compress(model, budget, [x], loss=loss) for loss in (None, cross_entropy))
    error = [(small(x) - model(x)).norm() for small in (blind, seeing)]
    assert error[1] < 0.1 * error[0]
    assert isinstance(seeing.heard, nn.Linear)


def test_weights_of_outputs_are_their_mean_squared_gradients() -> None:
    """The oracle: autograd, output by output."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    batches = [torch.randn(4, 5).double(), torch.randn(6, 5).double()]
    found = output_fisher(model, find_plan(model), batches, cross_entropy)
    want = {"0": torch.zeros(7), "2": torch.zeros(3)}
    for x in batches:
        first = model[0](x)
        last = model[2](torch.tanh(first))
        grads = torch.autograd.grad(cross_entropy(last), [first, last])
        for name, grad in zip(want, grads, strict=True):
            want[name] += grad.square().sum(0).float()
    for name in want:
        torch.testing.assert_close(found[name].rows_O, want[name])


def test_rows_of_an_embedding_weigh_their_lookups_and_features_the_gradients() -> None:
    """The oracle: autograd, of what was looked up."""
    model, tokens = nn.Sequential(nn.Embedding(9, 4), nn.Tanh(), nn.Linear(4, 3)), torch.tensor([[1, 2], [1, 5]])
    weights = output_fisher(model, find_plan(model), [tokens], cross_entropy)["0"]
    looked_up = model[0](tokens)
    (g,) = torch.autograd.grad(cross_entropy(model[2](model[1](looked_up))), looked_up)
    assert weights.rows_O is not None and weights.inputs_II is not None
    assert weights.rows_O.tolist() == [0, 2, 1, 0, 0, 1, 0, 0, 0]
    torch.testing.assert_close(weights.inputs_II, g.flatten(0, 1).t() @ g.flatten(0, 1) / 4)


def test_weights_of_a_tied_table_are_the_cost_of_an_error_at_both_ends() -> None:
    """Row w errs by e: n_w e^T G e at the look-ups and f_w e^T C e at the output layer, with f for n in both."""
    table, head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
    head.weight = table.weight
    model, tokens = nn.Sequential(table, nn.Tanh(), head), torch.tensor([[1, 2], [1, 5]])
    weights = output_fisher(model, find_plan(model), [tokens], cross_entropy)["0"]
    looked_up = table(tokens)
    logits = head(torch.tanh(looked_up))
    g, at_logits = torch.autograd.grad(cross_entropy(logits), [looked_up, logits])
    assert weights.rows_O is not None and weights.inputs_II is not None
    f = at_logits.square().sum((0, 1))
    torch.testing.assert_close(weights.rows_O, f)
    torch.testing.assert_close(weights.rows_O.sum() * weights.inputs_II, g.flatten(0, 1).t() @ g.flatten(0, 1))


def test_drawn_answers_weigh_every_word_by_its_probability() -> None:
    """The mean over all answers of the squared gradient of the cross entropy, p (1 - p), from one answer each."""
    model, x = nn.Sequential(nn.Linear(4, 6)), torch.randn(5, 4)
    loss = sampled_loss(num_words=6)
    found = output_fisher(model, find_plan(model), [x], loss, drawn=True)["0"]
    p = model(x).softmax(-1)
    torch.testing.assert_close(found.rows_O, (p * (1 - p)).sum(0).detach(), rtol=1e-4, atol=1e-5)


class Aside(nn.Module):
    """Two layers and a third that reads what they give, beside the answer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(32, 32, bias=False) for _ in range(2))
        self.aside = nn.Linear(32, width, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.second(torch.relu(self.first(x)))
        return h, self.aside(h)


def rank(layer: nn.Module) -> int:
    """Of a plain layer, or of the pair that it has become."""
    return min(min(part.weight.shape) for part in layer.modules() if isinstance(part, nn.Linear))


@given(st.integers(-20, 20), st.sampled_from([None, 0.0, 1e-6]))
@settings(max_examples=10)
def test_what_the_loss_does_not_depend_on_is_left_alone_at_any_scale_of_the_loss(
    power: int, share: float | None
) -> None:
    """Unused, used with a weight of zero, or next to nothing: ranks are the same, and those of the answer alone."""
    torch.manual_seed(0)
    model, x = Aside(), torch.randn(64, 32)
    want = torch.randn(64, 32)

    def loss(output: tuple[Tensor, Tensor]) -> Tensor:
        error = (output[0] - want).square().sum()
        return 2.0**power * (error if share is None else error + share * output[1].sum())

    with pytest.warns(UserWarning, match=r"left as they are, and others lose more.* everything: aside\. Exclude"):
        small = rw.compress(model, rw.Budget(removed=0.5), [x], loss=loss)
    assert torch.equal(small.aside.weight, model.aside.weight)
    assert 32 * 32 * 3 // 2 - 64 < rw.count(small) <= 32 * 32 * 3 // 2
    alone = rw.compress(
        nn.Sequential(model.first, nn.ReLU(), model.second),
        rw.Budget(params=rw.count(small) - 32 * 32),
        [x],
        loss=lambda output: (output - want).square().sum(),
    )
    assert (rank(small.first), rank(small.second)) == (rank(alone[0]), rank(alone[2]))


def test_what_the_loss_does_not_depend_on_gives_way_where_the_budget_asks_for_it() -> None:
    """It fills what is left. Its components are those of the data: there is nothing to weigh outputs by."""
    model, x = Aside(width=256), torch.randn(64, 32)
    budget = rw.Budget(params=32 * 32 * 2 + 8 * (32 + 256))
    small = rw.compress(model, budget, [x], loss=lambda output: 1e-6 * output[0].square().sum())
    assert [rank(layer) for layer in small.children()] == [32, 32, 8]
    h = model(x)[0].detach()
    factors = factorize.svd(model.aside.weight, 8, Moments(h.t() @ h / len(h)))
    want = h @ (factors.p_OR @ factors.q_RI).t()
    torch.testing.assert_close(small.aside(h), want, rtol=1e-3, atol=1e-4)


def test_a_layer_is_not_left_alone_at_the_price_of_another() -> None:
    """With `aside` whole there would be no component for the layers that answer."""
    model, x = Aside(), torch.randn(64, 32)
    small = rw.compress(model, rw.Budget(params=32 * 32 + 63), [x], loss=lambda output: output[0].square().sum())
    assert rank(small.aside) == 0
    assert min(rank(small.first), rank(small.second)) > 0


@given(specs, st.sampled_from(["pair", "pivot"]), st.integers(1, 4), st.integers(5, 95))
@settings(max_examples=20)
def test_even_ranks_keep_the_same_share_of_every_matrix(spec: Spec, layout: Any, multiple: int, percent: int) -> None:
    model, budget = spec.build(), rw.Budget(removed=percent / 100)
    try:
        pruner = rw.Pruner(
            copy.deepcopy(model), budget, "svd", plan=rw.find_plan(model), layout=layout, rank_multiple=multiple
        )
    except rw.BudgetError:
        return
    curves, room = pruner.account.curves, pruner.limit - pruner.account.fixed
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "These layers are left as they are")
        settings: Any = {"layout": layout, "ranks": "even", "rank_multiple": multiple, "embeddings": True}
        small = rw.compress(model, budget, [batch(spec, size=4)], **settings)
    want = uniform_allocation(curves, room)
    if all(want):
        assert rw.count(small) == pruner.account.size(want)
    assert rw.count(small) <= pruner.limit


def test_other_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match='`ranks` must be "global", "even" or "blend", but is \'equal\' instead'):
        rw.compress(nn.Linear(4, 4), rw.Budget(removed=0.5), ranks="equal")  # type: ignore[arg-type]


def test_progress_is_told_of_every_batch_and_matrix() -> None:
    told: list[tuple[str, int, int]] = []
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(9, 8)
    rw.compress(
        *(model, rw.Budget(removed=0.5), [x, x, x]),
        loss=lambda y: y.square().sum(),
        progress=lambda what, done, total: told.append((what, done, total)),
    )
    gradients = [("gradients", done, 3) for done in range(4)]
    assert told == [*gradients, ("ranks", 1, 2), ("ranks", 2, 2), ("factors", 1, 2), ("factors", 2, 2)]


def test_a_loss_that_depends_on_nothing_is_refused() -> None:
    with pytest.raises(rw.DataError, match="`loss` must depend on the matrices of the plan, but no batch gives any"):
        rw.compress(Aside(), rw.Budget(removed=0.5), [torch.randn(4, 32)], loss=lambda output: 0 * output[0].sum())


class Hidden(nn.Module):
    """Two layers, of which the loss is told nothing of the first, or only in the last of several calls."""

    def __init__(self, calls: int = 1, *, told: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.calls, self.told = nn.Linear(8, 8), nn.Linear(8, 8), calls, told

    def forward(self, x: Tensor) -> Tensor:
        for call in range(1, self.calls + 1):
            with torch.set_grad_enabled(self.told and call == self.calls):
                x = torch.tanh(self.first(x))
        y: Tensor = self.second(x)
        return y


def test_a_layer_without_gradients_has_no_worth_by_a_loss_and_is_refused() -> None:
    model, x = Hidden(), torch.randn(5, 8)
    with pytest.raises(rw.DataError, match=r"must have a gradient .* `torch.no_grad\(\)`: first. Exclude them"):
        rw.compress(model, rw.Budget(removed=0.3), [x], loss=lambda output: output.square().sum())
    plan = find_plan(model, exclude=["first"])
    small = rw.compress(model, rw.Budget(removed=0.2), [x], loss=lambda output: output.square().sum(), plan=plan)
    assert rank(small.first) == 8


def test_a_layer_is_weighed_by_the_calls_that_have_gradients() -> None:
    x = torch.randn(5, 8)
    model = Hidden(calls=2, told=True)
    weights = output_fisher(model, find_plan(model), [x], lambda output: output.square().sum())
    alone = nn.Sequential(model.first, nn.Tanh(), model.second)
    seen = [torch.tanh(model.first(x)).detach()]
    want = output_fisher(alone, find_plan(alone), seen, lambda output: output.square().sum())
    for name, same in (("first", "0"), ("second", "2")):
        torch.testing.assert_close(weights[name].rows_O, want[same].rows_O)


def test_a_model_without_any_gradient_is_refused() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(5, 8)
    with pytest.raises(rw.DataError, match="`loss` must depend on the matrices of the plan"):
        output_fisher(model, find_plan(model), [x], lambda output: output.detach().sum())


class Words(nn.Module):
    """A table of words that a head shares, beside the answer, or does not."""

    def __init__(self, *, tied: bool, by_name: bool = False) -> None:
        super().__init__()
        self.table, self.head, self.answer = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False), nn.Linear(4, 3)
        self.by_name = by_name
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        h = self.table(input=tokens) if self.by_name else self.table(tokens)
        h += 1.0
        return self.answer(h), self.head(h)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_tied_table_of_which_the_loss_hears_only_the_words_is_weighed_by_them(by_name: bool) -> None:
    tied, untied = Words(tied=True, by_name=by_name), Words(tied=False)
    untied.load_state_dict(tied.state_dict())
    tokens = torch.tensor([[1, 2], [1, 5]])
    found, want = (
        output_fisher(model, find_plan(model), [tokens], lambda output: cross_entropy(output[0]))
        for model in (tied, untied)
    )
    assert want["table"].rows_O is not None and want["table"].rows_O.any()
    for name in ("rows_O", "inputs_II"):
        assert torch.equal(getattr(found["table"], name), getattr(want["table"], name))
    assert want["head"] == Moments()


def test_moments_stop_after_the_last_use() -> None:
    ran: list[str] = []

    shared = nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), shared, nn.Tanh(), shared, nn.Linear(4, 4))
    model[4].register_forward_hook(lambda *_: ran.append("end"))
    plan, x = find_plan(model), torch.randn(3, 4)
    seen = count_calls(model, plan, x)
    assert list(seen.items()) == [("0", 1), ("1", 2), ("4", 1)]
    ran.clear()
    part = type(plan)(plan.sites[:2])
    stopped = second_moments(model, part, [x], last_calls=[("1", 2)])
    assert ran == []
    whole = second_moments(model, part, [x])
    assert ran == ["end"]
    assert all(torch.equal(stopped[name].inputs_II, whole[name].inputs_II) for name in whole)


class Experts(nn.Module):
    """Each batch is read by the expert that its first number chooses, then by a layer for all."""

    def __init__(self, num_experts: int = 2) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(24, 24) for _ in range(num_experts))
        self.last = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.experts[int(x.flatten()[0])](x)))


class Twice(nn.Module):
    """A matrix of which the second use is for batches that begin with a positive number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.second(h) if x.flatten()[0] > 0 else h


class Recurrent(nn.Module):
    """Reads a batch step by step, those for expert 1 in more steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(24)
        for rows in x.split(4 if x.flatten()[0] > 0 else 16):
            h = torch.tanh(self.second(torch.tanh(self.first(rows + h))))[0]
        return h


def chosen(expert: int, seed: int = 0) -> Tensor:
    """A batch for an expert, of few directions."""
    generator = torch.Generator().manual_seed(100 * seed + expert)
    x = torch.randn(64, 4, generator=generator) @ torch.randn(4, 24, generator=generator)
    x[0, 0] = expert
    return x


@pytest.mark.parametrize("least_bytes", [0, 2**24])
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 0, 1)])
@pytest.mark.parametrize("make", [Experts, Twice, Recurrent])
def test_every_matrix_is_measured_on_every_batch_that_reaches_it(
    make: type[nn.Module], order: tuple[int, ...], least_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "SHARE", 0.0)
    monkeypatch.setattr(calibration, "LEAST_BYTES", least_bytes)
    model, batches = make(), [chosen(expert, seed) for seed, expert in enumerate(order)]
    data = calibration.CalibrationData(model, find_plan(model), batches, None)
    found = {site.name: moments.inputs_II for site, moments in data.moments() if moments is not None}
    want = second_moments(model, find_plan(model), batches, dtype=torch.float32)
    assert found.keys() == want.keys()
    for name, moments in want.items():
        torch.testing.assert_close(found[name], moments.inputs_II)


def test_the_order_of_batches_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "LEAST_BYTES", 0)
    model, batches = Experts(3), [chosen(expert) for expert in range(3)]
    for order in permutations(batches):
        small = rw.compress(model, rw.Budget(removed=0.4), order)
        for x in batches:
            assert (small(x) - model(x)).norm() < 0.05 * model(x).norm()


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("weighed", [False, True])
def test_what_no_batch_reaches_is_named_and_left_alone(weighed: bool, ranks: Ranks) -> None:
    model, batches, loss = Experts(3), [chosen(0), chosen(1)], cross_entropy if weighed else None
    expected = r"should be reached by a batch .*, but these are not: experts.2\. .* exclude"
    with pytest.warns(UserWarning, match=expected) as warned:
        small = rw.compress(model, rw.Budget(removed=0.3), batches, loss=loss, ranks=ranks)
    # the line of whoever called, and not one inside
    assert warned[0].filename == __file__
    assert torch.equal(small.experts[2].weight, model.experts[2].weight)
    x = chosen(0)
    # even ranks lose more
    assert ranks == "even" or (small(x) - model(x)).norm() < 0.05 * model(x).norm()


def test_what_no_batch_of_the_loss_reaches_is_named() -> None:
    model, batches = Experts(2), [chosen(0), chosen(1)]
    with pytest.warns(UserWarning, match=r"but these are not: experts\.1\."):
        rw.compress(model, rw.Budget(removed=0.3), batches, loss=cross_entropy, loss_batches=batches[:1])


@pytest.mark.parametrize("ranks", RANKS)
def test_what_batches_of_the_loss_alone_reach_is_named_and_left_alone(ranks: Ranks) -> None:
    model, batches = Experts(3), [chosen(0), chosen(1), chosen(2)]
    settings: Any = {"loss": cross_entropy, "loss_batches": batches, "ranks": ranks}
    with pytest.warns(UserWarning, match=r"but these are not: experts\.2\."):
        small = rw.compress(model, rw.Budget(removed=0.3), batches[:2], **settings)
    assert torch.equal(small.experts[2].weight, model.experts[2].weight)


def test_later_matrices_see_what_became_of_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a group per matrix, each is whitened by data that went through the compressed model before it."""
    monkeypatch.setattr(calibration, "SHARE", 0.0)
    monkeypatch.setattr(calibration, "LEAST_BYTES", 0)
    model = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))
    x = torch.randn(100, 12)
    seen: list[dict[str, Any]] = []
    real = calibration.second_moments

    def watch(*args: Any, **kwargs: Any) -> Any:
        seen.append(real(*args, **kwargs))
        return dict(seen[-1])

    monkeypatch.setattr(calibration, "second_moments", watch)
    small = rw.compress(model, rw.Budget(removed=0.5), [x])
    # ranks are chosen by the dense model, for which the data run through it once
    assert [list(found) for found in seen] == [["0", "2"], ["0"], ["2"]]
    with torch.no_grad():
        h = torch.tanh(small[0](x))
    torch.testing.assert_close(seen[2]["2"].inputs_II, h.t() @ h / len(h), rtol=1e-4, atol=1e-5)


def test_no_more_tensors_live_than_the_model_and_a_group_of_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted while data run through: the model, and no more moments than a share of it."""
    monkeypatch.setattr(calibration, "LEAST_BYTES", 0)
    monkeypatch.setattr(calibration, "LEAST_BYTES_DENSE", 0)
    monkeypatch.setattr(calibrate, "FISHER_BYTES", 0)
    # what other tests have left behind need not be looked at again and again
    gc.collect()
    gc.freeze()
    layers = [nn.Linear(64, 64, bias=False) for _ in range(24)]
    model = nn.Sequential(*layers)
    size = sum(p.numel() * 4 for p in model.parameters())
    most = 0

    def bytes_held() -> int:
        found = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter)]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}.values())

    def watch(*_: Any) -> None:
        nonlocal most
        most = max(most, bytes_held())

    before = bytes_held()
    for layer in layers:
        layer.register_forward_hook(watch)
    try:
        rw.compress(model, rw.Budget(removed=0.3), [torch.randn(8, 64)], in_place=True)
    finally:
        gc.unfreeze()
    assert most - before < 0.3 * size


class Tagger(nn.Module):
    """An embedding, a layer and a classifier; it returns what `wrapped` makes of the logits."""

    def __init__(self, wrapped: Any = lambda logits: logits) -> None:
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(40, 16), nn.Linear(16, 16), nn.Linear(16, 12)
        self.wrapped = wrapped

    def forward(self, tokens: Tensor) -> Any:
        return self.wrapped(self.head(torch.tanh(self.body(self.words(tokens)))))


WRAPPED = {
    "numbers": lambda logits: logits,
    "a tuple": lambda logits: (logits, None),
    "logits": lambda logits: SimpleNamespace(logits=logits),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_by_default_errors_are_weighed_by_sampled_answers(name: str) -> None:
    torch.manual_seed(0)
    model, x = Tagger(WRAPPED[name]), [torch.randint(0, 40, (3, 7)) for _ in range(4)]
    small, same, blind = (
        rw.compress(model, rw.Budget(removed=0.2), x, **settings)
        for settings in ({}, {"loss": "sampled"}, {"loss": None})
    )
    states = [each.state_dict() for each in (small, same, blind)]
    assert all(torch.equal(tensor, states[1][key]) for key, tensor in states[0].items())
    assert any(key not in states[2] or not torch.equal(tensor, states[2][key]) for key, tensor in states[0].items())


class Text(nn.Module):
    """A table of `num_words`, layers of 16 x 64 weights, and an output layer, which may share the table."""

    def __init__(self, num_words: int, *, tied: bool) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(num_words, 16), nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, num_words, bias=False)
        if tied:
            self.head.weight = self.words.weight


@pytest.mark.parametrize(
    "num_words, tied, embeddings, compressed",
    [
        (200, False, None, True),  # large
        (6, False, None, False),  # small, and looked up only
        (6, True, None, True),  # an output layer too
        (200, False, False, False),
        (200, True, False, False),
        (6, False, True, True),
    ],
)
def test_embeddings_are_compressed_where_they_are_large_or_tied_or_asked_for(
    num_words: int, tied: bool, embeddings: bool | None, compressed: bool
) -> None:
    plan = default_plan(Text(num_words, tied=tied), embeddings=embeddings)
    assert any(use.name == "words" for site in plan.sites for use in site.uses) == compressed
    assert any(item.name == "words" for item in plan.left_out) != compressed


def test_an_embedding_that_must_stay_leaves_nothing_to_compress() -> None:
    with pytest.raises(rw.PlanError, match="words: an embedding, which embeddings=True .* compresses"):
        rw.compress(nn.ModuleDict({"words": nn.Embedding(40, 16)}), rw.Budget(removed=0.5), embeddings=False)


def test_answers_that_no_loss_can_be_drawn_from_are_refused_with_the_way_out() -> None:
    model = Tagger(lambda logits: logits.tolist())
    with pytest.raises(
        rw.RankwiseError, match="must return a .*tensor first, but returns list. Pass `loss`, a function"
    ):
        rw.compress(model, rw.Budget(removed=0.2), [torch.zeros(1, 2).long()])


def test_a_loss_without_data_is_refused() -> None:
    with pytest.raises(rw.RankwiseError, match="`loss` must go with `calibration`, but there is none"):
        rw.compress(nn.Linear(4, 4), rw.Budget(removed=0.5), loss=cross_entropy)


@pytest.mark.parametrize(
    "asked", [{"anchor": True}, {"smoothing": Smoothing(inputs=0.1)}, {"refinement": Refinement(steps=2)}]
)
def test_what_data_are_needed_for_is_refused_without_them(asked: dict[str, Any]) -> None:
    with pytest.raises(rw.PlanError, match=f"`{next(iter(asked))}` must go with `calibration`, but there is none"):
        rw.compress(nn.Linear(4, 4), rw.Budget(removed=0.5), **asked)


@pytest.mark.parametrize("asked", [{"smoothing": 0.1}, {"refinement": 3}])
def test_numbers_in_place_of_settings_are_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"must be a `rankwise.oneshot.(Smoothing|Refinement)`, but is (0.1|3) instead"):
        rw.compress(nn.Linear(4, 4), rw.Budget(removed=0.5), [torch.randn(2, 4)], **asked)


@pytest.mark.parametrize("given", [{"input": torch.randn(2, 4)}, "text.txt", torch.ones(2, 4)], ids=type)
def test_one_batch_in_place_of_several_is_refused(given: Any) -> None:
    model = nn.Linear(4, 4)
    for use in (partial(rw.compress, model), partial(rw.Pruner, model, anneal_steps=100, init="whitened")):
        with pytest.raises(
            TypeError, match="`calibration` must be several batches .*, but is a (dict|str|Tensor) instead"
        ):
            use(budget=rw.Budget(removed=0.5), calibration=given)
    with pytest.raises(
        TypeError, match="`loss_batches` must be several batches .*, but is a (dict|str|Tensor) instead"
    ):
        rw.compress(model, rw.Budget(removed=0.5), [torch.randn(2, 4)], loss_batches=given)


def test_what_is_compressed_in_inference_mode_can_be_trained() -> None:
    model, batches = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), [torch.randn(4, 8)]
    want = rw.compress(model, rw.Budget(removed=0.5), batches)
    with torch.inference_mode():
        small = rw.compress(model, rw.Budget(removed=0.5), batches)
        made_in_it = nn.Linear(8, 8)
    torch.testing.assert_close(small.state_dict(), want.state_dict(), rtol=0, atol=0)
    small(batches[0]).sum().backward()
    assert all(parameter.grad is not None for parameter in small.parameters())
    with pytest.raises(rw.RankwiseError, match="outside of `torch.inference_mode`.* but weight, bias were made"):
        rw.compress(made_in_it, rw.Budget(removed=0.5), batches)


def test_calibration_without_a_batch_is_refused() -> None:
    with pytest.raises(rw.DataError, match="`calibration` must hold at least one batch, but is empty"):
        rw.compress(nn.Linear(4, 4), rw.Budget(removed=0.5), [])


def test_a_loss_that_is_not_finite_is_refused_and_the_model_left_alone() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(rw.DataError, match="`loss` must have finite gradients, but that of the outputs of '' is not"):
        rw.compress(model, rw.Budget(removed=0.5), [torch.ones(2, 4)], loss=lambda y: (y * torch.nan).sum())
    assert all(p.requires_grad for p in model.parameters())
    assert not model._forward_hooks


def test_a_layer_that_data_reach_as_zeros_alone_is_left_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 16))
    nn.init.constant_(model[0].bias, -100.0)
    x = torch.randn(20, 16)
    with pytest.warns(UserWarning, match=r"left as they are, .* everything: 2\. Exclude"):
        small = rw.compress(model, rw.Budget(removed=0.5), calibration=[x], loss=None)
    assert torch.equal(small[2].weight, model[2].weight)
    assert all(torch.isfinite(parameter).all() for parameter in small.parameters())
    torch.testing.assert_close(small(x), model(x), rtol=0, atol=1e-3)


def test_smoothing_goes_from_the_data_to_what_counts_all_inputs_alike() -> None:
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(12, 9, bias=False)), [torch.randn(50, 12) * torch.arange(1, 13)]

    @torch.no_grad()
    def product(**given: Any) -> Tensor:
        return rw.compress(model, rw.Budget(removed=0.4), loss=None, **given)(torch.eye(12))

    def smoothed(inputs: float) -> Tensor:
        return product(calibration=data, smoothing=Smoothing(inputs=inputs))

    plain, whitened = product(), product(calibration=data)
    assert not torch.allclose(plain, whitened, atol=1e-2)
    assert torch.equal(smoothed(0.0), whitened)
    assert torch.allclose(smoothed(1e7), plain, atol=1e-4)
    # between the two, the error on the data grows with it
    dense = model[0].weight.detach().t()
    errors = [(data[0] @ (smoothed(much) - dense)).norm().item() for much in (0.0, 0.1, 1.0, 1e7)]
    assert errors == sorted(errors)


def test_smoothed_words_are_kept_though_no_batch_has_them() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(40, 12), nn.Linear(12, 4))
    data = [torch.arange(20).repeat(3)]

    def errors(words: float) -> tuple[float, float]:
        given: dict[str, Any] = {"loss": cross_entropy, "embeddings": True, "smoothing": Smoothing(words=words)}
        small = rw.compress(model, rw.Budget(removed=0.3), data, **given)
        lost = [(small[0](part) - model[0](part)).norm().item() for part in (torch.arange(20), torch.arange(20, 40))]
        return lost[0], lost[1]

    (seen, unseen), (less, more) = errors(0.0), errors(10.0)
    assert less > seen and more < unseen


@pytest.mark.parametrize("part", ["inputs", "outputs", "words"])
def test_a_smoothing_is_at_least_zero(part: str) -> None:
    with pytest.raises(ValueError, match=f"`{part}` of a smoothing must be at least 0, but is -0.1"):
        Smoothing(**{part: -0.1})
