"""Models of our own architectures load from their folder alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rankwise as rw
from rankwise.deploy.architectures import build, describe, from_description
from rankwise.errors import CheckpointError
from rankwise.lab.models import ModelConfig
from rankwise.lab.models.adaptive import Clusters
from rankwise.lab.models.sru import SRUConfig
from rankwise.lab.models.transformer_xl import TransformerXLConfig

CONFIGS: list[ModelConfig] = [
    SRUConfig(num_words=11, embedding_width=6, width=10, num_layers=2, rank=7, layer_norm=True),
    SRUConfig(num_words=11, embedding_width=10, width=10, num_layers=2, clusters=Clusters(cutoffs=(5,), widths=(6, 3))),
    TransformerXLConfig(num_words=11, width=8, num_heads=2, head_width=4, inner=12, num_layers=2, memory_length=5),
]


@pytest.mark.parametrize("config", CONFIGS, ids=["sru", "words", "transformer-xl"])
@pytest.mark.parametrize("method", ["flop-l0", "np-l0", "fac"])
def test_a_compact_model_of_ours_needs_no_skeleton(config: ModelConfig, method: str, tmp_path: Path) -> None:
    model = build(config)
    settings = {} if method == "fac" else {"anneal_steps": 1}
    pruner = rw.Pruner(model, rw.Budget(removed=0.3, of="prunable"), method, **settings)
    tokens = torch.randint(11, (2, 6))
    model(tokens)[0].sum().backward()
    pruner.step()
    small = pruner.compact().eval()
    rw.save(small, tmp_path / "small")
    loaded = rw.load(tmp_path / "small").eval()
    assert torch.equal(loaded(tokens)[0], small(tokens)[0])
    assert rw.count(loaded) == rw.count(small)
    assert describe(loaded) == describe(model)


@pytest.mark.parametrize("config", CONFIGS, ids=["sru", "words", "transformer-xl"])
def test_a_description_survives_json(config: ModelConfig) -> None:
    description = describe(build(config))
    assert description is not None
    assert from_description(json.loads(json.dumps(description))) == config


def test_a_model_of_your_own_needs_its_skeleton(tmp_path: Path) -> None:
    rw.save(nn.Linear(3, 2), tmp_path / "small")
    with pytest.raises(
        CheckpointError, match=r"needs its `skeleton`, but none was given for .*load\(folder, build\(\)\)"
    ):
        rw.load(tmp_path / "small")


@pytest.mark.parametrize(
    "damage, message",
    [
        ({"architecture": "srv"}, "Did you mean 'sru'"),
        ({"width": -1}, "`width` must be at least 1"),
        ({"wide": 3}, "unexpected keyword"),
    ],
)
def test_a_damaged_description_is_refused(damage: dict[str, Any], message: str, tmp_path: Path) -> None:
    rw.save(build(CONFIGS[0]), tmp_path / "small")
    path = tmp_path / "small" / "rankwise.json"
    structure = json.loads(path.read_bytes())
    structure["dense"] |= damage
    path.write_text(json.dumps(structure))
    with pytest.raises(CheckpointError, match="rankwise.json .* is damaged: its checksum is"):
        rw.load(tmp_path / "small")
    with pytest.raises(CheckpointError, match=message):
        rw.load(tmp_path / "small", verify=False)
