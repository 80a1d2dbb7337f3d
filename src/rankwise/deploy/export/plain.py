"""A model in the form that engines can run: the same function, without what their graphs cannot say.

Shapes: B = any batch dimensions, I = inputs, O = outputs, K = kept, D = width, T = steps, N = inputs of a layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankwise.core.copies import copied
from rankwise.core.layers import GatedLayer
from rankwise.errors import CheckpointError
from rankwise.modules import LowRankHead, PivotLinear, SelectedLinear
from rankwise.swap import become

SIZES = ("in_features", "out_features", "num_embeddings", "embedding_dim", "padding_idx")
"""What layers of PyTorch tell of themselves, and those in their place do too."""


def plain(model: nn.Module) -> nn.Module:
    """A copy of `model` in evaluation mode that shares its weights, its layers exchanged where engines need it."""
    _check(model)
    memo: dict[int, object] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    made = copied(model, memo).eval()
    for module in list(made.modules()):
        instead = _instead(module)
        if instead is not None:
            sizes = {name: getattr(module, name) for name in SIZES if hasattr(module, name)}
            become(module, instead.eval())
            vars(module).update(sizes)
        if hasattr(getattr(module, "config", None), "use_cache"):
            # what one call leaves for the next is no tensor
            module.config.use_cache = False  # type: ignore[union-attr]
    return made.eval()


def _check(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, GatedLayer):
            raise CheckpointError(
                f"An exported model must be compact, but {name or 'the model'} is gated. "
                "Export what `pruner.compact()` returns."
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type != "cpu" or (tensor.is_floating_point() and tensor.dtype != torch.float32):
            raise CheckpointError(
                f"An exported model must be float32 on the CPU, but {name} is {tensor.dtype} on {tensor.device}. "
                "Call `model.float().cpu()` first."
            )


def _instead(module: nn.Module) -> nn.Module | None:
    """The module to take the place of one that engines cannot run, or run badly."""
    if isinstance(module, SelectedLinear):
        return _without_inputs(module.columns, module.bias) or IndexedLinear(module)
    if isinstance(module, LowRankHead):
        other = PivotHead(module) if isinstance(module.projection, PivotLinear) else None
        return _without_inputs(module.embedding.weight, module.bias) or other
    if isinstance(module, PivotLinear):
        return OrderedPivots(module)
    if isinstance(module, nn.Sequential) and len(module) == 2 and isinstance(module[1], nn.Linear | PivotLinear):
        words = isinstance(module[0], nn.Embedding)
        return _without_inputs(module[1].weight, module[1].bias, for_words=words)
    if callable(own := getattr(module, "for_export", None)):
        made: nn.Module = own()
        return made
    return None


def _without_inputs(weight_OK: Tensor, bias: Tensor | None, *, for_words: bool = False) -> nn.Module | None:
    """For a layer of rank 0: engines do not know products over nothing."""
    if weight_OK.shape[1]:
        return None
    value = weight_OK.new_zeros(weight_OK.shape[0]) if bias is None else bias.detach()
    return Constant(value, for_words=for_words)


class Constant(nn.Module):
    """A layer that gives the same vector for every input."""

    value_O: Tensor

    def __init__(self, value_O: Tensor, *, for_words: bool) -> None:
        super().__init__()
        self.for_words = for_words
        self.register_buffer("value_O", value_O)

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape if self.for_words else x.shape[:-1]
        return self.value_O.expand(*shape, len(self.value_O))


class IndexedLinear(nn.Module):
    """`SelectedLinear` with the places of its inputs in place of the mask."""

    index_K: Tensor

    def __init__(self, layer: SelectedLinear) -> None:
        super().__init__()
        self.weight, self.bias = layer.columns, layer.bias
        self.register_buffer("index_K", layer.kept.nonzero().flatten())

    def forward(self, x_BI: Tensor) -> Tensor:
        return F.linear(x_BI.index_select(-1, self.index_K), self.weight, self.bias)


class OrderedPivots(nn.Module):
    """`PivotLinear` in one form for any number of rows, whose shape no graph has to say."""

    places_O: Tensor

    def __init__(self, layer: PivotLinear) -> None:
        super().__init__()
        self.coefficients, self.bias = layer.coefficients, layer.bias
        self.register_buffer("places_O", layer.places.long())

    def forward(self, x_BK: Tensor) -> Tensor:
        # engines do not know products without outputs
        y_BO = torch.cat([x_BK, F.linear(x_BK, self.coefficients)], -1) if len(self.coefficients) else x_BK
        y_BO = y_BO.index_select(-1, self.places_O)
        return y_BO if self.bias is None else y_BO + self.bias


class PivotHead(nn.Module):
    """`LowRankHead` on a `PivotLinear`, whose matrix is not multiplied out: h W = h_chosen + h_others C."""

    order_D: Tensor
    """First the places of the chosen, then those of the others."""

    def __init__(self, head: LowRankHead) -> None:
        super().__init__()
        assert isinstance(head.projection, PivotLinear)
        self.coefficients, self.bias = head.projection.coefficients, head.bias
        self.embedding = head.embedding
        self.register_buffer("order_D", head.projection.places.argsort())

    def forward(self, h_BD: Tensor) -> Tensor:
        rest, rank = self.coefficients.shape
        h_BK, others = torch.split(h_BD.index_select(-1, self.order_D), [rank, rest], -1)
        h_BK = h_BK + others @ self.coefficients if rest else h_BK
        return F.linear(h_BK, self.embedding.weight, self.bias)
