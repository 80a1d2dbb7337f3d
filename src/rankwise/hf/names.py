"""What a model is called: a folder, or a name on the hub, which is asked once and not for long."""

from __future__ import annotations

import os
from pathlib import Path

from rankwise.errors import CheckpointError

SECONDS = 5.0
"""How long the hub may take to answer."""


def check_name(name: str | os.PathLike[str], what: str = "MODEL") -> None:
    """Refuse a path where there is nothing. A word, or two with a slash between them, may be a name on the hub."""
    text = os.fspath(name)
    if os.path.isdir(text):
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


def source_of(name: str | os.PathLike[str], what: str = "MODEL") -> dict[str, bool]:
    """Options of `from_pretrained`: what is on this machine is enough where the hub does not answer.

    Without this transformers asks again and again for half a minute before it says that there is no connection.
    """
    check_name(name, what)
    return {} if os.path.exists(name) or _answers(os.fspath(name)) else {"local_files_only": True}


def _answers(name: str) -> bool:
    """Whether the hub says anything about a model, were it that there is none."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=SECONDS)
    except (HfHubHTTPError, ValueError):
        # no such model, or no such name: for transformers to say
        return True
    # errors of connections come from packages that differ by version, and offline mode is one of them
    except Exception:
        return False
    return True
