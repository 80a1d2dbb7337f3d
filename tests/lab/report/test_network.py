"""Names of matrices, as the models that people bring have them, say where they stand."""

from __future__ import annotations

import pytest

from rankwise.lab.report.network import REST, by_part, place_of

NAMES = {
    "model.layers.3.self_attn.q_proj": ("attention", "self_attn.q_proj", 3),
    "model.layers.11.mlp.down_proj": ("feed-forward", "mlp.down_proj", 11),
    "bert.encoder.layer.0.attention.self.query": ("attention", "attention.self.query", 0),
    "bert.encoder.layer.2.intermediate.dense": ("feed-forward", "intermediate.dense", 2),
    "transformer.h.5.attn.c_attn": ("attention", "attn.c_attn", 5),
    "transformer.wte": ("embeddings", "transformer.wte", None),
    "sru.layers.1.projection": ("recurrent", "projection", 1),
    "layers.0.attention.qkv": ("attention", "attention.qkv", 0),
    "layers.0.feed_forward.first": ("feed-forward", "feed_forward.first", 0),
    "embedding.clusters.2": ("word clusters", "embedding", 2),
    "output.clusters.0.projection": ("word clusters", "output.projection", 0),
    "lm_head": ("output", "lm_head", None),
    "blocks.7.mystery": ("other matrices", "mystery", 7),
    "": ("other matrices", "", None),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_says_part_kind_and_layer(name: str) -> None:
    assert tuple(place_of(name)) == NAMES[name]


def test_parts_add_up_to_the_model() -> None:
    words = {"embedding.clusters.0": [7, 7], "embedding.clusters.1": [3, 0]}
    matrices = {"a.0.attn.q": [10, 4], "a.0.mlp.up": [20, 6], **words}
    found = by_part(matrices, (50, 22))
    assert {part: pair[0] for part, pair in found.items()} == {
        "attention": 10, "feed-forward": 20, "words, cluster 1": 7, "words, cluster 2": 3, REST: 10,
    }  # fmt: skip
    assert [sum(pair[i] for pair in found.values()) for i in (0, 1)] == [50, 22]
