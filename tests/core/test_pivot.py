"""The pivot layout: exact, bounded, never larger than dense, and left where half precision would suffer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rankwise as rw
from rankwise.core.budget import CostCurve
from rankwise.core.exports import BOUND, ROUNDING, PivotExport, choose_rows
from rankwise.core.gates import Gate
from rankwise.core.matrices import FactorizedMatrix, factorized_curve
from rankwise.modules import PivotLinear, select

sizes = st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(0, 12), st.integers(0, 10**6))


def draw(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def matrix(p: Tensor, q: Tensor) -> FactorizedMatrix:
    costs = factorized_curve((len(p), q.shape[1]), len(q), pivot=True)
    return FactorizedMatrix(nn.Parameter(p), nn.Parameter(q), Gate(len(q)), costs)


@given(sizes)
def test_chosen_rows_span_the_others_with_bounded_coefficients(size: tuple[int, int, int, int]) -> None:
    rows, _, rank, seed = size
    p = draw(rows, min(rank, rows), seed)
    places, chosen, coefficients = choose_rows(p)
    assert coefficients.abs().max() <= BOUND * (1 + 1e-9) if coefficients.numel() else True
    assert sorted(places.tolist()) == list(range(rows))
    torch.testing.assert_close(torch.cat([p[chosen], coefficients @ p[chosen]])[places], p, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_coefficients_are_bounded_where_elimination_alone_leaves_larger_ones(seed: int) -> None:
    p = draw(300, 60, seed)
    assert choose_rows(p).coefficients.abs().max() <= BOUND


@pytest.mark.parametrize("true_rank", [0, 1, 3])
def test_a_matrix_of_lower_rank_than_it_is_given_is_exact_too(true_rank: int) -> None:
    """Dead components, or a pair that was never of full rank."""
    p = draw(9, true_rank, 0) @ draw(true_rank, 5, 1)
    _, chosen, coefficients = choose_rows(p)
    rest = [i for i in range(9) if i not in chosen.tolist()]
    assert coefficients.abs().max() <= BOUND
    torch.testing.assert_close(coefficients @ p[chosen], p[rest], rtol=1e-9, atol=1e-9)


def test_rows_of_very_different_size_are_exact() -> None:
    p = draw(40, 10, 0) * torch.logspace(0, -8, 40, dtype=torch.float64).unsqueeze(1)
    _, chosen, coefficients = choose_rows(p)
    rest = [i for i in range(40) if i not in chosen.tolist()]
    assert coefficients.abs().max() <= BOUND
    error = (coefficients @ p[chosen] - p[rest]).norm(dim=1) / p[rest].norm(dim=1)
    assert error.max() < 1e-5


@given(sizes)
def test_a_pivot_export_computes_the_same_and_costs_what_the_curve_says(size: tuple[int, int, int, int]) -> None:
    """Never more than dense, in each use and when uses are tied."""
    rows, columns, rank, seed = size
    gated = matrix(draw(rows, rank, seed), draw(rank, columns, seed + 1))
    bias, x = nn.Parameter(draw(rows, 1, seed)[:, 0]), draw(3, columns, seed + 2)
    weight, cost = gated.weight(), gated.cost_curve(rank)
    assert cost <= rows * columns
    kept = torch.arange(rank)
    made = gated.export(kept, None).as_linear(bias)
    assert sum(p.numel() for p in made.parameters()) == cost + rows
    torch.testing.assert_close(made(x), x @ weight.t() + bias)
    export = gated.export(kept, None)
    table, head = export.as_embedding(None), export.as_linear(bias)
    assert sum(p.numel() for p in nn.ModuleList([table, head]).parameters()) == cost + rows
    torch.testing.assert_close(table(torch.arange(rows)), weight)
    torch.testing.assert_close(head(x), x @ weight.t() + bias)


def test_tied_linear_layers_share_rows_and_coefficients() -> None:
    export = matrix(draw(7, 2, 0), draw(2, 5, 1)).export(torch.arange(2), None)
    first, second = export.as_linear(None), export.as_linear(None)
    assert {id(p) for p in first.parameters()} == {id(p) for p in second.parameters()}


def test_a_pivot_layer_has_the_gradients_of_the_matrix_multiplied_out() -> None:
    places = torch.tensor([4, 0, 2, 1, 3, 5], dtype=torch.int32)
    layer = PivotLinear(nn.Parameter(draw(4, 2, 0)), places, nn.Parameter(draw(6, 1, 1)[:, 0]))
    x = draw(3, 2, 2).requires_grad_()
    inputs = (x, layer.coefficients, layer.bias)
    assert torch.autograd.gradcheck(lambda x, *_: layer(x), inputs)
    torch.testing.assert_close(layer(x), x @ layer.weight.t() + layer.bias)


def test_a_pivot_layer_works_under_autocast() -> None:
    layer = PivotLinear(nn.Parameter(torch.randn(4, 2)), torch.arange(6, dtype=torch.int32))
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(torch.randn(3, 2))
    assert out.dtype == torch.bfloat16


@given(st.integers(1, 30), st.integers(1, 30))
def test_the_pivot_curve_is_the_count_of_the_layout_up_to_dense(rows: int, columns: int) -> None:
    curve = CostCurve(rows + columns, rows + columns, rows * columns, pivot=True)
    counts = [curve(k) for k in range(rows + columns + 1)]
    small = min(rows, columns)
    assert counts[: small + 1] == [k * columns + (rows - k) * k for k in range(small + 1)]
    # a pair of a model may have more components than its matrix has ranks
    assert counts[small:] == [rows * columns] * (len(counts) - small)
    assert curve.costs(torch.arange(rows + columns + 1)).tolist() == counts


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.sampled_from([torch.bfloat16, torch.float16]))
def test_half_precision_keeps_the_matrix_within_the_tolerance(seed: int, dtype: torch.dtype) -> None:
    """Whichever layout it takes, for factors of every condition."""
    generator = torch.Generator().manual_seed(seed)
    pruner = rw.Pruner(nn.Linear(24, 24, bias=False), rw.Budget(removed=0.3), "svd", layout="pivot")
    (matrix,) = pruner.controller.matrices
    with torch.no_grad():
        for parameter in (matrix.p, matrix.q):
            spread = 10 ** (3 * torch.rand(24, generator=generator) - 1.5)
            parameter.copy_(torch.randn(24, 24, generator=generator) * spread)
    pruner.model.to(dtype)
    small = pruner.compact()
    assert rw.count(small) == pruner.size().exported <= pruner.limit
    kept = pruner.controller.kept_components(pruner.limit)[0]
    want = matrix.p[:, kept].double() @ matrix.q[kept].double()
    got = small[1].weight.double() @ small[0].weight.double()
    assert (got - want).norm() <= (ROUNDING if isinstance(small[1], PivotLinear) else 1e-6) * want.norm()


def test_a_matrix_that_suffers_is_exported_as_a_pair_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)).bfloat16()
    pruner = rw.Pruner(model, rw.Budget(removed=0.4), "svd", layout="pivot")
    assert isinstance(pruner.controller.matrices[0].export(torch.arange(4), None), PivotExport)
    # nothing is good enough
    monkeypatch.setattr("rankwise.core.matrices.ROUNDING", 0.0)
    small = pruner.compact()
    assert not any(isinstance(module, PivotLinear) for module in small.modules())
    assert rw.count(small) == pruner.size().exported <= pruner.limit
    assert pruner.limit - rw.count(small) < 32


def test_a_layout_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match='`layout` must be "pair" or "pivot", but is \'pivots\' instead.'):
        rw.Pruner(nn.Linear(4, 4), rw.Budget(removed=0.5), "svd", layout="pivots")


def test_a_pivot_model_can_be_pruned_again() -> None:
    model = nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 30))
    once = rw.Pruner(model, rw.Budget(removed=0.2), "svd", layout="pivot").compact()
    assert any(isinstance(module, PivotLinear) for module in once.modules())
    index = torch.arange(30)
    same = rw.compress(once, rw.Budget(params=rw.count(once)))
    torch.testing.assert_close(same(index), once(index), rtol=1e-4, atol=1e-4)
    twice = rw.compress(once, rw.Budget(removed=0.2))
    assert rw.count(twice) <= 0.8 * rw.count(once)
    assert any(isinstance(module, PivotLinear) for module in twice.modules())


@given(st.lists(st.integers(1, 5), max_size=3), st.integers(0, 3), st.integers(1, 5), st.booleans())
def test_few_and_many_rows_are_the_same_product(batch: list[int], rank: int, more: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    bias = nn.Parameter(torch.randn(rank + more)) if has_bias else None
    layer = PivotLinear(nn.Parameter(torch.randn(more, rank)), torch.randperm(rank + more), bias)
    x = torch.randn(*batch, rank, requires_grad=True)
    expected = x @ layer.weight.t() + (0 if bias is None else bias)
    torch.testing.assert_close(layer(x), expected)
    weigh = torch.randn_like(expected)
    grads = torch.autograd.grad((layer(x) * weigh).sum(), [x, *layer.parameters()])
    oracle = torch.autograd.grad((expected * weigh).sum(), [x, *layer.parameters()])
    torch.testing.assert_close(grads, oracle)


@pytest.mark.parametrize("rows", [1, 9])
def test_a_pivot_layer_needs_no_torch_that_tells_export_from_compilation(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.compiler, "is_exporting", raising=False)
    layer = PivotLinear(nn.Parameter(torch.randn(3, 4)), torch.randperm(7))
    x = torch.randn(rows, 4)
    torch.testing.assert_close(layer(x), x @ layer.weight.t())


@given(st.lists(st.integers(0, 4), max_size=3), st.integers(1, 6), st.data())
def test_selection_is_that_of_the_last_dimension(batch: list[int], width: int, data: st.DataObject) -> None:
    index = torch.tensor(data.draw(st.lists(st.integers(0, width - 1), max_size=6)), dtype=torch.long)
    x = torch.randn(*batch, width)
    torch.testing.assert_close(select(x, index), x[..., index], rtol=0, atol=0)
