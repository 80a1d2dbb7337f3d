"""Presets: functions that return an experiment. One per row of the paper's tables, a `-short` twin of each, and `demo`.

The rows hold what the paper and its code publish: model, batch, learning rates, warm-up, epochs, the Lagrangian. A
`-short` twin is the same row in minutes on one GPU: fewer steps, bf16, a learning rate that falls from the base on
(cosine), layer norm, our own recipe, half the dropout on enwik8, less still for what is left, and a dense control that
trains on for as long and, where it has logits of all words, teaches. What was not published is in docs/departures.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from rankwise.core.budget import Budget
from rankwise.distill import Distillation
from rankwise.errors import RankwiseError, nearest
from rankwise.lab.models import ModelConfig
from rankwise.lab.models.adaptive import Clusters
from rankwise.lab.models.sru import SRUConfig
from rankwise.lab.models.transformer_xl import TransformerXLConfig
from rankwise.lab.tasks.base import Experiment
from rankwise.lab.tasks.causal import DECODERS, CausalExperiment
from rankwise.lab.tasks.pretrained import PretrainedConfig
from rankwise.lab.tasks.sentences import ENCODERS, GlueExperiment, SentenceExperiment
from rankwise.lab.tasks.streams import CorpusConfig, StreamExperiment, lighter_dropout
from rankwise.lab.training import TrainingConfig, TuningConfig
from rankwise.methods import METHODS, make_method

PRUNERS = ("fac", "agp", "np-l0", "flop-agp", "flop-l0")
EPOCH = {"enwik8": 90_000_000 // (64 * 256) + 1, "wikitext-103": 103_227_021 // (64 * 256) + 1}
"""Steps of 64 x 256 tokens."""
RAMP = 64_000
"""m, the steps in which the published runs reach their size."""
DISTILL = 0.8
"""The share of the loss that is the dense control's, wherever there is one to learn from (docs/log/training.md)."""
RISE = 16_000
"""The published learning rates of the multipliers fall with the root of the step; ours are constant: the rate here."""


@dataclass(frozen=True)
class Preset:
    """An experiment by name."""

    name: str
    make: Callable[[], Experiment]
    table: str
    """The table of the paper it is a row of; empty for ours."""
    about: str


def demo() -> StreamExperiment:
    """A small SRU on text that every Python carries: minutes on a laptop, no download."""
    phase = TrainingConfig(
        steps=600, batch_size=16, window=64, lr=4e-3, schedule="cosine", warmup_steps=50, clip=1.0,
        eval_every=300, checkpoint_every=300, log_every=50,
    )  # fmt: skip
    return StreamExperiment(
        name="demo",
        corpus=CorpusConfig(name="pydoc"),
        model=SRUConfig(
            num_words=100, embedding_width=64, width=512, num_layers=3, rank=96, layer_norm=True, dropout=0.0
        ),
        base=replace(phase, schedule="constant"),
        # gates of the plain SVD's components, by what they are worth to the loss (docs/log/methods.md)
        method=make_method("flop-l0", start="worth", anneal_steps=30),
        budget=Budget(removed=0.8, of="prunable"),
        training=replace(phase, distill=DISTILL),
        exclude=("embedding", "output"),
        compare=("dense", "fac"),
    )


def enwik8_sru(
    method: str = "flop-l0", removed: float | None = 0.8, *, plain: int | None = None, short: bool = False
) -> StreamExperiment:
    """Six SRU layers on enwik8: tables "enwik8" and "factorization analysis".

    `plain` is the width of a model without factorization, as NP-L0 has it: 1536 is of equal size, 2048 larger.
    """
    model = SRUConfig(
        num_words=205, embedding_width=205, width=plain or 3056, num_layers=6, rank=None if plain else 512,
        layer_norm=short, dropout=0.05 if short else 0.1,
    )  # fmt: skip
    phases = _sru_phases(model.width, warmup=16_000, epoch=EPOCH["enwik8"], epochs=(30, 100), decay=1e-7)
    return _row(
        "enwik8-sru" + (f"-plain-{plain}" if plain else ""), "enwik8", model, phases, method, removed,
        gates=(2, 3, 11 / 12), exclude=("embedding", "output"), short=(2_500, 7_500) if short else None,
    )  # fmt: skip


