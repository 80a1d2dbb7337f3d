"""The default plan: what is found, what is one matrix, what names choose, and what a pruner makes of it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

import rankwise as rw
from rankwise.adapters.plans import find_plan, split_pairs
from rankwise.core.layers import GatedLayer
from rankwise.core.plan import Site, Use
from rankwise.modules import LowRankEmbedding, LowRankHead, LowRankLinear
from tests.adapters.plan_toys import assert_trains_and_exports, kinds, names, reasons, weights
from tests.models import Conv1D, Spec, batch, specs

# what is found


def test_every_kind_of_use_is_found() -> None:
    spec = Spec(width=8, num_words=11, inner=12, parts=("linear", "nested", "pair", "conv1d", "norm"))
    plan = find_plan(spec.build())
    assert kinds(plan) == {
        "front": "embedding",
        "body.0": "linear",
        "body.1.0.0": "linear",
        "body.1.1": "linear",
        "body.2": "linear-pair",
        "body.3": "conv1d",
        "head": "linear",
    }
    assert plan.left_out == ()


def test_a_low_rank_head_and_its_pair_are_one_matrix() -> None:
    plan = find_plan(Spec(width=8, num_words=11, back="low-rank", parts=()).build())
    assert plan.sites == (Site((Use("front", "embedding-pair"), Use("head", "low-rank-head")), (11, 8), pair_rank=4),)
    assert plan.params == 4 * (11 + 8)
    assert plan.left_out == ()


def test_a_low_rank_head_named_before_its_pair_is_the_same_matrix() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            pair = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 8, bias=False))
            self.head = LowRankHead(pair[0], pair[1])
            self.front = pair

    (site,) = find_plan(Backwards()).sites
    assert site.name == "front"
    assert site.uses[1] == Use("head", "low-rank-head")


@pytest.mark.parametrize("back", ["tied", "bias-tied"])
def test_tied_embedding_and_head_are_one_matrix_counted_once(back: Any) -> None:
    model = Spec(width=8, num_words=11, back=back, parts=()).build()
    plan = find_plan(model)
    assert plan.sites == (Site((Use("front", "embedding"), Use("head", "linear")), (11, 8)),)
    assert plan.params == 11 * 8
    assert str(plan.sites[0]) == "front = head"


def test_a_module_under_two_names_is_one_matrix() -> None:
    shared = nn.Linear(6, 6)
    model = nn.ModuleDict({"first": shared, "other": nn.Linear(6, 6), "second": shared})
    plan = find_plan(model)
    assert [site.name for site in plan.sites] == ["first", "other"]
    assert plan.params == 2 * 36


def test_a_weight_shared_by_two_modules_is_one_matrix() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    (site,) = find_plan(model).sites
    assert [use.name for use in site.uses] == ["0", "2"]
    assert site.params == 36


def test_shapes_are_outputs_by_inputs() -> None:
    model = nn.ModuleDict(
        {
            "linear": nn.Linear(3, 5),
            "conv1d": Conv1D(5, 3),
            "words": nn.Embedding(7, 4),
            "pair": LowRankLinear(nn.Linear(3, 2, bias=False), nn.Linear(2, 5)),
            "words_pair": LowRankEmbedding(nn.Embedding(7, 2), nn.Linear(2, 4, bias=False)),
        }
    )
    plan = find_plan(model)
    assert {site.name: (site.shape, site.pair_rank) for site in plan.sites} == {
        "linear": ((5, 3), None),
        "conv1d": ((5, 3), None),
        "words": ((7, 4), None),
        "pair": ((5, 3), 2),
        "words_pair": ((7, 4), 2),
    }


@pytest.mark.parametrize(
    "layers",
    [
        (nn.Linear(4, 2), nn.Linear(2, 4)),
        (nn.Embedding(5, 2), nn.Linear(2, 4)),
        (nn.Linear(4, 2, bias=False), nn.Linear(2, 4), nn.Tanh()),
        (nn.Linear(4, 2, bias=False), nn.Embedding(5, 4)),
        # it may be one, but the code around it may also take it apart
        (nn.Linear(4, 2, bias=False), nn.Linear(2, 4)),
    ],
)
def test_a_sequence_of_two_layers_is_two_matrices(layers: tuple[nn.Module, ...]) -> None:
    plan = find_plan(nn.Sequential(*layers))
    assert set(kinds(plan)) == {"0", "1"}
    assert not any(site.pair_rank for site in plan.sites)


def test_a_subclass_of_sequential_may_do_other_things_than_a_pair() -> None:
    class Residual(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x)

    plan = find_plan(Residual(nn.Linear(4, 2, bias=False), nn.Linear(2, 4)))
    assert kinds(plan) == {"0": "linear", "1": "linear"}


def test_any_class_named_conv1d_with_its_attributes_is_one() -> None:
    other = type("Conv1D", (nn.Module,), {"forward": Conv1D.forward})()
    other.nf, other.weight, other.bias = 5, nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.zeros(5))
    plan = find_plan(nn.Sequential(other, nn.Tanh()))
    assert plan.sites == (Site((Use("0", "conv1d"),), (5, 3)),)


def test_a_convolution_is_no_conv1d() -> None:
    convolution = type("Conv1D", (nn.Conv1d,), {})(4, 4, 3)
    plan = find_plan(nn.Sequential(convolution, nn.Linear(4, 4)))
    assert set(kinds(plan)) == {"1"}
    assert "0" in reasons(plan)


def test_a_root_module_that_is_a_layer_is_planned() -> None:
    plan = find_plan(nn.Linear(3, 5))
    assert plan.sites == (Site((Use("", "linear"),), (5, 3)),)
    assert str(plan.sites[0]) == "(model)"


@given(specs)
def test_the_plans_size_is_that_of_its_distinct_weights(spec: Spec) -> None:
    model = spec.build()
    plan = find_plan(model)
    distinct = {id(w): w for name, kind in kinds(plan).items() for w in weights(model.get_submodule(name), kind)}
    assert plan.params == sum(w.numel() for w in distinct.values()) <= rw.count(model)


@given(specs)
def test_split_pairs_hold_the_same_weights(spec: Spec) -> None:
    plan = find_plan(spec.build())
    split = split_pairs(plan)
    assert split.params == plan.params
    assert not any(site.pair_rank for site in split.sites)


# include and exclude


def nested() -> nn.Module:
    return nn.ModuleDict(
        {
            "query": nn.Linear(4, 4),
            "block": nn.ModuleDict({"query": nn.Linear(4, 4), "subquery": nn.Linear(4, 4)}),
            "lm_head": nn.Linear(4, 4),
        }
    )


EVERYTHING = {"query", "block.query", "block.subquery", "lm_head"}


@pytest.mark.parametrize(
    "pattern, matched",
    [
        (["query"], {"query", "block.query"}),
        (("query",), {"query", "block.query"}),
        (["block.query"], {"block.query"}),
        (["query", "lm_head"], {"query", "block.query", "lm_head"}),
        ("query", {"query"}),
        (r".*query", {"query", "block.query", "block.subquery"}),
        (r"block\..*", {"block.query", "block.subquery"}),
        (r"query|lm_head", {"query", "lm_head"}),
        (r"block.*", {"block.query", "block.subquery"}),
        ("block", {"block.query", "block.subquery"}),
        (["block", "lm_head"], {"block.query", "block.subquery", "lm_head"}),
    ],
)
def test_names_match_as_last_parts_and_strings_as_whole_regular_expressions(pattern: Any, matched: set[str]) -> None:
    included, excluded = find_plan(nested(), include=pattern), find_plan(nested(), exclude=pattern)
    assert names(included) == matched
    assert names(excluded) == EVERYTHING - matched
    assert reasons(included) == dict.fromkeys(EVERYTHING - matched, "not in `include`")
    assert reasons(excluded) == dict.fromkeys(matched, "in `exclude`")


@pytest.mark.parametrize("word", ["include", "exclude"])
@pytest.mark.parametrize(
    "pattern, message",
    [
        (["lm_haed"], "must name layers of the model, but 'lm_haed' matches none. Did you mean 'lm_head'?"),
        (["query", "lm_haed"], "but 'lm_haed' matches none. Did you mean 'lm_head'?"),
        (["q.*"], "but 'q.*' matches none."),
        (["drop"], "but 'drop' matches none. 'drop' has no weights."),
        (["pair.0"], "but 'pair.0' matches none. It is a part of 'pair': name that."),
        ("lm_haed", "but 'lm_haed' matches none. Did you mean 'lm_head'?"),
        ("subquery", "A string is a regular expression for whole names: give a list, ['subquery']."),
        ("*head", "must be a regular expression, but is '*head': nothing to repeat at position 0. Write '.*' for any"),
    ],
)
def test_a_name_that_means_no_layer_is_refused(word: str, pattern: Any, message: str) -> None:
    model = nested()
    model["drop"] = nn.Dropout()
    model["pair"] = LowRankLinear(nn.Linear(4, 2, bias=False), nn.Linear(2, 4))
    with pytest.raises(rw.PlanError, match=f"`{word}` .*{re.escape(message)}"):
        find_plan(model, **{word: pattern})


@pytest.mark.parametrize("pattern", [None, 3, [3], ["query", None]])
def test_names_are_text(pattern: Any) -> None:
    with pytest.raises(TypeError, match="`exclude` must be a string or a list of names, but is"):
        find_plan(nested(), exclude=pattern)


def test_a_layer_that_is_left_out_anyway_can_be_named() -> None:
    model = nn.ModuleDict({"norm": nn.LayerNorm(4), "rnn": nn.RNN(4, 4), "fc": nn.Linear(4, 4)})
    assert names(find_plan(model, exclude=["norm", "rnn"])) == {"fc"}


def test_what_is_excluded_is_not_included() -> None:
    assert names(find_plan(nested(), include=".*query", exclude=["block.query"])) == {"query", "block.subquery"}


def test_an_excluded_pair_is_left_out_whole() -> None:
    plan = find_plan(Spec(parts=("pair", "linear")).build(), exclude=["body.0"])
    assert names(plan) == {"front", "body.1", "head"}
    assert set(reasons(plan)) == {"body.0"}


def test_a_module_is_known_by_each_of_its_names() -> None:
    shared = nn.Linear(6, 6)
    model = nn.ModuleDict({"first": shared, "second": shared, "other": nn.Linear(6, 6)})
    assert len(find_plan(model, include=["second"]).sites) == 1
    assert [site.name for site in find_plan(model, exclude=["second"]).sites] == ["other"]


# the plan and the pruner


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


def test_a_stock_transformer_is_planned_whole_and_runs_in_every_mode() -> None:
    model = Encoder()
    x = torch.randn(2, 5, 8)
    inside = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "linear1", "linear2")
    assert names(find_plan(model)) == {"head", *(f"encoder.layers.{i}.{name}" for i in (0, 1) for name in inside)}
    assert_trains_and_exports(model, x)
    model.eval()
    with torch.no_grad():
        fast = model(x)
    torch.testing.assert_close(fast, model(x), rtol=1e-4, atol=1e-5)


def test_every_layer_of_a_plan_becomes_gated_and_no_other() -> None:
    spec = Spec(parts=("linear", "nested", "conv1d", "norm"))
    model = spec.build()
    plan = find_plan(model, exclude=["body.0"])
    rw.Pruner(model, rw.Budget(removed=0.1), "flop-agp", plan, anneal_steps=1)
    assert {name for name, module in model.named_modules() if isinstance(module, GatedLayer)} == names(plan)
    model(batch(spec))


def test_a_gated_model_is_refused() -> None:
    model = Spec().build()
    rw.Pruner(model, rw.Budget(removed=0.1), anneal_steps=1)
    with pytest.raises(rw.PlanError, match="The model must not be gated yet, but is. Use the pruner that gated it"):
        find_plan(model)


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(rw.PlanError, match="The model must have parameters, but Tanh has none."):
        find_plan(nn.Tanh())


@pytest.mark.parametrize(
    "model, include, message",
    [
        (nn.Sequential(nn.RNN(4, 4)), None, "matches no module .*Left out:\n  0: RNN is not a linear layer"),
        (
            nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)),
            ["1"],
            "matches no module .*Left out:\n  0: not in `include`",
        ),
        (nn.LayerNorm(4), None, "matches no module of the model. Widen `include`, or narrow `exclude`.$"),
    ],
)
def test_a_plan_of_nothing_is_refused_with_what_was_left_out(model: nn.Module, include: Any, message: str) -> None:
    plan = find_plan(model, include=include)
    assert plan.sites == ()
    with pytest.raises(rw.PlanError, match=message):
        rw.Pruner(model, rw.Budget(removed=0.1), plan=plan, anneal_steps=1)


def tied(embedding: nn.Embedding) -> nn.ModuleDict:
    head = nn.Linear(4, 4)
    head.weight = embedding.weight
    return nn.ModuleDict({"a": embedding, "b": head})


STRANGERS = {
    "a missing name": (nn.ModuleDict({"c": nn.Linear(4, 4)}), nn.ModuleDict({"a": nn.Linear(4, 4)})),
    "another shape": (nn.ModuleDict({"a": nn.Linear(4, 5)}), nn.ModuleDict({"a": nn.Linear(4, 4)})),
    "a module without a weight": (nn.ModuleDict({"a": nn.Linear(4, 4)}), nn.ModuleDict({"a": nn.Tanh()})),
    "a linear layer that is an embedding": (
        nn.ModuleDict({"a": nn.Linear(4, 4)}),
        nn.ModuleDict({"a": nn.Embedding(4, 4)}),
    ),
    "an embedding that is a linear layer": (
        nn.ModuleDict({"a": nn.Embedding(4, 4)}),
        nn.ModuleDict({"a": nn.Linear(4, 4)}),
    ),
    "a pair that is one layer": (
        nn.ModuleDict({"a": LowRankLinear(nn.Linear(4, 2, bias=False), nn.Linear(2, 4))}),
        nn.ModuleDict({"a": nn.Linear(4, 4)}),
    ),
    "a tie that the model does not have": (
        tied(nn.Embedding(4, 4)),
        nn.ModuleDict({"a": nn.Embedding(4, 4), "b": nn.Linear(4, 4)}),
    ),
    "a convolution": (nn.ModuleDict({"a": nn.Linear(4, 4)}), nn.ModuleDict({"a": nn.Conv2d(4, 4, 1)})),
}


@pytest.mark.parametrize("what", STRANGERS)
def test_a_plan_of_another_model_is_refused_and_changes_nothing(what: str) -> None:
    other, model = STRANGERS[what]
    model["z"] = nn.Linear(3, 3)
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(rw.PlanError, match="Make the plan from this model"):
        rw.Pruner(model, rw.Budget(params=10_000), plan=find_plan(other), anneal_steps=1)
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_a_plan_is_no_way_around_a_gated_model() -> None:
    model = Spec().build()
    plan = find_plan(model)
    rw.Pruner(model, rw.Budget(removed=0.1), plan=plan, anneal_steps=1)
    with pytest.raises(rw.PlanError, match="must not be gated yet"):
        rw.Pruner(model, rw.Budget(removed=0.1), plan=plan, anneal_steps=1)
