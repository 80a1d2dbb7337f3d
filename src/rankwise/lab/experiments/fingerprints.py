"""What the parts of an experiment are made from. A finished part is used again only for the same."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankwise.deploy.save import WEIGHTS
from rankwise.lab.data.text import digest_of
from rankwise.lab.tasks.base import Task
from rankwise.lab.training.config import LoopConfig, binding


def base_fingerprint(task: Task[Any, Any], config: LoopConfig) -> dict[str, Any]:
    """What the dense base is made from."""
    plain = task.experiment.to_json()
    return _made_from({name: plain[name] for name in task.experiment.base_settings}, config, task.fingerprint)


def variant_fingerprint(task: Task[Any, Any], config: LoopConfig, base: Path | None) -> dict[str, Any]:
    """What a variant is made from: settings, and the base in that folder; one that is not trained yet is left open."""
    experiment = task.experiment
    plain = experiment.to_json()
    names = [*experiment.variant_settings, *(name for name in experiment.optional if name in plain)]
    about: dict[str, Any] = {name: plain[name] for name in names}
    if base is None:
        about["base"] = None
    elif (base / WEIGHTS).is_file():
        about["base"] = digest_of(base / WEIGHTS).partition(":")[2]
    return _made_from(about, config, task.fingerprint)


def _made_from(about: Mapping[str, Any], config: LoopConfig, data: str) -> dict[str, Any]:
    known = {"about": about, "training": dataclasses.asdict(config), "corpus": data}
    # as JSON gives it back: a tuple is a list there
    return binding(json.loads(json.dumps(known)))
