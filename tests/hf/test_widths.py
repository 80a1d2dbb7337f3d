"""Whole neurons and heads: what every method promises, and folders that stock transformers loads without rankwise."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rankwise as rw
from rankwise.adapters.widths import find_widths
from rankwise.core.widths import WidthSite
from rankwise.hf import save_pretrained
from tests.methods.rows import WIDTHS

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* of the gates had not decided"),
    pytest.mark.filterwarnings("ignore:the ramp has not ended"),
]

WORDS = 29
TINY: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**TINY, attention_bias=True, mlp_bias=True),
    "mistral": lambda: hf.MistralConfig(**TINY),
    "qwen2": lambda: hf.Qwen2Config(**TINY, tie_word_embeddings=True),
    "qwen3": lambda: hf.Qwen3Config(**TINY, head_dim=8),
    "gemma3": lambda: hf.Gemma3TextConfig(**TINY, head_dim=8, sliding_window=4, layer_types=None),
    "olmo": lambda: hf.OlmoConfig(**TINY),
}
LEARNED = [row for row in WIDTHS if "anneal_steps" in WIDTHS[row]]


def build(family: str = "llama", **changes: Any) -> hf.PreTrainedModel:
    """A model with weights large enough to tell models apart."""
    torch.manual_seed(0)
    config = FAMILIES[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    model = hf.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
            elif "bias" in next(name for name, each in model.named_parameters() if each is parameter):
                parameter.normal_(std=0.1)
    return model


def tokens(seed: int = 0, size: int = 3) -> Tensor:
    return torch.randint(3, WORDS, (size, 7), generator=torch.Generator().manual_seed(seed))


def train(model: Any, pruner: rw.Pruner, steps: int, start: int = 0) -> None:
    model.train()
    optimizer = torch.optim.SGD(pruner.weight_parameters(), lr=0.1)
    for step in range(start, start + steps):
        batch = tokens(step)
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()


def gated(family: str, row: str, removed: float = 0.25, **more: Any) -> tuple[Any, rw.Pruner]:
    model = build(family)
    return model, rw.Pruner(model, rw.Budget(removed=removed), row.split()[0], **WIDTHS[row], **more)


def logits(model: Any, batch: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(batch).logits


def check_size(small: Any, dense: Any, limit: int, multiple: int = 1) -> None:
    """At most the limit; and no layer may have another neuron, nor another head, in all layers."""
    size, config = rw.count(small), small.config
    assert size <= limit
    steps = []
    for width, kept in {"neurons": config.intermediate_size, "heads": config.num_key_value_heads}.items():
        sites = [s for s in find_widths(dense).sites if isinstance(s, WidthSite) and s.width.endswith(width)]
        allowed = sites[0].counts or range(1, sites[0].num_components + 1)
        step = multiple if width == "neurons" else 1
        more = next((n for n in allowed if n >= min(kept + step, sites[0].num_components) and n > kept), None)
        steps += [] if more is None else [sum((more - kept) * site.per_component for site in sites)]
    assert not steps or limit - size < min(steps)
    # the configuration alone says what the model is
    assert rw.count(hf.AutoModelForCausalLM.from_config(config)) == size


@settings(max_examples=40)
@given(
    st.sampled_from(list(FAMILIES)),
    st.sampled_from([row for row in WIDTHS if not row.endswith("neurons")]),
    st.integers(5, 70),
    st.sampled_from(["cpu", "cuda"]),
)
def test_the_exported_size_is_exact(family: str, row: str, percent: int, target: str) -> None:
    dense = build(family)
    model = build(family)
    budget = rw.Budget(removed=percent / 100)
    try:
        pruner = rw.Pruner(model, budget, row.split()[0], **WIDTHS[row], target=target)
    except rw.BudgetError as error:
        smallest = int(str(error).split("at least ")[1].split(" ")[0].replace(",", ""))
        assert smallest > rw.count(dense) * (100 - percent) // 100
        pruner = rw.Pruner(model, rw.Budget(params=smallest), row.split()[0], **WIDTHS[row], target=target)
        train(model, pruner, 1)
        assert rw.count(pruner.compact()) == smallest
        return
    train(model, pruner, 3)
    small = pruner.compact()
    assert rw.count(small) == pruner.size().exported
    # the cuda target wants the neurons of so small a model in fours
    check_size(small, dense, rw.count(dense) * (100 - percent) // 100, 4 if target == "cuda" else 1)


@settings(max_examples=30)
@given(st.sampled_from(list(FAMILIES)), st.integers(5, 60), st.sampled_from(["even", "global"]), st.booleans())
def test_the_one_shot_size_is_exact(family: str, percent: int, ranks: Any, calibrated: bool) -> None:
    dense = build(family)
    try:
        small = rw.compress(
            dense,
            rw.Budget(removed=percent / 100),
            [tokens(seed) for seed in range(3)] if calibrated else None,
            method="width",
            ranks=ranks,
        )
    except rw.BudgetError:
        return
    check_size(small, build(family), rw.count(dense) * (100 - percent) // 100)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("row", WIDTHS)
def test_a_compact_model_gives_the_gated_models_outputs(family: str, row: str) -> None:
    model, pruner = gated(family, row)
    train(model, pruner, 7)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        small = pruner.model.to(dtype) and pruner.compact()
        want, got = logits(model, tokens(99)), logits(small, tokens(99))
        assert (got - want).abs().max() <= tolerance * want.abs().max()
    assert all(type(module).__module__.startswith(("torch.nn", "transformers.")) for module in small.modules())


@pytest.mark.parametrize("row", LEARNED)
def test_evaluation_stands_at_the_current_target(row: str) -> None:
    model, pruner = gated("qwen2", row)
    train(model, pruner, 3)
    target = pruner.controller.target_size()
    assert pruner.limit < target < pruner.account.dense
    small = pruner.compact(rw.Budget(params=target))
    torch.testing.assert_close(logits(model, tokens()), logits(small, tokens()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_with_all_gates_open_the_gated_model_is_the_dense_one(family: str) -> None:
    model = build(family).double()
    want = logits(model, tokens())
    pruner = rw.Pruner(model, rw.Budget(params=rw.count(model)), "width-l0", anneal_steps=10)
    for gate in pruner.controller.gates:
        gate.alpha.fill_(50.0)
    pruner.controller.invalidate_masks()
    assert (model.train()(tokens()).logits - want).abs().max() <= 1e-10 * want.abs().max()


@pytest.mark.parametrize("row", WIDTHS)
@pytest.mark.parametrize("stop", [1, 4, 7])
def test_a_resumed_run_ends_with_the_same_weights(row: str, stop: int) -> None:
    """Bit for bit; and so does a second run with the same seed."""
    model, pruner = gated("qwen3", row)
    train(model, pruner, 9)
    other, other_pruner = gated("qwen3", row)
    train(other, other_pruner, stop)
    resumed, resumed_pruner = gated("qwen3", row)
    resumed.load_state_dict(copy.deepcopy(other.state_dict()))
    train(resumed, resumed_pruner, 9 - stop, start=stop)
    for a, b in zip(pruner.compact().parameters(), resumed_pruner.compact().parameters(), strict=True):
        assert torch.equal(a, b)


def test_one_run_gives_many_sizes_and_leaves_the_gated_model_as_it_is() -> None:
    model, pruner = gated("llama", "width-l0", 0.4)
    before = copy.deepcopy(model.config.to_dict())
    train(model, pruner, 7)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    sizes = [rw.count(pruner.compact(rw.Budget(removed=removed))) for removed in (0.1, 0.2, 0.4)]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 3
    assert model.config.to_dict() == before
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


BLOCKED = """
import json, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "rankwise":
            raise ImportError("rankwise must not be needed")

