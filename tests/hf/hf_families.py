"""Tiny random models of every family, built from their configuration: nothing is downloaded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import rankwise as rw

QUIET = [
    # runs of a few steps, in which no gate can decide
    pytest.mark.filterwarnings("ignore:.* of the gates had not decided"),
    # by DeBERTa's own code, when it is imported
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
]

WORDS = 53
ENCODER: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 20,
}
DECODER = {**ENCODER, "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
LOCAL_EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
DEBERTA = {
    **ENCODER,
    "relative_attention": True,
    "position_buckets": 4,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
    "pooler_hidden_size": 16,
}
DEBERTA_V3 = {**DEBERTA, "type_vocab_size": 0, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
DEBERTA_V2 = {**DEBERTA, "type_vocab_size": 2, "conv_kernel_size": 3, "conv_act": "gelu"}
DISTILBERT = {"vocab_size": WORDS, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
GPT2 = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 20, "bos_token_id": 1}
BART = {
    "vocab_size": WORDS,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "max_position_embeddings": 20,
    **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 24 for side in ("encoder", "decoder")},
    "scale_embedding": True,
    "eos_token_id": None,
    "forced_eos_token_id": None,
    "decoder_start_token_id": 1,
}
T5 = {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}


def classifier(config: Any) -> hf.PreTrainedModel:
    return hf.AutoModelForSequenceClassification.from_config(config)


def masked(config: Any) -> hf.PreTrainedModel:
    return hf.AutoModelForMaskedLM.from_config(config)


def causal(config: Any) -> hf.PreTrainedModel:
    return hf.AutoModelForCausalLM.from_config(config)


def t5(**more: Any) -> hf.PreTrainedModel:
    return hf.AutoModelForSeq2SeqLM.from_config(hf.T5Config(**T5, decoder_start_token_id=0, eos_token_id=None, **more))


FAMILIES: dict[str, Callable[[], hf.PreTrainedModel]] = {
    "bert": lambda: classifier(hf.BertConfig(**ENCODER)),
    "bert-mlm": lambda: masked(hf.BertConfig(**ENCODER)),
    "roberta": lambda: classifier(hf.RobertaConfig(**ENCODER)),
    "roberta-mlm": lambda: masked(hf.RobertaConfig(**ENCODER)),
    "mpnet": lambda: classifier(hf.MPNetConfig(**ENCODER)),
    "deberta-v2": lambda: masked(hf.DebertaV2Config(**DEBERTA_V2)),
    "deberta-v3": lambda: classifier(hf.DebertaV2Config(**DEBERTA_V3)),
    "distilbert": lambda: classifier(hf.DistilBertConfig(**DISTILBERT)),
    "gpt2": lambda: causal(hf.GPT2Config(**GPT2, eos_token_id=None, loss_type="ForCausalLM")),
    "llama": lambda: causal(hf.LlamaConfig(**DECODER)),
    "llama-tied": lambda: causal(hf.LlamaConfig(**DECODER, tie_word_embeddings=True)),
    "qwen2": lambda: causal(hf.Qwen2Config(**DECODER, tie_word_embeddings=True)),
    "qwen3": lambda: causal(hf.Qwen3Config(**DECODER, head_dim=8, tie_word_embeddings=True)),
    "mistral": lambda: causal(hf.MistralConfig(**DECODER)),
    "phi3": lambda: causal(hf.Phi3Config(**DECODER)),
    "olmo2": lambda: causal(hf.Olmo2Config(**DECODER)),
    "gemma": lambda: causal(hf.Gemma3TextConfig(**DECODER, head_dim=8)),
    "phi": lambda: causal(hf.PhiConfig(**{**DECODER, "num_key_value_heads": 2})),
    "olmo": lambda: causal(hf.OlmoConfig(**DECODER)),
    "mixtral": lambda: causal(hf.MixtralConfig(**DECODER, **LOCAL_EXPERTS)),
    "qwen2-moe": lambda: causal(hf.Qwen2MoeConfig(**DECODER, **EXPERTS, shared_expert_intermediate_size=20)),
    "qwen3-moe": lambda: causal(hf.Qwen3MoeConfig(**DECODER, **EXPERTS, head_dim=8, tie_word_embeddings=True)),
    "olmoe": lambda: causal(hf.OlmoeConfig(**DECODER, **LOCAL_EXPERTS)),
    # its experts are stored transposed, with biases, and their gates in turns with the rest
    "gpt-oss": lambda: causal(hf.GptOssConfig(**DECODER, **LOCAL_EXPERTS, head_dim=8, rope_parameters=ROPE)),
    "bart": lambda: hf.BartForConditionalGeneration(hf.BartConfig(**BART)),
    "t5": t5,
    "t5-gated": lambda: t5(feed_forward_proj="gated-gelu"),
}
TIED = ["bert-mlm", "roberta-mlm", "deberta-v2", "gpt2", "llama-tied", "qwen2", "qwen3", "qwen3-moe", "t5"]
MIXTURES = ["mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "gpt-oss"]
GENERATING = [
    "gpt2",
    "llama",
    "llama-tied",
    "qwen2",
    "qwen3",
    "mistral",
    "phi",
    "phi3",
    "olmo",
    "olmo2",
    "t5",
    *MIXTURES,
]

METHODS: dict[str, dict[str, Any]] = {
    "flop-l0": {"anneal_steps": 2},
    "flop-agp": {"anneal_steps": 2, "mask_every": 1},
    "np-l0": {"anneal_steps": 2},
    "agp": {"anneal_steps": 2, "mask_every": 1},
    "fac": {},
    "svd": {},
    "svd pivot": {"layout": "pivot"},
}


def build(family: str, seed: int = 0) -> hf.PreTrainedModel:
    """A model with weights large enough to tell models apart: fresh ones give nearly the same for every input."""
    torch.manual_seed(seed)
    model = FAMILIES[family]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model


def batch(model: hf.PreTrainedModel, size: int = 3, seed: int = 0) -> dict[str, Tensor]:
    """Inputs and labels."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, WORDS, (size, 7), generator=generator)
    labels = torch.arange(size) % 2 if "Classification" in type(model).__name__ else tokens
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def logits(model: hf.PreTrainedModel, **inputs: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad():
        return model(**(inputs or batch(model))).logits


def pruned(family: str, method: str = "flop-l0", removed: float = 0.4, steps: int = 3) -> rw.Pruner:
    """A short run, as a user would write it."""
    model = build(family)
    # given, for what is left out weighs more here than in a model of real size
    plan = rw.find_plan(model)
    pruner = rw.Pruner(model, rw.Budget(removed=removed), method.split()[0], plan, **METHODS[method])
    optimizer = torch.optim.AdamW(pruner.weight_parameters(), lr=1e-3)
    model.train()
    for step in range(steps):
        model(**batch(model, seed=step)).loss.backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()
    return pruner


@cache
def _compact(family: str, method: str, removed: float) -> hf.PreTrainedModel:
    small = pruned(family, method, removed).compact()
    assert isinstance(small, hf.PreTrainedModel)
    return small.eval()


def compact(family: str, method: str = "flop-l0", removed: float = 0.4) -> hf.PreTrainedModel:
    """A compact model of one's own."""
    return copy.deepcopy(_compact(family, method, 0.15 if method == "np-l0" else removed))
