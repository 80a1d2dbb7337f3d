"""Healing of models of transformers: decoders, encoders with or without a head, encoder-decoders.

What can be refused without the weights is refused first: kinds, vocabularies, quantized weights, texts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.core.budget import count
from rankwise.deploy.inputs import KeptBack, encoder, is_decoder, positions_of, special_tokens
from rankwise.distill import Distillation
from rankwise.errors import CheckpointError, DataError, InvalidValueError, RankwiseError, first_line
from rankwise.hub import source_of
from rankwise.lab.experiments.healing.pair import REMEDY, HealingConfig, Pair
from rankwise.lab.experiments.saved_models import open_model
from rankwise.lab.tasks.healing import HealingTask, check_known, parts_of_batch, read_healing_text
from rankwise.lab.tasks.pretrained import quiet
from rankwise.lab.training.config import LoopConfig

WINDOW, ENCODER_WINDOW = 512, 256
"""Tokens of a window, where nobody says how many."""
CHECKPOINTED = 1_000_000_000
"""Parameters from which on activations are computed again in the backward pass, where nobody says whether."""
OFTEN = 4
"""More passes over a text than that are worth a line."""


class PretrainedPair(Pair):
    """Models of transformers: decoders, encoders with or without a head, encoder-decoders."""

    def __init__(self, folder: str, teacher: str, config: HealingConfig) -> None:
        super().__init__(folder, teacher, config)
        from rankwise.hf.loading import empty_model

        self.about, other = _config_of(folder, "FOLDER"), _config_of(teacher, "`teacher`")
        self.is_decoder = is_decoder(self.about)
        with quiet():
            empty: Any = empty_model(folder)
        _check_kinds(folder, self.about, teacher, other)
        self.size, self.positions = count(empty), positions_of(empty)
        names = signature(type(empty).forward).parameters
        self.inputs = [name for name in ("input_ids", "decoder_input_ids") if name in names]
        if "input_ids" not in names:
            raise RankwiseError(f"FOLDER must be a model that reads text, but {folder} is a {type(empty).__name__}.")
        self.words: int = self.about.get_text_config().vocab_size
        if self.about.is_encoder_decoder:
            # `rankwise bench` times models that read one text
            self.next_command = "export --to onnx"
        self._check_window()
        self.checkpointing = config.checkpointing
        if self.checkpointing is None:
            self.checkpointing = self.size >= CHECKPOINTED and empty.supports_gradient_checkpointing
        elif self.checkpointing and not empty.supports_gradient_checkpointing:
            raise RankwiseError(
                f"`checkpointing` must be left out for this model: {type(empty).__name__} does not offer it."
            )
        if not getattr(self.about, "quantization_config", None):
            self.notes.append(
                f"{folder} has every layer as its class builds it: it was not compressed, or by width. All of its "
                "weights are trained all the same."
            )

    def _check_window(self) -> None:
        window = self.config.window
        if window is not None and self.positions is not None and window > self.positions:
            raise DataError(
                f"`window` must be at most {self.positions} tokens, which is all the model reads, but is {window}."
            )
        default = WINDOW if self.is_decoder else ENCODER_WINDOW
        self.window = window or min(default, self.positions or default)

    def check_target(self, out: Path, overwrite: bool) -> None:
        from rankwise.hf.saving import check_pretrained_target

        check_pretrained_target(out.resolve(), overwrite)

    def read(self, texts: Sequence[Path], valid: Sequence[Path]) -> str:
        from rankwise.hf.loading import load_tokenizer

        own, other = (load_tokenizer(name, needed=False) for name in (self.folder, self.teacher_name))
        self.tokenizer = tokenizer = own or other
        if tokenizer is None:
            raise CheckpointError(
                f"A text needs the model's tokenizer, but neither {self.folder} nor {self.teacher_name} has one that "
                "loads. Save the tokenizer beside the model."
            )
        found = read_healing_text(
            encoder(tokenizer), texts, valid, number=self.config.steps * self.config.batch_size, window=self.window,
            special=special_tokens(tokenizer, self.about),
        )  # fmt: skip
        check_known(found, tokenizer.unk_token_id, tokenizer.unk_token, self.words, self.folder)
        if own is not None and other is not None:
            _check_tokenizers(own, other, found.held_out_NT[0], self.teacher_name)
        self.text = found
        self.batch_size = min(self.config.batch_size, len(found.train_NT))
        self.accumulate = self._accumulate(self.config.accumulate)
        times = self.config.steps * self.batch_size / len(found.train_NT)
        if times > OFTEN:
            self.notes.append(
                f"{found.name} has {found.train_NT.numel():,} tokens to train on, so each is read {times:.0f} times: "
                "more text would heal better."
            )
        self.held_out = f"{len(found.held_out_NT)} windows held out"
        return found.fingerprint

    def prepare(self) -> None:
        teacher = _plain(open_model(self.teacher_name)).to(self.device).eval().requires_grad_(False)
        parts = torch.split(self.text.held_out_NT, self.batch_size // self.accumulate)
        batches = [dict.fromkeys(self.inputs, part.to(self.device)) for part in parts]
        with torch.no_grad():
            has_logits = isinstance(getattr(teacher(**batches[0]), "logits", None), Tensor)
        kept_back = KeptBack(teacher, batches, is_decoder=self.is_decoder)
        self.measure, self.dense = kept_back.measure, kept_back.dense
        # a decoder by its answers alone, of which there are many; other models by their states too
        distillation = Distillation(
            labels=0, logits=float(has_logits), hidden=float(not self.is_decoder), temperature=1
        )
        self.task = HealingTask(self.text, self.inputs, distillation, kept_back, not self.checkpointing)
        self.teacher = _cast(teacher, torch.bfloat16) if self.device.type == "cuda" else teacher

    def load(self) -> nn.Module:
        model: Any = open_model(self.folder)
        self.dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        self.used_cache = getattr(model.config.get_text_config(), "use_cache", None)
        model = _plain(model)
        if self.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        loaded: nn.Module = model
        return loaded

    def phase(self, steps: int, lr: float) -> LoopConfig:
        more = {"batch_size": self.batch_size, "accumulate": self.accumulate}
        return LoopConfig(**self.config.phase(steps, lr, self.device, **more))

    def _accumulate(self, given: int | None) -> int:
        size = self.batch_size
        if given is not None and size % given:
            raise InvalidValueError(f"`accumulate` must divide the {size} windows of a batch, but is {given} instead.")
        # the answer for a token is as wide as the vocabulary at most
        return given or parts_of_batch(size, self.window, self.words, on_gpu=self.device.type != "cpu")

    def measured(self, model: nn.Module) -> float:
        assert isinstance(self.task, HealingTask)
        return self.task.kept_back.measured(model.to(self.device))

    def rounded(self, model: nn.Module) -> nn.Module:
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(self.dtypes[name]).float()
        return model

    def save(self, model: nn.Module, out: Path, after: float, done: str, overwrite: bool) -> list[str]:
        from rankwise.hf.saving import save_pretrained

        known: Any = model.cpu().eval()
        for name, parameter in known.named_parameters():
            parameter.data = parameter.data.to(self.dtypes[name])
        if self.checkpointing:
            known.gradient_checkpointing_disable()
        if self.used_cache is not None:
            known.config.get_text_config().use_cache = self.used_cache
        quality = {self.measure: (self.dense, after)} if math.isfinite(after) else None
        with quiet():
            left = save_pretrained(
                known, out, tokenizer=self.tokenizer, quality=quality, base_model=self.teacher_name,
                overwrite=overwrite, files_from=self.folder, healing=done,
            )  # fmt: skip
        return [f"Not copied, because only JSON, text and safetensors files are: {', '.join(left)}."] if left else []


def _config_of(name: str, what: str) -> Any:
    """The configuration of a model whose weights can be trained."""
    from transformers import AutoConfig

    from rankwise.hf.format import METHOD

    try:
        with quiet():
            config = AutoConfig.from_pretrained(name, **source_of(name, what))
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{what} must be a folder or name that transformers can load, but {name!r} is not: {first_line(error)}"
        ) from None
    entry = getattr(config, "quantization_config", None) or {}
    method = entry.get("quant_method") if isinstance(entry, dict) else entry.quant_method
    if entry and method != METHOD:
        raise CheckpointError(
            f"{what} must hold its weights unrounded, but {name} is quantized by {method!r}. "
            "Give the folder that it was quantized from."
        )
    return config


def _check_kinds(folder: str, config: Any, teacher: str, other: Any) -> None:
    """Refuse a teacher whose answers or states are not of the same form."""
    kinds = [", ".join(each.architectures or ()) or type(each).__name__ for each in (config, other)]
    decoders = [is_decoder(each) for each in (config, other)]
    if decoders[0] != decoders[1] or (not decoders[0] and kinds[0] != kinds[1]):
        raise RankwiseError(
            f"`teacher` must be of the kind of {folder}, {kinds[0]}, but {teacher} is {kinds[1]}. {REMEDY}"
        )
    # hidden states of encoders are compared, and answers of all models
    names = {"vocab_size": "words"} if decoders[0] else {
        "vocab_size": "words", "hidden_size": "hidden units", "num_hidden_layers": "layers"
    }  # fmt: skip
    pairs = [
        (name, *(getattr(each.get_text_config(), key, None) for each in (config, other))) for key, name in names.items()
    ]
    pairs += [] if decoders[0] else [("labels", config.num_labels, other.num_labels)]
    for name, mine, theirs in pairs:
        if mine != theirs:
            raise RankwiseError(
                f"`teacher` must have as many {name} as {folder}, {mine:,}, but {teacher} has {theirs:,}. {REMEDY}"
            )


def _check_tokenizers(own: Any, other: Any, tokens: Tensor, teacher: str) -> None:
    """Refuse a teacher whose tokenizer has other numbers for the same text."""
    text = own.decode(tokens, skip_special_tokens=True)
    found = [encoder(each)(text) for each in (own, other)]
    if found[0] != found[1]:
        raise RankwiseError(
            f"`teacher` must read the same tokens, but the tokenizer of {teacher} has others for {text[:20]!r}. "
            f"{REMEDY}"
        )


def _plain(model: nn.Module) -> nn.Module:
    """The model with weights in float32, and without a memory of texts, which would take space."""
    known: Any = _cast(model, torch.float32)
    config = known.config.get_text_config()
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return model


def _cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model with weights of that precision; buffers, such as angles of positions, keep theirs."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model
