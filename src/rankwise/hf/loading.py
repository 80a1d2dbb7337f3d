"""Models of a folder, or of a name on the hub, whatever their class: how they are loaded, and how they are compressed.

What is wrong with a folder is said in one line.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from inspect import signature
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as hf_logging

from rankwise.core.host_memory import release_freed_memory
from rankwise.deploy.architectures import building_at_most
from rankwise.deploy.compress import Data, Source
from rankwise.deploy.compressed import Compressed
from rankwise.deploy.inputs import (
    Calibration,
    encoder,
    generated_windows,
    is_decoder,
    model_class,
    positions_of,
    read_windows,
    special_tokens,
)
from rankwise.errors import CheckpointError, DataError, RankwiseError, first_line
from rankwise.hf.bounds import Shapes, check_counts, check_proportion, most_tensors, shapes_in
from rankwise.hf.format import METHOD
from rankwise.hf.quantizer import RankwiseConfig, RankwiseQuantizer
from rankwise.hf.saving import check_pretrained_target, save_pretrained
from rankwise.hub import source_of

KEPT_BACK = "text kept back from the calibration"
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model")


def load_model(name: str) -> PreTrainedModel:
    """The model of that folder or name, in evaluation mode, of the class that its configuration names."""
    with _one_line(name), no_progress_bars():
        check_counts(Path(name))
        source: dict[str, Any] = source_of(name)
        config = AutoConfig.from_pretrained(name, **source)
        kind: Any = model_class(config) or AutoModelForCausalLM
        # the quantizer checks what a configuration says of compact layers
        if not hasattr(config, "quantization_config") and (shapes := shapes_in(Path(name))) is not None:
            check_proportion(_on_meta(config, shapes), shapes)
        model = kind.from_pretrained(name, dtype="auto", **source)
    assert isinstance(model, PreTrainedModel)
    return model


def empty_model(name: str) -> PreTrainedModel:
    """The model of that folder or name on the meta device, of the class that its configuration names.

    No file of weights is read. All weights, those of its heads too, are taken to be in the checkpoint.
    """
    with _one_line(name):
        check_counts(Path(name))
        config = AutoConfig.from_pretrained(name, **source_of(name))
        entry = vars(config).pop("quantization_config", None)
        dtype = getattr(config, "dtype", None)
        shapes = None
        with suppress(CheckpointError):
            shapes = shapes_in(Path(name))
        model = _on_meta(config, shapes)
        if entry is None:
            model.tie_weights()
        elif entry.get("quant_method") != METHOD:
            raise CheckpointError(
                f"A model must not be quantized to be planned, but its weights are by {entry.get('quant_method')!r}. "
                "Give the model before it was quantized."
            )
        else:
            quantizer = RankwiseQuantizer(RankwiseConfig(**entry), pre_quantized=True)
            quantizer.validate_environment()
            quantizer._process_model_before_weight_loading(model)
            # the quantizer has listed the ties; the stock mapping is that of the dense model
            model.tie_weights(recompute_mapping=False)
    if isinstance(dtype, torch.dtype):
        model.to(dtype)
    for parameter in model.parameters():
        # the mark of transformers for what a checkpoint brought
        parameter._is_hf_initialized = True
    assert isinstance(model, PreTrainedModel)
    model.eval()  # type: ignore[no-untyped-call]
    return model


def _on_meta(config: Any, shapes: Shapes | None) -> Any:
    """The model of a configuration without weights; `shapes` are those of the weights in its folder."""
    make: Any = model_class(config) or AutoModelForCausalLM.from_config
    plain = copy.deepcopy(config)
    vars(plain).pop("quantization_config", None)
    with building_at_most(most_tensors(shapes)), torch.device("meta"):
        return make(plain)


def load_tokenizer(name: str, *, needed: bool, what: str = "A calibration text") -> Any:
    """The tokenizer that comes with a model; None where it has none and none is needed by `what`."""
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
            f"{what} needs the model's tokenizer, but {name!r} has none that loads: {first_line(error)} "
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
    # what a folder says of a model may be anything, and transformers does not check it
    except Exception as error:
        if isinstance(error, RankwiseError):
            raise
        raise CheckpointError(
            f"MODEL must be a folder or name that transformers can load, but {name!r} is not: {first_line(error)}"
        ) from None


class PretrainedModel(Source):
    """A folder or a name that `from_pretrained` takes; any `from_pretrained` loads the folder that is written."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.used_cache: bool | None = None

    @property
    def generates(self) -> bool:
        try:
            return is_decoder(AutoConfig.from_pretrained(self.name)) and bool(load_tokenizer(self.name, needed=False))
        # loading the model says what is wrong
        except (OSError, ValueError, KeyError):
            return False

    def load(self) -> nn.Module:
        model: nn.Module = load_model(self.name)
        # what a model keeps to go on with a text takes memory
        self.used_cache = _use_cache(model, False)
        return model

    def check_target(self, folder: Path, overwrite: bool) -> None:
        check_pretrained_target(folder, overwrite)

    def save(self, small: nn.Module, made: Compressed, folder: Path, overwrite: bool) -> list[str]:
        _use_cache(small, self.used_cache)
        found = made.quality
        quality = {found.measure: (found.dense, found.small)} if found and isfinite(found.small) else None
        with no_progress_bars():
            left = save_pretrained(
                *(small, folder),  # type: ignore[arg-type]
                tokenizer=load_tokenizer(self.name, needed=False),
                size=made,
                quality=quality,
                speed=made.named_speed(),
                base_model=self.name,
                measured_on=KEPT_BACK,
                overwrite=overwrite,
                files_from=self.name,
            )
        return [f"Not copied, because only JSON, text and safetensors files are: {', '.join(left)}."] if left else []

    def read(self, calibration: Calibration) -> Callable[[nn.Module], Data]:
        # the tokenizer is read again when the model is saved: meanwhile its memory may be needed
        tokenizer = load_tokenizer(self.name, needed=True)
        try:
            config = AutoConfig.from_pretrained(self.name)
        except (OSError, ValueError, KeyError):
            # there is none, which loading the model will say
            config = None
        special = special_tokens(tokenizer, config)
        read = None if calibration.file is None else read_windows(encoder(tokenizer), calibration, special=special)
        del tokenizer
        release_freed_memory()

        def prepare(model: Any) -> Data:
            windows = generated_windows(model, calibration, special) if read is None else read
            _check_windows(model, [*windows.used, *windows.kept_back])
            # an encoder-decoder goes on with the text that it reads
            names = [name for name in ("input_ids", "decoder_input_ids") if name in signature(model.forward).parameters]

            def batch(some: Tensor) -> dict[str, Tensor]:
                return dict.fromkeys(names, some.to(model.device))

            return Data.of(windows, batch, model, is_decoder=is_decoder(model.config))

        return prepare


def _use_cache(model: Any, wanted: bool | None) -> bool | None:
    """Set `use_cache` of a model, unless `wanted` is None; gives what it was."""
    config = model.config.get_text_config()
    before: bool | None = getattr(config, "use_cache", None)
    if before is not None and wanted is not None:
        config.use_cache = wanted
    return before


def _check_windows(model: Any, windows: list[Tensor]) -> None:
    """Refuse windows that the model cannot read."""
    length, places = len(windows[0]), positions_of(model)
    if places is not None and length > places:
        raise DataError(f"A window must be at most {places} tokens, which is all the model reads, but is {length}.")
    largest, words = max(int(window.max()) for window in windows), model.config.get_text_config().vocab_size
    if largest >= words:
        raise DataError(f"The tokenizer must be the model's own, of {words} words, but gives number {largest}.")


def load_config(name: str) -> Any:
    """The configuration of that folder or name."""
    with _one_line(name):
        return AutoConfig.from_pretrained(name, **source_of(name))
