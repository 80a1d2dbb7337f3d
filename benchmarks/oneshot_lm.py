"""One-shot compression of a causal language model: `python benchmarks/oneshot_lm.py MODEL TEXTS OUT.json`.

MODEL is a folder that `from_pretrained` loads (for a model in GGUF form, save it with `save_pretrained` first); TEXTS
holds train.txt, valid.txt and test.txt. Rows, each at the same number of parameters: the truncated SVD and SVD-LLM's
whitened one, both with the same share of every linear layer (the embedding stays); ours as pairs and as pivots, and by
width: whole neurons and heads.
Calibration reads training text; perplexity is per token of the model's own tokenizer on the
first `--windows` windows of the test text (`--split valid` to try things out). `--heal STEPS` then trains every row but
"svd" on training text to give the dense model's answers, at each rate of `--lr`, of which validation text chooses one.
Rows that OUT.json holds already are not run again.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from datetime import date
from pathlib import Path
from typing import Any

import harness
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import rankwise as rw
from rankwise.core.calibrate import second_moments
from rankwise.core.factorize import svd
from rankwise.deploy.inputs import Calibration, encoder, text_windows
from rankwise.errors import RankwiseError
from rankwise.modules import linear
from rankwise.oneshot import default_plan

ROWS = {
    "svd": "truncated SVD, the same share of every layer",
    "svd-llm": "SVD whitened by calibration data, the same share of every layer",
    "pair": "ours: ranks by what the model's answers lose, pairs",
    "pivot": "ours: the same in the pivot layout",
    "width": "ours: whole neurons and heads, one width for all layers",
}


def uniform(model: nn.Module, removed: float, batches: list[Any] | None) -> tuple[nn.Module, int]:
    """Every linear layer a pair with the same share of its parameters."""
    small = copy.deepcopy(model)
    plan = default_plan(small)
    dense = rw.count(model)
    kept = 1 - math.ceil(removed * dense) / plan.params
    moments = {} if batches is None else second_moments(small, plan, batches, dtype=torch.float32)
    for site in plan.sites:
        layer = small.get_submodule(site.name)
        assert isinstance(layer, nn.Linear) and layer.bias is None
        rank = int(kept * layer.weight.numel() / sum(layer.weight.shape))
        factors = svd(layer.weight, rank, moments.pop(site.name, None))
        pair = [linear(nn.Parameter(weight), None) for weight in (factors.q_RI, factors.p_OR)]
        small.set_submodule(site.name, nn.Sequential(*pair))
    return small, rw.count(small)


def ours(model: nn.Module, removed: float, name: Any, windows: list[Tensor]) -> tuple[nn.Module, int]:
    how: dict[str, Any] = {"method": "width"} if name == "width" else {"layout": name}
    small = rw.compress(
        model,
        rw.Budget(removed=removed),
        [{"input_ids": window[None]} for window in windows],
        loss_batches=[{"input_ids": window[None, : Calibration.loss_window]} for window in windows],
        **how,
    )
    return small, rw.count(small)


@torch.no_grad()
def perplexity(model: nn.Module, tokens: Tensor, length: int, number: int) -> float:
    """Per token, each window from its second token on."""
    losses = []
    for window in tokens.split(length)[:number]:
        window = window.to(next(model.parameters()).device)[None]
        logits = model(input_ids=window).logits[0, :-1].float()
        losses.append(F.cross_entropy(logits, window[0, 1:]).item())
    return math.exp(sum(losses) / len(losses))


def heal(small: nn.Module, dense: nn.Module, tokens: Tensor, lr: float, options: argparse.Namespace) -> nn.Module:
    """AdamW on training text, towards the dense model's answers; a cosine from `lr` to zero."""
    optimizer = torch.optim.AdamW(small.parameters(), lr=lr, weight_decay=0.0, betas=(0.9, 0.95))
    windows = tokens[: len(tokens) // options.length * options.length].view(-1, options.length)
    generator = torch.Generator().manual_seed(options.seed)
    device = next(small.parameters()).device
    small.train()
    for step in range(options.heal):
        for group in optimizer.param_groups:
            group["lr"] = lr * 0.5 * (1 + math.cos(math.pi * step / options.heal))
        pick = torch.randint(len(windows), (options.batch,), generator=generator)
        batch = windows[pick].to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            with torch.no_grad():
                want = dense(input_ids=batch).logits.float().log_softmax(-1)
            got = small(input_ids=batch).logits.float().log_softmax(-1)
        loss = F.kl_div(got.flatten(0, 1), want.flatten(0, 1), log_target=True, reduction="batchmean")
        loss.backward()
        nn.utils.clip_grad_norm_(small.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"    heal {step}: {loss.item():.4f}", flush=True)
    return small.eval()


def _shared(settings: dict[str, Any]) -> dict[str, Any]:
    """What the rows of one file have in common."""
    return {name: value for name, value in settings.items() if name not in ("removed", "rows")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("texts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--removed", default="0.1,0.2,0.3")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--split", default="test", choices=["valid", "test"])
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--calibration-windows", type=int, default=64)
    parser.add_argument("--calibration-length", type=int, default=256)
    parser.add_argument("--heal", type=int, default=0, metavar="STEPS")
    parser.add_argument("--lr", default="1e-4,3e-4", metavar="RATES")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    calibration = Calibration(
        file=options.texts / "train.txt",
        num_windows=options.calibration_windows,
        window=options.calibration_length,
    )
    windows = [window.to(options.device) for window in text_windows(encoder(tokenizer), calibration)]
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    model = model.to(options.device).eval()

    def measured(small: nn.Module, split: str = options.split) -> float:
        text = (options.texts / f"{split}.txt").read_text(encoding="utf-8")
        # more than a window's letters, and no more than are needed
        tokens = tokenizer(text[: options.windows * options.length * 12], return_tensors="pt").input_ids[0]
        return perplexity(small, tokens, options.length, options.windows)

    def healed(small: nn.Module, tokens: Tensor) -> dict[str, Any]:
        """The rate is chosen on validation text; the split that is asked for is read once."""
        best, tried = small, dict[str, float]()
        for lr in options.lr.split(","):
            healthy = heal(copy.deepcopy(small), model, tokens, float(lr), options)
            tried[lr] = measured(healthy, "valid")
            if tried[lr] == min(tried.values()):
                best = healthy
        return {"valid": tried, "healed": measured(best)}

    record: dict[str, Any] = {
        "name": "oneshot-lm",
        "settings": {name: value for name, value in vars(options).items() if name not in ("model", "texts", "out")},
        "model": Path(options.model).name,
        "texts": options.texts.name,
        "split": options.split,
        "tokens": options.windows * options.length,
        "rows": [{"name": "dense", "parameters": rw.count(model), "perplexity": measured(model)}],
        "date": date.today().isoformat(),
        "hardware": harness.hardware(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rankwise": rw.__version__,
        "commit": harness.commit(),
    }
    print(record["rows"][0], flush=True)
    if options.out.exists():
        before = json.loads(options.out.read_text(encoding="utf-8"))
        if _shared(before["settings"]) != _shared(record["settings"]):
            raise RankwiseError(f"{options.out} must be of the same settings, but is of others. Give another file.")
        record["rows"] = before["rows"]
    found = {(row["name"], row.get("removed")) for row in record["rows"]}
    train = None
    if options.heal:
        text = (options.texts / "train.txt").read_text(encoding="utf-8")
        train = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    for removed in map(float, options.removed.split(",")):
        for name in options.rows.split(","):
            if (name, removed) in found:
                continue
            start = time.perf_counter()
            if name in ("pair", "pivot", "width"):
                small, size = ours(model, removed, name, windows)
            else:
                batches = [{"input_ids": window[None]} for window in windows] if name == "svd-llm" else None
                small, size = uniform(model, removed, batches)
            row = {"name": name, "about": ROWS[name], "removed": removed, "parameters": size}
            row["seconds"] = round(time.perf_counter() - start, 1)
            row["perplexity"] = measured(small)
            if train is not None and name != "svd":
                row |= healed(small, train)
            record["rows"].append(row)
            print(row, flush=True)
            del small
            options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
