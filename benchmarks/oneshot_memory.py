"""Peak memory of `rankwise compress`: `python benchmarks/oneshot_memory.py MODEL TEXT [--windows N]`.

The largest resident memory of a process that compresses, with and without that of one that only imports the same
packages, in units of the model's weights as they are loaded. The number of windows changes the time and not the memory.
The two models are timed as where no memory is left for both: otherwise the dense one is loaded once more at the end.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import harness
from safetensors import safe_open

IMPORTS = (
    "import torch, transformers, rankwise.hf.loading; transformers.AutoModelForCausalLM; torch.eye(99) @ torch.eye(99)"
)

COMPRESS = (
    "import sys; import rankwise.deploy.compressed as made; from rankwise.cli.app import run;"
    "made.free_memory = lambda device: 0; sys.exit(run(sys.argv[1:]))"
)


def peak(*words: str) -> int:
    """Bytes at the peak of a process that runs these words of Python's command line."""
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, sys.executable, *words], capture_output=True, text=True, check=True
    )
    # kilobytes, but for macOS
    return int(done.stdout) * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("text")
    parser.add_argument("--windows", default="4")
    parser.add_argument("--removed", default="0.2")
    options = parser.parse_args()
    size = 0
    for file in options.model.glob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            size += sum(weights.get_tensor(name).nbytes for name in weights.keys())  # noqa: SIM118
    with tempfile.TemporaryDirectory() as folder:
        command = ["compress", str(options.model), "--removed", options.removed, "--calibration", options.text]
        words = ["-c", COMPRESS, *command, "--windows", options.windows, "--out", f"{folder}/small"]
        whole = peak(*words)
    alone = peak("-c", IMPORTS)
    for case, value in (("with the interpreter and its packages", whole), ("without them", whole - alone)):
        harness.record("oneshot-memory", f"{options.model.name}, {case}", [value / size], "x", "<= 1.3")
    print(f"weights {size / 1e6:.0f} MB, packages {alone / 1e6:.0f} MB, peak {whole / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
