"""Factorizations against `torch.linalg.svd` and the laws they are made for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankwise.core import factorize
from rankwise.core.factorize import (
    Factors,
    Moments,
    _square_root,
    dropping_errors,
    random,
    same_size_rank,
    svd,
    svd_energy,
    svd_of_pair,
)

SHAPES = [(6, 6), (9, 4), (4, 9), (1, 5), (5, 1)]


def product(factors) -> torch.Tensor:
    return factors.p_OR @ factors.q_RI


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_full_rank_svd_is_the_matrix(shape: tuple[int, int], dtype: torch.dtype, tolerance: float) -> None:
    weight = torch.randn(shape, dtype=dtype)
    assert (product(svd(weight)) - weight).norm() <= tolerance * weight.norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_truncated_svd_has_the_least_error(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, dtype=torch.float64)
    values = torch.linalg.svdvals(weight)
    for rank in range(1, min(shape) + 1):
        factors = svd(weight, rank)
        torch.testing.assert_close((product(factors) - weight).norm(), values[rank:].norm(), atol=1e-7, rtol=1e-6)
        torch.testing.assert_close(factors.energy_R, values[:rank] ** 2, atol=1e-9, rtol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_factors_are_contiguous_as_weights_are(shape: tuple[int, int]) -> None:
    """What flattens parameters, as LBFGS and `parameters_to_vector`, takes no others."""
    weight, second = torch.randn(shape), torch.randn(min(shape), 7)
    for factors in (svd(weight), svd(weight, 1), svd_of_pair(svd(weight).p_OR, second)):
        assert factors.p_OR.is_contiguous() and factors.q_RI.is_contiguous()


def test_the_singular_values_are_shared_out_between_the_factors() -> None:
    factors = svd(torch.randn(8, 5, dtype=torch.float64))
    torch.testing.assert_close(factors.p_OR.norm(dim=0), factors.q_RI.norm(dim=1))


def test_a_matrix_of_low_rank_or_zeros_is_no_obstacle() -> None:
    for weight in (torch.ones(5, 4), torch.zeros(5, 4)):
        factors = svd(weight)
        assert torch.isfinite(factors.p_OR).all()
        torch.testing.assert_close(product(factors), weight, atol=1e-6, rtol=1e-5)


@given(st.integers(0, 10**6), st.sampled_from([(6, 4), (4, 6), (5, 5)]), st.integers(1, 3))
def test_whitened_svd_has_the_least_error_on_the_data(seed: int, shape: tuple[int, int], rank: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, dtype=torch.float64, generator=generator)
    mix = torch.randn(shape[1], shape[1], dtype=torch.float64, generator=generator)
    x = torch.randn(200, shape[1], dtype=torch.float64, generator=generator) @ mix
    moment = x.t() @ x / len(x)
    factors = svd(weight, rank, Moments(inputs_II=moment), damping=1e-9)
    error = (x @ (product(factors) - weight).t()).square().mean(0).sum()
    # the oracle: what remains of the outputs beyond their best subspace
    least = torch.linalg.svdvals(weight @ torch.linalg.cholesky(moment))[rank:].square().sum()
    torch.testing.assert_close(error, least, rtol=1e-4, atol=1e-6)


def test_whitening_at_full_rank_is_the_matrix_even_on_degenerate_data() -> None:
    for shape in SHAPES:
        weight = torch.randn(shape)
        x = torch.randn(3, shape[1], dtype=torch.float64)
        factors = svd(weight, None, Moments(x.t() @ x, torch.rand(shape[0])))
        assert (product(factors) - weight).norm() <= 1e-4 * weight.norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_where_all_data_are_zero_no_component_matters_and_the_matrix_is_kept(shape: tuple[int, int]) -> None:
    weight, silence = torch.randn(shape), Moments(inputs_II=torch.zeros(shape[1], shape[1]))
    pair = torch.randn(shape[0], 3), torch.randn(3, shape[1])
    for factors, whole in (
        (svd(weight, None, silence), weight),
        (svd_of_pair(*pair, None, silence), pair[0] @ pair[1]),
    ):
        assert (product(factors) - whole).norm() <= 1e-4 * whole.norm()
        assert not factors.energy_R.any()


def test_a_pair_of_zeros_is_no_obstacle() -> None:
    factors = svd_of_pair(torch.randn(6, 2), torch.zeros(2, 5))
    assert torch.isfinite(factors.p_OR).all()
    assert not product(factors).any()
    assert not factors.energy_R.any()


def test_frequent_rows_are_kept_best() -> None:
    weight = torch.randn(10, 6, dtype=torch.float64)
    rows = torch.zeros(10)
    rows[2] = 1.0
    factors = svd(weight, 1, Moments(rows_O=rows), damping=1e-6)
    torch.testing.assert_close(product(factors)[2], weight[2], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("scale", [0.02, 1.0])
def test_random_factors_have_the_variance_of_the_matrix(scale: float) -> None:
    weight = scale * torch.randn(300, 200)
    factors = random(weight, 50, torch.Generator().manual_seed(0))
    torch.testing.assert_close(product(factors).std(), weight.std(), rtol=0.05, atol=0)


@given(st.integers(1, 500), st.integers(1, 500))
def test_the_starting_rank_keeps_the_size(rows: int, columns: int) -> None:
    rank = same_size_rank((rows, columns))
    assert rank == 1 or rank * (rows + columns) <= rows * columns < (rank + 1) * (rows + columns)


@given(
    seed=st.integers(0, 10**6),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
    weighs=st.sampled_from(["nothing", "inputs", "rows", "both"]),
)
def test_the_svd_of_a_pair_is_that_of_its_product(seed: int, sizes: tuple[int, int, int], weighs: str) -> None:
    num_out, rank_of_pair, num_in = sizes
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    p_OR, q_RI, x = draw(num_out, rank_of_pair), draw(rank_of_pair, num_in), draw(30, num_in)
    moments = Moments(
        x.t() @ x / 30 if weighs in ("inputs", "both") else None,
        draw(num_out).square() if weighs in ("rows", "both") else None,
    )
    full = min(sizes)
    for rank in range(1, full + 1):
        got, want = svd_of_pair(p_OR, q_RI, rank, moments), svd(p_OR @ q_RI, rank, moments)
        torch.testing.assert_close(got.energy_R, want.energy_R, rtol=1e-5, atol=1e-7 * float(want.energy_R[0]))
        assert product(got).shape == (num_out, num_in) and got.p_OR.shape[1] == rank
        # where two energies are nearly the same, either component may be the last: the errors are the same all the same
        errors = [_weighted_error(product(each) - p_OR @ q_RI, moments) for each in (got, want)]
        torch.testing.assert_close(*errors, rtol=1e-4, atol=1e-5 * float(want.energy_R[0]) ** 0.5)
    assert (product(svd_of_pair(p_OR, q_RI)) - p_OR @ q_RI).norm() <= 1e-5 * (p_OR @ q_RI).norm()


def _weighted_error(error_OI: torch.Tensor, moments: Moments, damping: float = 1e-2) -> torch.Tensor:
    if moments.inputs_II is not None:
        mean = moments.inputs_II.diagonal().mean()
        error_OI = error_OI @ torch.linalg.cholesky(moments.inputs_II + damping * mean * torch.eye(len(error_OI.t())))
    if moments.rows_O is not None:
        error_OI = error_OI * (moments.rows_O + damping * moments.rows_O.mean()).sqrt()[:, None]
    return error_OI.norm()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("degenerate", [False, True])
def test_the_energies_alone_are_those_of_the_svd(shape: tuple[int, int], degenerate: bool) -> None:
    weight, x = torch.randn(shape, dtype=torch.float64), torch.randn(50, shape[1], dtype=torch.float64)
    inputs = x[:1].t() @ x[:1] if degenerate else x.t() @ x
    for moments in (None, Moments(inputs, torch.rand(shape[0])), Moments(0 * inputs)):
        want = svd(weight, moments=moments).energy_R
        torch.testing.assert_close(svd_energy(weight, min(shape), moments), want, atol=1e-9, rtol=1e-6)


@pytest.mark.parametrize("smallest", [1e-3, 0.0, -1e-12])
def test_the_root_of_moments_is_triangular_even_where_rounding_made_them_indefinite(smallest: float) -> None:
    vectors = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64)).Q
    c_II = vectors @ torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.5, smallest], dtype=torch.float64)) @ vectors.t()
    root = _square_root(c_II)
    torch.testing.assert_close(root, root.tril())
    torch.testing.assert_close(root @ root.t(), c_II, atol=1e-9, rtol=1e-9)


def some_moments(shape: tuple[int, int], weighs: str) -> Moments:
    x, g = torch.randn(3 * shape[1], shape[1]).double(), torch.randn(3 * shape[0], shape[0]).double()
    rows = {"rows": {"rows_O": g.square().sum(0)}, "whole": {"outputs_OO": g.t() @ g}, "nothing": {}}
    return Moments(inputs_II=x.t() @ x / len(x), **rows[weighs])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weighs", ["nothing", "rows", "whole"])
def test_dropping_a_component_of_the_best_factors_adds_its_energy(shape: tuple[int, int], weighs: str) -> None:
    weight, moments = torch.randn(shape).double(), some_moments(shape, weighs)
    factors = svd(weight, moments=moments)
    torch.testing.assert_close(dropping_errors(factors, moments), factors.energy_R, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("weighs", ["nothing", "rows", "whole"])
@pytest.mark.parametrize("shape", [(7, 4), (4, 7)])
def test_factors_do_not_depend_on_how_many_rows_are_summed_at_a_time(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], weighs: str
) -> None:
    weight, moments = torch.randn(shape).double(), some_moments(shape, weighs)
    want = svd(weight, 3, moments)
    for name in ("WEIGHT_ROWS", "WHOLE_ROWS", "MOMENT_ROWS"):
        monkeypatch.setattr(factorize, name, 3)
    got = svd(weight, 3, moments)
    torch.testing.assert_close(got.energy_R, want.energy_R)
    torch.testing.assert_close(got.p_OR @ got.q_RI, want.p_OR @ want.q_RI)


@pytest.mark.parametrize("weighs", ["nothing", "rows", "whole"])
def test_dropping_a_component_of_any_factors_adds_the_error_of_its_outputs(weighs: str) -> None:
    """E[e^T G e] for the outputs e = p q x, by an average over the data themselves."""
    o, i, r = 5, 4, 3
    factors = Factors(torch.randn(o, r).double(), torch.randn(r, i).double(), torch.ones(r).double())
    x, moments = torch.randn(50, i).double(), some_moments((o, i), weighs)
    moments = replace(moments, inputs_II=x.t() @ x / len(x))
    metric = torch.eye(o).double() if moments.rows_O is None else moments.rows_O.diag()
    metric = metric if moments.outputs_OO is None else moments.outputs_OO
    errors_BRO = torch.einsum("or,ri,bi->bro", factors.p_OR, factors.q_RI, x)
    want = torch.einsum("bro,on,brn->r", errors_BRO, metric, errors_BRO) / len(x)
    torch.testing.assert_close(dropping_errors(factors, moments, damping=0.0), want, rtol=1e-9, atol=1e-12)
    nothing = replace(moments, inputs_II=torch.zeros(i, i))
    assert not dropping_errors(factors, nothing).any()
