"""The Triton kernels of Transformer-XL against plain PyTorch: forward and every gradient, at odd shapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rankwise.kernels import linear
from rankwise.lab.kernels import layers
from rankwise.lab.kernels.relative_attention import reference
from rankwise.lab.models import transformer_xl as models
from rankwise.lab.models.transformer_xl import TransformerXL, TransformerXLConfig
from rankwise.modules import Pair
from tests.lab.kernels.triton_cases import (
    BF16,
    DEVICE,
    GPU,
    assert_same,
    by_interpreter,
    kernels,
    outputs_and_gradients,
    poison,  # noqa: F401
    run_by_interpreter,
    some,
)

pytestmark = pytest.mark.usefixtures("poison")

# batch, queries, memory, heads, width of a head, window
ATTENTION = [(2, 5, 3, 2, 16, None), (1, 70, 0, 2, 16, None), (2, 33, 65, 1, 32, None), (1, 130, 20, 1, 16, 9)]
ATTENTION += [(2, 1, 9, 1, 16, None), (1, 1, 0, 1, 16, None)]
if GPU:
    ATTENTION += [(3, 200, 300, 4, 64, None), (2, 512, 512, 8, 64, None), (2, 130, 64, 2, 128, 50)]


@by_interpreter
def test_the_kernels_by_the_interpreter() -> None:
    run_by_interpreter(__file__)


@kernels
@pytest.mark.parametrize("shape", ATTENTION, ids=str)
# the interpreter cannot multiply blocks of bfloat16
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if GPU else [torch.float32], ids=str)
def test_attention_and_every_gradient_are_those_of_the_reference(
    shape: tuple[int, int, int, int, int, int | None], dtype: torch.dtype
) -> None:
    from rankwise.lab.kernels.relative_attention import triton

    batch, queries, memory, heads, width, window = shape
    keys = queries + memory
    sizes = [(batch, keys, 3, heads, width), (keys, heads, width), (heads, width), (heads, width)]
    inputs = [some(*size, dtype=dtype) for size in sizes]
    got = outputs_and_gradients(lambda *a: triton.relative_attention(*a, queries, window), inputs)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    want = outputs_and_gradients(lambda *a: reference.relative_attention(*a, queries, window), exact)
    if keys == 1:
        # one key has all the weight, whatever its score
        got["d1"], got["d2"], got["d3"] = (got[name] + 1 for name in ("d1", "d2", "d3"))
        want["d1"], want["d2"], want["d3"] = (want[name] + 1 for name in ("d1", "d2", "d3"))
    want = {name: tensor.to(got[name].dtype) for name, tensor in want.items()}
    assert_same(got, want, 1e-5 if dtype == torch.float32 else 3 * BF16)


@pytest.mark.skipif(not GPU, reason="half precision of a GPU")
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("rate", [0.0, 0.25])
def test_a_compiled_norm_of_a_sum_is_that_of_torch(rate: float) -> None:
    """Where the addend is dropped, no gradient passes."""
    module, dropout = nn.LayerNorm(64, device=DEVICE), nn.Dropout(rate)
    x, addend = some(70, 64), some(70, 64)
    with torch.autocast("cuda", torch.bfloat16):
        got = outputs_and_gradients(lambda x, y: layers.norm_of_sum(module, x, y, dropout), [x, addend])
    dropped = got["d1"] == 0
    assert abs(float(dropped.float().mean()) - rate) < 0.06

    def plain(x: Tensor, addend: Tensor) -> Tensor:
        return module(x + addend * ~dropped / (1 - rate)).bfloat16()

    assert_same(got, outputs_and_gradients(plain, [x, addend]), BF16)


@pytest.mark.skipif(not GPU, reason="half precision of a GPU")
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
# torch's compiler looks at it itself, and hides the warning from its log alone
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_norm_and_loss_are_those_of_torch() -> None:
    module, targets = nn.LayerNorm(205, device=DEVICE), torch.randint(-1, 205, (70,), device=DEVICE)
    x = some(70, 205)

    def run(norm: Callable[..., Tensor], loss: Callable[..., Tensor]) -> dict[str, Tensor]:
        return outputs_and_gradients(lambda x: loss(norm(x).bfloat16()), [x])

    with torch.autocast("cuda", torch.bfloat16):
        got = run(lambda x: layers.norm(module, x), lambda y: layers.cross_entropy(y, targets, -1))
        want = run(module, lambda y: nn.functional.cross_entropy(y.float(), targets, ignore_index=-1))
    assert_same(got, want, BF16)


@kernels
@pytest.mark.parametrize("size", [(1,), (7, 33), (3000,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_relu_is_that_of_torch(size: tuple[int, ...], dtype: torch.dtype) -> None:
    from rankwise.lab.kernels.dropout import relu_dropout

    x = some(*size, dtype=dtype)
    got = outputs_and_gradients(lambda x: relu_dropout(x, 0.0), [x])
    assert_same(got, outputs_and_gradients(nn.functional.relu, [x]), 0)


@kernels
def test_relu_drops_its_share_and_no_gradient_passes_there() -> None:
    from rankwise.lab.kernels.dropout import relu_dropout

    x = some(100, 40)
    torch.manual_seed(0)
    got = outputs_and_gradients(lambda x: relu_dropout(x, 0.25), [x])
    kept = got["out0"] != 0
    assert abs(float(kept[x > 0].float().mean()) - 0.75) < 0.06
    want = outputs_and_gradients(lambda x: nn.functional.relu(x) * kept / 0.75, [x])
    assert_same(got, want, 1e-6)


@kernels
@pytest.mark.parametrize("shape", [(1, 1), (3, 130), (70, 5), (2500, 260)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_of_columns(shape: tuple[int, int], dtype: torch.dtype) -> None:
    from rankwise.kernels.linear_kernels import column_sums

    x = torch.randn(shape).to(DEVICE, dtype)
    torch.testing.assert_close(column_sums(x).double(), x.double().sum(0), rtol=1e-4, atol=1e-4)


@kernels
@pytest.mark.parametrize("shape", [(1, 1, 1), (4, 3, 33), (2, 130, 70)], ids=str)
def test_sums_of_columns_of_several_matrices(shape: tuple[int, int, int]) -> None:
    from rankwise.kernels.linear_kernels import stack_sums

    x = torch.randn(shape).to(DEVICE)
    torch.testing.assert_close(stack_sums(x).double(), x.double().sum(1), rtol=1e-4, atol=1e-4)


@kernels
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("gated", [False, True], ids=["", "z"])
@pytest.mark.parametrize("sizes", [(5, 7, 9, 3), (40, 24, 16, 8), (3, 1100, 30, 1)], ids=str)
def test_a_pair_and_every_gradient_are_those_of_the_reference(
    sizes: tuple[int, int, int, int], gated: bool, has_bias: bool
) -> None:
    from rankwise.kernels import linear

    rows, inputs, outputs, kept = sizes
    rank = 12
    active = torch.randperm(rank)[:kept].sort().values.to(DEVICE)
    tensors = [some(2, rows, inputs), some(rank, inputs), some(outputs, rank)]
    tensors += [some(rank) if gated else None, some(outputs) if has_bias else None]

    def fused(x: Tensor, q: Tensor, p: Tensor, z: Tensor | None, bias: Tensor | None) -> Tensor:
        return linear._PairLinear.apply(x, q, p, z, active, bias, torch.float32)

    def plain(x: Tensor, q: Tensor, p: Tensor, z: Tensor | None, bias: Tensor | None) -> Tensor:
        return linear.pair_reference(x, Pair(q, p, z, active), bias)

    assert_same(outputs_and_gradients(fused, tensors), outputs_and_gradients(plain, tensors), 1e-5)


@pytest.mark.skipif(not GPU, reason="half precision of a GPU")
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("inputs, outputs", [(64, 48), (205, 33), (16, 205)])
def test_a_linear_layer_in_half_precision_is_that_of_torch(inputs: int, outputs: int, has_bias: bool) -> None:
    tensors = [some(3, 20, inputs), some(outputs, inputs), some(outputs) if has_bias else None]
    with torch.autocast("cuda", torch.bfloat16):
        got = outputs_and_gradients(linear.linear, tensors)
    want = outputs_and_gradients(nn.functional.linear, tensors)
    assert_same(got, {name: tensor.to(got[name].dtype) for name, tensor in want.items()}, BF16)


@pytest.mark.skipif(not GPU, reason="half precision of a GPU")
@pytest.mark.parametrize("words, width", [(204, 512), (205, 205), (3, 1)])
def test_a_look_up_in_half_precision_is_that_of_torch(words: int, width: int) -> None:
    table = nn.Embedding(words, width, device=DEVICE)
    index = torch.randint(words, (4, 300), device=DEVICE)

    def run(look_up: Callable[[], Tensor]) -> dict[str, Tensor]:
        return outputs_and_gradients(lambda weight: look_up(), [table.weight])

    with torch.autocast("cuda", torch.bfloat16):
        got = run(lambda: layers.look_up(table, index))
    assert_same(got, run(lambda: table(index)), BF16)


@kernels
@pytest.mark.parametrize("pre_norm", [False, True], ids=["", "pre-norm"])
@pytest.mark.parametrize("same_length", [False, True], ids=["", "same length"])
def test_a_fused_model_gives_what_the_plain_one_gives(
    pre_norm: bool, same_length: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TransformerXLConfig(
        num_words=13, width=32, num_heads=2, head_width=16, inner=24, num_layers=2, memory_length=6, dropout=0.0,
        pre_norm=pre_norm, same_length=same_length,
    )  # fmt: skip
    model = TransformerXL(config).to(DEVICE)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.2)
    tokens = torch.randint(13, (2, 10), device=DEVICE)
    found = []
    for fused in (True, False):
        monkeypatch.setattr(models, "can_fuse", lambda x, fused=fused: fused)
        # outside autocast the interpreter knows the kernels in float32
        monkeypatch.setattr(models.RelativeAttention, "_can_fuse", lambda self, qkv, fused=fused: fused)
        _, memory = model(tokens[:, :4])
        logits, memory = model(tokens[:, 4:], memory)
        logits.square().mean().backward()
        results = {"logits": logits, **{f"memory {i}": m for i, m in enumerate(memory)}}
        for name, parameter in model.named_parameters():
            results[name], parameter.grad = parameter.grad, None
        found.append(results)
    assert_same(*found, 1e-5)
