"""What `import rankwise.hf` registers with transformers: how compact models are loaded, saved and resized.

Stock `from_pretrained` loads a compact model by an object that transformers calls a quantizer: layers take their saved
form before the weights are read. Nothing is quantized, and after loading no trace of it is left. Three methods of
`PreTrainedModel` are patched:

    save_pretrained           the stock one would write a folder that loads as random weights
    resize_token_embeddings   the stock one fails where the embedding is a product of two matrices
    from_pretrained           notes `ignore_mismatched_sizes`, which transformers does not pass on to a quantizer

The first two act only on models that hold a layer which rankwise changed; all others go straight to the stock method.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from rankwise.deploy.load import check_masks, replacements
from rankwise.deploy.structure import SavedLayers, checking, damaged, misfit, slots, ties_of
from rankwise.errors import CheckpointError, RankwiseError
from rankwise.files import check_file
from rankwise.hf.bounds import WHOLE, check_proportion, checking_folder, shapes_of
from rankwise.hf.format import (
    METHOD,
    OTHER_SIZES,
    check_listed,
    is_foreign,
    is_gated,
    names_for,
    of_same_sizes,
    renamed_for,
    ties_in,
    with_ties_of,
)
from rankwise.hf.saving import save_changed
from rankwise.modules import LowRankHead, PivotLinear, SelectedLinear, linear
from rankwise.split import split
from rankwise.swap import become

logger = logging.get_logger(__name__)
CHANGED = "_rankwise"
"""An attribute of every module of a model whose layers changed; copies have it too."""
SIZES_MAY_DIFFER: ContextVar[bool] = ContextVar("ignore_mismatched_sizes", default=False)
"""Whether the model that is being loaded may differ in sizes from the one that was saved."""


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
        self.saved = SavedLayers.read(entry) if self.pre_quantized else SavedLayers()
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
        for name in ("transformers_weights", WHOLE):
            vars(config).pop(name, None)
        return config

    update_tp_plan = update_attn_implementation

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> None:
        if checkpoint_files and self.saved.files is not None:
            _check_weights([Path(path) for path in checkpoint_files], self.saved.files)
        split(model, [form for name in self.saved.layers for form in names_for(name, model)])
        other_sizes = SIZES_MAY_DIFFER.get()
        held: dict[str, list[int]] = {}
        self.saved = saved = of_same_sizes(renamed_for(self.saved, model), model, ignore=other_sizes)
        if checkpoint_files:
            for path in checkpoint_files:
                if str(path).endswith(".safetensors"):
                    held |= shapes_of(Path(path))
            check_masks(saved.layers.values(), held.values())
            if is_foreign(model) or other_sizes:
                saved, self.copied = with_ties_of(saved, model, held)
            else:
                check_listed(saved, model, held)
        else:
            check_masks(saved.layers.values(), None)
        # masks of selected inputs are read as they are made; parameters follow the skeleton to the meta device
        with torch.device("cpu"):
            instead = replacements(saved.layers, model)
        for module in list(model.modules()):
            if id(module) in instead:
                become(module, instead[id(module)])
        if checkpoint_files:
            check_proportion(model, held)
        model.all_tied_weights_keys = ties_in(saved, model)
        model._keys_to_ignore_on_load_missing = [
            *(model._keys_to_ignore_on_load_missing or ()),
            *map(re.escape, self.copied),
        ]
        # keep transformers from initializing changed layers through their parents, which expect the unchanged ones
        for name, module in model.named_modules():
            holds = any(each.startswith(f"{name}.") or not name for each in saved.layers)
            if holds and not [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                module._is_hf_initialized = True
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
        with checking(path):
            check_file(path, files)
    given = {path.name for path in paths}
    # the part that the names of all shards of a model have in common
    groups = {name: re.sub(r"-\d{5}(-of-\d{5}\.safetensors)$", r"\1", name) for name in {*files, *given}}
    for name in files.keys() - given:
        if groups[name] != name and groups[name] in {groups[each] for each in given}:
            raise damaged(paths[0].with_name(name), "the index of the shards does not name it")


def _check_layer(model: PreTrainedModel, name: str) -> None:
    module = model.get_submodule(name)
    for key, tensor in module.state_dict(keep_vars=True).items():
        # an offloaded tensor is stored elsewhere
        if not tensor.is_meta and not getattr(tensor, "_is_hf_initialized", False):
            raise CheckpointError(f"The folder must hold {name}.{key}, but does not. Save the model again.")
    for slot in slots(module):
        if wrong := misfit(name, slot.module, slot.key, slot.holds):
            raise CheckpointError(f"In the weights {wrong}. Save the model again.")


def patch() -> None:
    """Replace the three methods of `PreTrainedModel`."""
    kind: Any = PreTrainedModel
    save, load = kind.save_pretrained, kind.from_pretrained.__func__

    def our_save(model: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        save_changed(model, save, *args, **kwargs)

    def from_pretrained(cls: Any, *args: Any, ignore_mismatched_sizes: bool = False, **kwargs: Any) -> Any:
        token = SIZES_MAY_DIFFER.set(ignore_mismatched_sizes)
        try:
            with checking_folder(args[0] if args else kwargs.get("pretrained_model_name_or_path")):
                return load(cls, *args, ignore_mismatched_sizes=ignore_mismatched_sizes, **kwargs)
        finally:
            SIZES_MAY_DIFFER.reset(token)

    kind.save_pretrained = _if_changed(our_save, save)
    kind.resize_token_embeddings = _if_changed(resize_token_embeddings, kind.resize_token_embeddings)
    kind.from_pretrained = classmethod(wraps(load)(from_pretrained))  # type: ignore[arg-type]


def _if_changed(ours: Callable[..., Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def method(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        # a model may also have taken in a compact part after it was made
        if not any(CHANGED in vars(part) for part in self.modules()):
            return stock(self, *args, **kwargs)
        declare_ties(self)
        return ours(self, *args, **kwargs)

    return method


def mark_changed(model: nn.Module) -> None:
    """Mark every module of `model`, and tell each model of transformers in it which tensors are tied."""
    for part in model.modules():
        vars(part)[CHANGED] = True
        if isinstance(part, PreTrainedModel):
            declare_ties(part)


def declare_ties(model: PreTrainedModel) -> None:
    """Tell transformers which tensors of the model are tied: its class names some that are gone."""
    ties = ties_of(model)
    model.all_tied_weights_keys = ties
    model._tied_weights_keys = {f"{re.escape(name)}$": f"{re.escape(source)}$" for name, source in ties.items()}
    # so that the Trainer, which loads a checkpoint by `load_state_dict`, does not miss them
    model._keys_to_ignore_on_save = {*(type(model)._keys_to_ignore_on_save or ()), *ties}


def resize_token_embeddings(
    model: PreTrainedModel,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
) -> nn.Module:
    """Like the method of transformers; new rows are drawn from the mean and covariance of the old rows of the factor.

    For a low-rank embedding its first factor is returned: BART and similar models count the rows of its weight.
    """
    if is_gated(model):
        raise RankwiseError(
            "A gated model cannot take another vocabulary, because its size is being counted. "
            "Call `resize_token_embeddings` before `rankwise.Pruner`, or on the compact model."
        )
    table = model.get_input_embeddings()
    if new_num_tokens is None and pad_to_multiple_of is None:
        return table
    words = table[0] if isinstance(table, nn.Sequential) else table
    assert isinstance(words, nn.Embedding)
    weight = words.weight
    # in place, so that every layer tied to it follows
    model._get_resized_embeddings(words, new_num_tokens, pad_to_multiple_of, mean_resizing)
    size = words.weight.shape[0]
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.weight is weight:
            module.num_embeddings = size
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is not None:
        _resize_head(model, head, size, mean_resizing)
    model.config.get_text_config().vocab_size = size
    model.vocab_size = size
    model.tie_weights()
    return words


def _resize_head(model: PreTrainedModel, head: nn.Module, size: int, mean_resizing: bool) -> None:
    last = head[-1] if isinstance(head, nn.Sequential) else head
    if isinstance(last, PivotLinear):
        # rows that come and go are those of a plain pair
        become(last, linear(nn.Parameter(last.weight.detach(), last.coefficients.requires_grad), last.bias))
    assert isinstance(last, nn.Linear | LowRankHead | SelectedLinear)
    bias = last.bias
    stored = last.columns if isinstance(last, SelectedLinear) else last.weight
    if not isinstance(last, LowRankHead) and stored.shape[0] != size:
        # a stock layer around the same rows, for transformers to lengthen
        rows = linear(nn.Parameter(stored.detach()), None)
        longer = model._get_resized_lm_head(rows, size, mean_resizing=mean_resizing)
        stored.data = longer.weight.data
    if bias is not None and bias.shape[0] != size:
        value = float(bias.detach().mean()) if mean_resizing else 0.0
        bias.data = F.pad(bias.data, (0, size - bias.shape[0]), value=value)
    if isinstance(last, nn.Linear):
        last.out_features = size
