"""How stock `from_pretrained` loads a compact model: its layers take their saved form before the weights are read.

transformers calls an object that does this a quantizer; nothing is quantized. After loading no trace of it is left.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from rankwise.deploy.load import replacements
from rankwise.deploy.pretrained import AGAIN, METHOD
from rankwise.deploy.structure import is_order
from rankwise.errors import CheckpointError
from rankwise.files import check_file
from rankwise.hf.format import OTHER_SIZES, SavedLayers, is_foreign
from rankwise.hf.patches import SIZES_MAY_DIFFER, mark_changed
from rankwise.modules import PivotLinear, SelectedLinear
from rankwise.split import split
from rankwise.swap import become

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.get_logger(__name__)


@register_quantization_config(METHOD)
class RankwiseConfig(QuantizationConfigMixin):
    """What `config.json` says of a compact model (`rankwise.hf.format`), as transformers passes it on."""

    def __init__(self, **entry: Any) -> None:
        self.__dict__.update(entry)
        self.quant_method = METHOD  # type: ignore[assignment]  # the enumeration lists their own alone


@register_quantizer(METHOD)
class RankwiseQuantizer(HfQuantizer):
    """Gives the layers of an empty model the form in which they were saved."""

    def __init__(self, quantization_config: RankwiseConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        entry = quantization_config.to_dict()
        self.saved = SavedLayers.read(entry) if self.pre_quantized else SavedLayers(False, {}, {})
        self.shapes: dict[str, torch.Size] = {}
        self.copied: dict[str, str] = {}

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        if not self.pre_quantized:
            raise CheckpointError(
                "A model is not compressed by `from_pretrained(quantization_config=...)`. "
                "Load it, then use `rankwise.Pruner` or `rankwise.compress`."
            )
        if self.saved.gated:
            raise CheckpointError(
                "`from_pretrained` loads compact models, but this folder holds a gated one: a checkpoint of a run. "
                "Resume the run (`trainer.train(resume_from_checkpoint=...)`) and save what `pruner.compact()` returns."
            )

    def update_attn_implementation(self, config: Any) -> Any:
        # the first hook that sees the configuration; older versions have the next one instead
        if hasattr(config, "transformers_weights"):
            del config.transformers_weights
        return config

    def update_tp_plan(self, config: Any) -> Any:
        return self.update_attn_implementation(config)

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> None:
        if checkpoint_files and self.saved.files is not None:
            _check_weights([Path(path) for path in checkpoint_files], self.saved.files)
        split(model, self.saved.layers)
        other_sizes = SIZES_MAY_DIFFER.get()
        self.saved = saved = self.saved.renamed_for(model).checked_sizes(model, ignore=other_sizes)
        if checkpoint_files:
            held = _tensors_in(checkpoint_files)
            if is_foreign(model) or other_sizes:
                saved = saved.with_ties_of(model, held)
            else:
                saved.check_listed(model, held)
        # masks of selected inputs are read as they are made; parameters follow the skeleton to the meta device
        with torch.device("cpu"):
            instead = replacements(saved.layers, model)
        for module in list(model.modules()):
            if id(module) in instead:
                become(module, instead[id(module)])
        model.all_tied_weights_keys = saved.ties(model)
        self.copied = saved.copied
        model._keys_to_ignore_on_load_missing = [
            *(model._keys_to_ignore_on_load_missing or ()),
            *map(re.escape, saved.copied),
        ]
        _mark_initialized(model, set(saved.layers))
        self.shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        _renew_other_sizes(model, self.shapes)
        for name in self.saved.layers:
            _check_layer(model, name)
        for name, source in self.copied.items():
            model.get_buffer(name).copy_(model.get_buffer(source))
        self.remove_quantization_config(model)  # type: ignore[no-untyped-call]
        for module in model.modules():
            if hasattr(module, "config"):
                vars(module.config).pop("_is_quantized", None)
        mark_changed(model)
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


def _renew_other_sizes(model: PreTrainedModel, shapes: Mapping[str, torch.Size]) -> None:
    """Give fresh values to parameters that were saved in another shape; refuse them where nobody asked for that."""
    found = {name: t for name, t in model.state_dict(keep_vars=True).items() if t.shape != shapes[name]}
    for name, tensor in found.items():
        if not SIZES_MAY_DIFFER.get() or not isinstance(tensor, nn.Parameter):
            raise CheckpointError(
                f"{name} must be {list(shapes[name])} as the configuration says, but was saved as "
                f"{list(tensor.shape)}. {OTHER_SIZES}"
            )
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        setattr(module, key, nn.Parameter(torch.empty(shapes[name], dtype=tensor.dtype, device=tensor.device)))
        vars(module)["_is_hf_initialized"] = False
    if found:
        # it passes by every module that has its values
        model.initialize_weights()  # type: ignore[no-untyped-call]
        model.tie_weights(recompute_mapping=False)
        logger.warning(f"Fresh, because the configuration asks for another size than saved: {', '.join(found)}.")


def _check_weights(paths: Sequence[Path], files: Mapping[str, str]) -> None:
    """Refuse files of weights that changed since they were saved, and an index that leaves out a shard."""
    for path in paths:
        try:
            check_file(path, files)
        except OSError as error:
            raise _damaged(path, str(error)) from None
    given = {path.name for path in paths}
    groups = {group for name in given if (group := _group(name)) is not None}
    for name in files.keys() - given:
        if _group(name) in groups:
            raise _damaged(paths[0].with_name(name), "the index of the shards does not name it")


def _group(name: str) -> str | None:
    """The part that the names of all shards of a model have in common."""
    shard = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.safetensors", name)
    return None if shard is None else f"{shard[1]} {shard[2]}"


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} must be as it was saved with its config.json, but is damaged: {what}. {AGAIN}")


def _tensors_in(files: Sequence[str]) -> list[str]:
    names: list[str] = []
    for path in files:
        if str(path).endswith(".safetensors"):
            with safe_open(path, framework="pt") as file:
                names += file.keys()
    return names


def _mark_initialized(model: PreTrainedModel, changed: set[str]) -> None:
    """Keep transformers from initializing changed layers through their parents, which expect the unchanged ones."""
    for name, module in model.named_modules():
        holds = any(each.startswith(f"{name}.") or not name for each in changed)
        if holds and not [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            module._is_hf_initialized = True


def _check_layer(model: PreTrainedModel, name: str) -> None:
    module = model.get_submodule(name)
    for key, tensor in module.state_dict(keep_vars=True).items():
        # an offloaded tensor is stored elsewhere
        if not tensor.is_meta and not getattr(tensor, "_is_hf_initialized", False):
            raise CheckpointError(f"The folder must hold {name}.{key}, but does not. Save the model again.")
    if isinstance(module, SelectedLinear):
        kept, columns = int(module.kept.sum()), module.columns.shape[1]
        if kept != columns:
            raise CheckpointError(f"{name} must keep {columns} inputs, but keeps {kept}. Save the model again.")
    for part in module.modules():
        if isinstance(part, PivotLinear) and not is_order(part.places):
            raise CheckpointError(f"The places of {name} must be an order of its outputs. Save the model again.")
