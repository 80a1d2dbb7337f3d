"""The paper's language models. They know nothing of pruning; each registers its architecture for saving and loading."""

from __future__ import annotations

from typing import TypeAlias

from rankwise.lab.models.sru import SRUConfig
from rankwise.lab.models.transformer_xl import TransformerXLConfig

ModelConfig: TypeAlias = SRUConfig | TransformerXLConfig
