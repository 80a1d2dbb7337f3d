"""The training loop: dense steps, then pruning, with evaluation, metrics and checkpoints. It knows no method.

Per step: batch -> loss and gradients, clipped -> weights -> `pruner.step()` -> evaluation, metrics and checkpoint,
where due. All of it is a function of (configuration, step, checkpoint), so a killed run goes on bit for bit on a CPU.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from torch import nn

from rankwise.core.budget import count
from rankwise.lab.data.corpus import Corpus
from rankwise.lab.training.accelerator import start_trackers
from rankwise.lab.training.config import TrainingConfig
from rankwise.lab.training.evaluate import Quality
from rankwise.lab.training.histograms import GATES
from rankwise.lab.training.interrupt import Interrupted, Stop, interruption
from rankwise.lab.training.progress import Progress
from rankwise.lab.training.records import FORMAT, FORMAT_VERSION, surroundings
from rankwise.lab.training.run import Best, MakePruner, Run
from rankwise.pruner import Pruner


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
    corpus: Corpus,
    config: TrainingConfig,
    folder: str | os.PathLike[str],
    *,
    pruner: Pruner | MakePruner | None = None,
    teacher: nn.Module | None = None,
    about: Mapping[str, Any] | None = None,
    trackers: Sequence[str] = (),
    progress: Progress | None = None,
) -> Outcome:
    """Train `model` in place, and go on where an earlier call with the same arguments was stopped.

    Args:
        model: a language model, (tokens, state) to (logits, state), made anew as the first call got it.
        corpus: its training text is trained on, its validation text evaluated; its test text is left alone.
        config: steps, learning rate and so on.
        folder: of the run. A run of another configuration in it is refused.
        pruner: one that has gated `model`, or a function that gates the model it is given, called after
            `config.dense_steps`. None: the model stays dense.
        teacher: another model with the same vocabulary, whose answers are learned to the share `config.distill`. It
            is put into evaluation mode, and its parameters ask for no gradient any more.
        about: JSON of what else makes this run: preset, shape of the model. Kept, and compared when a run goes on.
        trackers: names that Accelerate knows, such as "tensorboard".
        progress: is told what happens.
    """
    run = Run(model, corpus, config, folder, pruner, about or {}, trackers, teacher)
    with run.folder.held():
        return _fit(run, progress or Progress())


def _fit(run: Run, progress: Progress) -> Outcome:
    if not run.restore():
        # what an earlier run left that never came to a checkpoint
        run.folder.metrics.unlink(missing_ok=True)
        run.folder.record.unlink(missing_ok=True)
    run.folder.begin(run.configuration)
    # an interrupted evaluation has not written its line, so lines up to the step before are what is known
    run.folder.cut(run.step - run.pending)
    start_trackers(run.accelerator, run.config, run.step - run.pending)
    progress.begin(run.step, run.config.steps)
    try:
        with interruption() as stop:
            _go(run, stop, progress)
    finally:
        progress.end()
        run.accelerator.end_training()
    return _finish(run)


class _Clock:
    """Time that passed, and steps that were taken in it."""

    def __init__(self, step: int) -> None:
        self.step, self.then = step, time.perf_counter()

    def lap(self, step: int) -> tuple[float, int]:
        """Seconds and steps since the last lap."""
        now = time.perf_counter()
        passed = now - self.then, step - self.step
        self.step, self.then = step, now
        return passed


def _go(run: Run, stop: Stop, progress: Progress) -> None:
    """Take the steps that are left."""
    clock, speed = _Clock(run.step), _Clock(run.step)
    try:
        while run.pending or run.step < run.config.steps:
            if not run.pending:
                stop.check()
                if run.step >= run.config.dense_steps:
                    run.begin_pruning()
                run.train_step()
                progress.advance(run.step)
            _end_step(run, stop, progress, clock, speed)
    except Interrupted:
        run.seconds += clock.lap(run.step)[0]
        run.save()
        raise Interrupted(
            f"Stopped after step {run.step} of {run.config.steps}; run the same again to go on from there."
        ) from None


def _end_step(run: Run, stop: Stop, progress: Progress, clock: _Clock, speed: _Clock) -> None:
    """Evaluate, write metrics and a checkpoint, each where it is due."""
    config, step = run.config, run.step
    last, dense_ends = step == config.steps, 0 < config.dense_steps == step
    line: dict[str, Any] = {}
    is_best = False
    logs = last or step % config.log_every == 0
    training = run.training_metrics() if logs else {}
    seconds, num_steps = speed.lap(step) if logs else (0.0, 0)
    if num_steps:
        training["tokens_per_second"] = num_steps * run.windows.tokens_per_step / seconds
    if last or dense_ends or step % config.eval_every == 0:
        began = time.perf_counter()
        quality = run.evaluate(stop.check)
        # evaluation is no training: it does not count as time per token
        speed.then += time.perf_counter() - began
        is_best = run.is_new_best(quality)
        line = {"valid_loss": quality.loss, f"valid_{quality.measure}": quality.value, "is_best": is_best}
    run.seconds += clock.lap(run.step)[0]
    if logs or line:
        line = {"step": step, "seconds": run.seconds, **training, **line}
        run.folder.append(line)
        if run.accelerator.log_with:
            run.accelerator.log({key: value for key, value in line.items() if key not in ("step", GATES)}, step=step)
        progress.report(line)
    if logs:
        run.forget_sums()
    run.pending = False
    if last or is_best or step % config.checkpoint_every == 0:
        run.save()


def _finish(run: Run) -> Outcome:
    """Go back to the best weights, and write the record."""
    if run.best is not None and run.best.step != run.step:
        run.load_model(run.checkpoints.load(run.best.step))
    record = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "seed": run.config.seed,
        "configuration": run.configuration,
        "pruner": run.describe_pruner(),
        "corpus": run.corpus.record(),
        "steps": run.step,
        "tokens": run.step * run.windows.tokens_per_step,
        "sizes": _sizes(run),
        "quality": {"valid": _quality(run)},
        "seconds": run.seconds,
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **surroundings(run.device),
    }
    # finished before: only weights and pruner were wanted again
    before = run.folder.finished()
    if before is None:
        run.folder.finish(record)
    return Outcome(run.model, run.pruner, run.best, before or record, run.folder.path)


def _sizes(run: Run) -> dict[str, Any]:
    return {"dense": count(run.model)} if run.pruner is None else asdict(run.pruner.size())


def _quality(run: Run) -> dict[str, Any] | None:
    if run.best is None:
        return None
    quality = Quality(loss=run.best.loss, num_targets=run.valid.num_targets, unit=run.corpus.unit)
    return {"step": run.best.step, **quality.record()}
