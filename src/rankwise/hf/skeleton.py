"""A model of transformers without its weights: what `config.json` says, on the meta device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rankwise.errors import CheckpointError, RankwiseError, install_extra
from rankwise.hf.layout import METHOD
from rankwise.hf.names import source_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def empty_model(name: str) -> PreTrainedModel:
    """The model of that folder or name on the meta device, of the class that its configuration names.

    No file of weights is read. All weights are taken to be in the checkpoint, those of its heads too.
    """
    source = source_of(name)
    try:
        import transformers
    except ImportError:
        raise CheckpointError(f"{name} needs transformers, which is not installed. {install_extra('hf')}") from None
    try:
        config = transformers.AutoConfig.from_pretrained(name, **source)
        entry = vars(config).pop("quantization_config", None)
        kind = next((getattr(transformers, each, None) for each in config.architectures or []), None)
        dtype = getattr(config, "dtype", None)
        with torch.device("meta"):
            make: Any = kind or transformers.AutoModelForCausalLM.from_config
            model = make(config)
        if entry is None:
            model.tie_weights()
        else:
            _reshape(model, dict(entry))
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        if isinstance(error, RankwiseError):
            raise
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"MODEL must be a folder or name that transformers can load, but {name!r} is not: {line}"
        ) from None
    if isinstance(dtype, torch.dtype):
        model.to(dtype)
    for parameter in model.parameters():
        # the mark of transformers for what a checkpoint brought
        parameter._is_hf_initialized = True
    assert isinstance(model, transformers.PreTrainedModel)
    model.eval()  # type: ignore[no-untyped-call]
    return model


def _reshape(model: PreTrainedModel, entry: dict[str, Any]) -> None:
    """Give the layers of a compact model the form in which they were saved."""
    from rankwise.hf.quantizer import RankwiseConfig, RankwiseQuantizer

    if entry.get("quant_method") != METHOD:
        raise CheckpointError(
            f"A model must not be quantized to be planned, but its weights are by {entry.get('quant_method')!r}. "
            "Give the model before it was quantized."
        )
    quantizer = RankwiseQuantizer(RankwiseConfig(**entry), pre_quantized=True)
    quantizer.validate_environment()
    quantizer._process_model_before_weight_loading(model)
    # as the layout has listed the ties: the stock mapping is that of the dense model
    model.tie_weights(recompute_mapping=False)
