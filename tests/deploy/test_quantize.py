"""int8: close to the layer it stands for, each token by itself, the original untouched."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rankwise as rw
from rankwise.deploy import quantize
from rankwise.deploy.quantize import BFloat16Linear, bfloat16, int8
from rankwise.kernels import int8 as int8_layer
from rankwise.kernels.int8 import Int8Linear
from rankwise.lab.models.sru import SRUConfig, SRULanguageModel
from rankwise.lab.models.stream import open_stream
from rankwise.lab.models.transformer_xl import TransformerXL, TransformerXLConfig
from rankwise.modules import LowRankEmbedding, LowRankHead, PivotLinear

pytestmark = pytest.mark.filterwarnings("ignore:This processor has no instructions")


def sru() -> nn.Module:
    return SRULanguageModel(SRUConfig(num_words=11, embedding_width=8, width=12, num_layers=2, rank=5)).eval()


def transformer_xl() -> nn.Module:
    sizes = {"width": 12, "num_heads": 2, "head_width": 6, "inner": 20, "num_layers": 2, "memory_length": 5}
    return TransformerXL(TransformerXLConfig(num_words=11, **sizes)).eval()


def rounded(x_NI: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers from -127 to 127 and the scale of each row, in float64."""
    scale_N1 = x_NI.double().abs().amax(-1, keepdim=True) / 127
    return (x_NI.double() / scale_N1).round(), scale_N1


