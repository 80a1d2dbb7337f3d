"""Folders that hold a model: of a run, of `rankwise.save`, or of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
        return _of_transformers(folder)
    raise CheckpointError(
        f"FOLDER must hold a model of a run, of `rankwise.save` or of transformers, but {folder} holds none of them."
    )


def _of_transformers(folder: Path) -> nn.Module:
    try:
        import transformers
    except ImportError:
        raise CheckpointError(
            f'{folder} holds a model of transformers, which is not installed. Install it: pip install "rankwise[hf]".'
        ) from None
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
        name = (config.get("architectures") or [""])[0]
    except (OSError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{folder / 'config.json'} must be JSON of transformers, but is not: {error}.") from None
    kind = getattr(transformers, str(name), None)
    if kind is None:
        raise CheckpointError(
            f"{folder / 'config.json'} must name a class of transformers in `architectures`, but names {name!r}."
        )
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model: nn.Module = kind.from_pretrained(folder, local_files_only=True)
    except CheckpointError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{folder} must load in transformers, but it says: {first}") from error
    return model.eval()
