"""What a folder holds, and its models: of a run, of `rankwise.save`, or of transformers; with weights, or without.

`find_models` opens models to be timed against each other: those of a run, or a saved one against its dense shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rankwise.deploy.inputs import positions_of
from rankwise.deploy.load import dense_model, load, load_empty
from rankwise.deploy.save import OF_RUN, STRUCTURE
from rankwise.errors import CheckpointError, RankwiseError, first_line
from rankwise.lab.data.vocabulary import Vocabulary
from rankwise.lab.experiments.run_folder import (
    BASE,
    EXPERIMENT,
    MODEL,
    RECORD,
    VOCABULARY,
    find_run,
    load_run,
    read_experiment,
    refuse_sweep,
)
from rankwise.lab.training.records import read_json, write_file
from rankwise.surroundings import surroundings

PRETRAINED = "config.json"
"""The file that marks a folder of transformers."""
ASSUMED = (
    "Only the configuration was read. All weights, those of heads too, are taken to be in the checkpoint: a head that "
    "is fresh once the model is loaded is left out then."
)
LENGTH = 256
"""Tokens of a sequence to be timed, where no run says how many it was trained on."""
DENSE, FRESH = "dense", "dense, fresh weights"


def kind_of(folder: Path) -> Literal["saved", "run", "pretrained"] | None:
    """What a folder holds: a model of `rankwise.save`, a run, sweep or part of one, or a model of transformers."""
    if (folder / STRUCTURE).is_file():
        return "saved"
    if (folder / EXPERIMENT).is_file():
        return "run"
    return "pretrained" if (folder / PRETRAINED).is_file() else None


@dataclass(frozen=True, eq=False)
class OwnModel:
    """A model of a run or of `rankwise.save`."""

    model: nn.Module
    beside: dict[str, dict[str, Any]]
    """The experiment and the vocabulary of its run, by file; empty outside of a run."""

    @property
    def vocabulary(self) -> Vocabulary | None:
        return Vocabulary.from_json(self.beside[VOCABULARY]) if self.beside else None


def open_model(name: str) -> nn.Module:
    """The model in a folder, or of a name on the hub, in evaluation mode."""
    own = open_own(Path(name))
    if own is not None:
        return own.model
    _check_holds_model(Path(name))
    from rankwise.hf.loading import load_model

    return load_model(name)


def open_folder(folder: Path) -> nn.Module:
    """The model in a folder, in evaluation mode; a name on the hub is refused."""
    if not folder.is_dir():
        raise CheckpointError(f"FOLDER must be a folder that holds a model, but there is no {folder}.")
    return open_model(str(folder))


def open_own(folder: Path) -> OwnModel | None:
    """The model of a run or of `rankwise.save`; None for other folders."""
    # `rankwise compress` writes the files of a run beside the model of one
    if (folder / EXPERIMENT).is_file():
        run = load_run(folder)
        model, place = run.model, run.folder
    elif kind_of(folder) == "saved":
        model, place = load(folder).eval(), folder.resolve().parent
    else:
        return None
    found = {name: read_json(place / name) for name in OF_RUN}
    whole = {name: content for name, content in found.items() if content is not None}
    return OwnModel(model, whole if len(whole) == len(found) else {})


def open_empty(name: str) -> tuple[nn.Module, list[str]]:
    """The model of a folder, or of a name on the hub, without its weights; and what is assumed of it."""
    folder = Path(name)
    if (folder / EXPERIMENT).is_file():
        folder = find_run(folder).path
    if kind_of(folder) == "saved":
        return load_empty(folder), []
    _check_holds_model(folder)
    from rankwise.hf.loading import empty_model

    return empty_model(str(folder) if folder.is_dir() else name), [ASSUMED]


def _check_holds_model(folder: Path) -> None:
    if folder.is_file():
        raise CheckpointError(f"MODEL must be a folder or a name on the hub, but {folder} is a file.")
    if folder.is_dir() and kind_of(folder) is None:
        sources = "of a run, of `rankwise.save` or of transformers"
        raise CheckpointError(f"FOLDER must hold a model {sources}, but {folder} holds none of them.")


@dataclass(frozen=True, eq=False)
class TimedModels:
    """Models to be timed against each other, and on what."""

    models: dict[str, nn.Module]
    """The dense one first."""
    length: int
    """Tokens of a sequence, where nobody says how many."""
    record: Path | None = None
    """The record of a run, which keeps what is measured."""
    longest: int | None = None
    """Tokens that the models are sure to take; None where there is no end."""

    def tokens(self, batch: int, length: int) -> Tensor:
        """Some text: how long a model takes does not depend on what it reads."""
        config: Any = next(iter(self.models.values())).config
        number = config.num_words if hasattr(config, "num_words") else config.vocab_size
        return torch.randint(0, number, (batch, length), generator=torch.Generator().manual_seed(0))

    @torch.inference_mode()
    def check_length(self, length: int) -> None:
        """Refuse sequences that the models cannot read."""
        if self.longest is None or length <= self.longest:
            return
        try:
            next(iter(self.models.values()))(self.tokens(1, length))
        except (IndexError, RuntimeError):
            raise RankwiseError(
                f"`length` must be one that the model has positions for, but is {length} instead. "
                f"{self.longest} tokens are few enough."
            ) from None

    def keep(self, rows: list[dict[str, Any]], lines: list[str], device: str) -> None:
        """Write rows and remarks into the run's record, under "bench"."""
        if self.record is not None:
            measured = datetime.now(timezone.utc).isoformat(timespec="seconds")
            bench = {"rows": rows, "remarks": lines, "measured": measured, **surroundings(torch.device(device))}
            write_file(self.record, {**(read_json(self.record) or {}), "bench": bench})


