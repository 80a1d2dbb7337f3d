"""Every setting of an experiment can be named, changed and written down; every mistake is one line."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rankwise.cli.settings import override, settings
from rankwise.core.budget import Budget
from rankwise.errors import RankwiseError
from rankwise.lab.experiments.pipeline import run
from rankwise.lab.experiments.presets import PRESETS, preset
from rankwise.lab.models.sru import SRUConfig
from rankwise.lab.tasks.base import RAMP, from_json
from rankwise.methods import METHODS
from tests.lab.experiments.experiment_toys import toy


@pytest.mark.parametrize("name", PRESETS)
def test_an_experiment_survives_json(name: str) -> None:
    experiment = preset(name)
    assert from_json(json.loads(json.dumps(experiment.to_json()))) == experiment


@pytest.mark.parametrize("name", PRESETS)
def test_the_help_of_a_setting_names_no_part_of_the_code(name: str) -> None:
    for setting in settings(preset(name)).values():
        assert not re.search(r"this file|see `[A-Z]|\(`", setting.about), setting


def test_a_dtype_survives_json(tmp_path: Path) -> None:
    experiment = toy(tmp_path, budget=Budget(megabytes=1, dtype=torch.float16))
    assert from_json(json.loads(json.dumps(experiment.to_json()))) == experiment


def test_a_damaged_experiment_is_refused(tmp_path: Path) -> None:
    plain = toy(tmp_path).to_json()
    del plain["method"]
    with pytest.raises(RankwiseError, match="must hold all of its settings, but 'method'"):
        from_json(plain)


@pytest.mark.parametrize("value", [[], "2", 1.5, -1])
def test_a_count_that_is_none_is_refused(value: object, tmp_path: Path) -> None:
    plain = toy(tmp_path).to_json()
    plain["corpus"]["min_count"] = value
    with pytest.raises(RankwiseError, match="`min_count` must be a whole number of at least 0, but is"):
        from_json(plain)


@pytest.mark.parametrize("name", ["demo", "wikitext-103-sru-flop-l0-50", "enwik8-transformer-xl-flop-agp-80"])
def test_every_setting_can_be_set_to_what_it_is(name: str) -> None:
    """So each has a name, a type that can be parsed, and a place."""
    experiment = preset(name)
    for setting in settings(experiment).values():
        if isinstance(setting.value, bool | int | float | str) or setting.value is None:
            text = str(setting.value)
        elif isinstance(setting.value, tuple):
            text = ",".join(map(str, setting.value))
        else:
            continue
        if (
            setting.name.startswith(("model.clusters.", "healing.", "budget.params", "budget.megabytes"))
            and text == "None"
        ):
            continue
        assert override(experiment, {setting.name: text}) == experiment, setting.name


@pytest.mark.parametrize("name", ["demo", "wikitext-103-sru-flop-agp-50", "enwik8-transformer-xl-flop-l0-80"])
def test_every_setting_is_described(name: str) -> None:
    assert [setting.name for setting in settings(preset(name)).values() if not setting.about] == []


def test_settings_change_what_they_name(tmp_path: Path) -> None:
    experiment = toy(tmp_path)
    changed = override(
        experiment,
        {
            "training.lr": "3e-4",
            "training.betas": "0.8,0.9",
            "model.layer_norm": "true",
            "model.rank": "none",
            "exclude": "embedding",
            "compare": "dense,fac",
            "seed": "7",
            "both.steps": "9",
            "base.clip": "0.5",
        },
    )
    assert isinstance(experiment.model, SRUConfig)
    assert experiment.base is not None
    assert changed == replace(
        experiment,
        training=replace(experiment.training, lr=3e-4, betas=(0.8, 0.9), steps=9),
        model=replace(experiment.model, layer_norm=True, rank=None),
        exclude=("embedding",),
        compare=("dense", "fac"),
        seed=7,
        base=replace(experiment.base, steps=9, clip=0.5),
    )


def test_one_size_takes_the_place_of_another(tmp_path: Path) -> None:
    experiment = toy(tmp_path)
    assert override(experiment, {"budget.removed": "0.9"}).budget == Budget(removed=0.9, of="prunable")
    assert override(experiment, {"budget.params": "700"}).budget == Budget(params=700)
    half = {"budget.megabytes": "0.1", "budget.dtype": "float16"}
    assert override(experiment, half).budget == Budget(megabytes=0.1, dtype=torch.float16)
    with pytest.raises(RankwiseError, match="exactly one of"):
        override(experiment, {"budget.megabytes": "0.1", "budget.removed": "0.5"})


def test_a_method_keeps_the_settings_that_it_shares(tmp_path: Path) -> None:
    experiment = toy(tmp_path)
    swapped = override(experiment, {"method": "np-l0", "method.gate_lr": "9"})
    assert swapped.method.name == "np-l0"
    assert (swapped.method.anneal_steps, swapped.method.gate_lr) == (3, 9)  # type: ignore[attr-defined]
    assert override(experiment, {"method": "dense"}).budget is None
    assert override(override(experiment, {"method": "fac"}), {"init": "random"}).init == "random"


@pytest.mark.parametrize("before", METHODS)
@pytest.mark.parametrize("after", METHODS)
def test_every_method_can_take_the_place_of_every_other(before: str, after: str, tmp_path: Path) -> None:
    """One that gains a ramp reaches its size in a share of the steps that are trained."""
    size = {"budget.removed": "0.3"} if before == "dense" != after else {}
    experiment = override(toy(tmp_path, compare=("dense", "np-l0")), {"method": before})
    changed = override(experiment, {"method": after, "both.steps": "40", **size})
    assert changed.method.name == after
    assert (changed.budget is None) == (after == "dense")
    ramp, gained = getattr(changed.method, "anneal_steps", None), not hasattr(experiment.method, "anneal_steps")
    if ramp is not None:
        assert ramp == (RAMP * 40 if gained else 3)
        assert override(experiment, {"method": after, "method.anneal_steps": "7", **size}).method.anneal_steps == 7


def test_the_dense_method_has_nothing_to_compare_with(tmp_path: Path) -> None:
    experiment = toy(tmp_path, compare=("dense", "fac"))
    assert override(experiment, {"method": "dense"}).compare == ()
    with pytest.raises(RankwiseError, match="`compare` must be empty with the method dense.* Example: --method fac "):
        run(override(experiment, {"method": "dense", "compare": "fac"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_parts_that_are_missing_can_be_made_and_taken_away(tmp_path: Path) -> None:
    experiment = toy(tmp_path)
    words = {"model.embedding_width": "12", "model.clusters.widths": "4,2", "model.clusters.cutoffs": "3"}
    made = override(experiment, words)
    assert isinstance(made.model, SRUConfig)
    assert made.model.clusters is not None
    assert (made.model.clusters.widths, made.model.clusters.cutoffs) == ((4, 2), (3,))
    assert override(made, {"model.clusters": "none", "model.embedding_width": "8"}) == experiment
    assert override(experiment, {"base": "none"}).base is None


@pytest.mark.parametrize(
    "texts, message",
    [
        ({"training.learning_rate": "1"}, "There is no setting `training.learning_rate` here."),
        ({"trainin.lr": "1"}, "no setting `trainin.lr` here. Did you mean 'training.lr'"),
        ({"training.seed": "1"}, "no setting `training.seed` here.$"),
        ({"training.lr": "fast"}, "`training.lr` must be a number, but is 'fast' instead."),
        ({"training.steps": "1.5"}, "`training.steps` must be a whole number, but is '1.5' instead."),
        ({"training.steps": "0"}, "`steps` must be a whole number of at least 1, but is 0"),
        ({"training.schedule": "cosin"}, "`training.schedule` must be one of .* Did you mean 'cosine'"),
        ({"model.layer_norm": "maybe"}, "`model.layer_norm` must be true or false, but is 'maybe'"),
        ({"model.rank": "x"}, "`model.rank` must be a whole number, but is 'x'"),
        ({"budget.removed": "80"}, "Did you mean removed=0.8"),
        ({"budget.dtype": "half16", "budget.megabytes": "1"}, "`budget.dtype` must be a dtype of torch"),
        ({"method": "flop-l1"}, "Did you mean 'flop-l0'"),
        ({"method": "fac", "method.gate_lr": "1"}, "no setting `method.gate_lr` here"),
        (
            {"method": "fac", "method.anneal_steps": "5"},
            "no setting `method.anneal_steps` here, with fac. Leave it out",
        ),
        (
            {"method": "svd", "compare": "dense,flop-l0", "method.anneal_steps": "5"},
            "must be a setting of svd, but is one of flop-l0.* turn them round: --method flop-l0 --compare svd",
        ),
        (
            {"method.anneal_step": "5"},
            "no setting `method.anneal_step` here, with flop-l0. Did you mean 'anneal_steps'",
        ),
        ({"compare": "dens"}, "`compare` must name methods .* Did you mean 'dense'"),
        ({"budget": "none"}, "`budget` goes with every method but dense, but is missing with flop-l0"),
        ({"budget": "small"}, "`budget` must be none, or be set one by one, but is 'small'"),
        ({"base": "none", "base.lr": "1"}, "`base.lr` cannot be set where `base` is none"),
        ({"seed": "-1"}, "`seed` must be a whole number from 0 to .*, but is -1"),
        ({"init": "whitened"}, '`init` must be "svd", "fisher" or "random" here'),
        ({"init": "fisher", "base": "none"}, '`init` must be "random" without a base'),
        ({"init": "random", "method.start": "worth"}, '`method.start` must be "open" with random factors'),
        ({"model.clusters.widths": "4"}, "`embedding_width` must be `width`"),
    ],
)
def test_a_mistake_is_one_line(texts: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(RankwiseError, match=message) as caught:
        override(toy(tmp_path), texts)
    assert "\n" not in str(caught.value)
    assert "Pruner(" not in str(caught.value)


def test_a_group_that_is_none_says_what_else_it_needs(tmp_path: Path) -> None:
    experiment = override(toy(tmp_path), {"base": "none"})
    with pytest.raises(RankwiseError, match="`base` is none, so it needs `steps` too, but has none. Add --base.steps"):
        override(experiment, {"base.lr": "1"})


def test_a_dense_experiment_says_how_another_method_gets_its_size(tmp_path: Path) -> None:
    dense = override(toy(tmp_path), {"method": "dense"})
    with pytest.raises(RankwiseError, match="flop-l0 needs a size, but toy is dense. Example: --budget.removed 0.8"):
        override(dense, {"method": "flop-l0"})
