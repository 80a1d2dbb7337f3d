"""vLLM serves compact models: the tokens are those of transformers, and what it cannot serve it refuses in one line."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor

import rankwise as rw
from rankwise.files import sealed
from tests.serve.engine import NEW_TOKENS
from tests.serve.served import (
    CONFIGS,
    NEEDS_VLLM,
    PROMPTS,
    ask,
    build,
    dense_experts,
    mixed,
    narrowed,
    one_shot,
    pruned,
    save,
)

pytestmark = [NEEDS_VLLM, pytest.mark.filterwarnings("ignore:.* of the gates had not decided")]

MODELS: dict[str, Callable[[], hf.PreTrainedModel]] = {
    "llama mixed": mixed,
    "llama np-l0": lambda: pruned("llama", "np-l0"),
    "qwen3-moe with dense experts": dense_experts,
    "llama width": lambda: narrowed("llama"),
    "qwen3 width": lambda: narrowed("qwen3"),
}
for _family in CONFIGS:
    MODELS[f"{_family} pair"] = lambda family=_family: one_shot(family, "pair")  # type: ignore[misc]
    MODELS[f"{_family} pivot"] = lambda family=_family: one_shot(family, "pivot")  # type: ignore[misc]
    MODELS[f"{_family} pruned"] = lambda family=_family: pruned(family)  # type: ignore[misc]


# a rounding error may send a token to another expert
ROUNDED = [name for name in MODELS if not name.startswith("qwen3-moe")]


def entry_of(folder: Path) -> dict[str, Any]:
    entry: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return entry


def rewrite(folder: Path, **changes: Any) -> None:
    """Change the entry of a saved model, as somebody would who also writes the checksums."""
    content = json.loads((folder / "config.json").read_text())
    entry = {**content.get("quantization_config", {}), **changes}
    plain = {key: value for key, value in entry.items() if key not in ("files", "checksum")}
    content["quantization_config"] = sealed(plain, sorted(folder.glob("*.safetensors")))
    (folder / "config.json").write_text(json.dumps(content))


def gated(folder: Path, source: Path) -> None:
    shutil.rmtree(folder)
    model = build("llama")
    rw.Pruner(model, rw.Budget(removed=0.3), anneal_steps=2)
    model.save_pretrained(folder)


def newer(folder: Path, source: Path) -> None:
    rewrite(folder, version=99)


def changed(folder: Path, source: Path) -> None:
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)


def without_a_tensor(folder: Path, source: Path) -> None:
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.1.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    rewrite(folder)


def another_rank(folder: Path, source: Path) -> None:
    layers = entry_of(folder)["layers"]
    layers["model.layers.1.mlp.up_proj"]["rank"] += 1
    rewrite(folder, layers=layers)


def an_unknown_layer(folder: Path, source: Path) -> None:
    layers = entry_of(folder)["layers"]
    rewrite(folder, layers={**layers, "model.layers.0.adapter": layers["model.layers.0.mlp.up_proj"]})


def low_rank_experts(folder: Path, source: Path) -> None:
    shutil.rmtree(folder)
    rw.compress(build("qwen3-moe"), rw.Budget(removed=0.3)).save_pretrained(folder)  # type: ignore[operator]


REFUSED: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "gated": (gated, "vLLM serves compact models, but this folder holds a gated one"),
    "newer": (newer, "must be version 2 at most, but is version 99, written by rankwise"),
    "changed": (changed, "model.safetensors must be as rankwise wrote it, but is damaged"),
    "without a tensor": (without_a_tensor, "must hold model.layers.1.mlp.up_proj.1.weight, but does not"),
    "another rank": (another_rank, "model.layers.1.mlp.up_proj.0.weight must be"),
    "an unknown layer": (an_unknown_layer, "must have a layer model.layers.0.adapter, but has none"),
    "low-rank experts": (low_rank_experts, "model.layers.0.mlp.experts.0.down is in a RoutedExperts of vLLM"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, make in MODELS.items():
        save(make(), root / name)
    for name, (spoil, _) in REFUSED.items():
        shutil.copytree(root / "llama pair", root / name)
        spoil(root / name, root / "llama pair")
    return root


@pytest.fixture(scope="module")
def answers(folders: Path) -> dict[str, Any]:
    """What one vLLM process says of all folders."""

    def job(name: str, **settings: Any) -> dict[str, Any]:
        return {"folder": str(folders / name), "prompts": PROMPTS, **settings}

    jobs = {f"{name} float32": job(name, dtype="float32") for name in MODELS}
    jobs |= {f"{name} bfloat16": job(name, dtype="bfloat16") for name in ROUNDED}
    jobs["compiled"] = job("qwen2 pivot", dtype="float32", enforce_eager=False)
    # transformers' own classes, in which vLLM exchanges the layers
    jobs["transformers"] = job("qwen3 pair", dtype="float32", model_impl="transformers")
    jobs |= {name: job(name, dtype="float32") for name in REFUSED}
    return ask(jobs, folders / "all", VLLM_ENABLE_V1_MULTIPROCESSING="0")


def greedy(folder: Path) -> list[list[int]]:
    """The tokens of transformers."""
    model = hf.AutoModelForCausalLM.from_pretrained(folder).eval()
    found = []
    for prompt in PROMPTS:
        whole = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
        found.append(whole[0, len(prompt) :].tolist())
    return found


def logprobs_after(model: hf.PreTrainedModel, prompt: list[int], tokens: list[int]) -> Tensor:
    """The logprobs of all words at every step of a text that is given."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits.float()
    return logits[0, len(prompt) - 1 : -1].log_softmax(-1)


