"""What vLLM asks of a layer's method: to create its weights, to finish them after loading, and to compute with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from rankwise.deploy.structure import Head, Layer, Linear, LowRankEmbedding, PivotEmbedding
from rankwise.errors import CheckpointError
from rankwise.serve.grouped import Second, fused_group, grouped_pair
from rankwise.serve.weights import (
    AGAIN,
    GroupedWeights,
    Missing,
    Part,
    SecondFactor,
    Span,
    WordWeights,
    receiver,
)

PIVOT_RANK = 768
"""Below this rank a CPU takes longer to put the outputs of pivots in order than to multiply by a plain factor."""


class Product(nn.Module):
    """x W^T as vLLM computes it in its own dense layers; on a CPU, W is packed for that."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.method = UnquantizedLinearMethod()
        self.method.process_weights_after_loading(self)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.method.apply(self, x)
        return y


class Products(nn.Module):
    """`grouped_pair` by the products of vLLM."""

    def __init__(self, q_RI: Tensor, factors: Sequence[SecondFactor]) -> None:
        super().__init__()
        self.first = Product(q_RI)
        self.parts = [as_product(factor) for factor in factors]

    def forward(self, x: Tensor) -> Tensor:
        return grouped_pair(x, self.first, self.parts)


def as_product(factor: SecondFactor) -> Second:
    if factor.weight is None:
        return factor.value
    if factor.places is None or factor.rows < PIVOT_RANK:
        return Second(factor.rows, Product(factor.matrix))
    return Second(factor.rows, Product(factor.weight), factor.places.detach())


class LowRankLinearMethod(LinearMethodBase):
    """A layer of vLLM whose parts are low-rank or dense, each in its own form."""

    def __init__(self, parts: list[tuple[str, Linear | None]], missing: Missing) -> None:
        self.parts, self.missing = parts, missing

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        sizes = output_partition_sizes
        if len(self.parts) == 1 and len(sizes) > 1:
            # one matrix in the folder, several of vLLM (Phi-3's qkv_proj)
            refuse_divided(layer, self.parts[0][0])
            sizes = [sum(sizes)]
        spans = [outputs_here(layer, index, size) for index, size in enumerate(sizes)]
        for (name, form), span in zip(self.parts, spans, strict=True):
            if form is not None:
                check_sizes(name, form, (form.inputs, form.outputs), (input_size, span.whole))
        here = input_size_per_partition
        start = layer.tp_rank * here if here < input_size else 0
        parts = [Part(*part, span, size) for part, span, size in zip(self.parts, spans, sizes, strict=True)]
        layer.rankwise = GroupedWeights(layer, parts, Span(start, start + here, input_size), params_dtype, self.missing)

    def process_weights_after_loading(self, layer: Any) -> None:
        self.missing.check()
        first = getattr(layer, "0").weight
        if first.is_cuda:
            layer.group = fused_group(first, [factor.value for factor in layer.second])
        else:
            layer.group = Products(first, layer.second)
        # the group has them now
        for weight in (first, *layer.second.parameters()):
            weight.data = weight.data.new_empty(0)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y: Tensor = layer.group(x)
        return y if bias is None else y + bias

    def tie_weights(self, layer: Any, embed_tokens: nn.Module) -> Any:
        # the folder holds this head itself
        return layer


