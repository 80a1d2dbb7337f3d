"""A decoder compressed without training on a GPU: `python benchmarks/gpu_decoder.py [--layers 4] [--record FILE]`.

A decoder of Llama's shape in bfloat16 (width 4096, inner 11008, 32 heads, 32,000 words) with random weights whose
singular values fall as those of trained ones do: of weights without structure, some matrices would be kept whole and
the rest dropped. It is compressed by `rankwise.compress` with its defaults for a GPU, and in other ways. All models,
the dense one too, have the layers that read the same input fused (`rankwise.deploy.fuse_layers`), unless their name
says otherwise, are compiled by `torch.compile`, and are replayed as CUDA graphs in turns: decoding (one token, batch 1
and 32) and prefill (2048 tokens). `--tiny` is a dry run of everything on any machine, without compiler and graphs: its
times mean nothing.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from harness import Record, interleaved, spread
from models import draw_falling
from torch import Tensor, nn

import rankwise as rw
from rankwise.core.targets import TARGETS
from rankwise.deploy import fuse_layers
from rankwise.deploy.bench import engine
from rankwise.oneshot import default_plan

SHAPE = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "vocab_size": 32_000}
TINY = {"hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 4, "vocab_size": 500}
LOW = replace(TARGETS["cuda"], faster_below=1.0)
"""A GPU for which no matrix stays dense because low rank would be slower."""
VARIANTS: dict[str, tuple[float, dict[str, Any], bool]] = {
    "30% removed": (0.3, {}, True),
    "50% removed": (0.5, {}, True),
    "30% removed, not fused": (0.3, {}, False),
    "50% removed, not fused": (0.5, {}, False),
    "30% removed, all matrices of low rank": (0.3, {"ranks": "even", "target": LOW}, True),
    "50% removed, all matrices of low rank": (0.5, {"ranks": "even", "target": LOW}, True),
    "30% removed, pivot": (0.3, {"layout": "pivot"}, True),
    "50% removed, pivot": (0.5, {"layout": "pivot"}, True),
    "30% removed, odd ranks": (0.3, {"rank_multiple": 1}, True),
    "30% removed, multiples of 16": (0.3, {"rank_multiple": 16}, True),
    "30% removed, multiples of 128": (0.3, {"rank_multiple": 128}, True),
    "50% removed, multiples of 128": (0.5, {"rank_multiple": 128}, True),
    "30% removed, multiples of 256": (0.3, {"rank_multiple": 256}, True),
    "50% removed, multiples of 256": (0.5, {"rank_multiple": 256}, True),
}
"""The share removed, settings of `rankwise.compress`, and whether layers are fused."""
CASES = {"decode, batch 1": (1, 1), "decode, batch 32": (32, 1), "prefill, 2048 tokens": (1, 2048)}
TINY_CASES = {"decode, batch 1": (1, 1), "decode, batch 32": (32, 1), "prefill, 64 tokens": (1, 64)}


def causal(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **_: Any) -> tuple[Tensor, None]:
    """Attention without a mask, as engines for serving compute it: no text is padded. Under a compiler, transformers
    would make a mask of all pairs of tokens."""
    y = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
    return y.transpose(1, 2).contiguous(), None


transformers.AttentionInterface.register("causal", causal)
transformers.AttentionMaskInterface.register("causal", lambda *_, **__: None)


class Last(nn.Module):
    """The logits of the last token: what a step of serving computes, without a cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens, use_cache=False, logits_to_keep=1).logits
        return logits


