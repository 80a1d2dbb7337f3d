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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from rankwise.deploy.load import load
from rankwise.deploy.save import OF_RUN, STRUCTURE
from rankwise.errors import CheckpointError, DataError
from rankwise.files import reason, write_json
from rankwise.lab.data.corpus import Corpus
from rankwise.lab.data.sources import NAMES, load_prepared
from rankwise.lab.data.text import Progress
from rankwise.lab.data.vocabulary import Vocabulary
from rankwise.lab.experiments.arms import FORMAT, SWEEP, AnyExperiment
from rankwise.lab.experiments.config import CorpusConfig, Experiment
from rankwise.lab.experiments.fields import from_json, to_json
from rankwise.lab.training.checkpoint import check_same
from rankwise.lab.training.records import FORMAT as TRAINED

BASE = "base"
EXPERIMENT, VOCABULARY = OF_RUN
RECORD, EXPORT, MODEL = "record.json", "export.json", "model"
SEEDS = "seed-*"
"""Folders of a sweep."""
CONFIG, CHECKPOINTS = "config.json", "checkpoints"
"""Of a training run."""
FINGERPRINT = "fingerprint"
"""Of the text that a model was trained on, in the experiment beside it."""
CHOICE = {"corpus.name", "corpus.data", "corpus.unit", "corpus.min_count"}
"""Settings by which a user asks for another text than that of the training, or for another copy of it."""
SHOWN = 4
"""Folders of a sweep that a message names."""


@dataclass(frozen=True, eq=False)
class Exported:
    """A model that a run exported, in evaluation mode."""

    folder: Path
    experiment: Experiment
    model: nn.Module
    vocabulary: Vocabulary
    fingerprint: str | None
    """Of the text that it was trained on."""


def claim(folder: Path, form: str) -> dict[str, Any] | None:
    """Refuse a folder that another kind of command wrote to; its record, where it is finished.

    `form` is the format of the record to be written. A folder without one may still be that of a run in progress.
    """
    record = read(folder / RECORD, "format")
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


def is_of(record: Mapping[str, Any], experiment: Mapping[str, Any], arms: Sequence[str], fingerprint: str) -> bool:
    """Whether a finished record is of these settings and these data."""
    same = record.get("experiment") == experiment and record.get("arms") == arms
    return same and record["corpus"]["fingerprint"] == fingerprint


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
    done = read(path, "of")
    made = None if done is None else done["of"]
    if done is None and _has_checkpoints(folder):
        path = folder / CONFIG
        made = read(path)
    if made is None:
        return None
    if not isinstance(made, Mapping):
        raise _foreign(path, f"`of` is {made!r}")
    check_same(_shared(made, of), of, folder)
    return done


def check_vocabulary(corpus: Corpus, known: Vocabulary) -> None:
    """Refuse a text whose tokens have other numbers than those that a model was trained on."""
    if corpus.vocabulary != known:
        raise DataError(
            f"The corpus must have the vocabulary that the model was trained on ({len(known):,} {known.kind}s), but "
            f"{corpus.name} has another ({len(corpus.vocabulary):,} {corpus.vocabulary.kind}s). "
            "Give the corpus of its training."
        )


def write_experiment(folder: Path, experiment: AnyExperiment, fingerprint: str | None = None) -> None:
    """`fingerprint` is that of the corpus."""
    plain = to_json(experiment)
    if fingerprint is not None:
        plain["corpus"][FINGERPRINT] = fingerprint
    write(folder / EXPERIMENT, plain)


def read_experiment(folder: Path) -> AnyExperiment:
    """The experiment that a folder belongs to, without the places that were named for it.

    The folder may be a stranger's, so what it says must choose neither where is written nor which files are opened.
    """
    plain = read(folder / EXPERIMENT)
    if plain is None:
        raise CheckpointError(
            f"A run's folder must hold {EXPERIMENT}, but {folder} does not. Give the folder that `rankwise run`, "
            "`train`, `prune` or `sweep` wrote to."
        )
    if isinstance(corpus := plain.get("corpus"), dict):
        plain["corpus"] = {name: value for name, value in corpus.items() if name != FINGERPRINT}
    experiment = from_json(plain)
    if isinstance(experiment, Experiment):
        return replace(experiment, corpus=replace(experiment.corpus, data=None, cache=None))
    return replace(experiment, data=None)


