"""Jobs that may be stopped at any moment, and the rows that they measured: timed ones alone, others at once.

For `gpu_queue.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rankwise.files import write_json

HERE = Path(__file__).parent
ROOT = HERE.parent
MARK = "RANKWISE_QUEUE_JOB"
"""The variable of the environment by which the processes of a job are known."""
GRACE = 20.0
"""Seconds that a job has to end after Ctrl-C."""
LOG_LETTERS = 200_000
"""How much of the end of each log OUT gets."""
STATE, PACKED = "state.json", "queue.zip"
WELL = "well"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command. In it `{records}` is the folder of records, `{place}` one of its own, `{data}` that of corpora, and
    `{attempt}` a number that is another one each time."""

    command: str
    toy: str
    """What a dry run executes instead; if it begins with a plus, what it adds."""
    seconds: int
    """Its limit."""
    record: str
    """The file of its rows."""
    least: int = 60
    """Seconds in which it measures something; with fewer left it is not begun."""
    timed: bool = True
    """Whether nothing may run beside it. Neighbours that are not timed run at once."""
    needs: str = ""
    """A pattern of what the folder of corpora must have; without it the job is left out."""
    made: str = ""
    """A file in its own folder that becomes the record when it has ended well."""
    after: str = ""
    """A job that must have ended well before."""
    goes_on: bool = False
    """Whether it goes on from the record in `results/`."""


def processes_of(mark: str) -> list[int]:
    """The processes that were started with a mark that begins so, and all that these have started."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (entry / "environ").read_bytes().split(b"\0")
            if int(entry.name) != os.getpid() and any(each.startswith(wanted) for each in variables):
                found.append(int(entry.name))
    return found


def kill(mark: str, seconds: float = 30.0) -> None:
    """End all processes of a mark, and those that they start meanwhile."""
    end = time.monotonic() + seconds
    while (left := processes_of(mark)) and time.monotonic() < end:
        for number in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.05)


class Running:
    """A job that was begun."""

    def __init__(self, name: str, job: Job, queue: Queue, seconds: float) -> None:
        self.name, self.job, self.queue, self.began, self.seconds = name, job, queue, time.monotonic(), seconds
        place = queue.work / name
        place.mkdir(exist_ok=True)
        if job.goes_on and not (queue.records / job.record).exists():
            shutil.copy(ROOT / "results" / job.record, queue.records)
        command = job.command if not queue.toy else job.command + job.toy[1:] if job.toy[0] == "+" else job.toy
        self.about = queue.jobs.setdefault(name, {"attempts": 0, "seconds": 0.0})
        self.about["attempts"] += 1
        # now, because the queue may be killed before the job has ended
        write_json(queue.work / STATE, queue.state)
        given = {"records": queue.records, "place": place, "data": queue.data, "attempt": 99 + self.about["attempts"]}
        words = shlex.split(command.format(**{key: shlex.quote(str(value)) for key, value in given.items()}))
        self.mark = f"{queue.work}:{name}:"
        # what is killed cannot remove its temporary files
        self.scratch = Path(tempfile.mkdtemp(prefix=queue.prefix))
        environment = {
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": "200",
            **os.environ,
            MARK: self.mark,
            "TMPDIR": str(self.scratch),
            "TORCHINDUCTOR_CACHE_DIR": str(queue.work / "inductor"),
            "RANKWISE_BENCHMARKS_CSV": str(queue.records / "results.csv"),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE), str(ROOT / "src"), os.environ.get("PYTHONPATH")))),
        }
        with (queue.work / f"{name}.txt").open("ab") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def is_late(self) -> bool:
        return time.monotonic() >= self.began + self.seconds

    def stop(self) -> None:
        """Ctrl-C, by which a run keeps a checkpoint; then everything that is left of the job is killed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE)
        self.process.kill()
        kill(self.mark)
        self.process.wait()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def note(self, ended: str) -> None:
        """Keep how it ended, and its record."""
        if ended == WELL and self.job.made:
            shutil.copy(self.queue.work / self.name / self.job.made, self.queue.records / self.job.record)
        seconds = round(self.about["seconds"] + time.monotonic() - self.began, 1)
        said = [line for line in self.queue.log(self.name) if not line.startswith("Next: ")]
        self.about |= {"seconds": seconds, "ended": ended, "said": said[-1:]}
        write_json(self.queue.work / STATE, self.queue.state)
        self.queue.pack()


