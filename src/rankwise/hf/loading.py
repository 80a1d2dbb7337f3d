"""A folder of transformers as a model, whatever its class; what is wrong with it is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from rankwise.errors import CheckpointError, install_extra


def open_folder(folder: Path) -> nn.Module:
    """The model that `save_pretrained` wrote there, by the class that its config names, in evaluation mode."""
    try:
        import transformers
    except ImportError:
        raise CheckpointError(
            f"{folder} holds a model of transformers, which is not installed. {install_extra('hf')}"
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
