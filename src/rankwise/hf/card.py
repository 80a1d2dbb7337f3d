"""The model card: README.md with metadata for the hub, and the same figures in `.eval_results`.

Only what was measured is written. The hub ranks results on its own benchmarks alone; size, speed and a text of one's
own are none of them, and the notes beside them say so.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import yaml  # type: ignore[import-untyped]
from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils._validators import validate_repo_id

from rankwise.core.budget import SizeReport, count
from rankwise.deploy.structure import Head, LowRankEmbedding, LowRankLinear, layers_of
from rankwise.hf.format import entry_of
from rankwise.version import VERSION

if TYPE_CHECKING:
    from transformers import PreTrainedModel

README, RESULTS = "README.md", ".eval_results"
OWN_RESULTS = {"size.yaml", "quality.yaml", "speed.yaml"}
"""What is written to `.eval_results`; others may add results there."""
UNNAMED = "data that were not named"
NOT_MEASURED = "Not measured."
NO_DATASET = "No dataset of the hub: "
TASKS = {
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForConditionalGeneration": "text2text-generation",
}
"""The hub's word for what a class of transformers does, by the end of its name."""

BeforeAfter = tuple[float, float]
"""A figure of the dense model, and the same figure of this one."""


@dataclass(frozen=True)
class Card:
    """What is known of a model that is saved."""

    model: PreTrainedModel
    name: str
    size: SizeReport | None
    quality: Mapping[str, BeforeAfter]
    speed: Mapping[str, BeforeAfter]
    base_model: str | None
    """The dense model: a name on the hub, or a folder."""
    measured_on: str
    """The data of `quality`."""
    earlier: Mapping[str, str] = field(default_factory=dict)
    """Sections of the card of a model of the same layers, by title (`sections_of`)."""
    healing: str | None = None
    """What was done to heal it."""

    @property
    def kind(self) -> str:
        return type(self.model).__name__

    @property
    def title(self) -> str:
        """The name on one line."""
        return _in_one_line(self.name) or self.kind

    @property
    def is_stock(self) -> bool:
        """Whether the layers are as the class builds them, so that transformers alone loads the folder."""
        return entry_of(self.model) is None

    @property
    def hub_base(self) -> str | None:
        """The name of the dense model, where it is one that the hub may have."""
        if self.base_model is None or os.path.isdir(self.base_model):
            return None
        try:
            validate_repo_id(self.base_model)
        except HFValidationError:
            return None
        return self.base_model


@dataclass(frozen=True)
class Figure:
    """One number of a card."""

    about: str
    """The group that it belongs to, which stands for a dataset: size, quality or speed."""
    data: str
    """What it was measured on, in words."""
    name: str
    value: float


def write_card(folder: Path, card: Card) -> None:
    """Write README.md and, where something was measured, `.eval_results`."""
    (folder / README).write_text(f"---\n{metadata(card).to_yaml()}\n---\n\n{_text(card)}", encoding="utf-8")
    groups: dict[str, list[Figure]] = {}
    for figure in figures(card):
        groups.setdefault(figure.about, []).append(figure)
    for about, group in groups.items():
        (folder / RESULTS).mkdir(exist_ok=True)
        entries = [
            {
                "dataset": {"id": f"rankwise-{about}", "task_id": _slug(figure.name)},
                "value": figure.value,
                "notes": f"{figure.name}. {NO_DATASET}{figure.data}",
            }
            for figure in group
        ]
        text = yaml.safe_dump(entries, sort_keys=False, allow_unicode=True)
        (folder / RESULTS / f"{about}.yaml").write_text(text, encoding="utf-8")


def figures(card: Card) -> Iterator[Figure]:
    """Size, quality and speed, of the dense model too."""
    if card.size is not None:
        counted = "parameters that are not zero" if card.size.nonzeros else "parameters"
        yield Figure("size", "tied weights are counted once", counted, card.size.exported)
        yield Figure("size", "tied weights are counted once", "parameters of the dense model", card.size.dense)
    data = _in_one_line(card.measured_on) or UNNAMED
    groups = (("quality", data, card.quality), ("speed", "made-up text, one call in ms", card.speed))
    for about, data, pairs in groups:
        for name, (dense, small) in pairs.items():
            name = _in_one_line(name) or about
            yield Figure(about, data, name, small)
            yield Figure(about, data, f"{name}, dense model", dense)