def read_fingerprint(folder: Path) -> str | None:
    """That of the text which the model of a folder was trained on; None where nothing says it."""
    corpus = (read(folder / EXPERIMENT) or {}).get("corpus")
    found = corpus.get(FINGERPRINT) if isinstance(corpus, dict) else None
    return found if isinstance(found, str) else None


def load_text(
    config: CorpusConfig, given: Collection[str], fingerprint: str | None, progress: Progress | None = None
) -> Corpus:
    """The corpus of an experiment that was read from a folder; `given` are the settings that the user gave.

    Without a word from the user it is the text of the training, where the user's cache holds it prepared, or else a
    published corpus. A file is opened only if the user named it.
    """
    if fingerprint is not None and not CHOICE.intersection(given):
        prepared = load_prepared(fingerprint, cache=config.cache)
        if prepared is not None:
            return prepared
    if config.name not in NAMES and "corpus.name" not in given:
        raise DataError(
            "A text that is not in the cache must be named by whoever reads it, for a saved run chooses no file to "
            f"open, but `corpus.name` is not given. This run was trained on {config.name!r}: add --corpus.name FILE, "
            "or --corpus.cache FOLDER if the training had a cache of its own."
        )
    return config.load(progress)


def load_run(folder: Path) -> Exported:
    """The model of a run: that of the folder itself, or of the method that the experiment in it is about."""
    place, model, vocabulary = find_run(folder)
    own = read_experiment(place)
    assert isinstance(own, Experiment)
    return Exported(place, own, load(model).eval(), vocabulary, read_fingerprint(place))


def find_run(folder: Path) -> tuple[Path, Path, Vocabulary]:
    """Where the model of a run stands: its part of the run, the model itself, and its vocabulary."""
    experiment = read_experiment(folder)
    if not isinstance(experiment, Experiment):
        raise CheckpointError(
            f"A run of a language model is needed here, but {folder} is one of GLUE. "
            "Its models load by `from_pretrained`; `rankwise report` shows their figures."
        )
    # what `rankwise compress` makes of a run's model is no folder inside
    compressed = (folder / STRUCTURE).is_file()
    place = folder if compressed or (folder / MODEL).is_dir() else folder / experiment.method.name
    model = place if compressed else place / MODEL
    vocabulary = read_vocabulary(place)
    if vocabulary is None or not model.is_dir():
        refuse_sweep(folder)
        raise CheckpointError(
            f"A run must be finished before its model can be used, but there is none in {place}. "
            "Run the same command again to go on."
        )
    return place, model, vocabulary


def refuse_sweep(folder: Path) -> None:
    """Refuse the folder of a sweep, or of one of its seeds, where one model is needed."""
    record = read(folder / RECORD)
    # of a run whose own model is gone
    if record is None or read_experiment(folder).method.name in record.get("arms", ()):
        return
    models = sorted(path.parent for pattern in ("*", f"{SEEDS}/*") for path in folder.glob(f"{pattern}/{MODEL}"))
    if models:
        names = [str(path) for path in models[:SHOWN]] + ["and so on"] * (len(models) > SHOWN)
        raise CheckpointError(
            f"One model is needed here, but {folder} holds the {len(models)} of a sweep. Give the folder of one: "
            f"{', '.join(names)}."
        )


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


def read(path: Path, *keys: str) -> dict[str, Any] | None:
    """A JSON file that holds these keys; None where there is none."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _foreign(path, f"cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise _foreign(path, f"is a {type(content).__name__}")
    for key in keys:
        if key not in content:
            raise _foreign(path, f"has no `{key}`")
    return content


def read_vocabulary(folder: Path) -> Vocabulary | None:
    """The vocabulary of the model in a folder; None where there is none."""
    path = folder / VOCABULARY
    plain = read(path, "kind", "tokens")
    try:
        return None if plain is None else Vocabulary.from_json(plain)
    except DataError as error:
        raise _foreign(path, f"does not fit: {error}") from error


def _has_checkpoints(folder: Path) -> bool:
    return any((folder / CHECKPOINTS).glob("step-*"))


def _foreign(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"{path} must be JSON that rankwise wrote, but {found.rstrip('.')}. Remove it, or choose another folder."
    )


def _shared(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """What `then` says of all that `now` speaks of."""
    pairs = {key: (then.get(key), value) for key, value in now.items()}
    return {
        key: _shared(before, after) if isinstance(before, Mapping) and isinstance(after, Mapping) else before
        for key, (before, after) in pairs.items()
    }
