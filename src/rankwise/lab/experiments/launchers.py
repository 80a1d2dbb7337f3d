"""Where the cells of a sweep run: in processes of this machine, in jobs of SLURM or in tasks of Ray.

All three run the same command (`cells.py`) in a process of its own, which leaves a file when it has finished. A
launcher starts it, knows when it is over, and stops it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Protocol

from rankwise.errors import InvalidValueError, MissingPackageError, RankwiseError, install_extra, nearest, shortened

POLL_SECONDS = 0.1
"""Between two looks at a process of this machine."""
SAVING_SECONDS = 60.0
"""What a job that must leave its machine has for its last step and its checkpoint; SLURM gives it 90."""
SLURM_MINUTES = 60
"""The time limit of a job of SLURM, after which it is queued again and goes on."""
SUBMITIT_LOGGING = "SUBMITIT_LOG_LEVEL"


class Job(Protocol):
    """A cell that was started."""

    def is_over(self) -> bool: ...

    def stop(self, at_once: bool = False) -> None:
        """Ask it to save a checkpoint and end, or end it at once."""


class Launcher(ABC):
    """Starts commands, at most `workers` at a time; None: as many as there are."""

    name: ClassVar[str]
    known: ClassVar[tuple[str, ...] | None] = ()
    """The names of its options; None: any."""
    here: ClassVar[bool] = False
    """Whether all of it runs on this machine."""
    pause: float = POLL_SECONDS
    """Seconds between two looks at its jobs."""
    patience: float = 10.0
    """Seconds after which a file that another machine wrote must be seen here."""
    at_a_time: int = 1
    """How many there may be now: one where models are timed."""

    def __init__(self, workers: int | None = None, options: Mapping[str, str] | None = None) -> None:
        if workers is not None and workers < 1:
            raise InvalidValueError(f"`workers` must be at least 1, but is {workers} instead.")
        self.workers, self.options = workers, dict(options or {})
        for option in self.options:
            if self.known is not None and option not in self.known:
                known = f"of {', '.join(self.known)}" if self.known else "empty"
                hint = nearest(option, self.known)
                raise InvalidValueError(
                    f"The options of the launcher {self.name} must be {known}, but one is {option!r}.{hint}"
                )

    def open(self, folder: Path) -> None:  # noqa: B027
        """Called before the first command; what the launcher itself writes goes to `folder`."""

    @abstractmethod
    def start(self, command: Sequence[str], log: Path, worker: int, title: str) -> Job:
        """Start a command whose words are added to a file; `worker` is the lowest number that no other one has."""

    def close(self) -> None:  # noqa: B027
        """Called after the last command."""


def start_process(command: Sequence[str], log: Path, **settings: Any) -> subprocess.Popen[bytes]:
    """A process whose words are added to a file, and which sees by its input when this process is gone."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT, **settings)


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process of `start_process` is over; then its input is closed."""
    if process.poll() is None:
        return False
    assert process.stdin is not None
    process.stdin.close()
    return True


class Local(Launcher):
    """Processes of this machine. Its GPUs and cores are shared out; by default one worker for each GPU."""

    name, here = "local", True

    def __init__(self, workers: int | None = None, options: Mapping[str, str] | None = None) -> None:
        super().__init__(workers, options)
        self.gpus = visible_gpus()
        self.workers = workers or max(1, len(self.gpus))

    def environment(self, worker: int) -> dict[str, str]:
        """What differs between the workers: their GPUs, and how many threads each has."""
        found = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self.at_a_time)), **os.environ}
        if self.gpus:
            own = self.gpus[worker :: self.at_a_time] or [self.gpus[worker % len(self.gpus)]]
            found["CUDA_VISIBLE_DEVICES"] = ",".join(own)
        return found

    def start(self, command: Sequence[str], log: Path, worker: int, title: str) -> Job:
        # in a session of its own: Ctrl-C on a terminal is for us, and we stop the workers
        return Process(start_process(command, log, env=self.environment(worker), start_new_session=True))


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    # not above: a job of SLURM, which only waits for its process, imports this module too
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


class Process(Job):
    """A cell in a process of this machine."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def is_over(self) -> bool:
        return has_ended(self.process)

    def stop(self, at_once: bool = False) -> None:
        self.process.kill() if at_once else self.process.terminate()


class Command:
    """A command inside a job of SLURM or a task of Ray, on whatever machine that is."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.command, self.log, self.place = list(command), log.absolute(), Path.cwd()
        self.process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> None:
        self.process = start_process(self.command, self.log, cwd=self.place)
        try:
            while not has_ended(self.process):
                time.sleep(POLL_SECONDS)
        finally:
            self.save()
        if self.process.returncode:
            raise RuntimeError(f"The cell ended with exit code {self.process.returncode}; its log is {self.log}.")

    def save(self) -> None:
        """Let the process save a checkpoint and end, if it runs."""
        assert self.process is not None
        self.process.terminate()
        until = time.monotonic() + SAVING_SECONDS
        while not has_ended(self.process) and time.monotonic() < until:
            time.sleep(POLL_SECONDS)

    def checkpoint(self) -> Any:
        """Called by submitit when the job's time is over or its machine is needed: queue it again, to go on."""
        self.save()
        return import_module("submitit").helpers.DelayedSubmission(Command(self.command, self.log))


