"""The entry `quantization_config` in `config.json` of a compact model, and how it fits the model that is loaded.

It lists each layer that is not as the model's class builds it, and which tensors are tied. `quantization_config` is the
one entry that `from_pretrained` lets others act upon before it fills a model with weights.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rankwise.core.layers import GatedLayer
from rankwise.deploy.structure import (
    ENTRY,
    VERSION,
    Head,
    Layer,
    LowRankEmbedding,
    PivotHead,
    SavedLayers,
    layer_of,
    layers_of,
    role_of,
    ties_of,
    to_json,
)
from rankwise.errors import CheckpointError
from rankwise.version import VERSION as OWN_VERSION

if TYPE_CHECKING:
    from transformers import PreTrainedModel

METHOD = "rankwise"
OTHER_SIZES = (
    "Load it with the settings it was saved with (such as `num_labels`), or pass ignore_mismatched_sizes=True for "
    "fresh values."
)
"""The remedy for a configuration that asks for other sizes."""


def is_gated(model: nn.Module) -> bool:
    """Whether a model is being pruned."""
    return any(isinstance(module, GatedLayer) for module in model.modules())


def entry_of(model: PreTrainedModel) -> dict[str, Any] | None:
    """The entry for a model; None where every layer is as its class builds it."""
    entry: dict[str, Any] = {"quant_method": METHOD, "version": VERSION, "rankwise": OWN_VERSION}
    if is_gated(model):
        return {**entry, "gated": True}
    built = {name: layer_of(module) for name, module in skeleton_of(model).named_modules(remove_duplicate=False)}
    layers = {name: to_json(layer) for name, layer in layers_of(model).items() if built.get(name) != layer}
    return {**entry, "layers": layers, "tied": ties_of(model)} if layers else None


def skeleton_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model as its class builds it from its configuration, without weights."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        return type(model)(config)


def is_foreign(model: PreTrainedModel) -> bool:
    """Whether a folder that is being loaded was saved by a model of another class."""
    return type(model).__name__ not in (model.config.architectures or [])


def renamed_for(saved: SavedLayers, model: PreTrainedModel) -> SavedLayers:
    """The same layers under the names that a model of another class over the same base has for them.

    Layers that the other class does not have, such as the head that was saved, are left out.
    """
    here = _renamer(model, (name for name, _ in model.named_modules(remove_duplicate=False)))
    foreign = is_foreign(model)
    layers: dict[str, Layer] = {}

    def part_here(name: str | None) -> str | None:
        """The part of an embedding, which stands there once that has its form."""
        whole, _, part = (name or "").rpartition(".")
        known = here(whole) if name else None
        return name if known is None else f"{known}.{part}"

    for name, layer in saved.layers.items():
        known = here(name)
        if known is None and foreign:
            continue
        if isinstance(layer, Head):
            words, projection = part_here(layer.embedding), part_here(layer.projection)
            layer = dataclasses.replace(layer, embedding=words, projection=projection)
        layers[known or name] = layer
    if saved.layers and not layers:
        saved_by = ", ".join(model.config.architectures or ["another class"])
        raise CheckpointError(
            f"The layers of this folder must be in {type(model).__name__}, but none of them is: "
            f"it was saved by {saved_by}. Use its class, or `Auto...`."
        )
    return dataclasses.replace(saved, layers=layers)


def of_same_sizes(saved: SavedLayers, model: PreTrainedModel, *, ignore: bool) -> SavedLayers:
    """Refuse layers that have other sizes in `model`; with `ignore`, leave them out."""
    layers = dict(saved.layers)
    for name, module in model.named_modules(remove_duplicate=False):
        if name in layers and role_of(module) != layers[name].role:
            if not ignore:
                raise CheckpointError(
                    f"{name} must be {role_of(module) or type(module).__name__} as the configuration says, but was "
                    f"saved as {layers[name].role}. {OTHER_SIZES}"
                )
            del layers[name]
    return dataclasses.replace(saved, layers=layers)


def check_listed(saved: SavedLayers, model: PreTrainedModel, held: Iterable[str]) -> None:
    """Refuse a layer of `model` that was saved as factors but is not listed: it would get random weights.

    `held` are the names of the tensors in the folder.
    """
    known = {*held, *saved.tied}
    in_parts = {name.rsplit(".", 2)[0] for name in known if name.count(".") > 1}
    for name, module in model.named_modules(remove_duplicate=False):
        is_layer = role_of(module) is not None and not module._modules
        if is_layer and name in in_parts and name not in saved.layers and f"{name}.weight" not in known:
            raise CheckpointError(
                f"{ENTRY} must list {name}, which is saved in parts, but does not. Save the model again."
            )


def with_ties_of(saved: SavedLayers, model: PreTrainedModel, held: Iterable[str]) -> tuple[SavedLayers, dict[str, str]]:
    """Add the ties of a model of another class, such as an output layer tied to the saved embedding.

    `held` are the names of the tensors in the folder: a tensor that was saved by itself is not tied. Also returns the
    names of buffers that hold what others do: transformers knows tied parameters but no tied buffers.
    """
    here = _renamer(model, model.state_dict())
    own = {here(name) for name in held}
    layers, tied, copied = dict(saved.layers), dict(saved.tied), {}
    for name, source in model.all_tied_weights_keys.items():
        follower, table = name.removesuffix(".weight"), source.removesuffix(".weight")
        if follower in saved.layers or name in own:
            continue
        layer = saved.layers.get(table)
        if not isinstance(layer, LowRankEmbedding):
            tied[name] = source
            continue
        layers[follower] = _follower(layer, table, model.get_submodule(follower))
        words, projection = ("embedding", "projection") if isinstance(layers[follower], Head) else ("0", "1")
        key = "coefficients" if layer.pivot else "weight"
        tied[f"{follower}.{words}.weight"] = f"{table}.0.weight"
        tied[f"{follower}.{projection}.{key}"] = f"{table}.1.{key}"
        if layer.pivot:
            copied[f"{follower}.{projection}.places"] = f"{table}.1.places"
    return dataclasses.replace(saved, layers=layers, tied=tied), copied


def ties_in(saved: SavedLayers, model: PreTrainedModel) -> dict[str, str]:
    """The ties among the tensors of `model`, whose layers have their saved form already."""
    here = _renamer(model, model.state_dict())
    pairs = ((here(name), here(source)) for name, source in saved.tied.items())
    return {name: source for name, source in pairs if name is not None and source is not None}


def _follower(table: LowRankEmbedding, name: str, module: nn.Module) -> Layer:
    """A layer in the place of `module` that is tied to the embedding `name`: an embedding too, or a head."""
    if isinstance(module, nn.Embedding):
        return dataclasses.replace(table, padding_idx=module.padding_idx)
    return (PivotHead if table.pivot else Head)(
        inputs=table.width,
        outputs=table.words,
        bias=getattr(module, "bias", None) is not None,
        rank=table.rank,
        embedding=f"{name}.0",
        projection=None if table.pivot else f"{name}.1",
    )


def names_for(name: str, model: PreTrainedModel) -> tuple[str, str, str]:
    """What a saved name may be in `model`: as it is, or with the prefix of the base taken off or put on."""
    prefix = f"{model.base_model_prefix}."
    return name, name.removeprefix(prefix), prefix + name


def _renamer(model: PreTrainedModel, names: Iterable[str]) -> Callable[[str], str | None]:
    """How to find a saved name among `names`."""
    known = set(names)
    return lambda name: next((form for form in names_for(name, model) if form in known), None)