def told_logprobs(answer: dict[str, Any]) -> list[list[dict[int, float]]]:
    return [[{int(word): value for word, value in step.items()} for step in one] for one in answer["logprobs"]]


def largest_difference(answer: dict[str, Any], model: hf.PreTrainedModel) -> float:
    """Between vLLM's logprobs of the likeliest words and those of a model, on the text that vLLM wrote."""
    worst = 0.0
    for prompt, tokens, steps in zip(PROMPTS, answer["tokens"], told_logprobs(answer), strict=True):
        want = logprobs_after(model, prompt, tokens)
        for told, row in zip(steps, want, strict=True):
            worst = max(worst, *(abs(value - float(row[word])) for word, value in told.items()))
    return worst


def loaded(folder: Path, dtype: torch.dtype) -> hf.PreTrainedModel:
    return hf.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_transformers(name: str, folders: Path, answers: dict[str, Any]) -> None:
    # a narrow model is a stock one
    assert ("quantization_config" in json.loads((folders / name / "config.json").read_text())) != ("width" in name)
    answer = answers[f"{name} float32"]
    assert answer.get("tokens") == greedy(folders / name), answer
    assert largest_difference(answer, loaded(folders / name, torch.float32)) < 1e-4


@pytest.mark.parametrize("name", ROUNDED)
def test_in_bfloat16_the_difference_is_one_of_rounding(name: str, folders: Path, answers: dict[str, Any]) -> None:
    """vLLM may be three times as far from exact sums as transformers is; clear choices must be the same."""
    answer = answers[f"{name} bfloat16"]
    rounded = loaded(folders / name, torch.bfloat16)
    exact = loaded(folders / name, torch.bfloat16).float()
    decided = rounding = 0.0
    rows = [logprobs_after(exact, *text) for text in zip(PROMPTS, answer["tokens"], strict=True)]
    for (prompt, tokens), row in zip(zip(PROMPTS, answer["tokens"], strict=True), rows, strict=True):
        likeliest = row.topk(5).indices
        rounding = max(
            rounding, float((logprobs_after(rounded, prompt, tokens) - row).gather(1, likeliest).abs().max())
        )
    tolerance = 3 * rounding
    assert largest_difference(answer, exact) < tolerance
    for tokens, row in zip(answer["tokens"], rows, strict=True):
        best = row.topk(2)
        clear = best.values[:, 0] - best.values[:, 1] > 2 * tolerance
        assert torch.tensor(tokens)[clear].tolist() == best.indices[clear, 0].tolist()
        decided += float(clear.sum())
    # some choices are clear, and a model of other weights would be seen
    assert decided >= len(PROMPTS)
    assert largest_difference(answer, build(name.split()[0]).to(torch.bfloat16).float()) > 3 * tolerance


@pytest.mark.parametrize("form", ["dense", "pair", "pivot", "large pivot"])
def test_products_of_vllm_are_those_of_the_reference(form: str) -> None:
    from rankwise.serve.grouped import grouped_pair
    from rankwise.serve.methods import PIVOT_RANK, Products
    from rankwise.serve.weights import SecondFactor

    rank = {"dense": None, "large pivot": PIVOT_RANK}.get(form, 5)
    factors = [SecondFactor(rank, 900, "pivot" in form, torch.float32), SecondFactor(3, 4, False, torch.float32)]
    for factor in factors:
        for weight in (factor.weight, factor.places):
            if weight is not None:
                weight.data = torch.randn(weight.shape) if weight.is_floating_point() else torch.randperm(900).int()
    first, x = torch.randn(factors[0].rows + 3, 8), torch.randn(2, 8)
    expected = grouped_pair(x, first, [factor.value for factor in factors])
    torch.testing.assert_close(Products(first, factors)(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way, name", [("compiled", "qwen2 pivot"), ("transformers", "qwen3 pair")])
def test_other_ways_to_run_give_the_same_tokens(way: str, name: str, folders: Path, answers: dict[str, Any]) -> None:
    assert answers[way].get("tokens") == greedy(folders / name), answers[way]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_in_one_line(name: str, answers: dict[str, Any]) -> None:
    error = answers[name].get("error", "")
    assert REFUSED[name][1] in error
    assert "\n" not in error


def test_a_vllm_that_is_too_old_is_told_apart_and_still_starts(answers: dict[str, Any]) -> None:
    (said,) = answers["too old"]["said"]
    assert "must be served by vLLM 0.32 or newer" in said
    assert "tie_weights" in said


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two devices are two cores here")
def test_two_devices_give_the_tokens_of_one(folders: Path) -> None:
    first, second, *_ = sorted(os.sched_getaffinity(0))
    job = {"folder": str(folders / "llama mixed"), "prompts": PROMPTS, "dtype": "float32", "tensor_parallel_size": 2}
    found = ask({"two": job}, folders / "two", VLLM_CPU_OMP_THREADS_BIND=f"{first}|{second}")["two"]
    assert found.get("tokens") == greedy(folders / "llama mixed"), found
