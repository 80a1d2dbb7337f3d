"""Causal language modelling of a Hugging Face decoder on a text of one's own: fine-tune, prune, distil.

`rankwise run causal --text book.txt --model.name FOLDER`. The text is cut into windows of tokens, each after the
token with which the model expects a text to begin, if it has one. Shapes: N = windows, T = tokens of a window.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rankwise.core.plan import LeftOut, Plan, check_not_empty
from rankwise.deploy.inputs import encoder, is_decoder, special_tokens
from rankwise.errors import DataError, RankwiseError
from rankwise.lab.data.vocabulary import Progress, unreadable
from rankwise.lab.tasks.examples import TokenWindows
from rankwise.lab.tasks.language import perplexity
from rankwise.lab.tasks.pretrained import (
    Head,
    KnownModel,
    PretrainedExperiment,
    PretrainedTask,
    check_share,
    load_config,
    load_tokenizer,
)  # fmt: skip
from rankwise.measure import evaluating

DECODERS = {"causal": KnownModel("HuggingFaceTB/SmolLM2-135M", 134_515_008, 106_168_320, 269)}
"""Decoders by preset."""
DECODER = Head("AutoModelForCausalLM", "predicts the next token")
EVALUATION_BATCH = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenizedText:
    """Windows of a text in the numbers of a model's tokenizer."""

    name: str
    train: Tensor
    """(N, T)"""
    valid: tuple[Tensor, ...]
    """Windows of (1, T); the last may be shorter."""
    test: tuple[Tensor, ...]
    fingerprint: str

    def record(self) -> dict[str, Any]:
        splits = {"train": (self.train,), "valid": self.valid, "test": self.test}
        tokens = {name: sum(window.numel() for window in windows) for name, windows in splits.items()}
        return {"name": self.name, "tokens": tokens, "fingerprint": self.fingerprint}


