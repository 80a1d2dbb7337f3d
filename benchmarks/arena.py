"""One-shot compression under one protocol: ours and the ideas of its peers, on and off the calibration text.

    python benchmarks/arena.py tokenize MODEL TOKENS.npz train=FILE valid=FILE test=FILE other=FILE
    python benchmarks/arena.py run MODEL TOKENS.npz OUT.json --removed 0.2,0.3 --rows svd-llm,ours --refine 250

MODEL is a folder that `from_pretrained` loads, or one with a GGUF file. Calibration windows are of `train`; perplexity
is per token of the model's own tokenizer on the first `--windows` windows of `--split` and of `other`, each from its
second token on. Every row has the same number of parameters, up to one component of each matrix. `--seeds` are
calibration samples. `--heal STEPS` then trains a row on `train` to give the dense model's answers, at the rate that is
best on `valid`.

Peers are written from their papers: SVD-LLM (whitening, the same share everywhere), ASVD (inputs scaled by the square
root of their mean size, the same share), ZS-SVD (whitening, signed first-order loss, one choice of components over the
model that keeps the sum of the loss changes near zero), AA-SVD (inputs of the compressed model, outputs of the dense
one, the same share, then blocks refined by their plain squared error). Their own settings were not searched for.
"""

from __future__ import annotations

import argparse
import copy
import heapq
import json
import math
import time
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import rankwise as rw
from rankwise.core.calibrate import second_moments
from rankwise.core.factorize import Factors, Moments, svd
from rankwise.core.plan import Plan
from rankwise.modules import linear
from rankwise.oneshot import Refinement, default_plan, loss_of_choices

EVEN: dict[str, Any] = {"layout": "pair", "embeddings": False, "target": "cpu", "loss": None, "ranks": "even"}
ROWS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "svd-llm": ("SVD whitened by calibration data, the same share of every layer", EVEN),
    "asvd": ("SVD with inputs scaled by their mean size, the same share of every layer", None),
    "zs-svd": ("whitened SVD, components over the whole model by the first-order change of the loss", None),
    "aa-svd": (
        "whitened SVD towards the dense model's outputs, the same share of every layer",
        {**EVEN, "anchor": True},
    ),
    "ours": ("ours, pivot layout: ranks by what the model's answers lose, word table included", {"target": "size"}),
    "ours-anchored": ("the same, towards the dense model's outputs", {"target": "size", "anchor": True}),
    "ours-pairs": ("ours, pairs", {"target": "cpu"}),
    "ours-gpu": ("ours, pairs whose ranks are fast on a GPU", {"target": "cuda"}),
}


def load(folder: Path, device: str) -> Any:
    gguf = next(iter(sorted(folder.glob("*.gguf"))), None)
    given: dict[str, Any] = {"gguf_file": gguf.name} if gguf else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **given)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.use_cache = False
    return model.to(device).eval()


