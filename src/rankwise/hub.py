"""Names of models: a folder, or a name on the Hugging Face hub, which is asked once and with a short timeout."""

from __future__ import annotations

import os
from pathlib import Path

from rankwise.errors import CheckpointError
from rankwise.files import LARGEST_JSON

SECONDS = 5.0
"""How long the hub may take to answer."""
LARGEST_TABLE = 256 << 20
"""Bytes of a JSON file that is no configuration, at most: a vocabulary, or the index of the files of weights."""


def check_name(name: str | os.PathLike[str], what: str = "MODEL") -> None:
    """Refuse a path that does not exist. A word, or two with a slash between them, may be a name on the hub."""
    text = os.fspath(name)
    if os.path.isdir(text):
        check_json_sizes(Path(text))
        return
    if os.path.exists(text):
        raise CheckpointError(f"{what} must be a folder, or a name on the hub such as org/name, but {text} is a file.")
    path = Path(text)
    # `models/mine`, where there is a folder `models`, is a slip in the second word
    inside = len(path.parts) > 1 and path.parent.is_dir()
    if inside or text.startswith((".", "~", "/")) or path.is_absolute() or "\\" in text or text.count("/") > 1:
        raise CheckpointError(
            f"{what} must be a folder that exists, or a name on the hub such as org/name, but there is no {text!r}. "
            "Check the path."
        )


def check_json_sizes(folder: Path) -> None:
    """Refuse a folder with longer JSON files than any model has: transformers reads them whole."""
    for path in folder.glob("*.json"):
        most = LARGEST_JSON if path.name.endswith("config.json") else LARGEST_TABLE
        if path.is_file() and (size := path.stat().st_size) > most:
            raise CheckpointError(
                f"{path} must have at most {most:,} bytes, but has {size:,}. Save or download the model again."
            )


def source_of(name: str | os.PathLike[str], what: str = "MODEL") -> dict[str, bool]:
    """Options for `from_pretrained`: local files only, where the hub does not answer.

    Without this, transformers tries again for half a minute before it says that there is no connection.
    """
    check_name(name, what)
    return {} if os.path.exists(name) or _answers(os.fspath(name)) else {"local_files_only": True}


def _answers(name: str) -> bool:
    """Whether the hub answers, even if the answer is that there is no such model."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=SECONDS)
    except (HfHubHTTPError, ValueError):
        # there is no such model, which transformers will say
        return True
    # errors of connections come from packages that differ by version, and offline mode is one of them
    except Exception:
        return False
    return True
