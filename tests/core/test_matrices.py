"""Gated matrices: `linear` and `rows` against the matrix multiplied out, forward and every gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankwise.core.exports import LowRankExport
from rankwise.core.gates import Gate, HardConcreteGate, MagnitudeGate, Mask
from rankwise.core.layers import GatedEmbedding, GatedLinear
from rankwise.core.matrices import FactorizedMatrix, GatedMatrix, InputGatedMatrix, MaskedMatrix
from rankwise.kernels.linear import pair_linear
from rankwise.modules import pair_of

OUT, IN, RANK = 7, 5, 4
MATRICES = ["factorized", "input-gated", "masked"]
GATES = ["hard-concrete", "magnitude"]


def make(matrix: str, gate: str, *, selected: bool) -> GatedMatrix:
    """A matrix in double precision behind a gate of which some components are closed."""
    num = {"factorized": RANK, "input-gated": IN, "masked": OUT * IN}[matrix]
    made: Gate = HardConcreteGate(num) if gate == "hard-concrete" else MagnitudeGate(num, learned=True)
    z = torch.rand(num, dtype=torch.float64)
    z[::2] = 0
    made.z = z.requires_grad_()
    made.active = z.nonzero().flatten() if selected else None

    def parameter(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(*shape, dtype=torch.float64))

    match matrix:
        case "factorized":
            return FactorizedMatrix(parameter(OUT, RANK), parameter(RANK, IN), made)
        case "input-gated":
            return InputGatedMatrix(parameter(OUT, IN), made)
        case _:
            return MaskedMatrix(parameter(OUT, IN), made)


def gradients(output: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    weights = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad((output * weights).sum(), list(inputs.values()), allow_unused=True)
    return dict(zip(inputs, grads, strict=True))


def assert_same(fast: Tensor, plain: Tensor, matrix: GatedMatrix, inputs: dict[str, Tensor]) -> None:
    """Equal outputs and gradients; a closed gate has no gradient of its own, since z does not move there."""
    torch.testing.assert_close(fast, plain)
    inputs = {**inputs, **dict(matrix.named_parameters()), "z": matrix.gate.z}
    ours, truth = gradients(fast, inputs), gradients(plain, inputs)
    truth["z"] = torch.where(matrix.gate.z > 0, truth["z"], 0)
    ours["z"] = torch.where(matrix.gate.z > 0, ours["z"], 0)
    for name in inputs:
        torch.testing.assert_close(ours[name], truth[name], msg=lambda text, name=name: f"d{name}: {text}")


@pytest.mark.parametrize("selected", [False, True])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("matrix", MATRICES)
def test_linear_is_the_matrix_multiplied_out(matrix: str, gate: str, selected: bool) -> None:
    gated = make(matrix, gate, selected=selected)
    x = torch.randn(3, 2, IN, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(OUT, dtype=torch.float64, requires_grad=True)
    plain = x @ gated.weight().t() + bias
    assert_same(gated.linear(x, bias), plain, gated, {"x": x, "bias": bias})


@pytest.mark.parametrize("second", ["masked", "plain"])
def test_two_matrices_in_a_row_are_a_pair_where_neither_is_cut_smaller(second: str) -> None:
    first = GatedLinear(make("masked", "magnitude", selected=False), None)
    other = nn.Linear(OUT, IN, bias=False, dtype=torch.float64)
    if second == "masked":
        other = GatedLinear(MaskedMatrix(other.weight, MagnitudeGate(OUT * IN, learned=False)), None)
        other.matrix.gate.kept[::3] = False
    x = torch.randn(3, IN, dtype=torch.float64, requires_grad=True)
    pair = pair_of(nn.Sequential(first, other))
    assert pair is not None
    assert_same(pair_linear(x, pair, None), other(first(x)), first.matrix, {"x": x, **dict(other.named_parameters())})


@pytest.mark.parametrize("matrix", ["factorized", "input-gated"])
def test_two_in_a_row_are_no_pair_where_one_has_components_to_leave_out_or_a_bias(matrix: str) -> None:
    small, bias = make(matrix, "magnitude", selected=True), nn.Parameter(torch.zeros(OUT, dtype=torch.float64))
    plain = nn.Linear(OUT, IN, bias=False)
    assert pair_of(nn.Sequential(GatedLinear(small, None), plain)) is None
    masked = make("masked", "magnitude", selected=False)
    assert pair_of(nn.Sequential(GatedLinear(masked, bias), plain)) is None
    assert pair_of(nn.Sequential(plain)) is None


@pytest.mark.parametrize("selected", [False, True])
@pytest.mark.parametrize("matrix", ["factorized", "masked"])
def test_rows_are_the_rows_of_the_matrix(matrix: str, selected: bool) -> None:
    gated = make(matrix, "hard-concrete", selected=selected)
    index = torch.tensor([[0, 3], [6, 3]])
    assert_same(gated.rows(index, None), F.embedding(index, gated.weight()), gated, {})


@pytest.mark.parametrize("matrix", MATRICES)
def test_gated_layers_pass_gradcheck(matrix: str) -> None:
    gated = make(matrix, "hard-concrete", selected=False)
    with torch.no_grad():
        gated.gate.z.clamp_(min=0.1)
    x = torch.randn(2, IN, dtype=torch.float64, requires_grad=True)
    inputs = (x, gated.gate.z, *gated.parameters())
    assert torch.autograd.gradcheck(lambda x, *_: gated.linear(x, None), inputs)


@pytest.mark.parametrize("matrix", MATRICES)
def test_an_export_of_what_is_open_computes_the_same(matrix: str) -> None:
    gated = make(matrix, "hard-concrete", selected=True)
    x = torch.randn(3, IN, dtype=torch.float64)
    bias = nn.Parameter(torch.randn(OUT, dtype=torch.float64))
    plain = gated.export(gated.gate.z.nonzero().flatten(), gated.gate.z.detach()).as_linear(bias)
    torch.testing.assert_close(plain(x), gated.linear(x, bias))


def test_input_gating_is_the_special_case_p_is_w_and_q_is_one() -> None:
    gated = make("input-gated", "hard-concrete", selected=False)
    weight = next(gated.parameters())
    same = FactorizedMatrix(weight, nn.Parameter(torch.eye(IN, dtype=torch.float64)), gated.gate)
    torch.testing.assert_close(gated.weight(), same.weight())


def test_magnitudes_are_the_norms_of_components() -> None:
    for kind in MATRICES:
        gated = make(kind, "hard-concrete", selected=False)
        norms = []
        for k in range(gated.gate.num_components):
            with torch.no_grad():
                gated.gate.z.zero_()[k] = 1
            norms.append(gated.weight().norm())
        torch.testing.assert_close(gated.magnitudes().double(), torch.stack(norms).detach(), rtol=1e-5, atol=1e-6)


def test_a_layer_is_factored_only_where_that_is_smaller() -> None:
    gated = make("factorized", "hard-concrete", selected=False)
    for k in range(RANK + 1):
        export = gated.export(torch.arange(k), None)
        assert isinstance(export, LowRankExport) == (k * (OUT + IN) < OUT * IN)
        assert sum(p.numel() for p in export.as_linear(None).parameters()) == gated.cost_curve(k)


def test_tied_exports_share_their_parameters() -> None:
    gated = make("factorized", "hard-concrete", selected=False)
    for kept in (torch.arange(2), torch.arange(RANK)):
        export = gated.export(kept, None)
        words, head = export.as_embedding(None), export.as_linear(None)
        assert {id(p) for p in head.parameters()} == {id(p) for p in words.parameters()}
        index = torch.arange(OUT)
        h = torch.randn(3, IN, dtype=torch.float64)
        torch.testing.assert_close(head(h), h @ words(index).t())


def test_padding_rows_get_no_gradient() -> None:
    gated = make("factorized", "hard-concrete", selected=False)
    layer = GatedEmbedding(gated, padding_idx=3)
    layer(torch.tensor([3, 3, 1])).sum().backward()
    assert (gated.p.grad[3] == 0).all()
    assert (gated.p.grad[1] != 0).any()


def test_rank_zero_gives_the_bias_alone() -> None:
    gated = make("factorized", "hard-concrete", selected=False)
    with torch.no_grad():
        gated.gate.z.zero_()
    gated.gate.active = torch.tensor([], dtype=torch.long)
    bias = nn.Parameter(torch.randn(OUT, dtype=torch.float64))
    x = torch.randn(3, IN, dtype=torch.float64)
    for layer in (GatedLinear(gated, bias), gated.export(gated.gate.active, None).as_linear(bias)):
        torch.testing.assert_close(layer(x), bias.expand(3, OUT))


def test_autocast_reaches_both_products() -> None:
    matrix = FactorizedMatrix(
        nn.Parameter(torch.randn(OUT, RANK)), nn.Parameter(torch.randn(RANK, IN)), HardConcreteGate(RANK)
    )
    with torch.autocast("cpu", torch.bfloat16):
        out = GatedLinear(matrix, None)(torch.randn(2, IN))
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert matrix.gate.z.grad.dtype == torch.float32


def test_an_open_gate_is_not_multiplied_at_all() -> None:
    assert Gate(3)() == Mask(None, None)