def enwik8_sru_timed(minutes: int, *, base: int, steps: int, anneal_steps: int) -> StreamExperiment:
    """The paper's enwik8 model from nothing to an evaluated compact model in so many minutes on one H200.

    It reads the text at least twelve times, so it has the paper's dropout.
    """
    row = enwik8_sru("flop-l0", 0.8, short=True)
    assert row.base is not None
    shared: dict[str, Any] = {"warmup_steps": 500, "eval_every": 10**6, "checkpoint_every": 10**6, "log_every": 500}
    return replace(
        row,
        name=f"enwik8-sru-{minutes}min",
        model=replace(row.model, dropout=0.1),
        dropout=lighter_dropout(0.1, 0.8),
        base=replace(row.base, steps=base, **shared),
        # there is no time to train a teacher as well
        training=replace(row.training, steps=steps, distill=0.0, **shared),
        method=make_method("flop-l0", anneal_steps=anneal_steps),
        compare=(),
    )


enwik8_sru_10min = partial(enwik8_sru_timed, 10, base=16_000, steps=48_000, anneal_steps=2_400)
enwik8_sru_30min = partial(enwik8_sru_timed, 30, base=50_000, steps=165_000, anneal_steps=8_000)


def wikitext_103_sru(
    method: str = "flop-l0", removed: float | None = 0.5, *, plain: int | None = None, short: bool = False
) -> StreamExperiment:
    """Twelve SRU layers with adaptive embedding and softmax on WikiText-103: table "Wiki-103".

    `plain` is the width of a model without factorization, as NP-L0 has it: 1184 is of equal size.
    """
    width, rank = plain or 2048, None if plain else 512
    words = (10_000, 20_000, 40_000, 60_000, 100_000)
    clusters = Clusters(cutoffs=words, widths=(1024, 1024, 256, 256, 64, 64), scale=math.sqrt(width))
    model = SRUConfig(
        num_words=267_735, embedding_width=width, width=width, num_layers=12, rank=rank, first_rank=rank,
        layer_norm=short, clusters=clusters,
    )  # fmt: skip
    phases = _sru_phases(width, warmup=4_000, epoch=EPOCH["wikitext-103"], epochs=(50, 100), decay=0.0)
    return _row(
        "wikitext-103-sru" + (f"-plain-{plain}" if plain else ""), "wikitext-103", model, phases, method, removed,
        gates=(2, 5, 11 / 12), exclude=(), short=(1_750, 5_250) if short else None,
    )  # fmt: skip


def enwik8_transformer_xl(
    method: str = "flop-l0", removed: float | None = 0.8, *, short: bool = False
) -> StreamExperiment:
    """The 12-layer Transformer-XL on enwik8: table "Transformer-XL"."""
    batch, pruning_batch = (24, 24) if short else (48, 32)
    base = TrainingConfig(
        steps=200_000, batch_size=batch, window=512, lr=3e-4, schedule="cosine", clip=0.25,
        eval_every=4_000, checkpoint_every=4_000,
    )  # fmt: skip
    phases = base, replace(base, steps=300_000, batch_size=pruning_batch, lr=2.5e-4)
    model = TransformerXLConfig(num_words=204, dropout=0.05 if short else 0.1)
    return _row(
        "enwik8-transformer-xl", "enwik8", model, phases, method, removed,
        gates=(None, 1, 0.9952), exclude=("embedding", "output"), short=(1_750, 5_250) if short else None,
    )  # fmt: skip


