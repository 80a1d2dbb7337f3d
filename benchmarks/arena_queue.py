"""Many rows of the arena on one GPU: a plan of jobs, each in a process of its own, several at a time.

    python benchmarks/arena_queue.py FOLDER OUT 1 --minutes 9     # which texts, how much smoothing, how much refinement
    python benchmarks/arena_queue.py FOLDER OUT 2 --minutes 9     # levels, peers, samples, healing, by what 1 has shown
    python benchmarks/arena_queue.py FOLDER OUT show
    python benchmarks/arena_queue.py FOLDER OUT toy               # both plans with tiny models, on a CPU

FOLDER holds the folders of the models `smollm2` and `gemma`, with their tokenizers, `smollm2-tokens.npz` and
`gemma-tokens.npz` (`arena_texts.py`, `arena.py tokenize`), and `train.txt`. Jobs begin in the order of the plan; when
the time is up, what still runs is ended, and the same command goes on with the rest. Each job that ends adds a line to
OUT/rows.jsonl; OUT/logs has what it printed. OUT/arena-MODEL.json are records for `results/`.

The second plan takes the texts and the smoothing that lose least on `valid`, `docstrings` and `news` (half the weight
on the first, half on the other two), and the refinement that is best on `valid`; never by test text. Mixtures with code
are measured and not chosen, for the other test text is about code. `--calibrate`, `--smoothing` and `--windows` choose
by hand.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing as mp
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

# processes that are forked must find CUDA untouched
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import arena
import torch
from arena import Cell, Protocol

import rankwise as rw

TEXTS = ("valid", "docstrings", "news", "test", "other")
BOS = {"smollm2": None, "gemma": 2}
LEVELS = {"smollm2": (0.2, 0.3, 0.4), "gemma": (0.1, 0.2, 0.3)}
BROAD = "train+prose+sentences"
MOST_GEMMA = 3
"""Processes with its large logits at a time."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One process."""

    model: str
    kind: str = "row"
    """row, dense, generate or command."""
    cell: Cell | None = None
    words: tuple[str, ...] = ()
    """Of a command of rankwise, which is timed."""
    alone: bool = False
    """Whether nothing else runs beside it, so that its seconds mean something."""

    @property
    def key(self) -> str:
        parts = () if self.cell is None else [f"{name}={value}" for name, value in self.cell.settings.items()]
        return " ".join([self.model, self.kind, *parts, *self.words, *(["alone"] if self.alone else [])])

    @property
    def needs_generated(self) -> bool:
        return self.cell is not None and "generated" in self.cell.calibrate


def ours(model: str, removed: float, *, alone: bool = False, **settings: Any) -> Job:
    given = {"name": "ours", "removed": removed, **settings}
    return Job(model=model, cell=Cell(**given), alone=alone)


def first_plan() -> list[Job]:
    """SmolLM2 and Gemma at 20%: refinement, which takes longest, texts and smoothing."""
    jobs = [Job(model="smollm2", kind=kind) for kind in ("generate", "dense")]
    tried = (
        {"refine": 500, "calibration_windows": 1024, "refine_lr": 2e-4},
        {"refine": 500, "calibration_windows": 1024},
        {"refine": 250, "calibration_windows": 512},
    )
    jobs += [ours("smollm2", 0.2, calibrate=BROAD, **how) for how in tried]
    jobs += [Job(model="gemma", kind=kind) for kind in ("generate", "dense")]
    jobs += [ours("smollm2", 0.2, calibrate=mix) for mix in (BROAD, "train", "train+prose", f"{BROAD}+generated")]
    jobs += [ours("gemma", 0.2, calibrate=mix) for mix in (BROAD, "train")]
    return jobs + [ours("smollm2", 0.2, calibrate=BROAD, smoothing=how) for how in ("0.1,0.1,1", "0,0,1", "0.3,0.3,1")]


