"""The presets are the rows of the paper's tables, with its sizes."""

from __future__ import annotations

from typing import Any

import pytest

from rankwise.errors import RankwiseError
from rankwise.lab.experiments.presets import PRESETS, preset

# the sizes that the paper's tables print, in millions: name -> (before, after)
PAPER = {
    "enwik8-sru-dense": (35, 35),
    "enwik8-sru-flop-l0-70": (35, 11),
    "enwik8-sru-fac-80": (35, 8),
    "enwik8-sru-agp-90": (35, 4),
    "enwik8-sru-plain-1536-np-l0-70": (37, 11),
    "enwik8-sru-plain-1536-np-l0-80": (37, 8),
    "enwik8-sru-plain-1536-np-l0-90": (37, 4),
    "wikitext-103-sru-dense": (100, 100),
    "wikitext-103-sru-flop-l0-50": (100, 50),
    "wikitext-103-sru-fac-70": (100, 30),
    "wikitext-103-sru-agp-80": (100, 20),
    "enwik8-transformer-xl-dense": (41, 41),
    "enwik8-transformer-xl-flop-l0-80": (41, 8),
    "enwik8-transformer-xl-flop-agp-90": (41, 4),
}


@pytest.mark.parametrize("name", PAPER)
def test_a_row_has_the_papers_sizes(name: str) -> None:
    found = preset(name).size_preview()
    assert (round(found.parameters / 1e6), round(found.exported / 1e6)) == PAPER[name]


def test_a_row_counts_to_the_parameter() -> None:
    found = preset("enwik8-sru-flop-l0-80").size_preview()
    assert (found.parameters, found.prunable) == (34_541_414, 33_799_360)
    assert found.exported == 34_541_414 - 27_039_488


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_named_after_itself_and_has_a_short_twin(name: str) -> None:
    experiment = preset(name)
    assert experiment.name == name
    if PRESETS[name].table:
        row = name.removesuffix("-short")
        long, short = preset(row).size_preview(), preset(f"{row}-short").size_preview()
        assert 50 * short.tokens < long.tokens
        assert abs(short.parameters / long.parameters - 1) < 0.01  # layer norm


@pytest.mark.parametrize("name", [name for name in PRESETS if "-90" in name or "-dense" in name])
def test_what_is_left_has_less_dropout_in_short_runs(name: str) -> None:
    """D_o sqrt(C_r / C_o), and the paper's rows and dense ones as they are."""
    experiment = preset(name)
    lighter = name.endswith("-short") and "-dense" not in name
    assert experiment.dropout == (pytest.approx(experiment.model.dropout * 0.1**0.5, abs=5e-4) if lighter else None)


@pytest.mark.parametrize("name", PRESETS)
def test_what_has_a_teacher_to_give_is_taught_and_the_papers_rows_are_not(name: str) -> None:
    """A dense control that is trained anyway teaches, unless an adaptive softmax has no logits of all words."""
    experiment: Any = preset(name)
    if hasattr(experiment, "distillation"):
        assert experiment.distills
        return
    has_one = "dense" in experiment.compare and experiment.base is not None and not name.startswith("wikitext-103")
    assert experiment.distills == has_one
    if PRESETS[name].about == "as published":
        assert experiment.training.distill == 0
    assert experiment.control().training.distill == 0


def test_every_row_of_the_papers_tables_is_there() -> None:
    others = ("glue-", "sentences", "causal")
    rows = {name for name in PRESETS if not name.endswith("-short") and not name.startswith(others)}
    methods = ("fac", "agp", "flop-agp", "flop-l0")
    expected = {f"enwik8-sru-{method}-{level}" for method in methods for level in (70, 80, 90)}
    expected |= {f"enwik8-sru-plain-1536-np-l0-{level}" for level in (70, 80, 85, 90)}
    expected |= {f"enwik8-sru-plain-2048-np-l0-{level}" for level in (70, 80, 85, 90)}
    expected |= {"enwik8-sru-flop-l0-85", "enwik8-sru-plain-1536-dense", "enwik8-sru-plain-2048-dense"}
    expected |= {f"wikitext-103-sru-{method}-{level}" for method in methods for level in (50, 70, 80)}
    expected |= {f"wikitext-103-sru-plain-1184-np-l0-{level}" for level in (50, 70, 80)}
    expected |= {f"enwik8-transformer-xl-{method}-80" for method in methods}
    expected |= {f"enwik8-transformer-xl-{method}-90" for method in ("flop-agp", "flop-l0")}
    expected |= {f"{family}-dense" for family in ("enwik8-sru", "wikitext-103-sru", "enwik8-transformer-xl")}
    assert expected <= rows
    assert len(rows - expected) <= 3


def test_fac_trains_from_scratch_for_as_many_steps_in_all() -> None:
    fac, flop = preset("enwik8-sru-fac-80"), preset("enwik8-sru-flop-l0-80")
    assert (fac.base, fac.init) == (None, "random")
    assert flop.base is not None
    assert fac.training.steps == flop.base.steps + flop.training.steps


def test_the_learning_rate_is_the_published_one() -> None:
    """l_0 / sqrt(d) min(k^-1/2, k / w^3/2) with l_0 = 2, d = 3056 and w = 16,000."""
    training = preset("enwik8-sru-flop-l0-80").training
    for k in (1, 100, 16_000, 100_000):
        published = 2 / 3056**0.5 * min(k**-0.5, k / 16_000**1.5)
        assert training.lr_at(k) == pytest.approx(published, rel=1e-6)


def test_a_wrong_name_gets_the_nearest() -> None:
    with pytest.raises(RankwiseError, match="no preset 'enwik8-sru-flop-l0-81'. Did you mean 'enwik8-sru-flop-l0-8"):
        preset("enwik8-sru-flop-l0-81")


def test_the_rivals_of_the_demo_start_alike_with_a_ramp_of_their_own() -> None:
    """Gates that start by what components are worth need few steps; whoever prunes from all components needs more."""
    demo = preset("demo")
    for name in ("fac", "flop-agp", "np-l0", "agp"):
        rival = demo.with_method(name)
        assert (rival.init, rival.training, rival.budget) == (demo.init, demo.training, demo.budget)
        assert getattr(rival.method, "anneal_steps", 150) == demo.training.steps // 4
    assert demo.with_method("flop-l0").method is demo.method
