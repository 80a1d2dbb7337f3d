"""Making rankwise known to transformers: its registry of loaders, and manners for the models that are gated.

This runs while transformers is being imported, so that nothing here or in `quantizer` may need its models yet.
"""

from __future__ import annotations

from torch import nn
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    register_quantization_config,
    register_quantizer,
)

from rankwise.adapters.families import ON_CHANGE
from rankwise.hf.layout import METHOD
from rankwise.hf.quantizer import RankwiseConfig, RankwiseQuantizer


def register() -> None:
    """Once, however often it is called."""
    if METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(METHOD)(RankwiseConfig)
        register_quantizer(METHOD)(RankwiseQuantizer)
        ON_CHANGE.append(_teach)


def _teach(model: nn.Module) -> None:
    from rankwise.hf.manners import adopt

    adopt(model)