def _pretrained(hub: str, *, small: bool) -> dict[str, Any]:
    """Our recipe for pretrained models: one-shot, then distilled; 35% of the model removed, as in the paper."""
    tuned = TuningConfig(epochs=3, lr=1e-4 if small else 3e-5, max_steps=1_500, min_steps=200)
    # low: a model that is compressed already has more to lose than to learn (docs/log/fine-tuning.md)
    made_small = replace(tuned, lr=3e-5 if small else 1.5e-5, schedule="cosine")
    return {
        "model": PretrainedConfig(name=hub),
        "base": tuned,
        "method": make_method("svd", layout="pivot"),
        "budget": Budget(removed=0.35),
        "training": replace(made_small, epochs=4 if small else 10, max_steps=1_000 if small else 2_000, min_steps=400),
        "healing": replace(made_small, epochs=2 if small else 5, max_steps=500 if small else 1_000, min_steps=200),
        "distillation": Distillation(),
    }


def glue(name: str) -> GlueExperiment:
    """An encoder on a task of GLUE, embeddings pruned too."""
    return GlueExperiment(name=name, **_pretrained(ENCODERS[name].hub, small=name == "glue-minilm"))


def sentences() -> SentenceExperiment:
    """An encoder on rows of one's own: `--data rows.csv --text_column text --label_column label`."""
    return SentenceExperiment(name="sentences", **_pretrained(ENCODERS["glue-minilm"].hub, small=True))


def causal() -> CausalExperiment:
    """A decoder on a text of one's own, distilled from the dense one: `--text book.txt --model.name FOLDER`."""
    tuned = TuningConfig(epochs=1, lr=2e-5, batch_size=8, max_steps=2_000)
    smaller = replace(tuned, epochs=3, lr=1e-4, schedule="cosine", max_steps=4_000)
    return CausalExperiment(
        name="causal",
        model=PretrainedConfig(name=DECODERS["causal"].hub, max_length=512),
        base=tuned,
        method=make_method("svd"),
        budget=Budget(removed=0.2),
        training=smaller,
        healing=None,
        distillation=Distillation(hidden=0.0),
        calibration_rows=128,
    )


def preset(name: str) -> Experiment:
    """The experiment of that name."""
    if name not in PRESETS:
        raise RankwiseError(
            f"There is no preset {name!r}.{nearest(name, PRESETS)} `rankwise presets` lists all {len(PRESETS)}."
        )
    return PRESETS[name].make()


