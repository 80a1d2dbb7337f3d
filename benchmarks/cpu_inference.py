"""Inference on a CPU, against the released code: `python benchmarks/cpu_inference.py [--record] [PART ...]`.

sru    the paper's 35M SRU, 256 characters, batch 1
txl    the 41M Transformer-XL, segment 512 + memory 512, batch 1

Dense, 80% and 90% of the prunable removed (uniform ranks in multiples of 16, random weights: time does not depend on
them), int8 on top, streams (`open_stream`: keys and values of the memory are kept), the released code with the same
matrices (package `sru` 2.6.0, where it is installed; the original Transformer-XL's order of operations), and
unstructured pruning to the same sizes with torch's sparse kernels. On one thread and on two; all in turns. Outputs are
compared first. Less than ten minutes on two quiet cores: when others use them, figures for two threads mean nothing.

Rows are printed, and with --record also kept in results.csv.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial

import torch
from harness import interleaved, record
from peer import OriginalTransformerXL, released_sru, sparse
from torch import nn

import rankwise as rw
from rankwise.deploy.quantize import int8
from rankwise.errors import RankwiseError
from rankwise.lab.models.sru import SRUConfig, SRULanguageModel
from rankwise.lab.models.stream import open_stream
from rankwise.lab.models.transformer_xl import TransformerXL, TransformerXLConfig

report = partial(record, "cpu inference", keep="--record" in sys.argv)
THREADS = (1, 2)
FIXED = ("embedding", "output", "head")
Call = Callable[[], object]


def models(make: Callable[[], nn.Module]) -> dict[str, nn.Module]:
    """Dense, and with 80% and 90% of the prunable removed."""
    found = {"dense": make()}
    for removed in (0.8, 0.9):
        model = make()
        plan = rw.find_plan(model, exclude=[name for name in FIXED if hasattr(model, name)])
        budget = rw.Budget(removed=removed, of="prunable")
        pruner = rw.Pruner(model, budget, "fac", plan=plan, init="random", rank_multiple=16)
        found[f"{removed:.0%}"] = pruner.compact().eval()
    return found


def sru() -> nn.Module:
    torch.manual_seed(0)
    return SRULanguageModel(SRUConfig(num_words=205, embedding_width=205, width=3056, num_layers=6, rank=512)).eval()


def transformer_xl() -> nn.Module:
    torch.manual_seed(0)
    return TransformerXL(TransformerXLConfig(num_words=205)).eval()


def once(model: nn.Module, tokens: torch.Tensor, *state: object) -> object:
    with torch.inference_mode():
        return model(tokens, *state)


def sru_calls() -> dict[str, Call]:
    tokens = torch.randint(0, 205, (1, 256))
    ours = models(sru)
    calls: dict[str, Call] = {name: partial(once, model, tokens) for name, model in ours.items()}
    calls |= {f"{name} int8": partial(once, int8(model), tokens) for name, model in ours.items()}
    try:
        for name, model in ours.items():
            calls[f"{name} released"] = partial(once, released_sru(model), tokens)
            check(calls[f"{name} released"], calls[name])
    except RankwiseError as error:
        print(error)
    return calls | {f"{r:.0%} AGP, sparse": partial(once, sparse(sru(), r, FIXED), tokens) for r in (0.8, 0.9)}


def txl_calls() -> dict[str, Call]:
    tokens = torch.randint(0, 205, (1, 512))
    ours = models(transformer_xl)
    calls: dict[str, Call] = {}
    for name, model in ours.items():
        with torch.inference_mode():
            memory = model(tokens)[1]
        calls[name] = partial(once, model, tokens, memory)
        calls[f"{name} int8"] = partial(once, int8(model), tokens, memory)
        original = OriginalTransformerXL(model)
        calls[f"{name} original"] = partial(once, original, tokens, tuple(x.transpose(0, 1) for x in memory))
        check(calls[f"{name} original"], calls[name])
        for how, streamed in (("stream", model), ("int8 stream", int8(model))):
            stream = open_stream(streamed)
            stream.feed(tokens)
            calls[f"{name} {how}"] = partial(stream.feed, tokens)
    for removed in (0.8, 0.9):
        calls[f"{removed:.0%} AGP, sparse"] = partial(once, sparse(transformer_xl(), removed, FIXED), tokens, memory)
    return calls


def check(theirs: Call, ours: Call) -> None:
    """Their logits are ours."""
    torch.testing.assert_close(theirs()[0], ours()[0], rtol=1e-3, atol=1e-4)  # type: ignore[index]


SRU_GOALS = {
    "80% / dense": ">= 3.5", "90% / dense": ">= 5", "dense / dense released": ">= 1",
    "80% / 80% released": ">= 1.8", "90% / 90% released": ">= 1.8",
    "80% int8 / 80%": ">= 1.5", "90% int8 / 90%": ">= 1.5", "80% / 80% AGP, sparse": "", "90% / 90% AGP, sparse": "",
}  # fmt: skip
TXL_GOALS = {
    "80% / dense": ">= 2.0", "90% / dense": ">= 2.4", "dense / dense original": ">= 1.5",
    "80% / 80% original": "", "90% / 90% original": "",
    "80% stream / dense stream": "", "90% stream / dense stream": "",
    "80% int8 / 80%": ">= 1.5", "90% int8 / 90%": ">= 1.5", "80% int8 stream / 80% stream": "",
    "80% / 80% AGP, sparse": "", "90% / 90% AGP, sparse": "",
}  # fmt: skip


def bench(name: str, make: Callable[[], dict[str, Call]], goals: dict[str, str], repeats: int) -> None:
    calls = make()
    for num_threads in THREADS:
        torch.set_num_threads(num_threads)
        slow = {case: call for case, call in calls.items() if "sparse" in case}
        fast = {case: call for case, call in calls.items() if case not in slow}
        times = interleaved(fast, repeats) | interleaved(slow, 3)
        where = f"{num_threads} thread{'s' * (num_threads > 1)}"
        for case, taken in times.items():
            report(f"{name} {where}: {case}", [1e3 * t for t in taken], "ms")
        for ratio, goal in goals.items():
            ours, theirs = ratio.split(" / ")
            if theirs in times:
                # one slow spell spoils one pair of neighbours, not the median of pairs
                pairs = zip(times[theirs], times[ours], strict=False)
                report(f"{name} {where}: speed of {ratio}", [other / own for other, own in pairs], "x", goal)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="sru")
    parts = {"sru": (sru_calls, SRU_GOALS, 15), "txl": (txl_calls, TXL_GOALS, 7)}
    for part in [word for word in sys.argv[1:] if not word.startswith("-")] or parts:
        bench(part, *parts[part])