class LowRankEmbeddingMethod(QuantizeMethodBase):
    """A table of narrow words, and the matrix that widens them."""

    def __init__(self, name: str, form: LowRankEmbedding, missing: Missing) -> None:
        self.name, self.form, self.missing = name, form, missing

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        (padded,) = output_partition_sizes
        words = outputs_here(layer, 0, padded)
        check_sizes(self.name, self.form, (self.form.words, self.form.width), (words.whole, input_size))
        layer.rankwise = WordWeights(layer, self.name, self.form, words, padded, params_dtype, self.missing)

    def process_weights_after_loading(self, layer: Any) -> None:
        self.missing.check()
        # a head that is tied to this one reads its weights too
        layer.widening = Product(layer.second.matrix)

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        y: Tensor = layer.widening(F.embedding(input_, getattr(layer, "0").weight))
        return y

    def apply(self, layer: Any, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError("An embedding gives no logits; its head does.")


class LowRankHeadMethod(QuantizeMethodBase):
    """A head over narrow words: those of the embedding that it is tied to, or its own."""

    def __init__(self, name: str, form: Head, missing: Missing) -> None:
        self.name, self.form, self.missing = name, form, missing

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        (padded,) = output_partition_sizes
        words = outputs_here(layer, 0, padded)
        check_sizes(self.name, self.form, (self.form.inputs, self.form.outputs), (input_size, words.whole))
        if self.form.embedding is None:
            kind = PivotEmbedding if self.form.pivot else LowRankEmbedding
            form = kind(words=words.whole, width=input_size, padding_idx=None, rank=self.form.rank)
            children = ("embedding", "projection")
            layer.rankwise = WordWeights(layer, self.name, form, words, padded, params_dtype, self.missing, children)
            return
        # a folder holds the order of a pivot layer twice, because buffers are not tied
        projection = nn.Module()
        projection.places = receiver(lambda loaded, shard: None, torch.int32)
        layer.add_module("projection", projection)
        layer.rankwise = None

    def tie_weights(self, layer: Any, embed_tokens: nn.Module) -> Any:
        if self.form.embedding is not None:
            layer.rankwise = getattr(embed_tokens, "rankwise", None)
        return layer

    def process_weights_after_loading(self, layer: Any) -> None:
        self.missing.check()
        weights = layer.rankwise
        if weights is None:
            raise CheckpointError(
                f"{self.name} must be tied to {self.form.embedding}, but vLLM's model did not tie them. "
                "Check `tie_word_embeddings` in config.json."
            )
        # logits = words (P^T h)
        layer.narrowing = Product(weights.factor.matrix.t().contiguous())
        layer.words = Product(weights.table)
        if self.form.embedding is None:
            weights.table.data = weights.table.data.new_empty(0)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y: Tensor = layer.words(layer.narrowing(x))
        return y if bias is None else y + bias


class OwnHeadMethod(UnquantizedEmbeddingMethod):
    """A dense head beside a low-rank embedding: the folder holds its matrix, whatever `tie_word_embeddings` says."""

    def tie_weights(self, layer: Any, embed_tokens: nn.Module) -> Any:
        return layer


def outputs_here(layer: Any, index: int, size: int) -> Span:
    """Which outputs of the matrix with that number in a merged layer this device has; `size` are theirs, padded."""
    if isinstance(layer, VocabParallelEmbedding):
        indices = layer.shard_indices
        return Span(indices.org_vocab_start_index, indices.org_vocab_end_index, layer.org_vocab_size)
    if not isinstance(layer, ColumnParallelLinear):
        return Span(0, size, size)
    # devices that are more than there are heads of keys and values have copies of them
    copies = getattr(layer, "num_kv_head_replicas", 1) if index else 1
    start = layer.tp_rank // copies * size
    return Span(start, start + size, size * (layer.tp_size // copies))


def check_sizes(name: str, form: Layer, saved: tuple[int, int], asked: tuple[int, int]) -> None:
    if saved != asked:
        raise CheckpointError(
            f"{name} must be {asked[0]} -> {asked[1]} as config.json says, but was saved as {form.role}. {AGAIN}"
        )


def refuse_divided(layer: Any, name: str) -> None:
    """Refuse a matrix of which a device would have rows that are not next to each other."""
    if layer.tp_size > 1:
        raise CheckpointError(
            f"rankwise serves {name} with --tensor-parallel-size 1 only, because vLLM divides it in parts, but it is "
            f"{layer.tp_size}. Serve several copies (--data-parallel-size) instead."
        )
