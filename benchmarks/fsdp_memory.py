"""Memory of a sharded training run: `torchrun --nproc_per_node N benchmarks/fsdp_memory.py [--record FILE] [--tiny]`.

A decoder of 1.07B parameters, four layers of LLaMA's with 7B, is built, gated and sharded over the GPUs of this machine
(FSDP2, gathered in bfloat16, gradients reduced in float32), and takes three steps of AdamW with recomputed activations.
Printed and recorded is what a GPU holds after each part of a step, beside what the formulas of docs/scaling.md say;
`python benchmarks/scaling.py` prints both from `results/fsdp-memory.json`. For one GPU, `python` is enough instead of
`torchrun`. `--tiny` is a dry run on gloo, in which nothing is measured.
"""

from __future__ import annotations

import argparse
import gc
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from harness import Record
from scaling import CASES_1B, DECODER_1B, TOKENS_1B, Decoder, parts
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import rankwise as rw

TINY = Decoder(width=32, inner=86, layers=2, words=64)


def build(shape: Decoder, device: str) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=4 if shape is TINY else 32,
        vocab_size=shape.words,
        tie_word_embeddings=False,
        use_cache=False,
    )
    # drawn on the GPU, which takes a second and not a minute
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def shard(model: Any, device: str) -> None:
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def held(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def measure(case: str, shape: Decoder, tokens: tuple[int, int], device: str) -> dict[str, int]:
    """Bytes that one GPU holds, by what for; not those that it held before, such as cuBLAS's workspaces."""
    # models and optimizers are in cycles
    gc.collect()
    start = held(device)
    model = build(shape, device)
    pruner = None
    if case != "dense":
        max_rank = shape.width // 2 if "half" in case else None
        plan = rw.find_plan(model, "all-linear")
        pruner = rw.Pruner(model, rw.Budget(removed=0.5), plan=plan, max_rank=max_rank, anneal_steps=100, target="size")
    shard(model, device)
    found = {"weights, float32": held(device) - start}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randint(0, shape.words, tokens, device=device)
    for step in range(3):
        if device == "cuda" and step == 2:
            torch.cuda.reset_peak_memory_stats()
        before = held(device)
        model(input_ids=batch, labels=batch).loss.backward()
        if step == 0:
            found["gradients, float32"] = held(device) - before
        before = held(device)
        optimizer.step()
        if step == 0:
            found["Adam's moments"] = held(device) - before
        if pruner is not None:
            pruner.step()
        optimizer.zero_grad()
    found["peak of a step"] = torch.cuda.max_memory_allocated() - start if device == "cuda" else 0
    if pruner is not None:
        small = pruner.compact(rw.Budget(params=pruner.controller.target_size()))
        place = next(small.parameters()).device
        print(f"rank {dist.get_rank()}: compact model of {rw.count(small):,} parameters, on {place}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write what was measured, as JSON")
    options = parser.parse_args()
    device = "cpu" if options.tiny else "cuda"
    backend = "gloo" if options.tiny else "nccl"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    gpus = dist.get_world_size()
    shape, tokens = (TINY, (2, 8)) if options.tiny else (DECODER_1B, TOKENS_1B)
    record = Record(options.record if dist.get_rank() == 0 else None, "fsdp-memory", {**vars(options), "gpus": gpus})
    for case in CASES_1B:
        found = measure(case, shape, tokens, device)
        torch.cuda.empty_cache()
        record.add({"name": case, "bytes": found})
        if dist.get_rank() == 0:
            derived = parts(shape, case, tokens[0] * tokens[1])
            for name, value in found.items():
                share = f", derived {derived[name] / gpus / 1e9:.2f}" if name in derived else ""
                print(f"{case}: {name}: {value / 1e9:.2f} GB{share}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