def _row(
    family: str,
    corpus: str,
    model: ModelConfig,
    phases: tuple[TrainingConfig, TrainingConfig],
    method: str,
    removed: float | None,
    *,
    gates: tuple[float | None, float, float],
    exclude: tuple[str, ...],
    short: tuple[int, int] | None,
) -> StreamExperiment:
    """A row of a table.

    Args:
        gates: l_0 of alpha (None: the weights' learning rate), l_0 of lambda, and P(z > 0) at first.
        short: steps of the short twin, dense and pruning; None for the row as published.
    """
    level = "" if removed is None else f"-{round(100 * removed)}"
    shared: dict[str, Any] = {
        "name": f"{family}-{method}{level}{'-short' if short else ''}",
        "corpus": CorpusConfig(name=corpus),
        "model": model,
        "budget": None if removed is None else Budget(removed=removed, of="prunable"),
        "dropout": None if short is None or removed is None else lighter_dropout(model.dropout, removed),
        "exclude": exclude,
    }
    base, training = phases
    if short is not None:
        # a rate that falls twice costs what it gained the first time (docs/log/training.md)
        base = replace(_shortened(base, short[0]), schedule="constant")
        training = _shortened(training, short[1])
    if method == "fac":
        # from scratch, for as many steps as the other rows have in all
        whole = replace(training, steps=base.steps + training.steps)
        return StreamExperiment(base=None, method=make_method("fac"), training=whole, init="random", **shared)
    settings: dict[str, Any] = {"anneal_steps": training.steps // 16 if short else RAMP}
    if short is None:
        alpha, multiplier, open_probability = gates
        peak = 1 / math.sqrt(model.width * (base.warmup_steps or RISE))
        settings |= {
            "recipe": "published",
            "refactor": False,
            "gate_lr": training.lr if alpha is None else alpha * peak,
            "multiplier_lr": multiplier * peak,
            "open_probability": open_probability,
        }
    known = {field.name for field in fields(METHODS[method])}
    made = make_method(method, **{key: value for key, value in settings.items() if key in known})
    compare = ("dense",) if short and method != "dense" else ()
    if compare and getattr(model, "clusters", None) is None:
        # the control is trained anyway; an adaptive softmax gives no logits of all words to learn
        training = replace(training, distill=DISTILL)
    return StreamExperiment(base=base, method=made, training=training, compare=compare, **shared)


def _sru_phases(
    width: int, *, warmup: int, epoch: int, epochs: tuple[int, int], decay: float
) -> tuple[TrainingConfig, TrainingConfig]:
    """l_0 = 2: the learning rate peaks at 2 / sqrt(width x warm-up)."""
    phase = TrainingConfig(
        steps=epochs[0] * epoch, batch_size=64, window=256, lr=2 / math.sqrt(width * warmup), warmup_steps=warmup,
        weight_decay=decay, clip=0.3, reset_every=epoch, eval_every=epoch, checkpoint_every=epoch,
    )  # fmt: skip
    return phase, replace(phase, steps=epochs[1] * epoch)


def _shortened(phase: TrainingConfig, steps: int) -> TrainingConfig:
    return replace(
        phase, steps=steps, lr=1e-3 if phase.schedule == "inverse-sqrt" else 5e-4, schedule="cosine", warmup_steps=200,
        clip=0.5, reset_every=None, precision="bf16", eval_every=1_000, checkpoint_every=2_000,
    )  # fmt: skip


def _rows() -> Iterator[tuple[str, Callable[..., StreamExperiment]]]:
    """(table, maker) of every row; the maker takes `short`."""
    yield "enwik8", partial(enwik8_sru, "dense", None)
    for removed, method in itertools.product((0.7, 0.8, 0.9), PRUNERS):
        yield "enwik8", partial(enwik8_sru, method, removed, plain=1536 if method == "np-l0" else None)
    analysis = "factorization analysis"
    yield analysis, partial(enwik8_sru, "flop-l0", 0.85)
    yield analysis, partial(enwik8_sru, "np-l0", 0.85, plain=1536)
    for width in (1536, 2048):
        yield analysis, partial(enwik8_sru, "dense", None, plain=width)
    for removed in (0.7, 0.8, 0.85, 0.9):
        yield analysis, partial(enwik8_sru, "np-l0", removed, plain=2048)
    yield "WikiText-103", partial(wikitext_103_sru, "dense", None)
    for removed, method in itertools.product((0.5, 0.7, 0.8), PRUNERS):
        yield "WikiText-103", partial(wikitext_103_sru, method, removed, plain=1184 if method == "np-l0" else None)
    yield "Transformer-XL", partial(enwik8_transformer_xl, "dense", None)
    for method, removed in [*((m, 0.8) for m in PRUNERS if m != "np-l0"), ("flop-agp", 0.9), ("flop-l0", 0.9)]:
        yield "Transformer-XL", partial(enwik8_transformer_xl, method, removed)


def _presets() -> Iterator[Preset]:
    yield Preset("demo", demo, "", "a small SRU on text that every Python carries; minutes on a laptop")
    timed = "{} on one H200, start to evaluated compact model"
    yield Preset("enwik8-sru-10min", enwik8_sru_10min, "", timed.format("570 seconds"))
    yield Preset("enwik8-sru-30min", enwik8_sru_30min, "", timed.format("by estimate 27 minutes"))
    for name, encoder in ENCODERS.items():
        about = f"fine-tune, prune and heal {encoder.hub.rpartition('/')[2]} on a task of GLUE; minutes on one GPU"
        yield Preset(name, partial(glue, name), "", about)
    own = "fine-tune, prune and heal {} of your own choice on {} of your own"
    yield Preset("sentences", sentences, "", own.format("an encoder", "rows"))
    yield Preset("causal", causal, "", own.format("a decoder", "text"))
    for (table, make), short in itertools.product(_rows(), (False, True)):
        made = partial(make, short=short)
        about = "minutes on one GPU" if short else "as published"
        yield Preset(made().name, made, table, about)


PRESETS = {found.name: found for found in _presets()}
