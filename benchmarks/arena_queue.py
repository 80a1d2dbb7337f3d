"""Many rows of the arena on one GPU: jobs, each in a process of its own, several at a time.

    python benchmarks/arena_queue.py FOLDER OUT run --minutes 9
    python benchmarks/arena_queue.py FOLDER OUT show
    python benchmarks/arena_queue.py FOLDER OUT toy               # with tiny models, on a CPU

FOLDER holds the folders of the models `smollm2` and `gemma`, with their tokenizers, `smollm2-tokens.npz` and
`gemma-tokens.npz` (`arena_texts.py`, `arena.py tokenize`), and `train.txt`. Jobs begin in the order of the plan
(`arena_plans.py`), which test text does not decide; when the time is up, what still runs is ended; the exit code is 1,
and the same command goes on with the rest. Each job that ends adds a line to OUT/arena-rows.jsonl, what it printed to
OUT/arena-logs.txt, and its row to OUT/arena-MODEL.json, records for `results/`. `gpu_queue.py` has this among its jobs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing as mp
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

# processes that are forked must find CUDA untouched
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import arena
import torch
from arena import Cell, Protocol
from arena_plans import BOS, TEXTS, Job, plan, ratios
from harness import commit

import rankwise as rw

ROWS = "arena-rows.jsonl"
MOST_GEMMA = 2
"""Processes with its large logits at a time, of which one may heal it, in 38 GB of a GPU."""


def perform(job: Job, folder: Path, device: str, *, toy: bool) -> dict[str, Any]:
    """What a process does."""
    place, tokens = folder / job.model, folder / f"{job.model}-tokens.npz"
    sizes: dict[str, Any] = {"windows": 2, "length": 16} if toy else {}
    protocol = Protocol(texts=TEXTS, bos=BOS[job.model], device=device, **sizes)
    if job.kind == "generate":
        arena.generate(
            place, tokens, 32 if toy else 2048 if job.model == "smollm2" else 512, 16 if toy else 256, device
        )
        return {}
    if job.kind == "command":
        return command(job, place, folder / "train.txt", device, toy=toy)
    texts = arena.read_tokens(tokens)
    model = arena.load(place, device)
    if job.kind == "dense":
        found = {"parameters": rw.count(model), **arena.measured(model, texts, protocol)}
        return {**found, "about": arena.new_record(place, protocol, {}, found)}
    assert job.cell is not None
    few = {"calibration_windows": 16, "calibration_length": 16}
    few |= {name: min(getattr(job.cell, name), 4) for name in ("refine", "polish", "heal")}
    cell = replace(job.cell, **few) if toy else job.cell
    made = arena.row(cell, model, place, texts, protocol, folder / "train.txt")
    # a plan may go on at another commit
    made["commit"] = commit()
    return {**made, **job.cell.settings} if toy else made


def command(job: Job, place: Path, text: Path, device: str, *, toy: bool) -> dict[str, Any]:
    """Seconds of `rankwise compress` from beginning to end, and what it says of the model."""
    with tempfile.TemporaryDirectory() as out:
        words = ["compress", str(place), "--removed", "0.2", "--calibration", str(text), "--target", "size"]
        words += ["--out", f"{out}/small", "--json", "--device", device, *job.words]
        words += ["--window", "16", "--windows", "8"] if toy else []
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "rankwise", *words], capture_output=True, text=True)
        seconds = time.perf_counter() - start
        if done.returncode:
            raise RuntimeError(done.stderr[-500:])
        said = json.loads(done.stdout)
    return {"name": "rankwise compress", "seconds": round(seconds, 1), "quality": said["quality"], "of": said["ranks"]}


def child(job: Job, folder: Path, device: str, toy: bool, place: str) -> None:
    # a group with the processes that it starts, so that all are ended at once; it also ends with the queue
    os.setpgrp()
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    with open(f"{place}/log.txt", "w", encoding="utf-8") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        torch.set_num_threads(1 if device == "cpu" else 3)
        try:
            found = perform(job, folder, device, toy=toy)
        # a job that fails says so in its row, and the others go on
        except BaseException as error:
            traceback.print_exc()
            found = {"failed": f"{type(error).__name__}: {error}"[:300]}
        Path(f"{place}/result.json").write_text(json.dumps(found), encoding="utf-8")


def _end_with(queue: int) -> None:
    while os.getppid() == queue:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


def _touch(device: str) -> None:
    torch.zeros(1, device=device)


def mps(*words: str, quits: bool = False) -> bool:
    """Start or end the service by which several processes compute on one card at the same time."""
    name = "nvidia-cuda-mps-control"
    if shutil.which(name) is None:
        return False
    try:
        given = {"input": "quit\n", "text": True} if quits else {}
        return subprocess.run([name, *words], timeout=30, stdout=subprocess.DEVNULL, **given).returncode == 0
    except subprocess.TimeoutExpired:
        return False


class Queue:
    """Runs jobs, and writes down what they give."""

    def __init__(self, folder: Path, out: Path, options: argparse.Namespace) -> None:
        self.folder, self.out, self.options = folder, out, options
        out.mkdir(parents=True, exist_ok=True)
        self.rows = read_rows(out)
        self.running: dict[Any, tuple[Job, float, Path]] = {}
        self.deadline = time.monotonic() + 60 * options.minutes
        self.context: Any = mp.get_context("fork")
        if options.mps and not (mps("-d") and self._works()):
            print("no MPS here: processes take turns on the card", flush=True)
            mps(quits=True)
        if not self._works():
            print("CUDA does not survive a fork here: processes import everything anew", flush=True)
            self.context = mp.get_context("spawn")

    def _works(self) -> bool:
        """Whether a process can use the device."""
        probe = self.context.Process(target=_touch, args=(self.options.device,))
        probe.start()
        probe.join(60)
        if probe.is_alive():
            probe.terminate()
            probe.join()
        return bool(probe.exitcode == 0)

    def run(self, jobs: Sequence[Job]) -> bool:
        """Run what is missing; whether nothing is left for another time."""
        done = {row["job"] for row in self.rows if "failed" not in row}
        failed = {row["job"] for row in self.rows} - done
        waiting = [job for job in dict.fromkeys(jobs) if job.key not in done or self._lacks_text(job)]
        waiting.sort(key=lambda job: job.key in failed)
        print(f"{len(jobs)} jobs, {len(jobs) - len(waiting)} done before", flush=True)
        try:
            self._run(waiting)
        finally:
            cut = len(self.running)
            for process, (job, _, place) in self.running.items():
                print(f"ended: {job.key}", flush=True)
                os.killpg(process.pid, signal.SIGKILL)
                process.join()
                self._keep_log(job, place)
            self.running.clear()
        if waiting:
            print(f"{len(waiting)} jobs were not begun, the first: {waiting[0].key}", flush=True)
        return not (waiting or cut)

    def _lacks_text(self, job: Job) -> bool:
        """Whether what a job generated is not here any more."""
        return job.kind == "generate" and not self._generated(job).exists()

    def _generated(self, job: Job) -> Path:
        return self.folder / f"{job.model}-tokens.generated.npz"

    def _run(self, waiting: list[Job]) -> None:
        while (waiting or self.running) and time.monotonic() < self.deadline:
            while (job := self._next(waiting)) is not None:
                waiting.remove(job)
                self._start(job)
            self._collect()
            if waiting and not self.running and self._next(waiting) is None:
                print(f"{len(waiting)} jobs wait for text that was not generated", flush=True)
                break
            time.sleep(0.05)

    def _next(self, waiting: Sequence[Job]) -> Job | None:
        busy = [job for job, _, _ in self.running.values()]
        if len(busy) >= self.options.at_once or any(job.alone for job in busy):
            return None
        for job in waiting:
            if job.alone:
                return None if busy else job
            made = self._generated(job).exists()
            gemma = [each for each in busy if each.model == "gemma"]
            full = job.model == "gemma" and (
                len(gemma) >= MOST_GEMMA or (job.heals and any(each.heals for each in gemma))
            )
            if not full and (made or not job.needs_generated):
                return job
        return None

    def _start(self, job: Job) -> None:
        place = tempfile.mkdtemp()
        given = (job, self.folder, self.options.device, self.options.what == "toy", place)
        process = self.context.Process(target=child, args=given)
        process.start()
        with contextlib.suppress(PermissionError, ProcessLookupError):
            # by whoever is first, so that the group is there in any case
            os.setpgid(process.pid, process.pid)
        self.running[process] = (job, time.monotonic(), Path(place))

    def _collect(self) -> None:
        for process in [process for process in self.running if not process.is_alive()]:
            job, start, place = self.running.pop(process)
            # what it has started and left
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            result = place / "result.json"
            found = json.loads(result.read_text()) if result.exists() else {"failed": f"exit {process.exitcode}"}
            wall = round(time.monotonic() - start, 1)
            row = {"job": job.key, "model": job.model, "kind": job.kind, "wall": wall, "alone": job.alone, **found}
            row["beside"] = len(self.running)
            self.rows.append(row)
            with (self.out / ROWS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            write_records(self.out)
            self._keep_log(job, place)
            print(f"{wall:6.1f} s  {job.key}  {found.get('failed', '')}", flush=True)

    def _keep_log(self, job: Job, place: Path) -> None:
        log = place / "log.txt"
        with (self.out / "arena-logs.txt").open("a", encoding="utf-8") as file:
            file.write(f"==== {job.key}\n{log.read_text(errors='replace')[-20_000:] if log.exists() else ''}\n")
        shutil.rmtree(place, ignore_errors=True)


def read_rows(out: Path) -> list[dict[str, Any]]:
    path = out / ROWS
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def write_records(out: Path) -> None:
    """Records of the form that `results/` has, one for each model."""
    rows = read_rows(out)
    plain = ("job", "model", "kind", "about")
    for model in BOS:
        about = next((row["about"] for row in rows if row["model"] == model and row["kind"] == "dense"), None)
        if about is not None:
            mine = [row for row in rows if row["model"] == model and row["kind"] == "row" and "failed" not in row]
            about["rows"] = [{name: value for name, value in row.items() if name not in plain} for row in mine]
            default = asdict(Cell(name="", removed=0.0))
            about["settings"] |= {name: default[name] for name in default if name not in ("name", "removed", "seed")}
            (out / f"arena-{model}.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def show(out: Path) -> None:
    """A short table: perplexities as shares of dense, in the order of texts; test text in perplexity too."""
    rows = read_rows(out)
    print(f"{'':9}{'shares of dense on ' + ', '.join(TEXTS):52}{'test':>7}{'other':>7} {'s':>5}")
    for row in sorted(rows, key=lambda row: (row["model"], row.get("removed", 0.0))):
        about = row["job"].replace(f"{row['model']} row name=", "").replace("calibration_", "")
        if "failed" in row:
            print(f"{row['model']:8} failed: {about}: {row['failed'][:120]}")
            continue
        for stage in ("", "polished", "healed", "healed, generated"):
            of = {**row, **row.get(stage, {})} if stage else row
            if (stage and stage not in row) or "test" not in of:
                continue
            shares = " ".join(f"{value:7.3f}" for value in ratios(of, rows).values())
            figures = f"{of['test']:8.2f}{of['other']:8.2f} {of.get('seconds', 0):5.0f}"
            print(f"{row['model']:8} {shares} {figures} {stage or ''} {about}")
        if row["kind"] == "command":
            print(f"{row['model']:8} {row['seconds']} s: rankwise compress {about}: {row['quality']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("what", choices=["run", "show", "toy"])
    parser.add_argument("--at-once", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--mps", action="store_true", help="let processes share the card by NVIDIA's MPS, where it is")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="jobs whose names have one of these in them")
    parser.add_argument("--list", action="store_true", help="print the jobs and end")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "toy":
        import arena_toys

        options.device = "cpu"
        arena_toys.make(options.folder, TEXTS)
    jobs = [job for job in plan() if any(part in job.key for part in options.only.strip(",").split(","))]
    if options.list:
        return print("\n".join(job.key for job in jobs))
    done = options.what == "show" or Queue(options.folder, options.out, options).run(jobs)
    if options.mps:
        mps(quits=True)
    write_records(options.out)
    show(options.out)
    sys.exit(0 if done else 1)


if __name__ == "__main__":
    main()
