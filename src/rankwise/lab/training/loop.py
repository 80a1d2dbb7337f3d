"""The training loop: dense steps, then pruning, with evaluation, metrics and checkpoints, for every task and method.

Per step: batch -> loss and gradients, clipped -> weights -> `pruner.step()` -> evaluation, metrics and checkpoint,
where due. All of it is a function of (configuration, step, checkpoint), so a killed run resumes bit for bit on a CPU.
Several processes (`ranks.py`) take these steps together, each on its share of the batch.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankwise.core.budget import count
from rankwise.errors import RankwiseError, first_line
from rankwise.lab.training.config import LoopConfig, TrainingConfig
from rankwise.lab.training.interruption import Interrupted, Stop, interruption
from rankwise.lab.training.objective import Progress, Trainable
from rankwise.lab.training.ranks import own_ranks
from rankwise.lab.training.records import FORMAT, FORMAT_VERSION, SKIPPED, write_file
from rankwise.lab.training.run import Best, MakePruner, Run
from rankwise.lab.training.trackers import Trackers, check_trackers
from rankwise.pruner import Pruner
from rankwise.surroundings import surroundings


@dataclass(frozen=True, eq=False)
class Outcome:
    """A finished run."""

    model: nn.Module
    """With the weights of the best evaluation; with the last ones where none was of the size asked for."""
    pruner: Pruner | None
    best: Best | None
    record: dict[str, Any]
    """What `record.json` holds."""
    folder: Path


def fit(
    model: nn.Module,
    task: Trainable,
    config: LoopConfig,
    folder: str | os.PathLike[str],
    *,
    pruner: Pruner | MakePruner | None = None,
    teacher: nn.Module | None = None,
    about: Mapping[str, Any] | None = None,
    trackers: Sequence[str] = (),
    progress: Progress | None = None,
    after_step: Callable[[Pruner], None] | None = None,
) -> Outcome:
    """Train `model` in place, and continue where an earlier call with the same arguments was stopped.

    Several processes (`ranks.py`) make the same call; only the first writes, and calls `progress` and `after_step`.

    Args:
        model: the model as the first call got it, whether or not this call resumes.
        task: the data and the loss; its training data are trained on, its validation data evaluated, its test data
            are left alone.
        config: steps, learning rate and so on, as `task` reads them.
        folder: of the run. A run of another configuration in it is refused.
        pruner: one that has gated `model`, or a function that gates the model it is given, called after
            `config.dense_steps`. None: the model stays dense.
        teacher: another model for the same task, whose answers are learned. It is put into evaluation mode, and its
            parameters ask for no gradient any more.
        about: JSON of what else makes this run: preset, shape of the model. Kept, and compared when a run is resumed.
        trackers: "tensorboard", "wandb", "trackio".
        progress: called on each event.
        after_step: called with the pruner after each of its steps, and once when a run is resumed.
    """
    check_trackers(trackers)
    ranks = own_ranks()
    with ranks.together():
        run = Run(model, task, config, folder, pruner=pruner, teacher=teacher, about=about)
        if not ranks.is_first:
            return _fit(run, (), Progress(), lambda pruner: None)
        with run.folder.held():
            return _fit(run, trackers, progress or Progress(), after_step or (lambda pruner: None))


def _fit(run: Run, trackers: Sequence[str], progress: Progress, after_step: Callable[[Pruner], None]) -> Outcome:
    resumed, ranks = run.restore(), run.ranks

    def prepare() -> None:
        if not resumed:
            # what an earlier run left that never came to a checkpoint
            run.folder.metrics.unlink(missing_ok=True)
            run.folder.record.unlink(missing_ok=True)
        elif run.pruner is not None:
            after_step(run.pruner)
        write_file(run.folder.path / "config.json", run.configuration)
        # an interrupted evaluation has not written its line, so lines up to the step before are what is known
        run.folder.cut(run.step - run.pending)

    ranks.first(prepare)
    tracked = Trackers(trackers, run.folder.path, asdict(run.config), run.step - run.pending)
    progress.begin(run.step, run.config.steps)
    try:
        with interruption(ranks) as stop:
            _take_steps(run, stop, progress, tracked, after_step)
    finally:
        progress.end()
        tracked.close()
    outcome = _finish(run)
    # all have read what they need of the folder
    ranks.largest(0)
    return outcome


class _Clock:
    """When the run began, as if it had never stopped; and when, and after which step, the last line was written."""

    def __init__(self, run: Run) -> None:
        self.line, self.step = time.perf_counter(), run.step
        self.began = self.line - run.seconds

    def lap(self, step: int) -> tuple[float, int]:
        """Seconds and steps since the last line."""
        now = time.perf_counter()
        passed = now - self.line, step - self.step
        self.line, self.step = now, step
        return passed


def _take_steps(
    run: Run, stop: Stop, progress: Progress, trackers: Trackers, after_step: Callable[[Pruner], None]
) -> None:
    """Take the steps that are left."""
    clock = _Clock(run)
    try:
        while run.pending or run.step < run.config.steps:
            if not run.pending:
                stop.agree()
                if run.step >= run.config.dense_steps:
                    run.begin_pruning()
                run.train_step()
                if run.pruner is not None:
                    after_step(run.pruner)
                progress.advance(run.step)
            line = _end_step(run, stop, clock)
            if line:
                trackers.log(line)
                progress.report(line)
    except Interrupted:
        run.seconds = time.perf_counter() - clock.began
        run.save()
        stop.requested = run.ranks.largest(stop.requested or 0)
        stopped = Interrupted(
            f"Stopped after step {run.step} of {run.config.steps}; run the same again to go on from there."
        )
        stopped.signal = stop.requested or signal.SIGINT
        raise stopped from None
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RankwiseError) or not _is_out_of_memory(error):
            raise
        raise _out_of_memory(run, error) from error


def _is_out_of_memory(error: Exception) -> bool:
    # on a CPU torch raises a plain error
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _end_step(run: Run, stop: Stop, clock: _Clock) -> dict[str, Any]:
    """Evaluate, write metrics and a checkpoint, each where it is due; the line of metrics, empty where none is."""
    config, step = run.config, run.step
    last, dense_ends = step == config.steps, 0 < config.dense_steps == step
    line: dict[str, Any] = {}
    is_best = False
    logs = last or step % config.log_every == 0
    training = run.training_metrics() if logs else {}
    seconds, num_steps = clock.lap(step) if logs else (0.0, 0)
    if num_steps:
        training[f"{run.objective.unit}_per_second"] = num_steps * run.objective.per_step / seconds
    if config.eval_every is not None and (last or dense_ends or step % config.eval_every == 0):
        began = time.perf_counter()
        loss = run.evaluate(stop)
        if loss is None:
            raise Interrupted
        # evaluation is no training: it does not count as time per token
        clock.line += time.perf_counter() - began
        is_best = run.is_new_best(loss)
        line = {f"valid_{name}": value for name, value in run.objective.valid_figures(loss).items()}
        line["is_best"] = is_best
    run.seconds = time.perf_counter() - clock.began
    if logs or line:
        line = {"step": step, "seconds": run.seconds, **training, **line}
        if run.ranks.is_first:
            run.folder.append(line)
    if logs:
        run.forget_sums()
    run.pending = False
    if last or is_best or step % config.checkpoint_every == 0:
        run.save()
    return line


def _finish(run: Run) -> Outcome:
    """Go back to the best weights, and write the record."""
    if run.best is not None and run.best.step != run.step:
        run.load_model(run.checkpoints.load(run.best.step))
    quality = None
    if run.best is not None:
        figures = run.objective.valid_figures(run.best.loss)
        quality = {"step": run.best.step, **figures, "num_targets": run.objective.num_targets}
    record = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "seed": run.config.seed,
        "configuration": run.configuration,
        "pruner": run.describe_pruner(),
        "corpus": run.task.record(),
        "steps": run.step,
        run.objective.unit: run.step * run.objective.per_step,
        "sizes": {"dense": count(run.model)} if run.pruner is None else asdict(run.pruner.size()),
        "quality": {"valid": quality},
        "seconds": run.seconds,
        **({SKIPPED: run.weights.skipped.steps} if run.config.nonfinite == "skip" else {}),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **surroundings(run.device),
    }
    # finished before: only weights and pruner were wanted
    before = run.ranks.first(run.folder.finished)
    if before is None and run.ranks.is_first:
        write_file(run.folder.record, record)
    return Outcome(run.model, run.pruner, run.best, before or record, run.folder.path)


def _out_of_memory(run: Run, error: BaseException) -> RankwiseError:
    """The error for a step that does not fit into memory, with what to try."""
    config, device = run.config, run.device
    # other tasks read whole examples, which the settings of a phase do not cut
    parts = isinstance(config, TrainingConfig)
    less = f"raise `accumulate` ({config.accumulate}; the same gradient in less memory), " if parts else ""
    bf16 = ", set `precision` to bf16" if config.precision == "no" and device.type != "cpu" else ""
    return RankwiseError(
        f"A step must fit into the memory of {device}, but step {run.step + 1} does not: {first_line(error)} "
        f"To go on, {less}lower `batch_size` ({config.batch_size}){bf16}; the checkpoints in "
        f"{run.checkpoints.folder} are from before. A run with other settings needs another folder."
    )
