"""What only a GPU can measure, in the order in which it is missing: `python benchmarks/gpu_queue.py OUT --minutes 9`.

Each job is a command with a limit of its own. Its output goes to OUT/JOB.txt and its record to OUT; jobs that have
ended well are not run again, so the same command goes on with the rest. A job begins if its limit still fits into the
minutes. The records are copied to `results/` by hand, once they have been looked at. `--toy` is a dry run on a CPU,
`--only tests,memory` runs these.

The arena has a queue of its own (`arena_queue.py`), and so have the paper's tables (`tables.py`).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
GPU_TESTS = (
    "tests/test_cuda.py tests/test_compiled.py tests/kernels tests/lab/kernels tests/core/test_sharding.py "
    "tests/core/test_dropping.py tests/deploy/test_fuse.py tests/hf/test_offload.py tests/hf/test_experts.py "
    "tests/lab/training/test_training_cuda.py tests/lab/tasks/test_example_objective_cuda.py "
    "tests/lab/experiments/test_healing_cuda.py"
)


@dataclass(frozen=True)
class Job:
    """A command; `{out}` in it is the folder of the records."""

    command: str
    seconds: int
    """Its limit."""
    toy: str
    """What a dry run adds to it, or runs instead if it begins with a program."""


def _script(name: str) -> str:
    return f"{sys.executable} {HERE / name}.py"


JOBS = {
    "tests": Job(
        f"{sys.executable} -m pytest -q -n 8 {GPU_TESTS}",
        240,
        f"{sys.executable} -m pytest -q tests/test_cuda.py",
    ),
    "memory": Job(
        f"{sys.executable} -m torch.distributed.run --nproc_per_node 1 {HERE / 'fsdp_memory.py'}", 120, "--tiny"
    ),
    "engines": Job(
        f"{_script('engines')} {{out}}/engines.json --engines cuda,graph", 200, f"{_script('engines')} --help"
    ),
    "training": Job(
        f"{_script('gpu_training')} --compile --record {{out}}/gpu-training.json",
        420,
        f"{_script('gpu_training')} --tiny",
    ),
    "offload": Job(
        f"{_script('gpu_compress')} --offload --cap 8 --record {{out}}/gpu-compress-offload.json", 300, "--tiny"
    ),
    "decoder": Job(f"{_script('gpu_decoder')} --record {{out}}/gpu-decoder.json", 200, "--tiny"),
}


def run(name: str, job: Job, out: Path, *, toy: bool) -> bool:
    """Run a job; whether it ended well."""
    command = job.command if not toy else job.toy if job.toy.startswith(sys.executable) else f"{job.command} {job.toy}"
    start = time.monotonic()
    with (out / f"{name}.txt").open("w", encoding="utf-8") as log:
        try:
            done = subprocess.run(
                command.format(out=out).split(), stdout=log, stderr=subprocess.STDOUT, timeout=job.seconds
            )
            ended = "well" if done.returncode == 0 else f"with exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            ended = f"by its limit of {job.seconds} s"
    print(f"== {name}: {time.monotonic() - start:.0f} s, ended {ended}", flush=True)
    lines = (out / f"{name}.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    print("\n".join(line[:160] for line in lines[-12:]), flush=True)
    return ended == "well"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--only", default=",".join(JOBS))
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    left = []
    for name in options.only.split(","):
        job, done = JOBS[name], options.out / f"{name}.done"
        if done.exists():
            continue
        if time.monotonic() + job.seconds > deadline and not options.toy:
            left.append(name)
        elif run(name, job, options.out, toy=options.toy):
            done.touch()
        else:
            left.append(name)
    # rows of benchmarks/results.csv that jobs have added
    shutil.copy(HERE / "results.csv", options.out / "results.csv")
    print(f"left: {', '.join(left) or 'nothing'}")


if __name__ == "__main__":
    main()
