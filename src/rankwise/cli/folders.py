"""Folders that hold a model: of a run, of `rankwise.save`, or of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn


def open_model(folder: Path) -> nn.Module:
    """The model in a folder, in evaluation mode."""
    from rankwise.deploy.load import load
    from rankwise.deploy.save import STRUCTURE
    from rankwise.experiments.folder import EXPERIMENT, load_run

    if not folder.is_dir():
        raise CheckpointError(f"FOLDER must be a folder that holds a model, but there is no {folder}.")
    if (folder / EXPERIMENT).is_file():
        return load_run(folder).model
    if (folder / STRUCTURE).is_file():
        return load(folder).eval()
    if (folder / "config.json").is_file():
        from rankwise.hf.loading import open_folder

        return open_folder(folder)
    raise CheckpointError(
        f"FOLDER must hold a model of a run, of `rankwise.save` or of transformers, but {folder} holds none of them."
    )
