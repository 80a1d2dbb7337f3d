"""Where a matrix stands in a network, by its name: which part, which layer, and what it does there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

CLUSTERS = "word clusters"
PARTS: tuple[tuple[str, str], ...] = (
    ("attention", r"attn|attention|^[qkvo]$|qkv|query|key|value|heads?_net|[qkvo]_(proj|net)|out_proj|r_net"),
    ("feed-forward", r"mlp|ffn|^ff|feed_?forward|intermediate|^fc|lin\d|core_?net|inner|gate_proj|up_proj|down_proj|"
     r"^w\d$|expert"),
    ("recurrent", r"sru|lstm|gru|rnn|recurrent"),
    ("embeddings", r"embed|wte|wpe|word|token|position"),
    ("output", r"lm_head|output|head|classifier|pooler|softmax|score"),
)  # fmt: skip
"""Parts of a network, and what the words of a matrix' name look like there. The first that matches counts."""
OTHER, REST = "other matrices", "not pruned"


class Place(NamedTuple):
    """A matrix of a network."""

    part: str
    kind: str
    """What it is called inside its layer."""
    layer: int | None
    """Counted from 0; of a word cluster, its number. None outside of the layers."""


def place_of(name: str) -> Place:
    """Where a matrix of that name stands."""
    head, clusters, rest = name.rpartition("clusters.")
    if clusters and rest.split(".")[0].isdigit():
        number, *inner = rest.split(".")
        kind = next((word for word in reversed(head.split(".")) if word), "words")
        return Place(CLUSTERS, ".".join([kind, *inner]), int(number))
    words = name.split(".")
    place = next((i for i, word in enumerate(words) if word.isdigit()), None)
    layer = None if place is None else int(words[place])
    inner = words if place is None else words[place + 1 :] or words[:place]
    # the words inside the layer say more than those above it
    for scope in (inner, words):
        for part, pattern in PARTS:
            if any(re.search(pattern, word.lower()) for word in scope):
                return Place(part, ".".join(inner), layer)
    return Place(OTHER, ".".join(inner), layer)


def by_part(matrices: Mapping[str, Sequence[int]], total: Sequence[int]) -> dict[str, tuple[int, int]]:
    """Parameters before and after of each part, each word cluster by itself; `total`: of the whole model."""
    found: dict[str, tuple[int, int]] = {}
    for name, (dense, kept) in matrices.items():
        place = place_of(name)
        part = f"words, cluster {(place.layer or 0) + 1}" if place.part == CLUSTERS else place.part
        before = found.get(part, (0, 0))
        found[part] = (before[0] + dense, before[1] + kept)
    rest = [whole - sum(pair[i] for pair in found.values()) for i, whole in enumerate(total)]
    if min(rest) > 0:
        found[REST] = (rest[0], rest[1])
    return found
