"""int8 and bfloat16 on a CPU: copies of a model whose linear layers multiply in 8 or 16 bits.

int8 layers: `rankwise.kernels.int8`. Shapes: B = any batch dimensions, I = inputs, O = outputs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankwise.adapters import families
from rankwise.core.gates import FixedDtypeModule
from rankwise.errors import CheckpointError, RankwiseError
from rankwise.kernels.int8 import Int8Linear, can_multiply_bytes
from rankwise.lazy import lazy_weight
from rankwise.modules import LowRankHead, LowRankLinear, linear
from rankwise.swap import copied

TOKENS = 128
"""Tokens of a call, where nobody says how many."""
CALL_COST = {"int8": 9_000_000, "bfloat16": 3_500_000}
"""Multiplications that take as long as what a layer does beside them: rounding, scaling, and the call itself.

Measured on one core of an AMD EPYC (docs/log/speed-cpu.md).
"""


class BFloat16Linear(FixedDtypeModule):
    """A linear layer whose weight is bfloat16; its output has the dtype of its input. It has no gradient."""

    weight_OI: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.register_buffer("weight_OI", layer.weight.detach().bfloat16())
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().float())

    @property
    def weight(self) -> Tensor:
        """The rounded weight in float32, for code that reads it."""
        like = self.weight_OI.new_empty(0, dtype=torch.float32)
        return lazy_weight(self.weight_OI.float, self.weight_OI.shape, like)

    @torch.no_grad()
    def forward(self, x_BI: Tensor) -> Tensor:
        y_BO = F.linear(x_BI.bfloat16(), self.weight_OI).to(x_BI.dtype)
        return y_BO if self.bias is None else y_BO.add_(self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def bfloat16(model: nn.Module, *, tokens: int = TOKENS) -> nn.Module:
    """A copy of `model` for inference on a CPU whose linear layers multiply in bfloat16; otherwise like `int8`."""
    if not can_multiply_bfloat16():
        _warn("bfloat16 (AVX512_BF16)")
    return _multiplying(model, "bfloat16", BFloat16Linear, tokens)


def int8(model: nn.Module, *, tokens: int = TOKENS) -> nn.Module:
    """A copy of `model` for inference on a CPU whose linear layers multiply in int8; `model` stays as it is.

    A low-rank pair is two calls. Where these would take longer than one product with the whole matrix, for `tokens`
    tokens at a time, the pair is multiplied out and rounded as one layer: at a quarter of the bytes of float32 it is
    rarely larger than the pair was.

    Embeddings, norms and recurrences keep their precision. An output layer that is tied to an embedding gets rounded
    weights of its own; the embedding stays as it is. Attention of rankwise's own models runs in bfloat16 where the
    processor multiplies it faster. The copy is made in milliseconds, and `rankwise.save` refuses it: save the model,
    and quantize what was loaded.
    """
    if not can_multiply_bytes():
        _warn("int8 (VNNI)")
    return _multiplying(model, "int8", Int8Linear, tokens)


def check_unrounded(model: nn.Module) -> None:
    """Refuse to save a copy that `int8` or `bfloat16` made: no skeleton has such layers."""
    for name, module in model.named_modules():
        if isinstance(module, Int8Linear | BFloat16Linear):
            raise CheckpointError(
                f"A saved model must hold its weights unrounded, but {name or 'the model'} is {type(module).__name__}. "
                "Save the model that it was made from, and quantize what is loaded."
            )


def _warn(what: str) -> None:
    warnings.warn(
        f"This processor has no instructions for {what}, or torch no oneDNN to use them: such a model is smaller here, "
        "but not faster.",
        RuntimeWarning,
        stacklevel=3,
    )


def _multiplying(model: nn.Module, what: str, make: Callable[[nn.Linear], nn.Module], tokens: int) -> nn.Module:
    """A copy of `model` whose linear layers are replaced by `make`, but for those whose weight others read."""
    for name, parameter in model.named_parameters():
        if parameter.device.type != "cpu":
            raise RankwiseError(
                f"{what} needs a model on the CPU, but {name} is on {parameter.device} instead. Move it: model.cpu()."
            )
    modules = list(model.modules())
    heads = {m: _pair_of_head(m) for m in modules if isinstance(m, LowRankHead) and m.embedding.weight.numel()}
    pairs = {m: m for m in modules if isinstance(m, LowRankLinear)} | heads
    whole = {m: _multiplied_out(pair) for m, pair in pairs.items() if not _pays(pair, CALL_COST[what], tokens)}
    # these multiply by the weights of their layers, and do not call them
    readers = [module for module in modules if isinstance(module, LowRankHead | nn.RNNBase)]
    read = {part for module in (*readers, *whole) for part in module.children()}
    layers = [m for m in modules if type(m) is nn.Linear and m.weight.numel() and m not in read]
    if not layers and not whole and not heads:
        raise RankwiseError(
            f"{what} needs a model with linear layers, but {type(model).__name__} has none that can be replaced."
        )
    instead: dict[nn.Module, nn.Module] = {
        own: make(layer) for own, layer in (*zip(layers, layers, strict=True), *whole.items())
    }
    for head, pair in heads.items():
        if head not in whole:
            instead[head] = LowRankLinear(*map(make, pair.factors))  # type: ignore[arg-type]
    quantized = copied(model, instead=instead)
    if can_multiply_bfloat16():
        for module in quantized.modules():
            if hasattr(module, "inference_dtype"):
                module.inference_dtype = torch.bfloat16  # type: ignore[assignment]
    families.changed(quantized)
    return quantized.eval()


def _pair_of_head(head: LowRankHead) -> LowRankLinear:
    """The two products of a tied head as layers that can be called."""
    first = nn.Parameter(head.projection.weight.detach().t(), requires_grad=False)
    return LowRankLinear(linear(first, None), linear(head.embedding.weight, head.bias))  # type: ignore[arg-type]


def _pays(pair: LowRankLinear, call_cost: int, tokens: int) -> bool:
    """Whether the two factors are faster than the whole matrix: what they save must be worth a second call."""
    first, second = pair
    if type(first) is not nn.Linear or type(second) is not nn.Linear or not first.weight.numel():
        return True
    saved = pair.in_features * pair.out_features - first.weight.numel() - second.weight.numel()
    return tokens * saved >= call_cost


def _multiplied_out(pair: LowRankLinear) -> nn.Linear:
    with torch.device("meta"):
        layer = nn.Linear(pair.in_features, pair.out_features, bias=False)
    layer.weight = nn.Parameter((pair.weight + 0).detach(), requires_grad=False)
    layer.bias = pair.bias  # type: ignore[assignment]
    return layer


def can_multiply_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 faster than float32."""
    return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)())
