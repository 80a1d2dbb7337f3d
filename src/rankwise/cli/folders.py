"""Folders that hold a model: of a run, of `rankwise.save`, or of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn

    from rankwise.data.vocabulary import Vocabulary


def open_model(folder: Path) -> nn.Module:
    """The model in a folder, in evaluation mode."""
    if not folder.is_dir():
        raise CheckpointError(f"FOLDER must be a folder that holds a model, but there is no {folder}.")
    own = open_own(folder)
    if own is not None:
        return own[0]
    if (folder / "config.json").is_file():
        from rankwise.hf.loading import open_folder

        return open_folder(folder)
    raise CheckpointError(
        f"FOLDER must hold a model of a run, of `rankwise.save` or of transformers, but {folder} holds none of them."
    )


def open_own(folder: Path) -> tuple[nn.Module, Vocabulary | None] | None:
    """The model of a run or of `rankwise.save`, and its vocabulary where a run tells it; None for other folders."""
    from rankwise.deploy.load import load
    from rankwise.deploy.save import STRUCTURE
    from rankwise.experiments.folder import EXPERIMENT, load_run, read_vocabulary

    if (folder / EXPERIMENT).is_file():
        run = load_run(folder)
        return run.model, run.vocabulary
    if not (folder / STRUCTURE).is_file():
        return None
    of_run = folder.resolve().parent
    return load(folder).eval(), read_vocabulary(of_run) if (of_run / EXPERIMENT).is_file() else None
