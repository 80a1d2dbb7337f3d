"""Plans in PEFT's words: what a name, a list of names and a regular expression match, and what is a mistake."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import rankwise as rw
from rankwise.adapters.plans import peft_plan
from tests.adapters.plan_toys import names, reasons


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)


class Model(nn.Module):
    """Shaped as a language model with a head of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.layers = nn.ModuleList([Block(), Block()])
        self.score = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
        self.lm_head = nn.Linear(6, 9)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


LINEAR = {
    "layers.0.q_proj",
    "layers.0.k_proj",
    "layers.1.q_proj",
    "layers.1.k_proj",
    "score.0",
    "score.2",
}
EVERYTHING = {*LINEAR, "embed", "lm_head"}


@pytest.mark.parametrize(
    "targets, found",
    [
        (None, EVERYTHING),
        ("all-linear", LINEAR),
        (["q_proj"], {"layers.0.q_proj", "layers.1.q_proj"}),
        (("q_proj", "lm_head"), {"layers.0.q_proj", "layers.1.q_proj", "lm_head"}),
        (["0.q_proj"], {"layers.0.q_proj"}),
        (r".*\.1\..*_proj", {"layers.1.q_proj", "layers.1.k_proj"}),
        (r"score\.\d", {"score.0", "score.2"}),
        ("lm_head", {"lm_head"}),
    ],
)
def test_a_list_matches_last_parts_and_a_string_the_whole_name(targets: Any, found: set[str]) -> None:
    plan = peft_plan(Model(), targets)
    assert names(plan) == found
    assert reasons(plan) == dict.fromkeys(EVERYTHING - found, "not in `include`")


def test_what_is_excluded_goes_before_what_is_a_target() -> None:
    plan = peft_plan(Model(), ["q_proj", "k_proj"], exclude_modules=["1.k_proj"])
    assert names(plan) == {"layers.0.q_proj", "layers.0.k_proj", "layers.1.q_proj"}
    assert reasons(plan)["layers.1.k_proj"] == "in `exclude`"
    plan = peft_plan(Model(), exclude_modules=r"layers\..*|embed")
    assert names(plan) == {"score.0", "score.2", "lm_head"}
    # not the word as a last part: a string is the whole name
    assert "layers.0.q_proj" in names(peft_plan(Model(), exclude_modules="embed|q_proj"))


def test_modules_to_save_stay_whole_with_all_that_is_inside() -> None:
    plan = peft_plan(Model(), modules_to_save=["score", "layers.1"])
    assert names(plan) == {"embed", "lm_head", "layers.0.q_proj", "layers.0.k_proj"}
    saved = {"score.0", "score.2", "layers.1.q_proj", "layers.1.k_proj"}
    assert reasons(plan) == dict.fromkeys(saved, "in `exclude`")


def test_a_dot_in_a_name_is_a_dot() -> None:
    model = nn.ModuleDict({"a": nn.ModuleDict({"b": nn.Linear(4, 4)}), "a_b": nn.Linear(4, 4)})
    assert names(peft_plan(model, ["a.b"])) == {"a.b"}


@given(st.sets(st.sampled_from(sorted(EVERYTHING)), min_size=1), st.sets(st.sampled_from(sorted(EVERYTHING))))
def test_full_names_choose_exactly_themselves(targets: set[str], excluded: set[str]) -> None:
    model = Model()
    plan = peft_plan(model, sorted(targets), sorted(excluded) or None)
    assert names(plan) == targets - excluded
    assert names(plan) | reasons(plan).keys() == EVERYTHING
    assert not names(plan) & reasons(plan).keys()


@pytest.mark.parametrize(
    "arguments, match",
    [
        ({"target_modules": ["q_porj"]}, "`target_modules` must name layers.*'q_porj' matches none.*mean 'q_proj'"),
        ({"target_modules": ["q_proj", "no_such"]}, "`target_modules` must name layers.*'no_such' matches none"),
        ({"target_modules": "q_proj"}, r"'q_proj' matches none.*give a list, \['q_proj'\]"),
        ({"exclude_modules": ["lm_haed"]}, "`exclude_modules` must name layers.*Did you mean 'lm_head'"),
        ({"modules_to_save": ["scores"]}, "`modules_to_save` must name layers.*'scores' matches none"),
        ({"target_modules": "q_proj("}, r"`target_modules` must be a regular expression, but is 'q_proj\('"),
    ],
)
def test_a_pattern_that_matches_nothing_is_a_mistake(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(rw.PlanError, match=match):
        peft_plan(Model(), **arguments)


def test_a_pattern_is_a_string_or_a_list_of_them() -> None:
    with pytest.raises(TypeError, match=re.escape("`target_modules` must be a string or a list of names, but is [3]")):
        peft_plan(Model(), [3])  # type: ignore[list-item]


def test_a_model_without_a_linear_layer_has_no_linear_targets() -> None:
    with pytest.raises(rw.PlanError, match="'all-linear' must match linear layers, but Sequential has no linear layer"):
        peft_plan(nn.Sequential(nn.Embedding(4, 4)), "all-linear")