def find_models(folder: Path) -> TimedModels:
    """The models of a run or of one of its methods, a model that `rankwise.save` wrote, or one of Hugging Face."""
    # "." has no name, and no parent
    folder = folder.resolve() if folder.name in ("", "..") else folder
    kind = kind_of(folder)
    if kind == "run":
        return _models_of_run(folder)
    if kind is None:
        raise CheckpointError(
            f"`rankwise bench` needs the folder of a run or of a saved model, but {folder} is neither. Give one that "
            "`rankwise run`, `rankwise.save` or `save_pretrained` wrote."
        )
    model: Any = open_folder(folder).float()
    if getattr(model.config, "is_encoder_decoder", False):
        raise RankwiseError(
            f"`rankwise bench` times models that read one text, but {folder} holds a {type(model).__name__}, "
            "which reads two. Time it by `rankwise export`."
        )
    longest = positions_of(model) if kind == "pretrained" else None
    name = folder.parent.name if folder.name == MODEL else folder.name
    models = {FRESH: _dense_of(folder, model), name: model}
    return TimedModels(models, LENGTH if longest is None else min(LENGTH, longest), longest=longest)


def _models_of_run(folder: Path) -> TimedModels:
    experiment = read_experiment(folder)
    run = folder.parent if (folder / MODEL).is_dir() else folder
    places = [folder] if run is not folder else sorted(path.parent for path in folder.glob(f"*/{MODEL}"))
    if not places:
        refuse_sweep(folder)
        raise CheckpointError(
            f"A run must be finished before its models can be timed, but there is none in {folder}. "
            "Run the same command again to go on."
        )
    if (run / BASE / MODEL).is_dir() and run / BASE not in places:
        places.append(run / BASE)
    # the base, and what trained on from it, take as long as each other
    dense = [place for place in places if read_experiment(place).method.name == DENSE]
    dense.sort(key=lambda place: (place.name != BASE, place.name != DENSE))
    small = sorted(place for place in places if place not in dense)
    models = {place.name: open_folder(place / MODEL).float() for place in small}
    first = open_folder(dense[0] / MODEL).float() if dense else _dense_of(small[0] / MODEL, models[small[0].name])
    models = {DENSE if dense else FRESH: first, **models}
    record = next((place / RECORD for place in (folder, run) if "format" in (read_json(place / RECORD) or {})), None)
    return TimedModels(models, experiment.length, record)


def _dense_of(folder: Path, model: Any) -> nn.Module:
    """The dense model that the one in a folder was made from, with fresh weights."""
    if kind_of(folder) == "saved":
        return dense_model(folder)
    from rankwise.hf.format import skeleton_of

    try:
        dense: nn.Module = type(model)(skeleton_of(model).config)
    # fresh weights depend on settings that loading never reads
    except Exception as error:
        raise CheckpointError(
            f"{folder} must hold the configuration of a model that can be made anew, but transformers says: "
            f"{first_line(error)} Correct config.json."
        ) from error
    return dense