@dataclass(frozen=True, kw_only=True)
class CausalExperiment(PretrainedExperiment):
    """Fine-tune a decoder on a text, prune it to a size, heal it, and compare what comes out."""

    key: ClassVar[str] = "text"
    base_settings: ClassVar[tuple[str, ...]] = ("held_out", *PretrainedExperiment.base_settings)
    variant_settings: ClassVar[tuple[str, ...]] = ("held_out", "embeddings", *PretrainedExperiment.variant_settings)
    known_models: ClassVar[dict[str, KnownModel]] = DECODERS

    text: str | None = None
    """A text file, UTF-8."""
    held_out: float = 0.05
    """The share at the end of the text that is kept from training: once to choose settings on, once to report."""
    embeddings: bool = False
    """Prune the table of words too, and the output layer that is tied to it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "held_out", 0.4)

    @property
    def reads(self) -> str:
        return "a text of your own" if self.text is None else self.text

    def check_model(self) -> None:
        check_decoder(self.model.name, self.model.max_length)
        super().check_model()

    def read(self, progress: Progress | None = None) -> TokenizedText:
        if self.text is None:
            raise DataError("`text` must be a text file, but is not given. Example: --text book.txt.")
        name, length = self.model.name, self.model.max_length
        config = load_config(name)
        tokenizer = load_tokenizer(name)
        text = _read_text(Path(self.text))
        numbers = torch.tensor(encoder(tokenizer)(text), dtype=torch.long)
        words = config.get_text_config().vocab_size
        if len(numbers) and int(numbers.max()) >= words:
            raise DataError(
                f"The tokenizer of {name} must give numbers below {words:,}, the words of the model, but gives "
                f"{int(numbers.max()):,}. Save the model's own tokenizer beside it."
            )
        before = torch.tensor(special_tokens(tokenizer, config).before, dtype=torch.long)
        held = int(self.held_out * len(numbers))
        ends = len(numbers) - 2 * held, len(numbers) - held
        parts = {"train": numbers[: ends[0]], "valid": numbers[ends[0] : ends[1]], "test": numbers[ends[1] :]}
        windows = {split: _windows(part, before, length) for split, part in parts.items()}
        whole = [window for window in windows["train"] if window.shape[1] == length]
        if not whole or held < 2:
            raise DataError(
                f"{self.text} must hold at least a window of {length} tokens to train on, and 2 tokens in each share "
                f"that is held out ({self.held_out:g}), but has {len(numbers):,} tokens. "
                "Give more text, a larger --held_out or a smaller --model.max_length."
            )
        return TokenizedText(
            name=Path(self.text).name,
            train=torch.cat(whole),
            valid=tuple(windows["valid"]),
            test=tuple(windows["test"]),
            fingerprint=hashlib.sha256(numbers.numpy().tobytes()).hexdigest(),
        )

    def make_task(self, data: TokenizedText) -> CausalTask:
        return CausalTask(self, data)

    def portable(self) -> CausalExperiment:
        return replace(self, text=None)


class CausalTask(PretrainedTask[CausalExperiment, TokenizedText]):
    """A decoder that predicts the next token."""

    @cached_property
    def train(self) -> TokenWindows:
        return TokenWindows(self.data.train.to(self.device), ("input_ids", "labels"))

    def open(self, name: str | os.PathLike[str]) -> nn.Module:
        return DECODER.load(name)

    def plan(self, model: nn.Module) -> Plan:
        plan = super().plan(model)
        if self.experiment.embeddings:
            return plan
        tables = [site for site in plan.sites if site.has_embedding]
        left_out = [LeftOut(site.name, site.params, "a table of words, see `embeddings`") for site in tables]
        plan = Plan(tuple(site for site in plan.sites if site not in tables), (*plan.left_out, *left_out))
        check_not_empty(plan)
        return plan

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: str) -> dict[str, float]:
        """Perplexity per token, in float32, each window on its own."""
        windows = getattr(self.data, split)
        total, num_targets = 0.0, 0
        known: Any = model.to(self.device)
        with evaluating(model):
            for batch in _batched(windows):
                tokens = batch.to(self.device)
                targets = tokens.shape[0] * (tokens.shape[1] - 1)
                total += float(known(input_ids=tokens, labels=tokens).loss) * targets
                num_targets += targets
        loss = total / num_targets
        return {"loss": loss, "perplexity": perplexity(loss), "num_targets": num_targets}

    def example(self) -> dict[str, Tensor]:
        return {"input_ids": self.data.train[:1].to(self.device)}


def _read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} must be UTF-8, but is not: {error}.") from None
    if not text.strip():
        raise DataError(f"{path} must hold a text, but is empty.")
    return text


def _windows(numbers: Tensor, before: Tensor, length: int) -> list[Tensor]:
    """Windows of (1, T), in which every number is a target once; without a beginning, the first number is none.

    A window that does not begin with `before` begins with the last number of the one before it.
    """
    step = length - max(1, len(before))
    overlap = 0 if len(before) else 1
    found = []
    for start in range(0, max(1, len(numbers) - overlap), step):
        part = torch.cat([before, numbers[start : start + step + overlap]])
        if len(part) > 1:
            found.append(part[None])
    return found


def _batched(windows: tuple[Tensor, ...]) -> Iterator[Tensor]:
    """Windows of the same length together."""
    whole = [window for window in windows if window.shape[1] == windows[0].shape[1]]
    for start in range(0, len(whole), EVALUATION_BATCH):
        yield torch.cat(whole[start : start + EVALUATION_BATCH])
    yield from windows[len(whole) :]


def check_decoder(name: str | os.PathLike[str], max_length: int) -> None:
    """Refuse a model that does not predict the next token, or reads no windows of `max_length`."""
    config = load_config(name)
    if not is_decoder(config):
        kind = ", ".join(config.architectures or ()) or type(config).__name__
        raise RankwiseError(
            f"`model.name` must be a decoder with a head for the next token, but {name} is {kind}. "
            "Give one that was saved with its head, as by AutoModelForCausalLM."
        )
    DECODER.check(config, name, max_length)