def batches(tokens: Tensor, options: argparse.Namespace, seed: int) -> list[dict[str, Tensor]]:
    """Calibration windows at equal distances in the text, from a place that the seed decides, 16 at a time."""
    number, length = options.calibration_windows, options.calibration_length - (options.bos is not None)
    step = len(tokens) // number
    start = seed * 977 % max(step - length, 1)
    windows = [_with_bos(tokens[i * step + start :][:length], options.bos) for i in range(number)]
    most = max(1, min(16, 2**27 // (options.words * options.calibration_length)))
    return [{"input_ids": torch.stack(windows[i : i + most]).to(options.device)} for i in range(0, len(windows), most)]


def _with_bos(window: Tensor, bos: int | None) -> Tensor:
    return window if bos is None else torch.cat([torch.tensor([bos]), window])


@torch.no_grad()
def perplexity(model: Any, tokens: Tensor, options: argparse.Namespace) -> float:
    """Of the first windows, each from its second token on."""
    length = options.length - (options.bos is not None)
    total, number = 0.0, 0
    for window in tokens.split(length)[: options.windows]:
        window = _with_bos(window, options.bos)[None].to(options.device)
        logits = model(input_ids=window).logits[0, :-1].float()
        total += F.cross_entropy(logits, window[0, 1:], reduction="sum").item()
        number += len(logits)
    return math.exp(min(total / number, 700))


def uniform_rank(plan: Plan, dense: int, removed: float, shape: tuple[int, int]) -> int:
    kept = 1 - math.ceil(removed * dense) / plan.params
    return int(kept * math.prod(shape) / sum(shape))


def asvd(model: nn.Module, removed: float, data: list[Any], *, power: float = 0.5) -> nn.Module:
    """The SVD of W S with S = diag(mean |x|)^power, the same share of every layer."""
    small = copy.deepcopy(model)
    plan = default_plan(small, embeddings=False)
    sizes: dict[str, list[Tensor]] = {site.name: [] for site in plan.sites}
    handles = [
        small.get_submodule(name).register_forward_pre_hook(
            lambda _, args, to=found: to.append(args[0].abs().flatten(0, -2).mean(0))
        )
        for name, found in sizes.items()
    ]
    with torch.no_grad():
        for batch in data:
            small(**batch)
    for handle in handles:
        handle.remove()
    for site in plan.sites:
        layer: Any = small.get_submodule(site.name)
        scale = torch.stack(sizes[site.name]).mean(0).clamp(min=1e-6).pow(power)
        rank = uniform_rank(plan, rw.count(model), removed, site.shape)
        factors = svd(layer.weight, rank, Moments(torch.diag(scale.square())), damping=1e-12)
        _replace(small, site.name, factors)
    return small


def zs_svd(model: nn.Module, removed: float, data: list[Any], seed: int) -> nn.Module:
    """Components are dropped over the whole model by the first-order change of the loss, whose sum stays near zero."""
    small = copy.deepcopy(model)
    plan = default_plan(small, embeddings=False)
    generator = torch.Generator().manual_seed(seed)
    for batch in data:
        loss_of_choices(small(**batch).logits, generator).backward()
    found: dict[str, Factors] = {}
    change: dict[str, list[float]] = {}
    for site in plan.sites:
        layer: Any = small.get_submodule(site.name)
        moments = second_moments(small, Plan((site,)), data, dtype=torch.float32)[site.name]
        factors = svd(layer.weight, None, moments)
        found[site.name] = factors
        # dropping component i changes W by -p_i q_i
        change[site.name] = (-(layer.weight.grad @ factors.q_RI.t()) * factors.p_OR).sum(0).tolist()
    small.zero_grad()
    counts = _zero_sum(plan, change, math.ceil(removed * rw.count(model)))
    for site in plan.sites:
        factors, k = found[site.name], counts[site.name]
        if k * sum(site.shape) < math.prod(site.shape):
            _replace(small, site.name, Factors(factors.p_OR[:, :k], factors.q_RI[:k], factors.energy_R[:k]))
    return small


def _zero_sum(plan: Plan, change: dict[str, list[float]], wanted: int) -> dict[str, int]:
    """Components kept of each matrix: the last ones go first, those that bring the sum of all changes to zero."""
    shapes = {site.name: site.shape for site in plan.sites}
    counts = {name: len(values) for name, values in change.items()}
    heaps: dict[bool, list[tuple[float, str]]] = {True: [], False: []}

    def offer(name: str) -> None:
        if counts[name] > 1:
            value = change[name][counts[name] - 1]
            heapq.heappush(heaps[value > 0], (abs(value), name))

    def saved(name: str) -> int:
        return max(0, math.prod(shapes[name]) - counts[name] * sum(shapes[name]))

    for name in counts:
        offer(name)
    total, done = 0.0, 0
    while done < wanted and (heaps[True] or heaps[False]):
        wants_positive = total <= 0
        heap = heaps[wants_positive] or heaps[not wants_positive]
        _, name = heapq.heappop(heap)
        before = saved(name)
        total += change[name][counts[name] - 1]
        counts[name] -= 1
        done += saved(name) - before
        offer(name)
    return counts


def _replace(model: nn.Module, name: str, factors: Factors) -> None:
    layer: Any = model.get_submodule(name)
    bias = layer.bias
    pair = [
        linear(nn.Parameter(factors.q_RI.contiguous()), None),
        linear(nn.Parameter(factors.p_OR.contiguous()), bias),
    ]
    model.set_submodule(name, nn.Sequential(*pair))


def compressed(name: str, model: Any, removed: float, data: list[Any], options: argparse.Namespace, seed: int) -> Any:
    if name == "asvd":
        return asvd(model, removed, data)
    if name == "zs-svd":
        return zs_svd(model, removed, data, seed)
    settings = ROWS[name][1]
    assert settings is not None
    refinement = Refinement(steps=options.refine, learning_rate=options.refine_lr, seed=seed)
    return rw.compress(model, rw.Budget(removed=removed), data, refinement=refinement, **settings)


def heal(small: Any, dense: Any, tokens: Tensor, lr: float, options: argparse.Namespace) -> Any:
    """AdamW on training text, towards the dense model's answers; a cosine from `lr` to zero."""
    optimizer = torch.optim.AdamW(small.parameters(), lr=lr, weight_decay=0.0, betas=(0.9, 0.95))
    length = options.length - (options.bos is not None)
    windows = tokens[: len(tokens) // length * length].view(-1, length)
    generator = torch.Generator().manual_seed(0)
    cuda = options.device.startswith("cuda")
    small.train()
    for step in range(options.heal):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / options.heal))
        pick = torch.randint(len(windows), (options.batch,), generator=generator)
        for part in pick.split(max(1, 2**29 // (options.words * options.length))):
            batch = torch.stack([_with_bos(window, options.bos) for window in windows[part]]).to(options.device)
            with torch.autocast("cuda" if cuda else "cpu", torch.bfloat16, enabled=cuda):
                with torch.no_grad():
                    want = dense(input_ids=batch).logits.log_softmax(-1)
                got = small(input_ids=batch).logits.log_softmax(-1)
            loss = F.kl_div(got.flatten(0, 1), want.flatten(0, 1), log_target=True, reduction="sum")
            (loss / (len(pick) * options.length)).backward()
        nn.utils.clip_grad_norm_(small.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return small.eval()


def run(options: argparse.Namespace) -> None:
    tokens = {name: torch.from_numpy(text).long() for name, text in np.load(options.tokens).items()}
    model = load(options.model, options.device)
    options.words = model.config.get_text_config().vocab_size
    splits = {options.split: tokens[options.split], "other": tokens["other"]}
    dense = {name: perplexity(model, text, options) for name, text in splits.items()}
    names = ("split", "windows", "length", "calibration_windows", "calibration_length", "bos", "refine", "refine_lr")
    record: dict[str, Any] = {
        "name": "arena",
        "model": options.model.name,
        "settings": {name: getattr(options, name) for name in (*names, "heal", "heal_lr", "batch")},
        "dense": {"parameters": rw.count(model), **dense},
        "rows": [],
        "date": date.today().isoformat(),
        "hardware": harness.hardware(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rankwise": rw.__version__,
        "commit": harness.commit(),
    }
    print("dense", dense, flush=True)
    for seed in map(int, options.seeds.split(",")):
        data = batches(tokens["train"], options, seed)
        for removed, name in _cells(options.removed, options.rows):
            row = cell(name, removed, seed, model, data, tokens, splits, options)
            record["rows"].append(row)
            print(json.dumps(row), flush=True)
            options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _cells(removed: str, rows: str) -> Iterator[tuple[float, str]]:
    return ((float(share), name) for share in removed.split(",") for name in rows.split(","))


def cell(
    name: str,
    removed: float,
    seed: int,
    model: Any,
    data: list[Any],
    tokens: dict[str, Tensor],
    splits: dict[str, Tensor],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """One row: size, seconds, memory and perplexity, and those of the healed model."""
    cuda = options.device.startswith("cuda")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    small = compressed(name, model, removed, data, options, seed)
    row: dict[str, Any] = {"name": name, "removed": removed, "seed": seed, "parameters": rw.count(small)}
    row["seconds"] = round(time.perf_counter() - start, 1)
    row["gigabytes"] = round(torch.cuda.max_memory_allocated() / 1e9, 1) if cuda else None
    row |= {split: perplexity(small, text, options) for split, text in splits.items()}
    if options.heal:
        tried: dict[str, float] = {}
        best: Any = None
        start = time.perf_counter()
        for lr in options.heal_lr.split(","):
            healed = heal(copy.deepcopy(small), model, tokens["train"], float(lr), options)
            tried[lr] = perplexity(healed, tokens["valid"], options)
            best = healed if tried[lr] == min(tried.values()) else best
        row["healed"] = {split: perplexity(best, text, options) for split, text in splits.items()}
        row |= {"valid by rate": tried, "seconds of healing": round(time.perf_counter() - start, 1)}
    return row


def tokenize(model: Path, out: Path, texts: Sequence[str]) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    found = {}
    for text in texts:
        name, file = text.split("=", 1)
        whole = Path(file).read_text(encoding="utf-8")
        # a tokenizer takes long for one long text
        parts = [whole[i : i + 1_000_000] for i in range(0, len(whole), 1_000_000)]
        ids = [i for part in parts for i in tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]]
        found[name] = np.array(ids, dtype=np.int32)
        print(name, len(ids))
    np.savez_compressed(out, **found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("tokenize")
    one.add_argument("model", type=Path)
    one.add_argument("out", type=Path)
    one.add_argument("texts", nargs="+", metavar="NAME=FILE")
    two = commands.add_parser("run")
    two.add_argument("model", type=Path)
    two.add_argument("tokens", type=Path)
    two.add_argument("out", type=Path)
    two.add_argument("--removed", default="0.2,0.3,0.4")
    two.add_argument("--rows", default=",".join(ROWS))
    two.add_argument("--seeds", default="0")
    two.add_argument("--split", default="test", choices=["valid", "test"])
    two.add_argument("--windows", type=int, default=64)
    two.add_argument("--length", type=int, default=512)
    two.add_argument("--calibration-windows", type=int, default=256)
    two.add_argument("--calibration-length", type=int, default=256)
    two.add_argument("--bos", type=int, help="a token before every window")
    two.add_argument("--refine", type=int, default=0, metavar="STEPS")
    two.add_argument("--refine-lr", type=float, default=Refinement.learning_rate)
    two.add_argument("--heal", type=int, default=0, metavar="STEPS")
    two.add_argument("--heal-lr", default="3e-4", metavar="RATES")
    two.add_argument("--batch", type=int, default=16)
    two.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.command == "tokenize":
        tokenize(options.model, options.out, options.texts)
    else:
        run(options)


if __name__ == "__main__":
    main()
