"""Mixtures of experts: split into linear layers they compute the same, and every matrix of every expert is pruned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers import conversion_mapping
from transformers.core_model_loading import WeightConverter

import rankwise as rw
from rankwise.core.calibrate import second_moments
from rankwise.experts import SplitExperts, same_routes
from rankwise.split import all_split, split
from tests.hf.hf_families import MIXTURES, QUIET, batch, build, logits, pruned
from tests.hf.test_pretrained import load

pytestmark = QUIET
EXPERTS = "model.layers.1.mlp.experts"


def tokens(count: int = 4) -> list[dict[str, Tensor]]:
    model = build("mixtral")
    return [{"input_ids": batch(model, seed=seed)["input_ids"]} for seed in range(count)]


def routed(num_experts: int = 3, last: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states of nine tokens, two experts for each of them, and their weights."""
    torch.manual_seed(1)
    x, weights = torch.randn(9, 16, dtype=torch.float64), torch.rand(9, 2, dtype=torch.float64)
    index = torch.stack([torch.randperm(num_experts)[:2] for _ in range(9)])
    return x.requires_grad_(), index.clamp(max=last - 1), weights.requires_grad_()


def matrices(experts: nn.Module) -> list[Tensor]:
    """The matrices of each expert, one after the other, as its own layers would hold them."""
    packed = (experts.gate_up_proj, experts.down_proj)
    return [p[i].t() if experts.is_transposed else p[i] for i in range(experts.num_experts) for p in packed]


@pytest.mark.parametrize("last", [3, 2])
@pytest.mark.parametrize("family", MIXTURES)
def test_split_experts_are_the_stock_ones_with_all_gradients(family: str, last: int) -> None:
    """With `last` 2, nobody is sent to one of the three experts."""
    model = build(family).double()
    model.set_experts_implementation("eager")
    experts = model.get_submodule(EXPERTS)
    if family == "gpt-oss":
        nn.init.normal_(experts.down_proj_bias)
    given = routed(last=last)
    expected = experts(*given)
    x, _, weights = given
    want = torch.autograd.grad(expected.square().sum(), [x, weights, experts.gate_up_proj, experts.down_proj])
    want_matrices = [
        (g[i].t() if experts.is_transposed else g[i]) for i in range(experts.num_experts) for g in want[2:]
    ]
    with all_split(model):
        assert isinstance(experts, SplitExperts)
        found = experts(*given)
        layers = [m.weight for m in experts.modules() if isinstance(m, nn.Linear)]
        got = torch.autograd.grad(found.square().sum(), [x, weights, *layers])
        with torch.no_grad():
            torch.testing.assert_close(experts(*given), expected)
        torch.testing.assert_close(experts._all_experts(*given), expected)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(list(got[:2]), list(want[:2]))
    torch.testing.assert_close(list(got[2:]), want_matrices)


def test_tokens_of_no_expert_and_no_tokens_give_nothing() -> None:
    model = build("mixtral").double()
    model.set_experts_implementation("eager")
    experts = model.get_submodule(EXPERTS)
    x, index, weights = routed()
    index = index.clone()
    # as transformers marks experts of other processes, and tokens that are left out
    index[0], index[1, 1] = 3, 3
    # not every version of transformers takes such marks itself
    expected = experts(x, index.clamp(max=2), weights * (index < 3))
    with all_split(model), torch.no_grad():
        torch.testing.assert_close(experts(x, index, weights), expected)
        assert not experts(x, index, weights)[0].any()
        assert experts(x[:0], index[:0], weights[:0]).shape == (0, 16)
        assert not experts(x, torch.full_like(index, 3), weights).any()


def test_splitting_experts_takes_no_memory() -> None:
    model = build("mixtral")
    experts = model.get_submodule(EXPERTS)
    storages = {p.untyped_storage().data_ptr() for p in experts.parameters()}
    split(model, [f"{EXPERTS}.0.up"])
    assert isinstance(experts, SplitExperts)
    assert {p.untyped_storage().data_ptr() for p in experts.parameters()} == storages


