"""`model.save_pretrained` for gated or compact layers: the stock one, and the word that makes the folder safe."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.deploy.quantize import check_unrounded
from rankwise.deploy.save import refuse_nonfinite
from rankwise.files import sealed, write_json
from rankwise.hf.layout import REMEDY, entry_of, is_gated

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
    check_finite: bool = True,
    **kwargs: Any,
) -> None:
    """Save by the stock method; the folder says what its layers are, and stops those who cannot read that.

    Parameters of a compact model that are NaN or infinite are refused, unless `check_finite` is False.
    """
    check_unrounded(model)
    if check_finite and not is_gated(model):
        weights = dict(model.named_parameters(remove_duplicate=False))
        refuse_nonfinite({name: tensor for name, tensor in (state_dict or weights).items() if name in weights})
    hub = {name: kwargs.pop(name) for name in HUB if name in kwargs}
    entry = entry_of(model)
    with _saying(model.config, entry):
        stock(model, save_directory, is_main_process, state_dict, **kwargs)
    config = Path(save_directory) / CONFIG
    if entry is not None and model.should_save_on_this_rank(is_main_process):
        # Without rankwise, transformers would only warn of an unknown `quant_method`, and go on with random weights.
        # It does stop at a name for the weights that cannot be one, and shows it.
        content = json.loads(config.read_text(encoding="utf-8"))
        # weights of gates are not loaded by this entry
        said = sealed(entry, () if is_gated(model) else _weights_in(config.parent))
        write_json(config, {**content, ENTRY: said, "transformers_weights": REMEDY})
    if push_to_hub:
        # it saves by `save_pretrained`, and so by this very function, before it uploads
        model.push_to_hub(hub.pop("repo_id", Path(save_directory).name), **hub)


def _weights_in(folder: Path) -> list[Path]:
    """The files of weights that belong to a folder's `config.json`, those of other variants included."""
    found = sorted(folder.glob("model*.safetensors"))
    # stock code removes the shards of an earlier save, but leaves a file that was not in shards
    return [path for path in found if not any(folder.glob(f"{path.stem}-*-of-*.safetensors"))]


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