def second_plan(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> list[Job]:
    """By what the first has shown: sizes, healing, Gemma, peers on the same texts, samples, aligned ranks, seconds."""
    best = {model: chosen(rows, model, options) for model in BOS}
    refined = best_refinement(rows, options)

    def levels(model: str, **more: Any) -> list[Job]:
        return [ours(model, level, **{**best[model], **more}) for level in LEVELS[model]]

    def beside(*names: str, **more: Any) -> list[Job]:
        given = {**more, "calibrate": best["smollm2"]["calibrate"]}
        cells = [Cell(name=name, removed=level, **given) for level in LEVELS["smollm2"] for name in names]
        return [Job(model="smollm2", cell=cell) for cell in cells]

    jobs = [Job(model=model, kind="dense") for model in BOS]
    jobs += levels("smollm2", **refined, heal=300) + levels("gemma") + beside("zs-svd", "aa-svd", **refined)
    jobs += [ours("smollm2", 0.2, refine=500, calibration_windows=1024, refine_lr=2e-4)]
    jobs += levels("smollm2") + levels("smollm2", **refined, seed=1) + [Job(model="smollm2", kind="command")]
    jobs += [*levels("smollm2", **refined, seed=2), ours("gemma", 0.3, **best["gemma"], refine=250)]
    jobs += beside("zs-svd", "aa-svd", "svd-llm") + beside("svd-llm", **refined) + levels("gemma", heal=300)
    jobs += [job for seed in (1, 2) for job in levels("gemma", seed=seed)]
    jobs += [ours("smollm2", 0.2, name="ours-pairs", rank_multiple=number) for number in (None, 64, 32, 16, 8)]
    jobs += [ours("smollm2", 0.2, name="ours-gpu")]
    return [*jobs, Job(model="smollm2", kind="command", words=("--refine", "0", "--ranks", "global"), alone=True)]


def ratios(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Perplexities of a row as shares of the dense model's."""
    dense = next((each for each in rows if each["kind"] == "dense" and each["model"] == row["model"]), None)
    return {name: row[name] / dense[name] for name in TEXTS if name in row} if dense else {}


def score(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> float:
    found = {name: math.log(value) for name, value in ratios(row, rows).items()}
    return 0.5 * found["valid"] + 0.25 * (found["docstrings"] + found["news"]) if found else math.inf


def chosen(rows: Sequence[dict[str, Any]], model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Texts and smoothing that lose least at 20%, not refined."""
    given = {name: getattr(options, name) for name in ("calibrate", "smoothing") if getattr(options, name) is not None}
    tried = [
        row
        for row in rows
        if (row["model"], row["kind"], row.get("removed")) == (model, "row", 0.2)
        and row["name"] == "ours"
        and not any(row.get(name) for name in ("refine", "polish", "heal", "calibration_windows"))
        and "code" not in row.get("calibrate", "")
    ]
    best = min(tried, key=lambda row: score(row, rows), default={"calibrate": BROAD})
    return {"calibrate": best.get("calibrate", "train"), "smoothing": best.get("smoothing", ""), **given}


def best_refinement(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Steps, rate and windows that are best on validation text, of those tried on the broad texts."""
    tried = [row for row in rows if row["model"] == "smollm2" and row.get("refine") and "polish" not in row]
    tried = [row for row in tried if row.get("calibrate") == BROAD and row.get("removed") == 0.2]
    tried = [row for row in tried if row["name"] == "ours" and not row.get("seed") and not row.get("heal")]
    names = ("refine", "refine_lr", "calibration_windows")
    best = min(tried, key=lambda row: float(row["valid"]), default={"refine": 250, "calibration_windows": 512})
    found = {name: best[name] for name in names if name in best}
    return {**found, **({} if options.windows is None else {"calibration_windows": options.windows})}


def perform(job: Job, folder: Path, device: str, *, toy: bool) -> dict[str, Any]:
    """What a process does."""
    place, tokens = folder / job.model, folder / f"{job.model}-tokens.npz"
    sizes: dict[str, Any] = {"windows": 2, "length": 16} if toy else {}
    protocol = Protocol(texts=TEXTS, bos=BOS[job.model], device=device, **sizes)
    if job.kind == "generate":
        arena.generate(
            place, tokens, 32 if toy else 1024 if job.model == "smollm2" else 512, 16 if toy else 256, device
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


def child(job: Job, folder: Path, device: str, toy: bool, log: str, result: str) -> None:
    with open(log, "w", encoding="utf-8") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        torch.set_num_threads(1 if device == "cpu" else 3)
        try:
            found = perform(job, folder, device, toy=toy)
        # a job that fails says so in its row, and the others go on
        except BaseException as error:
            traceback.print_exc()
            found = {"failed": f"{type(error).__name__}: {error}"[:300]}
        Path(result).write_text(json.dumps(found), encoding="utf-8")


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
        (out / "logs").mkdir(parents=True, exist_ok=True)
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

    def run(self, jobs: Sequence[Job]) -> None:
        done = {row["job"] for row in self.rows if "failed" not in row}
        waiting = [job for job in dict.fromkeys(jobs) if job.key not in done]
        print(f"{len(jobs)} jobs, {len(jobs) - len(waiting)} done before", flush=True)
        while (waiting or self.running) and time.monotonic() < self.deadline:
            while (job := self._next(waiting)) is not None:
                waiting.remove(job)
                self._start(job)
            self._collect()
            if waiting and not self.running and self._next(waiting) is None:
                print(f"{len(waiting)} jobs wait for text that was not generated", flush=True)
                break
            time.sleep(0.05)
        for process, (job, _, _) in self.running.items():
            print(f"ended: {job.key}", flush=True)
            process.terminate()
            process.join()
        if waiting:
            print(f"{len(waiting)} jobs were not begun, the first: {waiting[0].key}", flush=True)

    def _next(self, waiting: Sequence[Job]) -> Job | None:
        busy = [job for job, _, _ in self.running.values()]
        if len(busy) >= self.options.at_once or any(job.alone for job in busy):
            return None
        for job in waiting:
            if job.alone:
                return None if busy else job
            made = (self.folder / f"{job.model}-tokens.generated.npz").exists()
            full = job.model == "gemma" and sum(each.model == "gemma" for each in busy) >= MOST_GEMMA
            if not full and (made or not job.needs_generated):
                return job
        return None

    def _start(self, job: Job) -> None:
        name = f"{len(self.rows) + len(self.running):03d}-{time.monotonic_ns() % 10**6:06d}"
        log, result = self.out / f"logs/{name}.txt", self.out / f"logs/{name}.json"
        options = self.options
        given = (job, self.folder, options.device, options.plan == "toy", str(log), str(result))
        process = self.context.Process(target=child, args=given)
        process.start()
        self.running[process] = (job, time.monotonic(), result)

    def _collect(self) -> None:
        for process in [process for process in self.running if not process.is_alive()]:
            job, start, result = self.running.pop(process)
            found = json.loads(result.read_text()) if result.exists() else {"failed": f"exit {process.exitcode}"}
            result.unlink(missing_ok=True)
            wall = round(time.monotonic() - start, 1)
            row = {"job": job.key, "model": job.model, "kind": job.kind, "wall": wall, "alone": job.alone, **found}
            row["beside"] = len(self.running)
            self.rows.append(row)
            with (self.out / "rows.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{wall:6.1f} s  {job.key}  {found.get('failed', '')}", flush=True)


def read_rows(out: Path) -> list[dict[str, Any]]:
    path = out / "rows.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def write_records(out: Path) -> None:
    """Records of the form that `results/` has, one for each model."""
    rows = read_rows(out)
    plain = ("job", "model", "kind", "beside", "alone", "about")
    for model in BOS:
        about = next((row["about"] for row in rows if row["model"] == model and row["kind"] == "dense"), None)
        if about is not None:
            mine = [row for row in rows if row["model"] == model and row["kind"] == "row" and "failed" not in row]
            about["rows"] = [{name: value for name, value in row.items() if name not in plain} for row in mine]
            default = asdict(Cell(name="", removed=0.0))
            about["settings"] |= {name: default[name] for name in default if name not in ("name", "removed", "seed")}
            about["settings"]["split"] = "test"
            (out / f"arena-{model}.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def show(out: Path) -> None:
    """A short table: perplexities as shares of dense, in the order of texts; test text in perplexity too."""
    rows = read_rows(out)
    print(f"{'':9}{'shares of dense on ' + ', '.join(TEXTS):52}{'test':>7}{'other':>7} {'s':>5}")
    for row in sorted(rows, key=lambda row: (row["model"], row.get("removed", 0.0))):
        about = row["job"].replace(f"{row['model']} row name=", "").replace("calibration_", "").replace(BROAD, "BROAD")
        if "failed" in row:
            print(f"{row['model']:8} failed: {about}: {row['failed'][:120]}")
            continue
        for stage in ("", "polished", "healed"):
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
    parser.add_argument("plan", choices=["1", "2", "show", "toy"])
    parser.add_argument("--at-once", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--mps", action="store_true", help="let processes share the card by NVIDIA's MPS, where it is")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--calibrate")
    parser.add_argument("--smoothing")
    parser.add_argument("--windows", type=int)
    parser.add_argument("--only", default="", help="jobs whose names have this in them")
    parser.add_argument("--list", action="store_true", help="print the jobs and end")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.plan == "toy":
        import arena_toys

        options.device = "cpu"
        arena_toys.make(options.folder, TEXTS)
    if options.plan != "show":
        plans = {"1": [first_plan], "2": [lambda: second_plan(read_rows(options.out), options)]}
        plans["toy"] = [*plans["1"], *plans["2"]]
        for plan in plans[options.plan]:
            jobs = [job for job in plan() if options.only in job.key]
            if options.list:
                return print("\n".join(job.key for job in jobs))
            Queue(options.folder, options.out, options).run(jobs)
    if options.mps:
        mps(quits=True)
    write_records(options.out)
    show(options.out)


if __name__ == "__main__":
    main()
