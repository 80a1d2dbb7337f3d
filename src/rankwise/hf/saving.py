"""`model.save_pretrained` for gated or compact layers: the stock one, and the word that makes the folder safe."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.deploy.quantize import check_unrounded
from rankwise.files import write_json
from rankwise.hf.layout import REMEDY, entry_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

CONFIG = "config.json"
ENTRY = "quantization_config"
HUB = ("repo_id", "commit_message", "create_pr", "private")
"""Arguments of an upload."""


def save_with_layout(
    model: PreTrainedModel,
    stock: Callable[..., None],
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: dict[str, Tensor] | None = None,
    push_to_hub: bool = False,
    **kwargs: Any,
) -> None:
    """Save by the stock method; the folder says what its layers are, and stops those who cannot read that."""
    check_unrounded(model)
    hub = {name: kwargs.pop(name) for name in HUB if name in kwargs}
    entry = entry_of(model)
    with _saying(model.config, entry):
        stock(model, save_directory, is_main_process, state_dict, **kwargs)
    config = Path(save_directory) / CONFIG
    if entry is not None and is_main_process:
        # Without rankwise, transformers would only warn of an unknown `quant_method`, and go on with random weights.
        # It does stop at a name for the weights that cannot be one, and shows it.
        content = json.loads(config.read_text(encoding="utf-8"))
        write_json(config, {**content, "transformers_weights": REMEDY})
    if push_to_hub:
        # it saves by `save_pretrained`, and so by this very function, before it uploads
        model.push_to_hub(hub.pop("repo_id", Path(save_directory).name), **hub)


@contextmanager
def _saying(config: PreTrainedConfig, entry: dict[str, Any] | None) -> Iterator[None]:
    """While it is written, the configuration says `entry`; other models may share it."""
    said = getattr(config, ENTRY, None)
    _say(config, entry)
    try:
        yield
    finally:
        _say(config, said)


def _say(config: PreTrainedConfig, entry: Any) -> None:
    if entry is not None:
        setattr(config, ENTRY, entry)
    elif hasattr(config, ENTRY):
        delattr(config, ENTRY)