def metadata(card: Card) -> ModelCardData:
    """What the hub reads at the top of README.md."""
    task = next((task for end, task in TASKS.items() if card.kind.endswith(end)), "feature-extraction")
    results = [
        EvalResult(
            task_type=task,
            dataset_type=f"rankwise-{figure.about}",
            dataset_name=figure.data,
            metric_type="perplexity" if figure.name == "perplexity" else _slug(figure.name),
            metric_name=figure.name,
            metric_value=figure.value,
        )
        for figure in figures(card)
    ]
    return ModelCardData(
        library_name="transformers",
        tags=["rankwise", "pruning", *([] if card.is_stock else ["low-rank"])],
        base_model=card.hub_base,
        model_name=card.title if results else None,
        eval_results=results or None,
    )


def _in_one_line(text: str) -> str:
    """A text without line breaks and double spaces, which YAML may change."""
    return " ".join(text.split())


def _slug(name: str) -> str:
    """A name in the letters of an identifier."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") or "metric"


def _text(card: Card) -> str:
    """README.md below its metadata."""
    model, achieved, layers = card.model, count(card.model), layers_of(card.model).values()
    ranks = [layer.rank for layer in layers if isinstance(layer, LowRankLinear | LowRankEmbedding | Head)]
    low_rank = f"{len(ranks)} of {len(layers)} linear layers and embeddings are low-rank"
    if ranks:
        low_rank += f", of rank {min(ranks)} to {max(ranks)}; `config.json` lists them"
    how, first = ", which writes\nweight matrices as products of two smaller ones", ""
    if card.is_stock:
        how = "; whatever loads this kind of model loads it"
    else:
        first = 'import rankwise.hf  # pip install ".[hf]" in a clone of rankwise\n'
    base = card.hub_base or (card.base_model and Path(card.base_model).name)
    # a JSON string is one of Python too
    return f"""\
# {card.title}

{card.kind} with {achieved:,} parameters{f", made of {base}" if base else ""} by rankwise {VERSION}{how}.

```python
{first}from transformers import {card.kind}

model = {card.kind}.from_pretrained({json.dumps(card.name)})
```
{_serving(card) if type(model).can_generate() and not model.config.is_encoder_decoder else ""}
## Size

{_sizes(card, achieved)}

{low_rank}. Tied weights are counted once.

## Quality

{_pairs("metric", card.quality, "g") or NOT_MEASURED}

{_healing(card)}## Speed

{_pairs("milliseconds per call", card.speed, ".2f") or card.earlier.get("Speed", NOT_MEASURED)}
"""


def _healing(card: Card) -> str:
    """What was done, after what was done before: a model may be healed more than once."""
    if card.healing is None:
        return ""
    return "\n\n".join(filter(None, ("## Healing", card.earlier.get("Healing"), card.healing))) + "\n\n"


def sections_of(folder: str) -> dict[str, str]:
    """The sections of the card in a folder by title; none where it has no card."""
    try:
        text = (Path(folder) / README).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return {}
    return {title: body.strip() for title, body in re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", text, re.M | re.S)}


def _serving(card: Card) -> str:
    """How a decoder is served, and measured on a text."""
    name = shlex.quote(card.title)
    needs = "" if card.is_stock else " With rankwise installed beside vLLM:"
    return f"""
Serve and measure it.{needs}

```
vllm serve {name}
rankwise evaluate {name} --text FILE
```
"""


def _sizes(card: Card, achieved: int) -> str:
    size = card.size
    if size is None:
        return card.earlier.get("Size", "The size of the dense model was not given.").split("\n\n")[0]
    rows = {"dense": size.dense, "requested, at most": size.budget}
    if size.nonzeros:
        rows |= {"this model, non-zero": size.exported, "this model, zeros included": achieved}
    else:
        rows["this model"] = achieved
    cells = {row: (f"{number:,}", f"{1 - number / size.dense:.2%}") for row, number in rows.items()}
    return _table(("", "parameters", "removed"), cells)


def _pairs(what: str, pairs: Mapping[str, BeforeAfter], form: str) -> str:
    cells = {name: [format(number, form) for number in pair] for name, pair in pairs.items()}
    return _table((what, "dense", "this model"), cells) if cells else ""


def _table(header: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *([name, *cells] for name, cells in rows.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
