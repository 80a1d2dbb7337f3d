"""The folder of an experiment, and what can be read back from it.

runs/demo/            experiment.json, record.json; latency.json where the budget is a time
    base/             the dense model that every method starts from
    flop-l0/          one folder for every method that was run
        config.json, metrics.jsonl, checkpoints/    of the training run
        experiment.json, vocabulary.json, model/    what was exported, for `evaluate` and `sample`
        export.json                                 its size and quality
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from rankwise.data.vocabulary import Vocabulary
from rankwise.deploy.load import load
from rankwise.errors import CheckpointError
from rankwise.experiments.arms import AnyExperiment
from rankwise.experiments.config import Experiment
from rankwise.experiments.fields import from_json, to_json
from rankwise.files import reason, write_json

BASE = "base"
EXPERIMENT, RECORD, EXPORT, VOCABULARY, MODEL = (
    "experiment.json", "record.json", "export.json", "vocabulary.json", "model",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Exported:
    """A model that a run exported, in evaluation mode."""

    folder: Path
    experiment: Experiment
    model: nn.Module
    vocabulary: Vocabulary


def write_experiment(folder: Path, experiment: AnyExperiment) -> None:
    write(folder / EXPERIMENT, to_json(experiment))


def read_experiment(folder: Path) -> AnyExperiment:
    """The experiment that a folder belongs to."""
    plain = read(folder / EXPERIMENT)
    if plain is None:
        raise CheckpointError(
            f"A run's folder must hold {EXPERIMENT}, but {folder} does not. Give the folder that `rankwise run`, "
            "`train`, `prune` or `sweep` wrote to."
        )
    return from_json(plain)


def load_run(folder: Path) -> Exported:
    """The model of a run: that of the folder itself, or of the method that the experiment in it is about."""
    experiment = read_experiment(folder)
    if not isinstance(experiment, Experiment):
        raise CheckpointError(
            f"A run of a language model is needed here, but {folder} is one of GLUE. "
            "Its models load by `from_pretrained`; `rankwise report` shows their figures."
        )
    place = folder if (folder / MODEL).is_dir() else folder / experiment.method.name
    vocabulary = read(place / VOCABULARY)
    if vocabulary is None or not (place / MODEL).is_dir():
        raise CheckpointError(
            f"A run must be finished before its model can be used, but there is none in {place}. "
            "Run the same command again to go on."
        )
    own = read_experiment(place)
    assert isinstance(own, Experiment)
    return Exported(place, own, load(place / MODEL).eval(), Vocabulary.from_json(vocabulary))


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file whole, and make the folders above it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, content)
    except OSError as error:
        raise CheckpointError(
            f"A run must be able to write to its folder, but {path.parent} failed: {reason(error)}. "
            "Free some space or choose another place, and run again."
        ) from error


def read(path: Path) -> dict[str, Any] | None:
    """A JSON file; None where there is none."""
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
        return content
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} must be JSON that rankwise wrote, but cannot be read: {error}.") from error
