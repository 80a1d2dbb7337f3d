"""The model card: the size asked for, the size reached, and what was measured; nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rankwise.core.budget import SizeReport, count
from rankwise.deploy.structure import Head, LowRankEmbedding, LowRankLinear, layers_of
from rankwise.version import VERSION

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BeforeAfter = tuple[float, float]
"""A figure of the dense model, and the same figure of this one."""


def card(
    model: PreTrainedModel,
    name: str,
    *,
    size: SizeReport | None,
    quality: Mapping[str, BeforeAfter] | None,
    speed: Mapping[str, BeforeAfter] | None,
    base_model: str | None,
) -> str:
    """The text of README.md."""
    kind = type(model).__name__
    lines = [
        *_front_matter(base_model),
        f"# {name}",
        "",
        f"{kind} with {count(model):,} parameters"
        + (f", made of {base_model}" if base_model else "")
        + f" by rankwise {VERSION}, which writes weight matrices as products of two smaller ones.",
        "",
        "```python",
        'import rankwise.hf  # pip install ".[hf]" in a clone of rankwise',
        f"from transformers import {kind}",
        "",
        f"model = {kind}.from_pretrained({json.dumps(name)})",
        "```",
        "",
        "## Size",
        "",
        *_size(model, size),
        "",
        *_layers(model),
        "",
        "## Quality",
        "",
        *_table(quality, "metric", "g"),
        "",
        "## Speed",
        "",
        *_table(speed, "milliseconds per call", ".2f"),
    ]
    return "\n".join(lines) + "\n"


def _front_matter(base_model: str | None) -> list[str]:
    # a JSON string is a YAML string too
    base = [f"base_model: {json.dumps(base_model)}"] if base_model else []
    return ["---", "library_name: transformers", "tags: [rankwise, pruning, low-rank]", *base, "---", ""]


def _size(model: PreTrainedModel, size: SizeReport | None) -> list[str]:
    achieved = count(model)
    if size is None:
        return [f"{achieved:,} parameters, tied weights counted once. The size of the dense model was not given."]
    rows = [("dense", size.dense), ("requested, at most", size.budget), ("this model", achieved)]
    if size.nonzeros:
        rows[2:] = [("this model, non-zero", size.exported), ("this model, zeros included", achieved)]
    table = ["| | parameters | removed |", "|---|---|---|"]
    return [*table, *(f"| {name} | {n:,} | {1 - n / size.dense:.2%} |" for name, n in rows)]


def _layers(model: PreTrainedModel) -> list[str]:
    layers = layers_of(model).values()
    ranks = [layer.rank for layer in layers if isinstance(layer, LowRankLinear | LowRankEmbedding | Head)]
    if not ranks:
        return [f"None of the {len(layers)} linear layers and embeddings is low-rank."]
    return [
        f"{len(ranks)} of {len(layers)} linear layers and embeddings are low-rank, of rank {min(ranks)} to "
        f"{max(ranks)}; `config.json` lists them."
    ]


def _table(figures: Mapping[str, BeforeAfter] | None, what: str, form: str) -> list[str]:
    if not figures:
        return ["Not measured."]
    rows = [f"| {name} | {before:{form}} | {after:{form}} |" for name, (before, after) in figures.items()]
    return [f"| {what} | dense | this model |", "|---|---|---|", *rows]