class Slurm(Launcher):
    """Jobs of SLURM, by submitit. Options are those of `sbatch` without their dashes: partition, gpus-per-node, mem."""

    name, known, pause = "slurm", None, 2.0
    cluster = "slurm"
    """The executor of submitit; tests have "local"."""

    def open(self, folder: Path) -> None:
        with _own_logging():
            submitit = installed("submitit", "cluster")
        if self.cluster == "slurm" and (missing := [name for name in ("sbatch", "srun") if not shutil.which(name)]):
            raise RankwiseError(
                f"The launcher slurm needs the commands of SLURM, but there is no `{missing[0]}` here. Run it where "
                "you would run sbatch, or use the launcher local."
            )
        # a job that was queued again goes on from its checkpoint, so there is no limit to that
        self.executor = submitit.AutoExecutor(folder / "submitit", cluster=self.cluster, slurm_max_num_timeout=10_000)
        further = {name.replace("-", "_"): value for name, value in self.options.items()}
        self.executor.update_parameters(timeout_min=SLURM_MINUTES, slurm_additional_parameters=further)

    def start(self, command: Sequence[str], log: Path, worker: int, title: str) -> Job:
        self.executor.update_parameters(name=f"rankwise-{title.replace('/', '-')}")
        try:
            return SubmittedJob(self.executor.submit(Command(command, log)))
        except import_module("submitit.core.utils").FailedJobError as error:
            raise RankwiseError(f"sbatch refused the job {title}: {shortened(error)}") from None


class SubmittedJob(Job):
    """A cell that submitit submitted. Its pickles are removed, and none is read."""

    def __init__(self, job: Any) -> None:
        self.job = job

    def is_over(self) -> bool:
        if not self.job.done():
            return False
        for path in (self.job.paths.submitted_pickle, self.job.paths.result_pickle):
            path.unlink(missing_ok=True)
        return True

    def stop(self, at_once: bool = False) -> None:
        self.job.cancel(check=False)


class Ray(Launcher):
    """Tasks of Ray: of the cluster that this machine belongs to or `address` names, or else of one started here.

    `cpus` and `gpus` say what a cell needs: by default one core, and one GPU where the cluster has any.
    """

    name, known = "ray", ("address", "cpus", "gpus")

    def open(self, folder: Path) -> None:
        ray = self.ray = installed("ray", "ray")
        try:
            needs = {f"num_{name}": float(self.options[name]) for name in ("cpus", "gpus") if name in self.options}
        except ValueError:
            raise InvalidValueError(f"`cpus` and `gpus` must be numbers, but are {self.options} instead.") from None
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            ray.init(address=self.options.get("address", "auto"), **quiet)
        except ConnectionError:
            if "address" in self.options:
                raise RankwiseError(
                    f"`address` must be that of a Ray cluster, but none answers at {self.options['address']}."
                ) from None
            ray.init(include_dashboard=False, num_cpus=self.workers, **quiet)
        needs = {"num_cpus": 1, "num_gpus": min(1, ray.cluster_resources().get("GPU", 0))} | needs
        # a cell that fails is tried again by us, who know whether it is finished
        self.run = ray.remote(max_retries=0, **needs)(run_command)

    def start(self, command: Sequence[str], log: Path, worker: int, title: str) -> Job:
        return RayTask(self.ray, self.run.remote(Command(command, log)))

    def close(self) -> None:
        self.ray.shutdown()


def run_command(command: Command) -> None:
    """A task of Ray."""
    command()


class RayTask(Job):
    """A cell in a task of Ray."""

    def __init__(self, ray: Any, task: Any) -> None:
        self.ray, self.task = ray, task

    def is_over(self) -> bool:
        return bool(self.ray.wait([self.task], timeout=0)[0])

    def stop(self, at_once: bool = False) -> None:
        self.ray.cancel(self.task, force=at_once)


LAUNCHERS: dict[str, type[Launcher]] = {kind.name: kind for kind in (Local, Slurm, Ray)}


def make_launcher(name: str, workers: int | None = None, options: Mapping[str, str] | None = None) -> Launcher:
    """The launcher of that name; see its class for its options."""
    if name not in LAUNCHERS:
        raise InvalidValueError(
            f"`launcher` must be one of {', '.join(LAUNCHERS)}, but is {name!r} instead.{nearest(name, LAUNCHERS)}"
        )
    return LAUNCHERS[name](workers, options)


def installed(package: str, extra: str) -> Any:
    """A package that a launcher needs."""
    try:
        return import_module(package)
    except ImportError:
        raise MissingPackageError(
            f"The launcher needs {package}, but it is not installed. {install_extra(extra)}"
        ) from None


@contextmanager
def _own_logging() -> Iterator[None]:
    """Keep submitit from setting up the logging of this process when it is imported. In its jobs it still does.

    That closes all handlers there are, and absl's, which TensorBoard brings, may close stderr too. It also writes to
    stdout, where a command may print JSON.
    """
    before = os.environ.get(SUBMITIT_LOGGING)
    os.environ[SUBMITIT_LOGGING] = "NOCONFIG"
    try:
        yield
    finally:
        del os.environ[SUBMITIT_LOGGING]
        if before is not None:
            os.environ[SUBMITIT_LOGGING] = before


def ignore_user_signals() -> None:
    """Leave it to submitit, in the process above, to answer SLURM's word that the time is over."""
    if hasattr(signal, "SIGUSR2"):
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
