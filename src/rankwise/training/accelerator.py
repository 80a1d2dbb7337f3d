"""The Accelerator of a run: device, precision and trackers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rankwise.errors import RankwiseError, install_extra
from rankwise.training.config import TrainingConfig

try:
    from accelerate import Accelerator  # type: ignore[import-untyped]
    from accelerate.state import AcceleratorState  # type: ignore[import-untyped]
except ImportError as error:
    raise ImportError(
        f"Training needs the package accelerate, which is not installed. {install_extra('train')}"
    ) from error


def make_accelerator(config: TrainingConfig, folder: Path, trackers: Sequence[str]) -> Any:
    """An Accelerator for `config`; `trackers` are names that Accelerate knows, and those not installed are left out."""
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
