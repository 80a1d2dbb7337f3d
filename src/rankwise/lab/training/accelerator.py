"""The Accelerator of a run: device, precision and trackers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rankwise.errors import MissingPackageError, RankwiseError, install_extra, nearest
from rankwise.lab.training.config import TrainingConfig

try:
    from accelerate import Accelerator, tracking  # type: ignore[import-untyped]
    from accelerate.state import AcceleratorState  # type: ignore[import-untyped]
    from accelerate.utils import LoggerType  # type: ignore[import-untyped]
except ImportError as error:
    raise MissingPackageError(
        f"Training needs the package accelerate, which is not installed. {install_extra('train')}"
    ) from error

PACKAGED = tuple(LoggerType.list())
"""Trackers of Accelerate itself; each has the name of the package that it needs."""


def check_trackers(names: Sequence[str]) -> None:
    """Refuse a tracker that Accelerate does not know, or would leave out because its package is not installed."""
    # "all" are those that are installed; one that the user has registered needs no package
    ready = {"all", *map(str, tracking.get_available_trackers())} | set(tracking.LOGGER_TYPE_TO_CLASS) - set(PACKAGED)
    known = sorted({"all", *tracking.LOGGER_TYPE_TO_CLASS})
    for name in names:
        if name not in known:
            raise RankwiseError(
                f"A tracker must be one of {', '.join(known)}, but is {name!r} instead.{nearest(name, known)}"
            )
        if name not in ready:
            raise RankwiseError(
                f"The tracker {name} needs its package, which is not installed. Install it: pip install {name}."
            )


def make_accelerator(config: TrainingConfig, folder: Path, trackers: Sequence[str]) -> Any:
    """An Accelerator for `config`; `trackers` are names that Accelerate knows, of packages that are installed."""
    check_trackers(trackers)
    settings = {
        "mixed_precision": config.precision,
        "cpu": config.device == "cpu",
        "log_with": list(trackers) or None,
        "project_dir": str(folder),
    }
    try:
        accelerator = Accelerator(**settings)
    except ValueError as error:
        if "already been initialized" not in str(error):
            raise RankwiseError(f"Accelerate refuses the settings of this run: {error}") from error
        # it keeps one precision and one device for a process; runs that follow each other may want others
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(**settings)
    if accelerator.num_processes > 1:
        raise RankwiseError(
            f"Training must run in one process, but was started in {accelerator.num_processes}. "
            "Start it with `--num_processes 1`."
        )
    return accelerator


def start_trackers(accelerator: Any, config: TrainingConfig, step: int) -> None:
    """Open the trackers; what TensorBoard has of steps after `step` is forgotten."""
    if accelerator.log_with:
        values = {key: _plain(value) for key, value in dataclasses.asdict(config).items()}
        accelerator.init_trackers("trackers", config=values, init_kwargs={"tensorboard": {"purge_step": step + 1}})


def _plain(value: object) -> object:
    return value if isinstance(value, bool | int | float | str) else str(value)
