"""What only a GPU can measure, as a queue of jobs that may be stopped at any moment.

    python benchmarks/gpu_queue.py OUT --minutes 9 --data FOLDER    # again and again, until nothing is left
    python benchmarks/gpu_queue.py OUT --take                       # records of finished jobs into results/
    python benchmarks/gpu_queue.py OUT --toy                        # a dry run of every job on a CPU

Jobs are in the order of what is worth most. Each has a limit, at which it gets Ctrl-C, and then it and all that it has
started is killed. A job that ended well is not run again; one that was stopped goes on with the rows that are missing;
one that failed, or was at its limit, is tried again after all others. Jobs that are not timed run at once, with
`torture.py fuzz` beside them on the CPU; a timed one runs alone.

Everything is written to `--work` (runs/gpu-queue) as it is measured, and packed into two files of OUT within a second:
`queue.zip` (records, and which jobs are done) and `logs.txt`; `--show` prints their table. Where WORK is gone, the same
command goes on from OUT. FOLDER has enwik8 or enwik8.zip, and arena, the folder of `arena_queue.py`; jobs that lack it
are left out. RANKWISE_COMMIT says the commit, where git does not know it or knows an older one.

After `--take`, print what shows the records: `page.py` (docs/results.md), `engines.py --page docs/deploy.md`,
`scaling.py` (tables of docs/scaling.md), `torture.py table` (docs/reliability.md).
Not taken: outcomes of tests and rows of the arena, of which queue.zip has records to look at first. The paper's tables
have a queue of their own (`tables.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import zipfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gpu_tests
import torch
from jobs import HERE, PACKED, ROOT, STATE, WELL, Job, Queue

from rankwise.surroundings import surroundings

TESTS = (
    "tests/test_cuda.py tests/test_compiled.py tests/kernels tests/lab/kernels tests/core/test_sharding.py "
    "tests/core/test_dropping.py tests/oneshot/test_blockwise_cuda.py tests/deploy/test_fuse.py "
    "tests/deploy/test_bench.py tests/hf/test_offload.py tests/hf/test_experts.py "
    "tests/lab/training/test_training_cuda.py tests/lab/models/test_adaptive_softmax.py "
    "tests/lab/tasks/test_example_objective_cuda.py tests/lab/experiments/test_healing_cuda.py"
)


def _script(name: str) -> str:
    return f"{sys.executable} {HERE / name}.py"


def _run(preset: str) -> str:
    return f"{sys.executable} -m rankwise run {preset} --out {{place}}/run"


SHARED = {"engines.json": ("parts", ("engine", "model")), "torture.json": ("rows", ("name",))}
"""Records that have rows of other machines as well, the list of them, and what a row is known by."""
CORES = os.cpu_count() or 2
OUTCOMES = "gpu-tests.jsonl"
ARENA = "arena-rows.jsonl"
# pytest-benchmark, where it is installed, warns beside xdist, and warnings are errors
PYTEST = f"{sys.executable} -m pytest -p no:benchmark -p gpu_tests --outcomes {{records}}/{OUTCOMES}"
VARIANTS = "30% removed;50% removed;30% removed, multiples of 256;30% removed, not fused;30% removed, pivot"
TINY = "--tiny --layers 1 --repeats 2"
TINY_RUN = "--base.steps 6 --training.steps 6 --method.anneal_steps 3 --training.eval_every 3 --base.eval_every 3"

JOBS = {
    "arena": Job(
        # it is stopped by this queue
        command=f"{_script('arena_queue')} {{data}}/arena {{records}} run --mps --minutes 60",
        toy=f"{_script('arena_queue')} {{place}}/models {{records}} toy --at-once 2",
        seconds=3600,
        record=ARENA,
        least=120,
        timed=False,
        needs="arena",
    ),
    "mpnet": Job(
        command=f"{_script('glue')} {{records}}/glue-mpnet.json --model {{data}}/mpnet --data {{data}}/glue "
        "--rows control --tasks sst2,qnli --seeds 0,1,2 --work {place}",
        toy=f"{_script('gpu_training')} {TINY} --max-rank 0 --record {{place}}/nothing.json",
        seconds=900,
        record="glue-mpnet.json",
        least=250,
        timed=False,
        needs="mpnet",
        goes_on=True,
    ),
    "tests": Job(
        command=f"{PYTEST} {'-n 8' if find_spec('xdist') else ''} {TESTS}",
        toy=f"{PYTEST} tests/core/test_dropping.py tests/test_cuda.py",
        seconds=270,
        record=OUTCOMES,
        timed=False,
    ),
    "memory": Job(
        command=f"{_script('fsdp_memory')} --record {{records}}/fsdp-memory.json",
        toy="+ --tiny",
        seconds=120,
        record="fsdp-memory.json",
        timed=False,
    ),
    "ten-minutes": Job(
        command=f"{_run('enwik8-sru-10min')} --corpus.data {{data}}",
        toy=_run(f"demo {TINY_RUN}"),
        seconds=900,
        record="enwik8-sru-10min.json",
        least=120,
        needs="enwik8*",
        made="run/record.json",
    ),
    "training": Job(
        command=f"{_script('gpu_training')} --compile --record {{records}}/gpu-training-compiled.json",
        toy=f"{_script('gpu_training')} {TINY} --max-rank 0 --record {{records}}/gpu-training-compiled.json",
        seconds=420,
        record="gpu-training-compiled.json",
    ),
    "engines": Job(
        command=f"{_script('engines')} {{records}}/engines.json --engines cuda,graph",
        toy=f"{_script('engines')} {{records}}/engines.json --engines torch --toy --repeats 2",
        seconds=200,
        record="engines.json",
    ),
    "offload": Job(
        command=f"{_script('gpu_compress')} --offload --cap 8 --record {{records}}/gpu-compress-offload.json",
        toy="+ --tiny --layers 2 --windows 2",
        seconds=500,
        record="gpu-compress-offload.json",
        least=240,
    ),
    "plain-training": Job(
        command=f"{_script('gpu_training')} --record {{records}}/gpu-training.json",
        toy=f"+ {TINY} --max-rank 0",
        seconds=240,
        record="gpu-training.json",
    ),
    "loop": Job(
        command=f"{_script('lm_speed')} loop --cases dense '20% open' '10% open' --seconds 10",
        toy="+ --tiny --models sru",
        seconds=330,
        record="results.csv",
    ),
    "inference": Job(command=f"{_script('gpu_inference')} --record", toy="+ --tiny", seconds=240, record="results.csv"),
    "compress": Job(
        command=f"{_script('gpu_compress')} --record {{records}}/gpu-compress.json",
        toy="+ --tiny --layers 2 --windows 2",
        seconds=400,
        record="gpu-compress.json",
        least=180,
    ),
    "decoder": Job(
        command=f"{_script('gpu_decoder')} --variants '{VARIANTS}' --record {{records}}/gpu-decoder.json",
        toy=f"+ {TINY}",
        seconds=420,
        record="gpu-decoder.json",
        least=150,
    ),
    "half-hour": Job(
        command=f"{_run('enwik8-sru-30min')} --corpus.data {{data}}",
        toy=_run(f"demo {TINY_RUN}"),
        seconds=2400,
        record="enwik8-sru-30min.json",
        least=120,
        needs="enwik8*",
        made="run/record.json",
    ),
}
"""By what is worth most. `rankwise run` writes no rows before its end, but goes on where it was stopped."""
FUZZ = Job(
    command=f"{_script('torture')} fuzz --add --seed {{attempt}} --number 900000 --workers {CORES // 2} "
    "--record {records}/torture.json",
    toy=f"{_script('torture')} fuzz --add --seed {{attempt}} --number 900000 --record {{records}}/torture.json",
    seconds=10**6,
    record="torture.json",
)


class Packed:
    """What OUT has of a queue."""

    def __init__(self, out: Path) -> None:
        with zipfile.ZipFile(out / PACKED) as packed:
            texts = {name: packed.read(name).decode("utf-8") for name in packed.namelist()}
        self.state = json.loads(texts.pop(STATE, '{"jobs": {}}'))
        self.records = {Path(name).name: text for name, text in texts.items()}

    def ended(self, name: str) -> str:
        return str(self.state["jobs"].get(name, {}).get("ended", "not yet"))

    def rows(self, record: str) -> int:
        """What a record has measured; of fuzzed cases, how many."""
        text = self.records.get(record, "")
        if not record.endswith(".json"):
            return max(0, len(text.splitlines()) - record.endswith(".csv"))
        content = json.loads(text or "{}")
        return sum(row.get("tried", 1) for row in content.get("rows", content.get("parts", ())))

    def summary(self) -> str:
        """A line for each job, and what was found wrong."""
        lines = [f"{'job':15} {'ended':20} {'s':>6} {'rows':>6}  its last words"]
        for name, job in {**JOBS, "beside": FUZZ}.items():
            about = self.state["jobs"].get(name, {})
            said = " ".join(about.get("said", ()))[:90]
            seconds = about.get("seconds", 0.0)
            lines.append(f"{name:15} {self.ended(name):20} {seconds:6.0f} {self.rows(job.record):>6}  {said}")
        outcomes = gpu_tests.read(self.records.get(OUTCOMES, ""))
        lines += [f"failed: {test}" for test, outcome in outcomes.items() if outcome == "failed"]
        rows = {row["job"]: row for row in map(json.loads, self.records.get(ARENA, "").splitlines())}
        lines += [f"failed: {name}: {row['failed'][:150]}" for name, row in rows.items() if "failed" in row]
        fuzzed = json.loads(self.records.get(FUZZ.record, '{"rows": []}'))
        return "\n".join([*lines, *(f"fuzz: {wrong[:150]}" for row in fuzzed["rows"] for wrong in row["bad"])])

    def take(self, root: Path) -> None:
        """Copy the records of jobs that have ended well to `results/`, and say which are left."""
        for name, job in {**JOBS, "beside": FUZZ}.items():
            made = self.records.get(job.record)
            if made is None or job.record.endswith(".jsonl"):
                continue
            if job is not FUZZ and self.ended(name) != WELL:
                print(f"left: {job.record}, because {name} ended {self.ended(name)}")
                continue
            to = root / ("benchmarks" if job.record == "results.csv" else "results") / job.record
            to.write_text(merged(job.record, to.read_text(), made) if to.exists() else made, encoding="utf-8")
            print(f"taken: {to.relative_to(root)}")


def merged(name: str, before: str, made: str) -> str:
    """The text of a record with what was measured; of files that others write to as well, what they have stays."""
    if name == "results.csv":
        known = set(before.splitlines())
        return before + "".join(f"{line}\n" for line in made.splitlines() if line not in known)
    if name not in SHARED:
        return made
    part, keys = SHARED[name]
    content, more = json.loads(before), json.loads(made)
    rows: dict[tuple[Any, ...], Any] = {}
    for row in (*content[part], *more[part]):
        known = rows.setdefault(tuple(row[key] for key in keys), row)
        # a queue may have had time for a few cases only
        if row.get("tried", 0) >= known.get("tried", 0):
            rows[tuple(row[key] for key in keys)] = row
    return json.dumps({**content, part: list(rows.values())}, indent=1) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=9.0, help="nothing runs longer (default: 9)")
    parser.add_argument("--only", default=",".join(JOBS), help=f"of {', '.join(JOBS)}")
    parser.add_argument("--data", type=Path, help="the folder with enwik8 and arena")
    parser.add_argument("--work", type=Path, help="where jobs write (default: runs/gpu-queue)")
    parser.add_argument("--show", action="store_true", help="print the table of OUT, and run nothing")
    parser.add_argument("--take", action="store_true", help="copy records to results/, and run nothing")
    parser.add_argument("--toy", action="store_true", help="a dry run on a CPU")
    options = parser.parse_args(arguments)
    names = options.only.split(",")
    if unknown := [name for name in names if name not in JOBS]:
        parser.error(f"--only must name jobs of {', '.join(JOBS)}, but has {unknown[0]!r}.")
    if options.show or options.take:
        if not (options.out / PACKED).exists():
            parser.error(f"the folder of a queue must have {PACKED}, but {options.out} has not.")
        found = Packed(options.out)
        if options.take and found.state["toy"]:
            parser.error(f"the records of {options.out} must not be of a dry run, but they are.")
        found.take(ROOT) if options.take else print(found.summary())
        return
    deadline = time.monotonic() + 60 * options.minutes
    # here, and not as a job that has ended and measured nothing
    if not options.toy and not torch.cuda.is_available():
        parser.error("there must be a GPU, but torch finds none. For a dry run: --toy.")
    if not options.toy and surroundings(torch.device("cpu"))["commit"] is None:
        parser.error("records must have a commit, but git does not know it. Say it by RANKWISE_COMMIT.")
    if options.data is not None and not options.data.is_dir():
        parser.error(f"--data must be a folder, but {options.data} is none.")
    work = options.work or ROOT / "runs" / ("gpu-queue-toy" if options.toy else "gpu-queue")
    if (options.out / PACKED).exists() and not (work / STATE).exists():
        with zipfile.ZipFile(options.out / PACKED) as packed:
            packed.extractall(work)
    queue = Queue(options.out, work, data=options.data, toy=options.toy)
    # a scheduler's end is like Ctrl-C; and a process that was started to ignore Ctrl-C would have jobs ignore it too
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    try:
        queue.run({name: JOBS[name] for name in names}, deadline, FUZZ)
    finally:
        queue.pack()
        print(f"\n{Packed(options.out).summary()}", flush=True)


if __name__ == "__main__":
    main()