def test_every_matrix_of_every_expert_has_a_rank_of_its_own() -> None:
    model = build("qwen3-moe")
    pruner = rw.Pruner(model, rw.Budget(removed=0.4), "flop-agp", rw.find_plan(model), anneal_steps=1)
    names = {
        f"model.layers.{layer}.mlp.experts.{i}.{part}" for layer in (0, 1) for i in range(3) for part in ("up", "down")
    }
    assert names <= pruner.ranks().keys()
    assert len({pruner.ranks()[name] for name in names}) > 1


def test_an_expert_that_no_token_reaches_has_a_gradient_of_zero() -> None:
    """Without one, `DistributedDataParallel` would wait for it."""
    pruner = pruned("gpt-oss", steps=0)
    never(pruner.model, 2)
    pruner.model(**batch(pruner.model)).loss.backward()
    assert all(parameter.grad is not None for parameter in pruner.weight_parameters())
    unreached = [p for name, p in pruner.model.named_parameters() if ".experts.2." in name]
    assert unreached
    assert not any(p.grad.any() for p in unreached)


def never(model: Any, expert: int) -> None:
    """Let no token be sent to an expert of GPT-OSS, whose routers have biases."""
    for layer in model.model.layers:
        layer.mlp.router.bias.data[expert] = -100.0


# compression without training


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_moments_are_those_of_the_tokens_that_an_expert_gets(family: str) -> None:
    model, batches = build(family).eval(), tokens()
    seen: list[tuple[Tensor, Tensor]] = []
    handle = model.get_submodule(EXPERTS).register_forward_pre_hook(lambda module, args: seen.append(args[:2]))
    for inputs in batches:
        logits(model, **inputs)
    handle.remove()
    plan = rw.find_plan(model)
    split(model, [use.name for site in plan.sites for use in site.uses])
    found = second_moments(model, plan, batches)
    for i in range(3):
        x = torch.cat([x[(index == i).any(-1)] for x, index in seen]).double()
        assert len(x)
        torch.testing.assert_close(found[f"{EXPERTS}.{i}.up"].inputs_II, x.t() @ x / len(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"loss": None}, {"ranks": "even"}])
def test_an_expert_that_calibration_never_reaches_is_left_alone_with_a_line(settings: dict[str, Any]) -> None:
    model = build("gpt-oss")
    never(model, 2)
    with pytest.warns(UserWarning, match=r"are not: .*layers\.0\.mlp\.experts\.2\.up"):
        small = rw.compress(model, rw.Budget(removed=0.3), tokens(), **settings)
    assert rw.count(small) <= 0.7 * rw.count(model)
    for layer in (0, 1):
        stock, made = (m.model.layers[layer].mlp.experts for m in (model, small))
        kept = getattr(made, "2")
        assert torch.equal(kept.up.weight, stock.gate_up_proj[2].t())
        assert torch.equal(kept.down.weight, stock.down_proj[2].t())


@pytest.mark.parametrize("layout", ["pair", "pivot"])
@pytest.mark.parametrize("family", MIXTURES)
def test_a_compressed_mixture_is_saved_loaded_and_of_exact_size(family: str, layout: Any, tmp_path: Path) -> None:
    model = build(family).eval()
    whole = rw.compress(model, rw.Budget(params=rw.count(model)), tokens())
    torch.testing.assert_close(logits(whole), logits(model), rtol=1e-4, atol=1e-4)
    limit = int(0.7 * rw.count(model))
    small: Any = rw.compress(model, rw.Budget(params=limit), tokens(), layout=layout)
    assert any(isinstance(module, SplitExperts) for module in small.modules())
    assert limit - 3 * 16 < rw.count(small) <= limit
    small.save_pretrained(tmp_path / "hf")
    torch.testing.assert_close(logits(load(tmp_path / "hf", type(model))), logits(small), rtol=1e-5, atol=1e-5)
    rw.save(small, tmp_path / "own")
    torch.testing.assert_close(logits(rw.load(tmp_path / "own", build(family, 1))), logits(small), rtol=1e-5, atol=1e-5)