class Queue:
    """Runs jobs, and keeps what they have measured: in `work` at once, in `out` within a second."""

    def __init__(self, out: Path, work: Path, *, data: Path | None = None, toy: bool = False) -> None:
        self.out, self.work, self.toy = out, work.resolve(), toy
        self.data = data.resolve() if data else None
        self.records = self.work / "records"
        self.records.mkdir(parents=True, exist_ok=True)
        out.mkdir(parents=True, exist_ok=True)
        state = self.work / STATE
        self.state: dict[str, Any] = {"toy": toy, "jobs": {}}
        if state.exists():
            self.state = json.loads(state.read_text(encoding="utf-8"))
        if self.state["toy"] != toy:
            raise SystemExit(f"{self.work} must be of a dry run with --toy, and only then, but is not. Remove it.")
        self.jobs: dict[str, Any] = self.state["jobs"]
        self.packed: object = None
        self.beside: Running | None = None
        self.prefix = f"job-{hashlib.sha256(bytes(self.work)).hexdigest()[:12]}-"
        # of a queue that was killed
        kill(f"{self.work}:")
        for scratch in Path(tempfile.gettempdir()).glob(f"{self.prefix}*"):
            shutil.rmtree(scratch, ignore_errors=True)

    def run(self, jobs: Mapping[str, Job], deadline: float, beside: Job | None = None) -> None:
        """Run what is not done, last what failed or took all of its time before; nothing runs after the deadline.

        `beside` runs as long as jobs do that are not timed.
        """
        names = sorted(jobs, key=lambda name: self._comes_last(name) or self._comes_last(jobs[name].after))
        try:
            for timed, group in groupby(names, key=lambda name: jobs[name].timed):
                if not timed:
                    self._watch({name: jobs[name] for name in group}, deadline, beside)
                    continue
                for name in group:
                    self._watch({name: jobs[name]}, deadline, None)
        finally:
            self._end_beside()
            self.pack()

    def ended(self, name: str) -> str:
        """How a job ended."""
        return str(self.jobs.get(name, {}).get("ended", "not yet"))

    def _lacks(self, job: Job) -> str:
        """What a job goes by that is not there, if anything."""
        if job.after and self.ended(job.after) != WELL:
            return f"{job.after} has not ended well"
        is_there = self.toy or not job.needs or (self.data and any(self.data.glob(job.needs)))
        return "" if is_there else f"there is no {job.needs} in {self.data}"

    def _comes_last(self, name: str) -> bool:
        return self.ended(name).startswith(("with", "at"))

    def _end_beside(self) -> None:
        if self.beside is not None:
            self.beside.stop()
            self.beside.note("with the others")
        self.beside = None

    def _watch(self, waiting: dict[str, Job], deadline: float, beside: Job | None) -> None:
        """Run jobs at once, each until it has ended, or its time is over."""
        running: list[Running] = []
        try:
            while waiting or running:
                for name in list(waiting):
                    if waiting[name].after not in waiting and waiting[name].after not in {
                        each.name for each in running
                    }:
                        job = waiting.pop(name)
                        left = deadline - GRACE - time.monotonic()
                        if self._may_begin(name, job, left):
                            self._beside(beside, deadline)
                            running.append(Running(name, job, self, min(job.seconds, left)))
                for each in [each for each in running if each.has_ended or each.is_late]:
                    running.remove(each)
                    self._note(each)
                time.sleep(0.2)
                self.pack()
        finally:
            for each in running:
                self._note(each)

    def _may_begin(self, name: str, job: Job, left: float) -> bool:
        if self.ended(name) == WELL or left < job.least:
            return False
        if lacks := self._lacks(job):
            print(f"\n== {name}: left out, because {lacks}", flush=True)
        return not lacks

    def _beside(self, beside: Job | None, deadline: float) -> None:
        """Begin what runs beside others, or end it."""
        if beside is None:
            self._end_beside()
        elif self.beside is None:
            self.beside = Running("beside", beside, self, deadline)

    def _note(self, running: Running) -> None:
        """Keep how a job ended, which is stopped if it has not."""
        in_time = running.has_ended
        # one that has ended may have left processes, too
        running.stop()
        code, seconds = running.process.returncode, running.seconds
        cut = f"at its limit, {seconds} s" if seconds == running.job.seconds else f"stopped after {seconds:.0f} s"
        running.note(cut if not in_time else f"with exit code {code}" if code else WELL)
        print(f"\n== {running.name}: {self.ended(running.name)}", flush=True)
        print("\n".join(line[:150] for line in self.log(running.name)[-6:]), flush=True)

    def log(self, name: str) -> list[str]:
        """The lines that a job has printed."""
        path = self.work / f"{name}.txt"
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        return [line for line in text.replace("\r", "\n").splitlines() if line.strip()]

    def pack(self) -> None:
        """Bring `out` up to date, if anything was written since."""
        records = [file for file in self.records.iterdir() if not file.name.startswith(".")]
        kept, logs = [self.work / STATE, *sorted(records)], sorted(self.work.glob("*.txt"))
        now = [(file, stat.st_mtime_ns, stat.st_size) for file in (*kept, *logs) if (stat := _stat(file))]
        if now == self.packed:
            return
        self.packed = now

        def pack(path: Path) -> None:
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
                for file in filter(Path.exists, kept):
                    packed.write(file, file.relative_to(self.work))

        _replace(self.out / PACKED, pack)
        ends = [f"==== {log.stem}\n{log.read_text(encoding='utf-8', errors='replace')[-LOG_LETTERS:]}" for log in logs]
        _replace(self.out / "logs.txt", lambda path: path.write_text("\n".join(ends), encoding="utf-8"))


def _stat(file: Path) -> os.stat_result | None:
    """None for a file that was replaced just now."""
    with contextlib.suppress(FileNotFoundError):
        return file.stat()
    return None


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file whole: a process that is killed leaves the one before."""
    unfinished = path.with_name(f".{path.name}")
    write(unfinished)
    unfinished.replace(path)