sys.meta_path.insert(0, Block())
import torch, transformers

transformers.utils.logging.set_verbosity_error()
found = {}
for folder in sys.argv[1:]:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    prompt = torch.arange(3, 9)[None]
    found[folder] = model.generate(prompt, max_new_tokens=12, do_sample=False)[0].tolist()
assert not any(name.split(".")[0] == "rankwise" for name in sys.modules)
print(json.dumps(found))
"""


def test_stock_transformers_loads_the_folders_without_rankwise(tmp_path: Path) -> None:
    """Every family, trained and one-shot, in a process that cannot import rankwise: the same greedy tokens."""
    want = {}
    for family in FAMILIES:
        model, pruner = gated(family, "width-l0", 0.3)
        train(model, pruner, 7)
        shot = rw.compress(
            build(family), rw.Budget(removed=0.3), [tokens(i) for i in range(3)], method="width", rank_multiple=4
        )
        for name, small in (("trained", pruner.compact().eval()), ("one-shot", shot.eval())):
            assert isinstance(small, hf.PreTrainedModel)
            folder = str(tmp_path / f"{family}-{name}")
            save_pretrained(small, folder, size=pruner.size() if name == "trained" else None)
            assert "quantization_config" not in json.loads((Path(folder) / "config.json").read_text())
            assert "rankwise.hf" not in (Path(folder) / "README.md").read_text()
            want[folder] = small.generate(torch.arange(3, 9)[None], max_new_tokens=12, do_sample=False)[0].tolist()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    answer = subprocess.run(
        [sys.executable, "-c", BLOCKED, *want], capture_output=True, text=True, env=environment, check=False
    )
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout.splitlines()[-1]) == want


def doubled() -> Any:
    """A model in which every neuron has a twin with the same activation, and so has every key-value group."""
    model = build("qwen3", layer_types=["full_attention"] * 2).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            for part in (layer.mlp.gate_proj, layer.mlp.up_proj):
                part.weight[12:] = part.weight[:12]
            for part in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                half = part.out_features // 2
                part.weight[half:] = part.weight[:half]
    return model


def test_what_is_left_takes_over_what_it_can_replace() -> None:
    """Half of a model whose other half is redundant does the work of all of it."""
    model = doubled()
    sites = find_widths(model).sites
    budget = rw.Budget(params=rw.count(model) - sum(site.params for site in sites) // 2)
    batches = [tokens(seed, size=8) for seed in range(4)]
    small = rw.compress(model, budget, batches, method="width")
    assert (small.config.intermediate_size, small.config.num_key_value_heads) == (12, 1)
    want = logits(model, tokens(99))
    assert (logits(small, tokens(99)) - want).norm() < 0.05 * want.norm()
    blind = rw.compress(model, budget, method="width")
    assert (logits(blind, tokens(99)) - want).norm() > 0.3 * want.norm()


def test_head_counts_that_the_configuration_refuses_are_not_chosen(tmp_path: Path) -> None:
    """Llama's hidden size must be a multiple of its number of heads, even if the size of a head is given."""
    config = hf.LlamaConfig(**{**TINY, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 4})
    model = hf.AutoModelForCausalLM.from_config(config)
    (counts,) = {site.counts for site in find_widths(model).sites if isinstance(site, WidthSite) and site.counts}
    assert counts == (1, 2, 4, 8)
    free = hf.AutoModelForCausalLM.from_config(
        hf.MistralConfig(**{**TINY, "num_attention_heads": 8, "num_key_value_heads": 8})
    )
    assert all(isinstance(site, WidthSite) and not site.counts for site in find_widths(free).sites)
    seen = set()
    for removed in (0.1, 0.2, 0.3, 0.4):
        small = rw.compress(model, rw.Budget(removed=removed), method="width")
        small.save_pretrained(tmp_path / str(removed))
        again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / str(removed))
        assert torch.equal(logits(again, tokens()), logits(small, tokens()))
        seen.add(small.config.num_attention_heads)
    assert seen <= set(counts) and len(seen) > 1