def build(shape: dict[str, int], layers: int, device: str) -> nn.Module:
    """A decoder without a tied output layer."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **shape, num_hidden_layers=layers, max_position_embeddings=4096, tie_word_embeddings=False
    )
    config._attn_implementation = "causal"
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    draw_falling(model)
    return model.eval()


def ranks(model: nn.Module, names: list[str]) -> list[int | str]:
    """The rank of every planned matrix, or that it is dense."""
    found: list[int | str] = []
    for name in names:
        module = model.get_submodule(name)
        found.append(module[-1].in_features if isinstance(module, nn.Sequential) else "dense")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--variants", default=";".join(list(VARIANTS)[:8]), help="separated by semicolons")
    parser.add_argument("--profile", action="store_true", help="print where the time of every case goes")
    parser.add_argument("--tiny", action="store_true", help="a dry run on any machine")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write what was measured, as JSON")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.tiny:
        parser.error("there must be a GPU, but torch finds none. For a dry run: --tiny.")

    variants, cases = options.variants.split(";"), TINY_CASES if options.tiny else CASES
    record = Record(options.record, "gpu-decoder", vars(options))
    missing = {case: size for case, size in cases.items() if any(case not in (record.row(n) or ()) for n in variants)}
    if missing:
        measure(compressed(variants, options, device, record), missing, options, device, record)
    else:
        print(f"measured before, at the same commit: {options.record}")
    print(f"\n{table(record.rows, list(cases))}")


def compressed(variants: list[str], options: argparse.Namespace, device: str, record: Record) -> dict[str, nn.Module]:
    """The dense decoder and its variants, of which the record has the sizes."""
    dense = build(TINY if options.tiny else SHAPE, options.layers, device)
    plan = default_plan(dense)
    names = [site.name for site in plan.sites]
    models = {"dense": dense}
    record.add({"name": "dense", "parameters": rw.count(dense), **(record.row("dense") or {})})
    for name in variants:
        start = time.perf_counter()
        removed, settings, is_fused = VARIANTS[name]
        # a dry run shows what a GPU gets
        small = rw.compress(dense, rw.Budget(removed=removed), plan=plan, **{"target": "cuda", **settings}).eval()
        seconds, number, found = round(time.perf_counter() - start, 1), rw.count(small), ranks(small, names)
        most = Counter(map(str, found)).most_common(6)
        print(f"{name}: {number:,} parameters in {seconds} s, {most}", flush=True)
        about = {"parameters": number, "seconds": seconds, "ranks": dict(zip(names, found, strict=True))}
        record.add({"name": name, **about, **(record.row(name) or {})})
        models[name] = fuse_layers(small) if is_fused else small
    fuse_layers(dense)
    return models


def measure(
    models: dict[str, nn.Module],
    cases: dict[str, tuple[int, int]],
    options: argparse.Namespace,
    device: str,
    record: Record,
) -> None:
    """Time all models in turns, one case after the other."""
    for case, (batch, length) in cases.items():
        tokens = torch.randint(0, models["dense"].config.vocab_size, (batch, length), device=device)
        calls = prepare(models, tokens, "torch" if options.tiny else "graph", device)
        if options.profile:
            for name, call in calls.items():
                print(f"\n{name}, {case}:\n{profile(call)}", flush=True)
        times = interleaved(calls, options.repeats)
        for name, taken in times.items():
            timed = {
                "milliseconds": spread([1e3 * t for t in taken]),
                # above 1: faster than dense
                "speed": spread([a / b for a, b in zip(times["dense"], taken, strict=True)]),
            }
            record.add({**(record.row(name) or {}), case: timed})
        print(f"\n{table(record.rows, [case])}", flush=True)


def prepare(models: dict[str, nn.Module], tokens: Tensor, how: str, device: str) -> dict[str, Callable[[], object]]:
    def compiled(model: nn.Module) -> Any:
        torch._dynamo.reset()
        return torch.compile(model, dynamic=False) if how == "graph" else model

    calls: dict[str, Callable[[], object]] = {}
    for name, model in models.items():
        start = time.perf_counter()
        calls[name] = engine(how, device).prepare(compiled(Last(model)), (tokens,))
        print(f"{name}, {tuple(tokens.shape)}: ready in {time.perf_counter() - start:.0f} s", flush=True)
    return calls


def profile(call: Callable[[], object], repeats: int = 5, kernels: int = 8) -> str:
    """The kernels that take most of the time of a call: microseconds and number of launches in one call."""
    call()
    with torch.profiler.profile() as found:
        for _ in range(repeats):
            call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    spent = {
        event.key: (event.self_device_time_total / repeats, event.count / repeats) for event in found.key_averages()
    }
    most = sorted(spent.items(), key=lambda item: -item[1][0])[:kernels]
    lines = [f"{us:9.1f} us in {launches:5.1f} launches  {name[:90]}" for name, (us, launches) in most]
    return "\n".join([f"{sum(us for us, _ in spent.values()):9.1f} us in all", *lines])


def table(rows: list[dict[str, Any]], cases: list[str]) -> str:
    """Milliseconds, and in brackets the speed against dense, median and spread (20th to 80th percentile)."""
    lines = ["| | parameters | " + " | ".join(cases) + " |", "|---|---|" + "---|" * len(cases)]
    for row in rows:
        cells = []
        for case in cases:
            ms, speed = row[case]["milliseconds"], row[case]["speed"]
            of_dense = (
                "" if row["name"] == "dense" else f" ({speed['median']:.2f}x, {speed['p20']:.2f} to {speed['p80']:.2f})"
            )
            cells.append(f"{ms['median']:.3f} ms{of_dense}")
        lines.append(f"| {row['name']} | {row['parameters']:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