@pytest.mark.parametrize("fast", [True, False])
@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 40), inputs=st.integers(1, 300), outputs=st.integers(1, 70), bias=st.booleans(),
    size=st.sampled_from([1e-3, 1.0, 1e4]), transposed=st.booleans(),
)  # fmt: skip
def test_a_layer_multiplies_rounded_inputs_by_rounded_weights(
    fast: bool, rows: int, inputs: int, outputs: int, bias: bool, size: float, transposed: bool
) -> None:
    if fast and not int8_layer.can_multiply_bytes():
        pytest.skip("this processor has no instructions for int8")
    layer = nn.Linear(inputs, outputs, bias=bias)
    if transposed:
        layer.weight = nn.Parameter(torch.randn(inputs, outputs).t())
    x_NI = size * torch.randn(rows, inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(int8_layer, "can_multiply_bytes", lambda: fast)
        got_NO = Int8Linear(layer)(x_NI)
    (x, x_scale), (w, w_scale) = rounded(x_NI), rounded(layer.weight.detach())
    want_NO = x @ w.t() * x_scale * w_scale.t() + (layer.bias.detach().double() if bias else 0)
    # a number that lies half-way may be rounded to either side
    slack = float(((w.abs().amax() * w_scale.amax()) * x_scale.amax()) * 2)
    torch.testing.assert_close(got_NO.double(), want_NO, rtol=1e-5, atol=slack)


def test_rounding_costs_about_a_percent() -> None:
    torch.manual_seed(0)
    layer, x_NI = nn.Linear(300, 200), torch.randn(64, 300)
    want_NO = layer(x_NI).detach()
    error = (Int8Linear(layer)(x_NI) - want_NO).norm() / want_NO.norm()
    assert 1e-4 < error < 0.02


def test_zeros_stay_zeros_and_shapes_and_dtypes_stay() -> None:
    layer = nn.Linear(6, 3, bias=False)
    assert torch.equal(Int8Linear(layer)(torch.zeros(2, 4, 6)), torch.zeros(2, 4, 3))
    assert Int8Linear(layer)(torch.randn(2, 0, 6)).shape == (2, 0, 3)
    assert Int8Linear(layer)(torch.randn(5, 6, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("make", [sru, transformer_xl])
def test_tokens_are_rounded_by_themselves(make: object) -> None:
    torch.manual_seed(0)
    model = int8(make())  # type: ignore[operator]
    tokens_BT = torch.randint(0, 11, (2, 9))
    with torch.inference_mode():
        together_BTV = model(tokens_BT)[0]
        alone_BTV = torch.cat([model(row_BT)[0] for row_BT in tokens_BT.split(1)])
    torch.testing.assert_close(together_BTV, alone_BTV, rtol=0.02, atol=0.02)
    stream = open_stream(model)
    streamed_BTV = torch.cat([stream.feed(column_BT) for column_BT in tokens_BT.split(1, dim=1)], 1)
    # the first tokens, before memory runs full
    torch.testing.assert_close(streamed_BTV[:, :5], together_BTV[:, :5], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("make", [sru, transformer_xl])
def test_the_original_stays_as_it_is(make: object) -> None:
    model: nn.Module = make()  # type: ignore[operator]
    before = copy.deepcopy(model.state_dict())
    small = int8(model)
    assert not any(type(module) is nn.Linear for module in small.modules())
    assert any(type(module) is nn.Linear for module in model.modules())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    tokens_BT = torch.randint(0, 11, (1, 6))
    with torch.inference_mode():
        want_BTV, got_BTV = model(tokens_BT)[0], small(tokens_BT)[0]
    assert (got_BTV - want_BTV).norm() < 0.05 * want_BTV.norm()
    assert not torch.equal(got_BTV, want_BTV)


def test_a_layer_that_is_used_twice_stays_one() -> None:
    layer = nn.Linear(4, 4)
    small = int8(nn.Sequential(layer, nn.ReLU(), layer))
    assert isinstance(small, nn.Sequential)
    assert small[0] is small[2]
    alone = int8(layer)
    assert isinstance(alone, Int8Linear)


@pytest.mark.parametrize("make", [int8, bfloat16])
@pytest.mark.parametrize("tokens", [1, 10**6])
@pytest.mark.parametrize("pivot", [False, True], ids=["pair", "pivot"])
def test_a_tied_head_of_low_rank_is_rounded_and_its_embedding_is_not(
    make: Callable[..., nn.Module], tokens: int, pivot: bool
) -> None:
    """With few tokens it is one product, with many it is two; words are looked up as before."""
    torch.manual_seed(0)
    projection = (
        PivotLinear(nn.Parameter(torch.randn(12, 20)), torch.randperm(32)) if pivot else nn.Linear(20, 32, False)
    )
    table = LowRankEmbedding(nn.Embedding(70, 20), projection)
    head = LowRankHead(*table.factors, nn.Parameter(torch.randn(70)))
    small = make(nn.ModuleList([table, head]), tokens=tokens)
    assert not any(type(module) in (nn.Linear, LowRankHead) for module in small.modules())
    assert sum(isinstance(module, Int8Linear | BFloat16Linear) for module in small[1].modules()) == 1 + (tokens > 1)
    assert torch.equal(small[0][0].weight, table[0].weight)
    h_BD = torch.randn(5, 32)
    want_BN = head(h_BD).detach()
    assert 0 < float((small[1](h_BD) - want_BN).norm() / want_BN.norm()) < 0.03


def test_code_that_asks_for_a_dtype_gets_that_of_the_activations() -> None:
    assert int8(nn.Linear(4, 4)).weight.dtype == torch.float32


MAKERS = pytest.mark.parametrize("make", [int8, bfloat16])


@MAKERS
def test_a_model_that_was_called_can_be_copied_and_pickled(make: Callable[[nn.Module], nn.Module]) -> None:
    small, x_NI = make(nn.Linear(8, 5)), torch.randn(3, 8)
    want_NO = small(x_NI)
    for again in (copy.deepcopy(small), pickle.loads(pickle.dumps(small))):
        assert torch.equal(again(x_NI), want_NO)


@MAKERS
def test_weights_that_are_loaded_after_a_call_are_used(make: Callable[[nn.Module], nn.Module]) -> None:
    small, other, x_NI = make(nn.Linear(8, 5)), make(nn.Linear(8, 5)), torch.randn(3, 8)
    small(x_NI)
    small.load_state_dict(other.state_dict())
    assert torch.equal(small(x_NI), other(x_NI))


@MAKERS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_model_that_is_cast_multiplies_as_before(make: Callable[[nn.Module], nn.Module], dtype: torch.dtype) -> None:
    small, x_NI = make(nn.Linear(8, 5)), torch.randn(3, 8).to(dtype)
    want_NO = small(x_NI)
    assert want_NO.dtype == dtype
    assert torch.equal(small.to(dtype)(x_NI), want_NO)
    assert torch.equal(small.float()(x_NI), want_NO)


@MAKERS
def test_a_rounded_model_is_not_saved(make: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    with pytest.raises(rw.CheckpointError, match="but 0 is .*Linear. Save the model that it was made from"):
        rw.save(make(nn.Sequential(nn.Linear(8, 5))), tmp_path / "small")
    assert not (tmp_path / "small").exists()


def test_a_model_elsewhere_or_without_layers_is_refused() -> None:
    with pytest.raises(rw.RankwiseError, match="needs a model on the CPU, but weight is on meta instead"):
        int8(nn.Linear(2, 2, device="meta"))
    with pytest.raises(rw.RankwiseError, match="needs a model with linear layers, but ReLU has none that can be"):
        int8(nn.ReLU())


def test_a_processor_without_the_instructions_gets_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "can_multiply_bytes", lambda: False)
    with pytest.warns(RuntimeWarning, match="smaller here, but not faster"):
        int8(nn.Linear(2, 2))


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_a_bfloat16_layer_multiplies_rounded_inputs_by_rounded_weights(bias: bool) -> None:
    layer = nn.Linear(70, 33, bias=bias)
    x_NI = torch.randn(20, 70)
    want_NO = x_NI.bfloat16().double() @ layer.weight.detach().bfloat16().double().t()
    # the sum itself is rounded to eight bits; the bias is added after that
    got_NO = BFloat16Linear(layer)(x_NI).double() - (layer.bias.detach().double() if bias else 0)
    torch.testing.assert_close(got_NO, want_NO, rtol=2**-8, atol=1e-2)


@pytest.mark.parametrize("make", [sru, transformer_xl])
def test_a_bfloat16_model_is_close_and_the_original_untouched(make: Callable[[], nn.Module]) -> None:
    model = make()
    before = copy.deepcopy(model.state_dict())
    tokens = torch.randint(11, (2, 9))
    small = bfloat16(model)
    with torch.inference_mode():
        want, got = model(tokens)[0], small(tokens)[0]
    assert (got - want).norm() < 0.05 * want.norm()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    linear = [module for module in small.modules() if type(module) is nn.Linear]
    assert not linear


@pytest.mark.parametrize("make, layer", [(int8, Int8Linear), (bfloat16, BFloat16Linear)], ids=["int8", "bfloat16"])
def test_a_pair_is_two_calls_only_where_they_save_more_than_a_call_takes(
    make: Callable[..., nn.Module], layer: type[nn.Module]
) -> None:
    """With few tokens the second call is not worth it; both forms compute the same, up to rounding."""
    torch.manual_seed(0)
    small = rw.compress(nn.Sequential(nn.Linear(96, 128), nn.Tanh(), nn.Linear(128, 64)), rw.Budget(removed=0.6))
    x = torch.randn(50, 96)
    few, many = make(small, tokens=1), make(small, tokens=10**6)
    numbers = [sum(isinstance(module, layer) for module in model.modules()) for model in (few, many)]
    assert numbers == [2, 4]
    want = small(x).detach()
    for model in (few, many):
        assert float((model(x) - want).norm() / want.norm()) < 0.03
