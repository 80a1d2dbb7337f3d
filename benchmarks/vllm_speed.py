"""Tokens per second in vLLM, dense and compressed: `.venv-vllm/bin/python benchmarks/vllm_speed.py [--record]`.

A random decoder of the Llama shape is saved dense, and compressed in both layouts and levels. vLLM serves each folder
in a process of its own, as it does for users, with its default settings but for the length. Timed are the decoding of
one request and of several, and the reading of long prompts, each as often as `--repeats` says; shown is the median.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4},
    "135M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
}
CASES = {"decode, 1 request": (1, 16, 64), "decode, 8 requests": (8, 16, 64), "read prompts": (4, 512, 1)}
"""Requests, tokens of a prompt, and new tokens."""


def save_models(root: Path, shape: str, removed: list[float], dtype: str) -> list[str]:
    """Write the folders; returns their names, dense first."""
    import torch
    import transformers as hf

    import rankwise as rw
    from rankwise.hf import save_pretrained

    torch.manual_seed(0)
    sizes = SHAPES[shape]
    config = hf.LlamaConfig(**sizes, num_key_value_heads=sizes["num_attention_heads"], vocab_size=8192)
    model = hf.LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()
    model.save_pretrained(root / "dense")
    names = ["dense"]
    for share in removed:
        for layout in ("pair", "pivot"):
            plan = rw.find_plan(model, "all-linear")
            budget = rw.Budget(removed=share, of="prunable")
            small: Any = rw.compress(model, budget, plan=plan, layout=layout, rank_multiple=16)  # type: ignore[arg-type]
            names.append(f"{share:.0%} removed, {layout}")
            save_pretrained(small, root / names[-1])
    return names


def serve(folder: str, dtype: str, repeats: int, scale: int) -> None:
    """Print the tokens per second of every case as JSON; runs in a process of its own."""
    from vllm import LLM, SamplingParams

    llm = LLM(folder, skip_tokenizer_init=True, dtype=dtype, max_model_len=1024, enable_prefix_caching=False)
    found: dict[str, list[float]] = {}
    for case, (requests, length, new) in CASES.items():
        counted = length if new == 1 else new // scale
        prompts = [{"prompt_token_ids": [3 + (7 * i + j) % 8000 for j in range(length)]} for i in range(requests)]
        settings = SamplingParams(temperature=0, max_tokens=max(1, new // scale), ignore_eos=True, detokenize=False)
        times = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            llm.generate(prompts, settings, use_tqdm=False)
            times.append(time.perf_counter() - start)
        found[case] = [requests * counted / seconds for seconds in times[1:]]
    print(f"\nFOUND {json.dumps(found)}")


def measured(folder: Path, arguments: argparse.Namespace) -> dict[str, list[float]]:
    own = ["--serve", str(folder), "--dtype", arguments.dtype, "--repeats", str(arguments.repeats)]
    own += ["--quick"] * arguments.quick
    environment = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", **os.environ}
    done = subprocess.run(
        [sys.executable, __file__, *own], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    found: dict[str, list[float]] = json.loads(line.removeprefix("FOUND "))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="135M")
    parser.add_argument("--removed", type=float, nargs="+", default=[0.3, 0.5])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--quick", action="store_true", help="a dry run: tiny models, few tokens; its times mean nothing"
    )
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results.csv")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.dtype, arguments.repeats, 16 if arguments.quick else 1)
        return
    if arguments.quick:
        arguments.shape, arguments.removed, arguments.repeats = "tiny", [0.3], 1
    with tempfile.TemporaryDirectory() as root:
        names = save_models(Path(root), arguments.shape, arguments.removed, arguments.dtype)
        found = {name: measured(Path(root) / name, arguments) for name in names}
    show(found)
    if arguments.record:
        from harness import record

        for name, cases in found.items():
            for case, values in cases.items():
                label = f"{arguments.shape} {arguments.dtype}, {name}, {case}"
                record("vllm_speed", label, values, "tokens/s")


def show(found: dict[str, dict[str, list[float]]]) -> None:
    """Tokens per second, and the ratio to dense."""
    from statistics import median

    print(f"| | {' | '.join(CASES)} |\n|---{'|---' * len(CASES)}|")
    for name, cases in found.items():
        cells = [
            f"{median(values):.1f} ({median(values) / median(found['dense'][case]):.2f}x)"
            for case, values in cases.items()
        ]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
