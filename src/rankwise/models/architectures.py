"""Our architectures by name: from a model to a description that JSON can hold, and back.

A saved model of ours carries its description, so it loads without the code that built it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import nn

from rankwise.errors import CheckpointError, nearest
from rankwise.models.sru import SRUConfig, SRULanguageModel
from rankwise.models.transformer_xl import TransformerXL, TransformerXLConfig

ModelConfig: TypeAlias = SRUConfig | TransformerXLConfig

CONFIGS: dict[str, type[ModelConfig]] = {"sru": SRUConfig, "transformer-xl": TransformerXLConfig}
_MODELS: dict[type[ModelConfig], Callable[[Any], nn.Module]] = {
    SRUConfig: SRULanguageModel,
    TransformerXLConfig: TransformerXL,
}


def name_of(config: ModelConfig) -> str:
    """The name of a config's architecture."""
    return next(name for name, kind in CONFIGS.items() if kind is type(config))


def build(config: ModelConfig) -> nn.Module:
    """A fresh model."""
    return _MODELS[type(config)](config)


def describe(model: nn.Module) -> dict[str, Any] | None:
    """Architecture and shape of the dense model, for JSON; None where the architecture is not ours."""
    if type(model) not in _MODELS.values():
        return None
    config = model.config
    assert isinstance(config, SRUConfig | TransformerXLConfig)
    return describe_config(config)


def describe_config(config: ModelConfig) -> dict[str, Any]:
    """Architecture and shape, for JSON."""
    return {"architecture": name_of(config), **dataclasses.asdict(config)}


def from_description(description: Mapping[str, Any]) -> ModelConfig:
    """The config that was described."""
    settings = dict(description)
    name = settings.pop("architecture", None)
    if name not in CONFIGS:
        raise CheckpointError(
            f"`architecture` must be one of {', '.join(CONFIGS)}, but is {name!r} instead.{nearest(str(name), CONFIGS)}"
        )
    try:
        return CONFIGS[name](**settings)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"The description of a {name} model must hold its settings, but {error}.") from error
