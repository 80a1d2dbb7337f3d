"""Tiny random models of the families that vLLM serves, compact in every form; and a vLLM process that loads them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import rankwise as rw
from rankwise.hf import save_pretrained

NEEDS_VLLM = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM has an environment of its own: make test-vllm"
)
WORDS = 250
"""Not a multiple of 64, to which vLLM pads a vocabulary."""
# the kernels of vLLM need heads of 32 numbers at least, and its Qwen2 heads that fill the width
DECODER: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 2, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
CONFIGS = {
    "llama": (hf.LlamaConfig, {"tie_word_embeddings": False}),
    "qwen2": (hf.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (hf.Qwen3Config, {"tie_word_embeddings": True}),
    "gemma3": (hf.Gemma3TextConfig, {"tie_word_embeddings": True, "sliding_window": 16}),
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
PROMPTS = [[5, 9, 33, 41], [7, 8, 100], [200, 3, 4, 5, 6, 7, 12, 249]]


def build(family: str, **more: Any) -> hf.PreTrainedModel:
    """A model with weights large enough to tell models apart."""
    torch.manual_seed(0)
    kind, settings = CONFIGS.get(family, (hf.Qwen3MoeConfig, MIXTURE))
    model = hf.AutoModelForCausalLM.from_config(kind(**{**DECODER, **settings, **more}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.3)
    return model.eval()


def one_shot(family: str, layout: str) -> hf.PreTrainedModel:
    """Embeddings and heads included: the plan names them."""
    model = build(family)
    return rw.compress(model, rw.Budget(removed=0.3), plan=rw.find_plan(model), layout=layout)  # type: ignore[arg-type, return-value]


def pruned(family: str, method: str = "flop-l0") -> hf.PreTrainedModel:
    """A short run, as a user would write it."""
    model = build(family)
    pruner = rw.Pruner(model, rw.Budget(removed=0.3), method, rw.find_plan(model), anneal_steps=2)
    optimizer = torch.optim.AdamW(pruner.weight_parameters(), lr=1e-3)
    model.train()
    for step in range(3):
        tokens = torch.randint(3, WORDS, (3, 9), generator=torch.Generator().manual_seed(step))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()
    return pruner.compact().eval()  # type: ignore[return-value]


def narrowed(family: str) -> hf.PreTrainedModel:
    """Fewer neurons and heads: a stock model, which the plugin has no part in."""
    tokens = torch.randint(3, WORDS, (8, 9), generator=torch.Generator().manual_seed(0))
    small = rw.compress(build(family), rw.Budget(removed=0.2), tokens.split(2), method="width")
    return small  # type: ignore[return-value]


def dense_experts() -> hf.PreTrainedModel:
    """A mixture of experts whose other layers are low-rank."""
    model = build("qwen3-moe")
    plan = rw.find_plan(model, exclude=["experts"])
    return rw.compress(model, rw.Budget(removed=0.2), plan=plan)  # type: ignore[return-value]


def mixed() -> hf.PreTrainedModel:
    """Pairs, pivots and dense matrices in one merged layer; one head of keys and values, copied by two devices."""
    model: Any = build("llama", num_key_value_heads=1)
    pairs = r"model\.layers\.0\.(self_attn\.q_proj|mlp\.(gate|down)_proj)|model\.embed_tokens"
    pivots = r"model\.layers\.\d\.(self_attn\.[vo]_proj|mlp\.up_proj)|model\.layers\.1\.mlp\.down_proj|lm_head"
    for names, layout in ((pairs, "pair"), (pivots, "pivot")):
        budget = rw.Budget(removed=0.4, of="prunable")
        model = rw.compress(model, budget, plan=rw.find_plan(model, names), layout=layout)  # type: ignore[arg-type]
    return model  # type: ignore[no-any-return]


def save(model: hf.PreTrainedModel, folder: Path) -> Path:
    save_pretrained(model, folder)
    return folder


def environment(cache: Path, **more: str) -> dict[str, str]:
    """The environment of a vLLM process: nothing is fetched or reported, and one gigabyte is enough for its cache."""
    own = {
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # vLLM finds plugins of packages that are installed
        "PYTHONPATH": "",
    }
    return {**os.environ, **own, **more}


def ask(jobs: dict[str, dict[str, Any]], folder: Path, **more: str) -> dict[str, Any]:
    """What vLLM answers to each job, in a process of its own."""
    folder.mkdir(exist_ok=True)
    told, answers = folder / "jobs.json", folder / "answers.json"
    told.write_text(json.dumps(jobs))
    script = Path(__file__).with_name("engine.py")
    command = [sys.executable, str(script), str(told), str(answers)]
    done = subprocess.run(
        command,
        env=environment(folder.parent / "cache", **more),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    found: dict[str, Any] = json.loads(answers.read_text())
    found["log"] = done.stdout + done.stderr
    return found
