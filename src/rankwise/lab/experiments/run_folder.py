"""The folder of an experiment: what is written to it, and what can be read from it.

runs/demo/            experiment.json, record.json; latency.json where the budget is a time
    base/             the dense model that every method starts from
    flop-l0/          one folder for every method that was run
        config.json, metrics.jsonl, checkpoints/    the training run
        healing/                                    the training run of the compact model
        experiment.json, vocabulary.json, model/    what was exported
        export.json                                 its size and quality
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from rankwise.deploy.load import load
from rankwise.deploy.save import OF_RUN, STRUCTURE, WEIGHTS
from rankwise.errors import CheckpointError
from rankwise.lab.data.vocabulary import Vocabulary, digest_of
from rankwise.lab.tasks.base import Experiment, SavedModel, Task, from_json
from rankwise.lab.tasks.streams import read_vocabulary
from rankwise.lab.training.checkpoint import check_same
from rankwise.lab.training.config import LoopConfig, binding, lasting
from rankwise.lab.training.records import FORMAT as TRAINED
from rankwise.lab.training.records import foreign_file, read_json, write_file

FORMAT, VERSION = "rankwise-experiment", 1
"""The format of the record of a run."""
SWEEP = "rankwise-sweep"
"""The format of the record of a sweep."""
BASE = "base"
EXPERIMENT, VOCABULARY = OF_RUN
RECORD, EXPORT, MODEL = "record.json", "export.json", "model"
SEEDS = "seed-*"
"""Folders of a sweep."""
CONFIG, CHECKPOINTS = "config.json", "checkpoints"
"""Files of a training run."""
FINGERPRINT = "fingerprint"
"""The key of the fingerprint of the text that a model was trained on, in the experiment beside it."""
SHOWN = 4
"""Folders of a sweep that a message names."""


@dataclass(frozen=True, eq=False)
class Exported:
    """A language model of ours that a run exported, in evaluation mode."""

    folder: Path
    model: nn.Module
    vocabulary: Vocabulary


def claim(folder: Path, form: str) -> dict[str, Any] | None:
    """Refuse a folder that another kind of command wrote to; its record, where it is finished.

    `form` is the format of the record to be written. A folder without one may still be that of a run in progress.
    """
    record = read_json(folder / RECORD, "format")
    found = None
    if record is not None:
        found = record["format"]
    elif _has_checkpoints(folder):
        found = TRAINED
    elif any(folder.glob(f"{SEEDS}/{EXPERIMENT}")):
        found = SWEEP
    elif (folder / EXPERIMENT).is_file():
        found = FORMAT
    if found is not None:
        check_same({"format": found}, {"format": form}, folder)
    return record


def is_of(record: Mapping[str, Any], experiment: Mapping[str, Any], variants: Sequence[str], fingerprint: str) -> bool:
    """Whether a finished record is of these settings and these data, and nothing in it failed."""
    same = _lasting(record.get("experiment")) == _lasting(experiment) and record.get("arms") == variants
    return same and not record.get("failed") and record["corpus"]["fingerprint"] == fingerprint


def _lasting(settings: Any) -> Any:
    """Settings without those that change no result, which earlier versions may not have had."""
    if not isinstance(settings, Mapping):
        return settings
    return {name: _lasting(value) for name, value in lasting(settings).items()}


def has_models(folder: Path, rows: Iterable[Mapping[str, Any]], *beside: str) -> bool:
    """Whether the models of these rows are there, inside the folder, and what stands beside them."""
    places = [Path(row["folder"]) for row in rows]
    if any(place.is_absolute() or ".." in place.parts for place in places):
        return False
    return all((folder / place / name).exists() for place in places for name in (MODEL, *beside))


def check_part(folder: Path, of: Mapping[str, Any]) -> dict[str, Any] | None:
    """Refuse a part that was made, or begun, from something else than `of`; its export, where it is finished.

    What `of` does not speak of may have been anything.
    """
    path = folder / EXPORT
    done = read_json(path, "of", "rows")
    made = None if done is None else done["of"]
    if done is None and _has_checkpoints(folder):
        path = folder / CONFIG
        made = read_json(path)
    if made is None:
        return None
    if not isinstance(made, Mapping):
        raise foreign_file(path, f"`of` is {made!r}")
    check_same(_shared(made, of), of, folder)
    return done


def base_fingerprint(task: Task[Any, Any], config: LoopConfig) -> dict[str, Any]:
    """What the dense base is made from."""
    plain = task.experiment.to_json()
    return _made_from({name: plain[name] for name in task.experiment.base_settings}, config, task.fingerprint)


def variant_fingerprint(task: Task[Any, Any], config: LoopConfig, base: Path | None) -> dict[str, Any]:
    """What a variant is made from: settings, and the base in that folder; one that is not trained yet is left open."""
    experiment = task.experiment
    plain = experiment.to_json()
    names = [*experiment.variant_settings, *(name for name in experiment.optional if name in plain)]
    about: dict[str, Any] = {name: _lasting(plain[name]) for name in names}
    if base is None:
        about["base"] = None
    elif (base / WEIGHTS).is_file():
        about["base"] = digest_of(base / WEIGHTS).partition(":")[2]
    return _made_from(about, config, task.fingerprint)


def _made_from(about: Mapping[str, Any], config: LoopConfig, data: str) -> dict[str, Any]:
    known = {"about": about, "training": dataclasses.asdict(config), "corpus": data}
    # as JSON gives it back: a tuple is a list there
    return binding(json.loads(json.dumps(known)))


def write_experiment(folder: Path, experiment: Experiment, fingerprint: str | None = None) -> None:
    """Write the settings; `fingerprint` is that of the corpus, where there is one."""
    plain = experiment.to_json()
    if fingerprint is not None and isinstance(plain.get("corpus"), dict):
        plain["corpus"][FINGERPRINT] = fingerprint
    write_file(folder / EXPERIMENT, plain)


def read_experiment(folder: Path) -> Experiment:
    """The experiment that a folder belongs to, without the places that were named for it.

    The folder may be a stranger's, so what it says must choose neither where is written nor which files are opened.
    """
    plain = read_json(folder / EXPERIMENT)
    if plain is None:
        raise CheckpointError(
            f"A run's folder must hold {EXPERIMENT}, but {folder} does not. Give the folder that `rankwise run`, "
            "`train`, `prune` or `sweep` wrote to."
        )
    return experiment_from(plain).portable()


def experiment_from(plain: Mapping[str, Any]) -> Experiment:
    """The experiment that `write_experiment` wrote down."""
    if isinstance(corpus := plain.get("corpus"), dict):
        plain = {**plain, "corpus": {name: value for name, value in corpus.items() if name != FINGERPRINT}}
    return from_json(plain)


def read_fingerprint(folder: Path) -> str | None:
    """The fingerprint of the text that the model of a folder was trained on; None where nothing says it."""
    corpus = (read_json(folder / EXPERIMENT) or {}).get("corpus")
    found = corpus.get(FINGERPRINT) if isinstance(corpus, dict) else None
    return found if isinstance(found, str) else None


def load_run(folder: Path) -> Exported:
    """The model of a run, with its vocabulary: that of the folder itself, or of the experiment's own method."""
    saved = find_run(folder)
    if (saved.path / "config.json").is_file():
        raise CheckpointError(
            f"A model with a vocabulary of ours is needed here, but {saved.folder} holds one of transformers. "
            f"Load {saved.path} by `from_pretrained`; `rankwise report` shows the figures of its run."
        )
    vocabulary = read_vocabulary(saved.folder)
    if vocabulary is None:
        raise _unfinished(saved.folder)
    model: Any = load(saved.path).eval()
    if model.config.num_words != len(vocabulary):
        raise CheckpointError(
            f"A model must have as many words as its vocabulary, but in {saved.folder} it has "
            f"{model.config.num_words:,} and {VOCABULARY} {len(vocabulary):,}. Take both from the same run."
        )
    return Exported(saved.folder, model, vocabulary)


