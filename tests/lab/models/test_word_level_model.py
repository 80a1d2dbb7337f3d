"""The paper's WikiText-103 model: SRU between a tied adaptive embedding and softmax, counted to the parameter."""

from __future__ import annotations

import pytest
import torch

import rankwise as rw
from rankwise.lab.models.adaptive import Clusters
from rankwise.lab.models.sru import SRUConfig, SRULanguageModel


@pytest.mark.parametrize("layer_norm, total", [(False, 100_222_876), (True, 100_272_028)])
def test_the_wikitext_103_model_has_the_papers_size(layer_norm: bool, total: int) -> None:
    config = SRUConfig(
        num_words=267_735,
        embedding_width=2048,
        width=2048,
        num_layers=12,
        rank=512,
        first_rank=512,
        layer_norm=layer_norm,
        clusters=Clusters(cutoffs=(10_000, 20_000, 40_000, 60_000, 100_000), widths=(1024, 1024, 256, 256, 64, 64)),
    )
    with torch.device("meta"):
        model = SRULanguageModel(config)
    assert rw.count(model) == total
    plan = rw.find_plan(model)
    assert plan.params == 99_856_832
    assert sum(site.has_embedding for site in plan.sites) == 6
