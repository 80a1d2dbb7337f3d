"""Every family of models x every method: planned whole, trained, compact, exact, the same outputs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import rankwise as rw
from rankwise.core.layers import GatedLayer
from rankwise.modules import LowRankLinear
from rankwise.split import all_split
from tests.hf.hf_families import DECODER, ENCODER, FAMILIES, METHODS, QUIET, TIED, batch, build, logits, pruned

pytestmark = QUIET

# what a family's own code does with a weight, so that its layer must stay
LEFT_OUT: dict[str, dict[str, str]] = {
    "deberta-v2": {
        "deberta.encoder.conv.conv": "it is a convolution of a longer kernel, of groups or of strides",
    },
    "bart": {
        f"model.{side}.embed_positions": "BartLearnedPositionalEmbedding has a forward of its own, which does more "
        "than scale rows"
        for side in ("encoder", "decoder")
    },
    # which experts a token is sent to stays as it is
    **{
        family: {
            f"model.layers.{i}.mlp.{name}": f"{kind}TopKRouter is not a linear layer or an embedding" for i in (0, 1)
        }
        for family, kind, name in (
            ("mixtral", "Mixtral", "gate"),
            ("qwen2-moe", "Qwen2Moe", "gate"),
            ("qwen3-moe", "Qwen3Moe", "gate"),
            ("olmoe", "Olmoe", "gate"),
            ("gpt-oss", "GptOss", "router"),
        )
    },
}
HEADS = {
    "bert": {"classifier"},
    "roberta": {"classifier.dense", "classifier.out_proj"},
    "mpnet": {"classifier.dense", "classifier.out_proj"},
    "deberta-v3": {"pooler.dense", "classifier"},
    "distilbert": {"pre_classifier", "classifier"},
}


def nonzeros(small: nn.Module, pruner: rw.Pruner) -> int:
    planned = {use.name for site in pruner.plan.sites for use in site.uses}
    masked = {module.weight for name, module in small.named_modules() if name in planned}
    return sum(int(p.count_nonzero()) if p in masked else p.numel() for p in small.parameters())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_pruned_to_the_exact_size_and_computes_the_same(family: str, method: str) -> None:
    pruner = pruned(family, method, removed=0.15 if method == "np-l0" else 0.4)
    model = pruner.model
    assert isinstance(model, hf.PreTrainedModel)
    small = pruner.compact()
    size = nonzeros(small, pruner) if method == "agp" else rw.count(small)
    counts = list(pruner.ranks().values())
    steps = [c(k + 1) - c(k) for c, k in zip(pruner.account.curves, counts, strict=True) if k < c.num_components]
    assert size <= pruner.limit
    # fac takes ranks for good before it trains
    assert method == "fac" or pruner.limit - pruner.size().exported < min(steps)
    if method != "agp":
        assert size == pruner.size().exported
    want = logits(model)
    assert not any(isinstance(module, GatedLayer) for module in small.modules())
    assert want.std() > 1e-3
    torch.testing.assert_close(logits(small), want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_layer_and_embedding_is_planned_but_fresh_heads(family: str) -> None:
    model = build(family)
    plan = rw.find_plan(model)
    found = {use.name for site in plan.sites for use in site.uses}
    with all_split(model):
        layers = {
            name
            for name, module in model.named_modules(remove_duplicate=False)
            if isinstance(module, nn.Linear | nn.Embedding) or type(module).__name__ == "Conv1D"
        }
    reasons = {item.name: item.reason for item in plan.left_out}
    heads = {name for name, reason in reasons.items() if "most likely fresh" in reason}
    assert heads == HEADS.get(family, set())
    assert {name: reason for name, reason in reasons.items() if name not in heads} == LEFT_OUT.get(family, {})
    assert found == layers - reasons.keys()


@pytest.mark.parametrize("family", TIED)
def test_a_tied_output_layer_is_one_matrix_with_its_embedding(family: str) -> None:
    model = build(family)
    shared = {frozenset(use.name for use in site.uses) for site in rw.find_plan(model).sites if len(site.uses) > 1}
    assert len(shared) == 1
    head = model.get_output_embeddings()
    names = {name for name, module in model.named_modules(remove_duplicate=False) if module is head}
    assert names <= next(iter(shared))
    small = pruned(family).compact()
    assert rw.count(small) < rw.count(model)
    assert small.get_output_embeddings().embedding.weight is small.get_input_embeddings()[0].weight


@pytest.mark.parametrize("family", FAMILIES)
def test_a_factorization_at_full_rank_computes_what_the_model_did(family: str) -> None:
    model = build(family)
    want = logits(model)
    pruner = rw.Pruner(model, rw.Budget(params=rw.count(model)), "flop-agp", rw.find_plan(model), anneal_steps=1)
    assert len(pruner.plan.sites) > 5
    torch.testing.assert_close(logits(model), want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


def test_fused_and_transposed_weights_are_read_the_right_way() -> None:
    """GPT-2 stores q, k and v in one matrix, inputs by outputs."""
    model = build("gpt2")
    weight = model.transformer.h[0].attn.c_attn.weight.detach().clone()
    plan = rw.find_plan(model, include=["c_attn"])
    assert {site.shape for site in plan.sites} == {(3 * 16, 16)}
    rw.Pruner(model, rw.Budget(removed=0.01), "flop-agp", plan, anneal_steps=1)
    torch.testing.assert_close(model.transformer.h[0].attn.c_attn.weight, weight.t(), rtol=1e-4, atol=1e-5)


def test_a_layer_that_is_asked_for_its_dtype_can_still_be_asked() -> None:
    """T5 casts to the dtype of `wo`, which it keeps in float32: a product of two layers answers without being made."""
    small = pruned("t5", "fac", removed=0.5).compact()
    wo = small.encoder.block[0].layer[1].DenseReluDense.wo
    assert isinstance(wo, LowRankLinear)
    assert wo.weight.shape == (wo.out_features, wo.in_features)
    assert not any(name.endswith("wo.weight") for name in small.state_dict())
    small.half()
    for module in small.modules():
        if type(module).__name__ == "T5DenseActDense":
            module.wo.float()
    assert logits(small).isfinite().all()


# heads that did not come with the checkpoint


def left_out(model: nn.Module) -> dict[str, str]:
    return {item.name: item.reason for item in rw.find_plan(model).left_out}


def test_what_did_not_come_with_the_checkpoint_is_left_out(tmp_path: Any) -> None:
    """BERT's pooler is no part of a masked language model: it is as fresh as the classifier, though inside the base."""
    build("bert-mlm").save_pretrained(tmp_path)
    model = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    fresh = "its weights did not come with the checkpoint"
    assert left_out(model) == {"bert.pooler.dense": fresh, "classifier": fresh}
    everything = rw.find_plan(model, include=".*")
    assert everything.left_out == ()
    trained = hf.AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert left_out(trained) == {}


def test_a_head_that_came_with_the_checkpoint_is_planned(tmp_path: Any) -> None:
    build("roberta").save_pretrained(tmp_path)
    model = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert left_out(model) == {}
    # a copy forgets where its weights came from
    assert left_out(copy.deepcopy(model)).keys() == HEADS["roberta"]


def test_the_head_of_a_language_model_is_no_task_head() -> None:
    assert left_out(hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(**DECODER))) == {}
    scored = hf.AutoModelForSequenceClassification.from_config(hf.LlamaConfig(**DECODER))
    assert left_out(scored).keys() == {"score"}


def test_a_bare_encoder_in_a_model_of_ones_own_is_planned_whole() -> None:
    model = nn.ModuleDict({"encoder": hf.AutoModel.from_config(hf.BertConfig(**ENCODER)), "head": nn.Linear(16, 2)})
    assert left_out(model) == {}


def test_batches_of_the_test_models_differ() -> None:
    """The oracle of this file: outputs that are the same for all inputs would prove nothing."""
    for family in FAMILIES:
        model = build(family)
        assert (logits(model, **batch(model, seed=1)) - logits(model, **batch(model, seed=2))).abs().max() > 1e-3
