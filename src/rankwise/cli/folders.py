"""Folders that hold a model: of a run, of `rankwise.save`, or of transformers; with their weights, or without."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn

    from rankwise.lab.data.vocabulary import Vocabulary

ASSUMED = (
    "Only the configuration was read. All weights, those of heads too, are taken to be in the checkpoint: a head that "
    "is fresh once the model is loaded is left out then."
)


@dataclass(frozen=True, eq=False)
class Own:
    """A model of rankwise's own."""

    model: nn.Module
    beside: dict[str, dict[str, Any]]
    """What else its run says of it, by file: its experiment and its vocabulary; empty outside of a run."""

    @property
    def vocabulary(self) -> Vocabulary | None:
        from rankwise.lab.data.vocabulary import Vocabulary
        from rankwise.lab.experiments.folder import VOCABULARY

        return Vocabulary.from_json(self.beside[VOCABULARY]) if self.beside else None


def open_model(folder: Path) -> nn.Module:
    """The model in a folder, in evaluation mode."""
    if not folder.is_dir():
        raise CheckpointError(f"FOLDER must be a folder that holds a model, but there is no {folder}.")
    own = open_own(folder)
    if own is not None:
        return own.model
    if (folder / "config.json").is_file():
        from rankwise.hf.loading import open_folder

        return open_folder(folder)
    raise _holds_none(folder)


def open_own(folder: Path) -> Own | None:
    """The model of a run or of `rankwise.save`; None for other folders."""
    from rankwise.deploy.load import load
    from rankwise.deploy.save import OF_RUN, STRUCTURE
    from rankwise.lab.experiments.folder import EXPERIMENT, load_run, read

    if (folder / EXPERIMENT).is_file():
        run = load_run(folder)
        model, place = run.model, run.folder
    elif (folder / STRUCTURE).is_file():
        model, place = load(folder).eval(), folder.resolve().parent
    else:
        return None
    found = {name: read(place / name) for name in OF_RUN}
    whole = {name: content for name, content in found.items() if content is not None}
    return Own(model, whole if len(whole) == len(found) else {})


def open_empty(target: str) -> tuple[nn.Module, list[str]]:
    """The model of a folder, or of a name on the hub, without its weights; and what is assumed of it."""
    from rankwise.deploy.load import load_empty
    from rankwise.deploy.save import STRUCTURE
    from rankwise.lab.experiments.folder import EXPERIMENT, find_run

    folder = Path(target)
    if (folder / EXPERIMENT).is_file():
        return load_empty(find_run(folder)[1]), []
    if (folder / STRUCTURE).is_file():
        return load_empty(folder), []
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise _holds_none(folder)
    if folder.is_file():
        raise CheckpointError(f"MODEL must be a folder or a name on the hub, but {folder} is a file.")
    from rankwise.hf.skeleton import empty_model

    return empty_model(target), [ASSUMED]


def _holds_none(folder: Path) -> CheckpointError:
    return CheckpointError(
        f"FOLDER must hold a model of a run, of `rankwise.save` or of transformers, but {folder} holds none of them."
    )
