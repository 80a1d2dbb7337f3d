"""What the parts of a language model's experiment are made from. A finished part is used again only for the same."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankwise.deploy.architectures import describe_config
from rankwise.deploy.save import WEIGHTS
from rankwise.lab.data.corpus import Corpus
from rankwise.lab.data.text import read_blocks
from rankwise.lab.experiments.config import Experiment
from rankwise.lab.experiments.fields import to_json
from rankwise.lab.experiments.folder import MODEL
from rankwise.lab.training import TrainingConfig
from rankwise.lab.training.config import binding


def of_base(experiment: Experiment, corpus: Corpus) -> dict[str, Any]:
    """Of the dense base."""
    assert experiment.base_training is not None
    about = {"model": describe_config(experiment.model), "seed": experiment.seed}
    return _made_from(about, experiment.base_training, corpus)


def of_arm(experiment: Experiment, base: Path | None, corpus: Corpus) -> dict[str, Any]:
    """Of an arm from the base in that folder; a base that is not trained yet is left open."""
    described = to_json(experiment)
    about = {key: described[key] for key in ("model", "method", "budget", "dropout", "init", "exclude", "seed")}
    if base is None:
        about["base"] = None
    elif (base / MODEL / WEIGHTS).is_file():
        about["base"] = _fingerprint(base / MODEL / WEIGHTS)
    return _made_from(about, experiment.pruning_training, corpus)


def _made_from(about: Mapping[str, Any], config: TrainingConfig, corpus: Corpus) -> dict[str, Any]:
    known = {"about": about, "training": dataclasses.asdict(config), "corpus": corpus.fingerprint}
    # as JSON gives it back: a tuple is a list there
    return binding(json.loads(json.dumps(known)))


def _fingerprint(path: Path) -> str:
    digest = hashlib.sha256()
    for block in read_blocks(path):
        digest.update(block)
    return digest.hexdigest()
