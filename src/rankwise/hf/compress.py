"""One-shot compression of a model of transformers: how it is loaded, how it reads a text, and how it is saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from math import isfinite
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig

from rankwise.core.host_memory import release_freed_memory
from rankwise.deploy.calibration import Calibration, encoder, read_windows, special_tokens
from rankwise.deploy.compress import Compressed, Data, Source
from rankwise.deploy.inputs import is_decoder, positions_of
from rankwise.errors import DataError
from rankwise.hf.loading import load_model, load_tokenizer, no_progress_bars
from rankwise.hf.saving import check_pretrained_target, save_pretrained


class PretrainedModel(Source):
    """A folder or a name that `from_pretrained` takes; any `from_pretrained` loads the folder that is written."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.used_cache: bool | None = None

    def load(self) -> nn.Module:
        model: nn.Module = load_model(self.name)
        # what a model keeps to go on with a text takes memory
        self.used_cache = _use_cache(model, False)
        return model

    def check_target(self, folder: Path, overwrite: bool) -> None:
        check_pretrained_target(folder, overwrite)

    def save(self, small: nn.Module, made: Compressed, folder: Path, overwrite: bool) -> list[str]:
        _use_cache(small, self.used_cache)
        quality = made.quality
        figures = {quality.measure: (quality.dense, quality.small)} if quality and isfinite(quality.small) else None
        speed = {f"{tokens} token{'s'[: tokens - 1]} on {made.device}": pair for tokens, pair in made.speed.items()}
        with no_progress_bars():
            left = save_pretrained(
                *(small, folder),  # type: ignore[arg-type]
                tokenizer=load_tokenizer(self.name, needed=False),
                size=made,
                quality=figures,
                speed=speed,
                base_model=self.name,
                overwrite=overwrite,
                files_from=self.name,
            )
        return [f"Not copied, because only JSON, text and safetensors files are: {', '.join(left)}."] if left else []

    def read(self, calibration: Calibration) -> Callable[[nn.Module], Data]:
        # the tokenizer is read again when the model is saved: meanwhile its memory may be needed
        tokenizer = load_tokenizer(self.name, needed=True)
        special = special_tokens(tokenizer, _config(self.name))
        windows = read_windows(encoder(tokenizer), calibration, special=special)
        del tokenizer
        release_freed_memory()

        def prepare(model: Any) -> Data:
            _check_windows(model, [*windows.used, *windows.kept_back])
            # an encoder-decoder goes on with the text that it reads
            names = [name for name in ("input_ids", "decoder_input_ids") if name in signature(model.forward).parameters]

            def batches(of: Sequence[Tensor]) -> list[dict[str, Tensor]]:
                return [dict.fromkeys(names, window[None].to(model.device)) for window in of]

            return Data(
                batches=batches(windows.used),
                loss_batches=batches([special.shortened(window, calibration.loss_window) for window in windows.used]),
                kept_back=batches(windows.kept_back),
                is_decoder=is_decoder(model.config),
                window=calibration.window,
                notes=windows.notes,
            )

        return prepare


def _config(name: str) -> Any:
    """The configuration of a model; None where there is none, which loading the model will say."""
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError):
        return None


def _use_cache(model: Any, wanted: bool | None) -> bool | None:
    """Set `use_cache` of a model, unless `wanted` is None; gives what it was."""
    config = model.config.get_text_config()
    before: bool | None = getattr(config, "use_cache", None)
    if before is not None and wanted is not None:
        config.use_cache = wanted
    return before


def _check_windows(model: Any, windows: Sequence[Tensor]) -> None:
    """Refuse windows that the model cannot read."""
    length, places = len(windows[0]), positions_of(model)
    if places is not None and length > places:
        raise DataError(f"A window must be at most {places} tokens, which is all the model reads, but is {length}.")
    largest, words = max(int(window.max()) for window in windows), model.config.get_text_config().vocab_size
    if largest >= words:
        raise DataError(f"The tokenizer must be the model's own, of {words} words, but gives number {largest}.")
