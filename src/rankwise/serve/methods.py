"""What vLLM asks of a layer's method: to create its weights, to finish them after loading, and to compute with them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from rankwise.deploy.structure import Head, Linear, LowRankEmbedding, PivotEmbedding, PivotHead
from rankwise.errors import CheckpointError
from rankwise.serve.grouped import Second, grouped_pair, second_product
from rankwise.serve.weights import AGAIN, GroupedWeights, Missing, Part, WordWeights, receiver


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
        refuse_parallel(layer, self.parts[0][0])
        # one matrix in the folder may be several of vLLM (Phi-3's qkv_proj)
        sizes = output_partition_sizes if len(self.parts) > 1 else [sum(output_partition_sizes)]
        parts = [Part(name, size, form) for (name, form), size in zip(self.parts, sizes, strict=True)]
        for part in parts:
            # vLLM pads the outputs of a head
            outputs = getattr(layer, "org_vocab_size", part.outputs)
            if part.form is not None and (part.form.inputs, part.form.outputs) != (input_size, outputs):
                raise CheckpointError(
                    f"{part.name} must be linear {input_size} -> {outputs} as config.json says, but was saved as "
                    f"{part.form.role}. {AGAIN}"
                )
        layer.rankwise = GroupedWeights(layer, parts, input_size, params_dtype, self.missing)

    def process_weights_after_loading(self, layer: Any) -> None:
        self.missing.check()

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        parts = [factor.value for factor in layer.second]
        return grouped_pair(x, getattr(layer, "0").weight, parts, bias)

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
        refuse_parallel(layer, self.name)
        if (self.form.words, self.form.width) != (layer.org_vocab_size, input_size):
            raise CheckpointError(
                f"{self.name} must be embedding {layer.org_vocab_size} -> {input_size} as config.json says, but was "
                f"saved as {self.form.role}. {AGAIN}"
            )
        rows = sum(output_partition_sizes)
        layer.rankwise = WordWeights(layer, self.name, self.form, rows, params_dtype, self.missing)

    def process_weights_after_loading(self, layer: Any) -> None:
        self.missing.check()

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        words = F.embedding(input_, getattr(layer, "0").weight)
        return second_product(words, layer.second.value)

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
        refuse_parallel(layer, self.name)
        if self.form.embedding is None:
            kind = PivotEmbedding if isinstance(self.form, PivotHead) else LowRankEmbedding
            form = kind(words=self.form.outputs, width=self.form.inputs, padding_idx=None, rank=self.form.rank)
            children = ("embedding", "projection")
            rows = sum(output_partition_sizes)
            layer.rankwise = WordWeights(layer, self.name, form, rows, params_dtype, self.missing, children)
            return
        # a folder holds the order of a pivot layer twice: buffers are not tied
        projection = nn.Module()
        projection.places = receiver(lambda loaded, shard: None, torch.int32)
        layer.add_module("projection", projection)
        layer.rankwise = None

    def tie_weights(self, layer: Any, embed_tokens: nn.Module) -> Any:
        if self.form.embedding is not None:
            source = getattr(embed_tokens, "rankwise", None)
            if not isinstance(source, WordWeights):
                raise CheckpointError(f"{self.name} must be tied to a low-rank embedding, but is not. {AGAIN}")
            layer.rankwise = source
        return layer

    def process_weights_after_loading(self, layer: Any) -> None:
        weights: Any = layer.rankwise
        if weights is None:
            raise CheckpointError(
                f"{self.name} must be tied to {self.form.embedding}, but config.json has `tie_word_embeddings` false. "
                "Set it to true."
            )
        self.missing.check()
        # logits = words (P^T h)
        first = nn.Parameter(weights.factor.matrix.t().contiguous(), requires_grad=False)
        layer.register_parameter("narrowing", first)
        layer.register_parameter("words", weights.table)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        words: Any = layer.words
        return grouped_pair(x, layer.narrowing, [Second(words.shape[1], words)], bias)


class OwnHeadMethod(UnquantizedEmbeddingMethod):
    """A dense head beside a low-rank embedding: the folder holds its matrix, whatever `tie_word_embeddings` says."""

    def tie_weights(self, layer: Any, embed_tokens: nn.Module) -> Any:
        return layer


def refuse_parallel(layer: Any, name: str) -> None:
    """Refuse a layer whose matrices would be divided among several devices."""
    if getattr(layer, "tp_size", 1) > 1:
        raise CheckpointError(
            f"Folders of rankwise must be served with --tensor-parallel-size 1, but {name} would be divided among "
            f"{layer.tp_size} devices. Serve several copies (--data-parallel-size) instead."
        )
