"""Models of a folder, or of a name on the hub, whatever their class: how they are loaded, and how they are compressed.

What is wrong with a folder is said in one line.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from inspect import signature
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as hf_logging

from rankwise.core.host_memory import release_freed_memory
from rankwise.core.placement import device_of, offload_of
from rankwise.deploy.architectures import building_at_most
from rankwise.deploy.compress import Beside, Data, Source
from rankwise.deploy.compressed import Compressed
from rankwise.deploy.documents import SpecialTokens, check_known
from rankwise.deploy.inputs import (
    Calibration,
    Windows,
    encoder,
    is_decoder,
    kept_apart,
    model_class,
    positions_of,
    read_windows,
    special_tokens,
    windows_elsewhere,
)
from rankwise.errors import CheckpointError, DataError, RankwiseError, first_line
from rankwise.hf.bounds import Shapes, check_counts, check_proportion, most_tensors, shapes_in
from rankwise.hf.format import METHOD
from rankwise.hf.generated import generated
from rankwise.hf.quantizer import RankwiseConfig, RankwiseQuantizer
from rankwise.hf.saving import check_generation, check_pretrained_target, save_pretrained
from rankwise.hub import source_of
from rankwise.oneshot import Progress

OWN_TEXT = (
    "No text was given, so the model has generated its own: {} windows of {} tokens calibrate it, others say what is "
    "lost. A text like those that it is for is better: --calibration FILE."
)
OWN_NAME = "text of its own"
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
        config = load_config(name)
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
    folder = Path(name)
    try:
        # where there is nothing, transformers may make up one without words
        if folder.is_dir() and not any(any(folder.glob(files)) for files in TOKENIZER_FILES):
            raise FileNotFoundError(f"no {' or '.join(TOKENIZER_FILES)} there.")
        return AutoTokenizer.from_pretrained(name, **source)
    # a missing tokenizer raises errors of many types
    except Exception as error:
        if not needed:
            return None
        if not folder.is_dir():
            # there may be no model either, which is said first
            load_config(name)
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
        nowhere = "" if Path(name).is_dir() else "there is no such folder, and the hub gave no such model: "
        raise CheckpointError(
            f"MODEL must be a folder or name that transformers can load, but {name!r} is not: {nowhere}"
            f"{first_line(error)}"
        ) from None


class PretrainedModel(Source):
    """A folder or a name that `from_pretrained` takes; any `from_pretrained` loads the folder that is written."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.used_cache: bool | None = None

    @property
    def generates(self) -> bool:
        try:
            return is_decoder(load_config(self.name)) and bool(load_tokenizer(self.name, needed=False))
        # loading the model says what is wrong
        except CheckpointError:
            return False

    def load(self) -> nn.Module:
        model = load_model(self.name)
        # before hours of work, not after them
        check_generation(model)
        # what a model keeps to go on with a text takes memory
        self.used_cache = _use_cache(model, False)
        return model

    def check_target(self, folder: Path, overwrite: bool) -> None:
        check_pretrained_target(folder, overwrite)

    def save(self, small: nn.Module, made: Compressed, folder: Path, overwrite: bool, beside: Beside) -> list[str]:
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
                beside=beside,
            )
        return [f"Not copied, because only JSON, text and safetensors files are: {', '.join(left)}."] if left else []

    def window(self, most: int) -> int:
        with suppress(CheckpointError, ValueError):
            return default_window(load_config(self.name), most)
        return most

    def read(self, calibration: Calibration, progress: Progress | None = None) -> Callable[[nn.Module], Data]:
        # the tokenizer is read again when the model is saved: meanwhile its memory may be needed
        tokenizer = load_tokenizer(self.name, needed=True)
        try:
            config = load_config(self.name)
        except CheckpointError:
            # there is none, which loading the model will say
            config = None
        special = special_tokens(tokenizer, config)
        # of each text as many as the model generates
        number = max(1, calibration.num_windows // (len(calibration.files) + 1)) if calibration.generated else 0
        given, own = (replace(calibration, num_windows=n) for n in (calibration.num_windows - number or 1, number or 1))
        read = None if calibration.file is None else read_windows(encoder(tokenizer), given, special=special)
        elsewhere = windows_elsewhere(encoder(tokenizer), calibration, special=special)
        if read is not None:
            texts = ", ".join(path.name for path in calibration.files)
            found = torch.cat([*read.used, *read.kept_back])
            check_known(found, tokenizer.unk_token_id, tokenizer.unk_token, "`calibration`", texts)
        del tokenizer
        release_freed_memory()

        def prepare(model: Any) -> Data:
            if read is None and offload_of(model) is not None:
                raise RankwiseError(
                    "A model that is read from disk would take hours to generate its own calibration text, but none is "
                    "given. Name one with --calibration, or use --offload none with a device on which it fits."
                )
            windows = generated_windows(model, calibration, special, progress=progress) if read is None else read
            windows = windows._replace(elsewhere=elsewhere)
            _check_windows(model, [*windows.used, *(w for some in windows.compared.values() for w in some)])
            if read is not None and calibration.generated:
                windows = windows.mixed(generated_windows(model, own, special, progress=progress), OWN_NAME)
            # an encoder-decoder goes on with the text that it reads
            names = [name for name in ("input_ids", "decoder_input_ids") if name in signature(model.forward).parameters]

            def batch(some: Tensor) -> dict[str, Tensor]:
                return dict.fromkeys(names, some.to(device_of(model)))

            return Data.of(windows, batch, model, is_decoder=is_decoder(model.config))

        return prepare


def generated_windows(
    model: Any, calibration: Calibration, special: SpecialTokens, *, seed: int = 0, progress: Progress | None = None
) -> Windows:
    """Windows that a decoder generates itself: where no text says what it is for."""
    length = min(calibration.window, positions_of(model) or calibration.window)
    number, told = calibration.num_windows + calibration.num_kept_back, progress or (lambda what, done, total: None)
    windows = generated(model, number, length, special, seed=seed, progress=partial(told, "generating"))
    made = kept_apart(list(windows), calibration, special=special)
    line = OWN_TEXT.format(len(made.used), len(made.used[0]))
    return made._replace(notes=[line, *made.notes] if calibration.file is None else made.notes)


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
        raise DataError(
            f"A window must be at most {places} tokens, which is all the model reads, but is {length}. Pass --window."
        )
    check_words(max(int(window.max()) for window in windows), model.config)


def check_words(largest: int, config: Any) -> None:
    """Refuse tokens that the model does not have; `largest` is the largest of them."""
    words = config.get_text_config().vocab_size
    if largest >= words:
        raise DataError(f"The tokenizer must be the model's own, of {words} words, but gives number {largest}.")


def default_window(config: Any, window: int) -> int:
    """`window`, or all that the model reads where that is less."""
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    return min(window, most) if isinstance(most, int) and most > 0 else window


def load_config(name: str) -> Any:
    """The configuration of that folder or name."""
    with _one_line(name):
        check_counts(Path(name))
        return AutoConfig.from_pretrained(name, **source_of(name))
