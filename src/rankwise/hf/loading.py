"""Models and tokenizers of a folder, or of a name on the hub, whatever their class; what is wrong is one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as hf_logging

from rankwise.deploy.inputs import model_class
from rankwise.deploy.pretrained import METHOD
from rankwise.errors import CheckpointError, RankwiseError, first_line
from rankwise.hf.quantizer import RankwiseConfig, RankwiseQuantizer
from rankwise.hub import source_of

TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model")


def load_model(name: str) -> PreTrainedModel:
    """The model of that folder or name, in evaluation mode, of the class that its configuration names."""
    with _one_line(name), no_progress_bars():
        source: dict[str, Any] = source_of(name)
        config = AutoConfig.from_pretrained(name, **source)
        kind: Any = model_class(config) or AutoModelForCausalLM
        model = kind.from_pretrained(name, dtype="auto", **source)
    assert isinstance(model, PreTrainedModel)
    return model


def empty_model(name: str) -> PreTrainedModel:
    """The model of that folder or name on the meta device, of the class that its configuration names.

    No file of weights is read. All weights, those of its heads too, are taken to be in the checkpoint.
    """
    with _one_line(name):
        config = AutoConfig.from_pretrained(name, **source_of(name))
        entry = vars(config).pop("quantization_config", None)
        dtype = getattr(config, "dtype", None)
        make: Any = model_class(config) or AutoModelForCausalLM.from_config
        with torch.device("meta"):
            model = make(config)
        if entry is None:
            model.tie_weights()
        else:
            _shrink_layers(model, dict(entry))
    if isinstance(dtype, torch.dtype):
        model.to(dtype)
    for parameter in model.parameters():
        # the mark of transformers for what a checkpoint brought
        parameter._is_hf_initialized = True
    assert isinstance(model, PreTrainedModel)
    model.eval()  # type: ignore[no-untyped-call]
    return model


def _shrink_layers(model: PreTrainedModel, entry: dict[str, Any]) -> None:
    """Give the layers of a compact model the form in which they were saved."""
    if entry.get("quant_method") != METHOD:
        raise CheckpointError(
            f"A model must not be quantized to be planned, but its weights are by {entry.get('quant_method')!r}. "
            "Give the model before it was quantized."
        )
    quantizer = RankwiseQuantizer(RankwiseConfig(**entry), pre_quantized=True)
    quantizer.validate_environment()
    quantizer._process_model_before_weight_loading(model)
    # the quantizer has listed the ties; the stock mapping is that of the dense model
    model.tie_weights(recompute_mapping=False)


def load_tokenizer(name: str, *, needed: bool) -> Any:
    """The tokenizer that comes with a model; None where it has none and none is needed."""
    source: dict[str, Any] = source_of(name)
    try:
        folder = Path(name)
        # where there is nothing, transformers may make up one without words
        if folder.is_dir() and not any(any(folder.glob(files)) for files in TOKENIZER_FILES):
            raise FileNotFoundError(f"no {' or '.join(TOKENIZER_FILES)} there.")
        return AutoTokenizer.from_pretrained(name, **source)
    # a missing tokenizer raises errors of many types
    except Exception as error:
        if not needed:
            return None
        raise CheckpointError(
            f"A calibration text needs the model's tokenizer, but {name!r} has none that loads: {first_line(error)} "
            "Save the tokenizer beside the model."
        ) from None


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing progress bars, unless on a terminal."""
    bars = hf_logging.is_progress_bar_enabled() and not sys.stderr.isatty()
    if bars:
        hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if bars:
            hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def _one_line(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        if isinstance(error, RankwiseError):
            raise
        raise CheckpointError(
            f"MODEL must be a folder or name that transformers can load, but {name!r} is not: {first_line(error)}"
        ) from None