def test_neurons_come_in_multiples() -> None:
    for removed in (0.15, 0.3, 0.45):
        small = rw.compress(build("mistral"), rw.Budget(removed=removed), method="width", rank_multiple=8)
        assert small.config.intermediate_size % 8 == 0


def test_a_plan_says_which_blocks_are_pruned() -> None:
    model = build("mistral")
    plan = rw.find_plan(model, exclude=["o_proj"])
    small = rw.compress(model, rw.Budget(removed=0.2), method="width", plan=plan)
    assert small.config.num_key_value_heads == 2 and small.config.intermediate_size < 24
    with pytest.raises(rw.PlanError, match="must hold every layer of the feed-forward or of the attention blocks"):
        rw.compress(model, rw.Budget(removed=0.2), method="width", plan=rw.find_plan(model, include=["up_proj"]))


def other(kind: str) -> nn.Module:
    sizes = {**TINY, "num_local_experts": 4, "num_experts_per_tok": 2}
    uneven = {**TINY, "num_attention_heads": 6, "num_key_value_heads": 4, "head_dim": 4}
    configs: dict[str, Callable[[], Any]] = {
        "packed": lambda: hf.Phi3Config(**TINY),
        "experts": lambda: hf.MixtralConfig(**sizes),
        "gpt2": lambda: hf.GPT2Config(vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=20),
        "norm over heads": lambda: hf.Olmo2Config(**TINY),
        "uneven": lambda: hf.Qwen2Config(**uneven),
    }
    return nn.Linear(4, 4) if kind == "no model" else hf.AutoModelForCausalLM.from_config(configs[kind]())