def find_run(folder: Path) -> SavedModel:
    """Where the model of a run stands: that of the folder itself, or of the experiment's own method."""
    experiment = read_experiment(folder)
    # what `rankwise compress` makes of a run's model is no folder inside
    compressed = (folder / STRUCTURE).is_file()
    place = folder if compressed or (folder / MODEL).is_dir() else folder / experiment.method.name
    model = place if compressed else place / MODEL
    if not model.is_dir():
        refuse_sweep(folder)
        raise _unfinished(place)
    return SavedModel(place, model, read_experiment(place), read_fingerprint(place))


def _unfinished(place: Path) -> CheckpointError:
    return CheckpointError(
        f"A run must be finished before its model can be used, but there is none in {place}. "
        "Run the same command again to go on."
    )


def refuse_sweep(folder: Path) -> None:
    """Refuse the folder of a sweep, or of one of its seeds, where one model is needed."""
    record = read_json(folder / RECORD)
    # a run whose own model is gone
    if record is None or read_experiment(folder).method.name in record.get("arms", ()):
        return
    models = sorted(path.parent for pattern in ("*", f"{SEEDS}/*") for path in folder.glob(f"{pattern}/{MODEL}"))
    if models:
        names = [str(path) for path in models[:SHOWN]] + ["and so on"] * (len(models) > SHOWN)
        raise CheckpointError(
            f"One model is needed here, but {folder} holds the {len(models)} of a sweep. Give the folder of one: "
            f"{', '.join(names)}."
        )


def _has_checkpoints(folder: Path) -> bool:
    return any((folder / CHECKPOINTS).glob("step-*"))


def _shared(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """What `then` says of all that `now` speaks of."""
    pairs = {key: (then.get(key), value) for key, value in now.items()}
    return {
        key: _shared(before, after) if isinstance(before, Mapping) and isinstance(after, Mapping) else before
        for key, (before, after) in pairs.items()
    }
