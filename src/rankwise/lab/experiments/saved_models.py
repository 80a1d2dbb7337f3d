"""What a folder holds, and its model: of a run, of `rankwise.save`, or of transformers; with weights, or without."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from rankwise.deploy.load import load, load_empty
from rankwise.deploy.save import OF_RUN, STRUCTURE
from rankwise.errors import CheckpointError
from rankwise.lab.data.vocabulary import Vocabulary
from rankwise.lab.experiments.folder import EXPERIMENT, VOCABULARY, find_run, load_run, read

PRETRAINED = "config.json"
"""The file that marks a folder of transformers."""
ASSUMED = (
    "Only the configuration was read. All weights, those of heads too, are taken to be in the checkpoint: a head that "
    "is fresh once the model is loaded is left out then."
)


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
    folder = Path(name)
    own = open_own(folder)
    if own is not None:
        return own.model
    _check_holds_model(folder)
    from rankwise.hf.loading import load_model

    return load_model(name)


def open_folder(folder: Path) -> nn.Module:
    """The model in a folder, in evaluation mode; a name on the hub is refused."""
    if not folder.is_dir():
        raise CheckpointError(f"FOLDER must be a folder that holds a model, but there is no {folder}.")
    return open_model(str(folder))


def open_own(folder: Path) -> OwnModel | None:
    """The model of a run or of `rankwise.save`; None for other folders."""
    kind = kind_of(folder)
    if kind not in ("saved", "run"):
        return None
    # `rankwise compress` writes the files of a run beside the model of one
    if (folder / EXPERIMENT).is_file():
        run = load_run(folder)
        model, place = run.model, run.folder
    else:
        model, place = load(folder).eval(), folder.resolve().parent
    found = {name: read(place / name) for name in OF_RUN}
    whole = {name: content for name, content in found.items() if content is not None}
    return OwnModel(model, whole if len(whole) == len(found) else {})


def open_empty(name: str) -> tuple[nn.Module, list[str]]:
    """The model of a folder, or of a name on the hub, without its weights; and what is assumed of it."""
    folder = Path(name)
    if (folder / EXPERIMENT).is_file():
        return load_empty(find_run(folder)[1]), []
    if kind_of(folder) == "saved":
        return load_empty(folder), []
    _check_holds_model(folder)
    from rankwise.hf.loading import empty_model

    return empty_model(name), [ASSUMED]


def _check_holds_model(folder: Path) -> None:
    if folder.is_file():
        raise CheckpointError(f"MODEL must be a folder or a name on the hub, but {folder} is a file.")
    if folder.is_dir() and kind_of(folder) is None:
        raise CheckpointError(
            f"FOLDER must hold a model of a run, of `rankwise.save` or of transformers, but {folder} holds none of "
            "them."
        )