def test_some_experts_may_stay_as_they_are(tmp_path: Path) -> None:
    """Those that are not pruned are saved as stock code saves them, and loaded beside the others."""
    model = build("qwen2-moe")
    plan = rw.find_plan(model, exclude=["layers.0.mlp.experts", "layers.1.mlp.experts.1"])
    small: Any = rw.compress(model, rw.Budget(removed=0.2), tokens(), plan=plan)
    small.save_pretrained(tmp_path)
    again: Any = load(tmp_path, type(model))
    assert [type(layer.mlp.experts).__name__ for layer in again.model.layers] == ["Qwen2MoeExperts", "SplitExperts"]
    torch.testing.assert_close(logits(again), logits(small), rtol=1e-5, atol=1e-5)


def test_the_base_of_a_saved_mixture_is_loaded_alone(tmp_path: Path) -> None:
    small: Any = rw.compress(build("mixtral"), rw.Budget(removed=0.3), tokens())
    small.save_pretrained(tmp_path)
    base = hf.AutoModel.from_pretrained(tmp_path).eval()
    inputs = tokens(1)[0]
    with torch.no_grad():
        expected = small.eval().model(**inputs).last_hidden_state
        torch.testing.assert_close(base(**inputs).last_hidden_state, expected, rtol=1e-5, atol=1e-5)


def test_no_conversion_of_transformers_takes_our_tensors_for_others() -> None:
    names = [f"model.layers.0.{block}.experts.0.{part}.{end}" for block in ("mlp", "block_sparse_moe", "feed_forward")
             for part in ("up", "down") for end in ("weight", "bias", "0.weight", "1.coefficients")]  # fmt: skip
    checked = 0
    for kind in conversion_mapping._build_checkpoint_conversion_mapping():
        for one in conversion_mapping.get_checkpoint_conversion_mapping(kind) or ():
            for way in (one, one.reverse_transform()):
                if isinstance(way, WeightConverter):
                    checked += 1
                    assert [name for name in names if way.rename_source_key(name)[1] is not None] == [], kind
    assert checked > 50


# what cannot be split, and checks


def reasons(model: nn.Module) -> set[str]:
    return {item.reason for item in rw.find_plan(model).left_out if item.name.endswith("experts")}


def test_experts_that_cannot_be_split_are_left_out_with_a_reason() -> None:
    model = build("mixtral")
    first, second = (layer.mlp.experts for layer in model.model.layers)
    first._is_expert_parallel = True
    assert reasons(model) == {"its experts are spread over several processes"}
    first._is_expert_parallel = False
    first.more = nn.Parameter(torch.zeros(2, 2))
    assert reasons(model) == {"MixtralExperts holds more than its own weights"}
    del first.more
    first.num_experts = 4
    assert reasons(model) == {"gate_up_proj does not hold one matrix for each of 4 experts"}
    first.num_experts = 3
    first.down_proj = second.down_proj
    assert reasons(model) == {"it shares a packed weight with another module"}


@pytest.mark.parametrize("is_split", [False, True])
def test_runs_that_are_compared_send_tokens_to_the_same_experts(is_split: bool) -> None:
    model: Any = build("mixtral").eval()
    if is_split:
        split(model, [f"model.layers.{i}.mlp.experts.0.up" for i in (0, 1)])
    inputs = tokens(1)[0]
    expected = logits(model, **inputs)
    with same_routes(model) as start:
        start()
        assert torch.equal(logits(model, **inputs), expected)
        for layer in model.model.layers:
            layer.mlp.gate.weight.data.neg_()
        for _ in range(2):
            start()
            assert torch.equal(logits(model, **inputs), expected)
    assert not torch.allclose(logits(model, **inputs), expected, atol=1e-3)
