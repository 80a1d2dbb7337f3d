"""Tokens per second in vLLM, dense and compressed: `.venv-vllm/bin/python benchmarks/vllm_speed.py --record FILE`.

A random decoder of the Llama shape is saved dense, and compressed in both layouts and levels. vLLM serves each folder
in a process of its own, as it does for users, with its default settings but for the length. Timed are the decoding of
one request and of several, and the reading of long prompts. The folders take turns, `--rounds` times, and each time a
case is timed `--repeats` times; kept are the median and its ratio to the dense model's, in all and of each round.
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
from statistics import median
from typing import Any

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4},
    "135M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
}
CASES = {"decode, 1 request": (1, 16, 64), "decode, 8 requests": (8, 16, 64), "read prompts": (4, 512, 1)}
"""Requests, tokens of a prompt, and new tokens."""


def save_models(root: Path, shape: str, removed: list[float], dtype: str) -> dict[str, int]:
    """Write the folders; returns their names and sizes, dense first."""
    import torch
    import transformers as hf

    import rankwise as rw
    from rankwise.hf import save_pretrained

    torch.manual_seed(0)
    sizes = SHAPES[shape]
    config = hf.LlamaConfig(**sizes, num_key_value_heads=sizes["num_attention_heads"], vocab_size=8192)
    model = hf.LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()
    model.save_pretrained(root / "dense")
    found = {"dense": rw.count(model)}
    for share in removed:
        for layout in ("pair", "pivot"):
            plan = rw.find_plan(model, "all-linear")
            budget = rw.Budget(removed=share, of="prunable")
            small: Any = rw.compress(model, budget, plan=plan, layout=layout, rank_multiple=16)  # type: ignore[arg-type]
            name = f"{share:.0%} removed, {layout}"
            found[name] = rw.count(small)
            save_pretrained(small, root / name)
    return found


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
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--quick", action="store_true", help="a dry run: tiny models, few tokens; its times mean nothing"
    )
    parser.add_argument("--record", type=Path, metavar="FILE", help="a JSON file for the rows")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.dtype, arguments.repeats, 16 if arguments.quick else 1)
        return
    if arguments.quick:
        arguments.shape, arguments.removed, arguments.rounds, arguments.repeats = "tiny", [0.3], 1, 1
    from harness import Record

    settings = {name: getattr(arguments, name) for name in ("shape", "removed", "dtype", "rounds", "repeats", "quick")}
    record = Record(arguments.record, "vllm-speed", settings)
    with tempfile.TemporaryDirectory() as root:
        sizes = save_models(Path(root), arguments.shape, arguments.removed, arguments.dtype)
        rounds = [{name: measured(Path(root) / name, arguments) for name in sizes} for _ in range(arguments.rounds)]
    for name, parameters in sizes.items():
        cases = {case: compared([(found[name][case], found["dense"][case]) for found in rounds]) for case in CASES}
        record.add({"name": name, "parameters": parameters, **cases})
    show(record.rows)


def compared(rounds: list[tuple[list[float], list[float]]]) -> dict[str, Any]:
    """Tokens per second over all rounds, and the speed relative to dense, in all and in each round."""
    own, dense = ([value for both in rounds for value in both[i]] for i in range(2))
    speeds = [median(one) / median(other) for one, other in rounds]
    return {"tokens/s": median(own), "speed": median(own) / median(dense), "of rounds": speeds}


def show(rows: list[dict[str, Any]]) -> None:
    """Tokens per second, and the speed relative to dense."""
    print(f"| | {' | '.join(CASES)} |\n|---{'|---' * len(CASES)}|")
    for row in rows:
        cells = [f"{row[case]['tokens/s']:.1f} ({row[case]['speed']:.2f}x)" for case in CASES]
        print(f"| {row['name']} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
