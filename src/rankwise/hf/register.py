"""Making rankwise known to transformers: its registry of loaders, and the manners of models whose layers changed.

This runs once `transformers.modeling_utils` is there; nothing here may need more of transformers than that.
"""

from __future__ import annotations

from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    register_quantization_config,
    register_quantizer,
)

from rankwise.adapters.families import ON_CHANGE
from rankwise.hf.layout import METHOD
from rankwise.hf.manners import adopt, teach
from rankwise.hf.mismatch import remember_flag
from rankwise.hf.quantizer import RankwiseConfig, RankwiseQuantizer


def register() -> None:
    """Once, however often it is called."""
    if METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(METHOD)(RankwiseConfig)
        register_quantizer(METHOD)(RankwiseQuantizer)
        teach(PreTrainedModel)
        remember_flag(PreTrainedModel)
        ON_CHANGE.append(adopt)
