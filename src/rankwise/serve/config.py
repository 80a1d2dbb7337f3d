"""The entry `quantization_config` of a folder, as vLLM reads it, and which method each layer of vLLM gets by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from rankwise.deploy.structure import Head, Layer, Linear, LowRankEmbedding, SavedLayers, checking
from rankwise.errors import CheckpointError
from rankwise.files import check_file
from rankwise.serve import METHOD
from rankwise.serve.methods import (
    LowRankEmbeddingMethod,
    LowRankHeadMethod,
    LowRankLinearMethod,
    OwnHeadMethod,
)
from rankwise.serve.weights import Missing

# the newest part of the interface that we need: heads are tied by their method
QuantizeMethodBase.tie_weights  # noqa: B018


class RankwiseConfig(QuantizationConfig):
    """The layers of a compact model by name. Nothing is quantized: `quantization` is what vLLM calls the place."""

    def __init__(self, layers: dict[str, Layer], files: dict[str, str] | None) -> None:
        super().__init__()
        self.layers, self.files = layers, files
        self.served: set[str] = set()
        self.missing = Missing(self._check_served)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> RankwiseConfig:
        entry = SavedLayers.read(config)
        if entry.gated:
            raise CheckpointError(
                "vLLM serves compact models, but this folder holds a gated one: a checkpoint of a run. Resume the run "
                "and save what `pruner.compact()` returns."
            )
        for name, form in entry.layers.items():
            projection = f"{name}.projection.{'coefficients' if getattr(form, 'pivot', False) else 'weight'}"
            if isinstance(form, Head) and form.embedding is not None and projection not in entry.tied:
                raise CheckpointError(
                    f"{name} must be tied to its embedding whole, but has a projection of its own, which rankwise does "
                    "not serve. Serve the model with transformers."
                )
        return cls(entry.layers, entry.files)

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def maybe_update_config(self, model_name: str, *args: Any, **kwargs: Any) -> None:
        """Compare the files of weights of a local folder with their checksums."""
        for name in self.files or {}:
            path = Path(model_name) / name
            if path.is_file():
                with checking(path):
                    check_file(path, self.files or {})

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Take over the names that vLLM's class has for layers."""
        mapper = getattr(hf_to_vllm_mapper, "get_rename_mapper", lambda: hf_to_vllm_mapper)()
        self.layers = mapper.apply_dict(self.layers)

    def get_quant_method(self, layer: Any, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, LinearBase):
            return self._linear_method(prefix)
        if isinstance(layer, ParallelLMHead):
            return self._head_method(prefix)
        if isinstance(layer, VocabParallelEmbedding):
            return self._embedding_method(layer, prefix)
        # what is left has matrices of another shape, such as the experts of a mixture
        inside = sorted(name for name in self.layers if prefix and name.startswith(f"{prefix}."))
        if inside:
            raise CheckpointError(
                f"rankwise serves linear layers and embeddings, but {inside[0]} is in a {type(layer).__name__} of "
                "vLLM (a mixture of experts?). Compress the model again without it (`--exclude experts`), or serve it "
                "with transformers."
            )
        return None

    def _linear_method(self, prefix: str) -> QuantizeMethodBase:
        parent, _, own = prefix.rpartition(".")
        names = [prefix]
        if prefix not in self.layers:
            names = [f"{parent}.{part}".lstrip(".") for part in self.packed_modules_mapping.get(own, [own])]
        forms = [(name, self._form(name, Linear)) for name in names]
        if all(form is None for _, form in forms):
            return UnquantizedLinearMethod()
        return LowRankLinearMethod(forms, self.missing)

    def _head_method(self, prefix: str) -> QuantizeMethodBase | None:
        form = self._form(prefix, Linear)
        if isinstance(form, Head):
            return LowRankHeadMethod(prefix, form, self.missing)
        if form is not None:
            return LowRankLinearMethod([(prefix, form)], self.missing)
        narrow = any(isinstance(each, LowRankEmbedding) for each in self.layers.values())
        return OwnHeadMethod() if narrow else None

    def _embedding_method(self, layer: Any, prefix: str) -> QuantizeMethodBase | None:
        tables = {name: form for name, form in self.layers.items() if isinstance(form, LowRankEmbedding)}
        if not prefix:
            # some of vLLM's classes do not name their embedding: it is known by its size
            size = (layer.org_vocab_size, layer.embedding_dim)
            found = [name for name, form in tables.items() if (form.words, form.width) == size]
            if len(found) > 1:
                raise CheckpointError(
                    f"vLLM must tell which embedding it asks for, but {', '.join(found)} are of one size. "
                    "Compress the model again with dense embeddings."
                )
            prefix = found[0] if found else ""
        if prefix not in tables:
            return None
        self.served.add(prefix)
        return LowRankEmbeddingMethod(prefix, tables[prefix], self.missing)

    def _form(self, name: str, kind: type[Linear]) -> Linear | None:
        form = self.layers.get(name)
        if form is None:
            return None
        if not isinstance(form, kind):
            raise CheckpointError(f"{name} must be a linear layer in vLLM's model, but was saved as {form.role}.")
        self.served.add(name)
        return form

    def _check_served(self) -> None:
        left = sorted(self.layers.keys() - self.served)
        # a stage of a pipeline has some of the layers
        if left and get_pp_group().world_size == 1:
            raise CheckpointError(
                f"vLLM's model must have a layer {left[0]}, but has none of that name. Serve the model with "
                "transformers, or compress it again without this layer."
            )


def register_with_vllm() -> None:
    """Make `quant_method: rankwise` known."""
    register_quantization_config(METHOD)(RankwiseConfig)