@pytest.mark.parametrize(
    "kind, message",
    {
        "no model": "must be a decoder of transformers, such as Llama.*but is a Linear",
        "packed": "one block of gate_proj, up_proj, down_proj.*Phi3ForCausalLM has 0 for 2 layers",
        "experts": "MixtralForCausalLM has 0 for 2 layers. Packed projections and experts have no one width",
        "gpt2": "GPT2LMHeadModel has 0 for",
        "norm over heads": r"self_attn.q_norm.weight: must be the same for all heads, of 4 numbers, but has 16",
        "uneven": "The number of heads must be a multiple of that of key-value heads, but is 6 for 4",
    }.items(),
)
def test_models_without_such_blocks_are_refused(kind: str, message: str) -> None:
    model = other(kind)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(rw.PlanError, match=message):
        rw.compress(model, rw.Budget(removed=0.1), method="width")
    with pytest.raises(rw.PlanError, match=message):
        rw.Pruner(model, rw.Budget(removed=0.1), "width-l0", anneal_steps=10)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_arguments_that_do_not_fit_are_refused() -> None:
    model, budget = build(), rw.Budget(removed=0.2)
    with pytest.raises(rw.BudgetError, match="and 1 neurons of every layer, and 1 key-value heads of every layer"):
        rw.compress(model, rw.Budget(removed=0.9), method="width")
    with pytest.raises(rw.BudgetError, match="must be a size for width, but is `latency_ms`"):
        rw.compress(model, rw.Budget(latency_ms=1.0), method="width")
    with pytest.raises(rw.BudgetError, match="must be a size for width-l0, but is `latency_ms`"):
        rw.Pruner(model, rw.Budget(latency_ms=1.0), "width-l0", anneal_steps=10)
    with pytest.raises(rw.RankwiseError, match="`layout` and `embeddings` are settings of low rank"):
        rw.compress(model, budget, method="width", layout="pivot")
    with pytest.raises(ValueError, match=r'`method` must be one of "svd", "width", "width\+svd", but is \'wide\''):
        rw.compress(model, budget, method="wide")  # type: ignore[arg-type]
