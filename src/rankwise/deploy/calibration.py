"""A calibration text: its windows of tokens, those that are kept back, and how well a model does on these.

Windows lie at equal distances in the text. Compression sees most of them; the others tell what was lost.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankwise.deploy.inputs import is_decoder
from rankwise.errors import DataError, InvalidValueError
from rankwise.files import not_utf8
from rankwise.measure import call_model, evaluating

BYTES_PER_TOKEN = 16
"""More bytes than nearly every token of a text has."""
BYTES_PER_CHARACTER = 4
"""The most bytes that a character has in UTF-8."""
MOST_KEPT_BACK = 16
PERPLEXITY = "perplexity"
ANSWERS = "perplexity of the dense model's likeliest words"
ERROR = "relative error of the outputs"
MUCH = {PERPLEXITY: 1.5, ANSWERS: 1.5, ERROR: 0.3}
"""What counts as a large loss: the factor by which a perplexity grows, or the error itself."""
LARGEST = 700.0
"""Nats whose exponential is a number."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A text, and how much of it is read."""

    file: Path
    num_windows: int = 64
    """Windows, at equal distances in the text. A quarter as many more are kept back, to say what was lost."""
    window: int = 256
    """Tokens of a window."""
    loss_window: int = 32
    """Tokens at the start of a window by which gradients are measured: they take far more memory."""

    def __post_init__(self) -> None:
        for name in ("num_windows", "window", "loss_window"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                option = " (--windows)" if name == "num_windows" else ""
                raise InvalidValueError(
                    f"`{name}`{option} must be a whole number of at least 1, but is {value!r} instead."
                )

    @property
    def num_kept_back(self) -> int:
        return max(1, min(self.num_windows // 4, MOST_KEPT_BACK))


@dataclass(frozen=True)
class SpecialTokens:
    """Special tokens that a model expects before and after every text."""

    before: tuple[int, ...] = ()
    """Such as BOS or [CLS]."""
    after: tuple[int, ...] = ()
    """Such as [SEP]."""

    def around(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor([*self.before, *tokens, *self.after], dtype=torch.long)

    def shortened(self, window: Tensor, length: int) -> Tensor:
        """The first tokens of a window, with the special tokens of the whole window."""
        last = len(self.after)
        if length >= len(window):
            return window
        return torch.cat([window[: max(length - last, 1)], window[len(window) - last :]])


def special_tokens(tokenizer: Any, config: Any) -> SpecialTokens:
    """The special tokens that a model expects around a text: those that its tokenizer adds.

    A decoder gets BOS first, which not every tokenizer adds, and nothing after a text that goes on.
    """
    plain, whole = (tokenizer("a", add_special_tokens=added, verbose=False)["input_ids"] for added in (False, True))
    places = [i for i in range(len(whole)) if whole[i : i + len(plain)] == plain] if plain else []
    before, after = (tuple(whole[: places[0]]), tuple(whole[places[0] + len(plain) :])) if places else ((), ())
    if config is not None and is_decoder(config):
        text = config.get_text_config()
        first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else getattr(text, "bos_token_id", None)
        known = isinstance(first, int) and 0 <= first < text.vocab_size
        return SpecialTokens(before or ((first,) if known else ()))
    if not before and not after and None not in (tokenizer.cls_token_id, tokenizer.sep_token_id):
        return SpecialTokens((tokenizer.cls_token_id,), (tokenizer.sep_token_id,))
    return SpecialTokens(before, after)


def encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """From a text to its tokens, without special ones around it."""
    return lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


class Windows(NamedTuple):
    """Windows of a text."""

    used: list[Tensor]
    kept_back: list[Tensor]
    notes: list[str]
    """What a user should know about them."""


def read_windows(
    encode: Callable[[str], list[int]],
    calibration: Calibration,
    *,
    bytes_per_token: int = BYTES_PER_TOKEN,
    special: SpecialTokens | None = None,
) -> Windows:
    """Windows of a text for calibration, and those that are kept back."""
    more = calibration.num_kept_back
    found = text_windows(encode, calibration, bytes_per_token=bytes_per_token, special=special, more=more)
    used, back = split(found, calibration)
    note = (
        f"{calibration.file} holds {len(found)} windows of {calibration.window} tokens, fewer than the "
        f"{calibration.num_windows + more} asked for: {len(used)} calibrate, {len(back)} are kept back."
    )
    return Windows(used, back, [note] if len(found) < calibration.num_windows + more else [])


def text_windows(
    encode: Callable[[str], list[int]],
    calibration: Calibration,
    *,
    bytes_per_token: int = BYTES_PER_TOKEN,
    special: SpecialTokens | None = None,
    more: int = 0,
) -> list[Tensor]:
    """Windows of tokens at equal distances in a text, none of which overlap; of a long one only those places are read.

    Args:
        special: tokens around every window; they count as part of it.
        more: windows beside those that `calibration` asks for. A short text may hold fewer of either.
    """
    special = special or SpecialTokens()
    wanted = calibration.num_windows + more
    length = calibration.window - len(special.before) - len(special.after)
    if length < 1:
        raise DataError(
            f"`window` must be longer than the {calibration.window - length} special tokens of the model, "
            f"but is {calibration.window} instead."
        )
    span = length * bytes_per_token
    try:
        size = calibration.file.stat().st_size
        with calibration.file.open("rb") as file:

            def tokens(first: int, num_bytes: int) -> list[int]:
                file.seek(first)
                return encode(_decoded(calibration.file, file.read(num_bytes), first))

            if size >= wanted * span:
                found = [tokens(i * size // wanted, span)[:length] for i in range(wanted)]
            else:
                found = _cut(tokens(0, size), length, wanted)
    except OSError as error:
        raise DataError(f"`calibration` must be a text, but {calibration.file} is not: {error.strerror}.") from None
    whole = [special.around(window) for window in found if len(window) == length]
    if not whole:
        raise DataError(
            f"`calibration` must hold at least one window of {calibration.window} tokens, but {calibration.file} has "
            f"{max(map(len, found))}. Give a longer text, or shorter windows."
        )
    return whole


def _cut(tokens: list[int], length: int, wanted: int) -> list[list[int]]:
    """As many windows of a short text as are wanted, or as it has; its beginning where it has none."""
    whole = len(tokens) // length
    number = min(wanted, whole)
    starts = [i * whole // number * length for i in range(number)]
    return [tokens[start : start + length] for start in starts] or [tokens]


def split(windows: Sequence[Tensor], calibration: Calibration) -> tuple[list[Tensor], list[Tensor]]:
    """Windows for calibration, and those that are kept back, which lie between them; of a single window none is."""
    number, wanted = len(windows), calibration.num_windows + calibration.num_kept_back
    back = calibration.num_kept_back if number >= wanted else number * calibration.num_kept_back // wanted
    back = max(back, 1) if number > 1 else 0
    places = {(2 * i + 1) * number // (2 * back) for i in range(back)}
    return (
        [window for i, window in enumerate(windows) if i not in places],
        [window for i, window in enumerate(windows) if i in places],
    )


def _decoded(path: Path, block: bytes, first: int) -> str:
    """A block that begins at byte `first` of a text, without the characters that are cut at its ends."""
    cut = 0
    while first > 0 and cut < min(BYTES_PER_CHARACTER - 1, len(block)) and block[cut] & 0xC0 == 0x80:
        cut += 1
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(block[cut:])
    except UnicodeDecodeError as error:
        raise not_utf8(path, first + cut, error) from None


@dataclass(frozen=True)
class Quality:
    """One measure of the dense model and of the small one, on windows kept back from calibration; less is better."""

    measure: str
    dense: float
    small: float
    windows: int

    @property
    def is_bad(self) -> bool:
        """Whether so much was lost that other ranks are worth a try."""
        return self.small > MUCH[self.measure] * (1.0 if self.measure == ERROR else self.dense)

    def __str__(self) -> str:
        both = f"{self.small:.4g}" if self.measure == ERROR else f"{self.dense:.4g} dense, {self.small:.4g} small"
        return f"{self.measure} {both} on {self.windows} windows kept back"


class KeptBack:
    """Windows that calibration does not see. They measure a decoder by the text, and other models by the dense one."""

    def __init__(self, model: nn.Module, batches: Sequence[Any], *, is_decoder: bool) -> None:
        self.batches = batches
        self.wanted: list[Tensor] = []
        self.measure = PERPLEXITY
        if is_decoder:
            self.wanted = [_tokens_of(batch)[:, 1:] for batch in batches]
        else:
            answers = [answer.cpu() for answer in self._answers(model, likeliest=True)]
            self.measure = ERROR if answers[0].is_floating_point() else ANSWERS
            self.wanted = answers
        self.dense = self.measured(model)

    def quality(self, small: nn.Module) -> Quality:
        """The small model beside the dense one."""
        return Quality(self.measure, self.dense, self.measured(small), len(self.batches))

    def measured(self, model: nn.Module) -> float:
        """The measure of a model, on the device where it is."""
        total, number = 0.0, 0.0
        for wanted, answer in zip(self.wanted, self._answers(model), strict=True):
            if self.measure == ERROR:
                total += (answer.float() - wanted.to(answer.device).float()).square().sum().item()
                number += wanted.float().square().sum().item()
                continue
            # of a decoder all but the last position say what comes next
            logits = answer[:, : wanted.shape[1]].flatten(0, 1)
            total += F.cross_entropy(logits.float(), wanted.to(logits.device).flatten(), reduction="sum").item()
            number += wanted.numel()
        if self.measure == ERROR:
            return math.sqrt(total / number) if number else 0.0
        mean = total / max(number, 1)
        # NaN counts as the worst
        return math.exp(min(mean, LARGEST)) if math.isfinite(mean) else math.inf

    def _answers(self, model: nn.Module, *, likeliest: bool = False) -> Any:
        with torch.inference_mode(), evaluating(model):
            for batch in self.batches:
                output = call_model(model, batch)
                answer = output.logits if hasattr(output, "logits") else output[0]
                words = getattr(getattr(model, "config", None), "vocab_size", None)
                yield answer.argmax(-1) if likeliest and answer.shape[-1] == words else answer


def _tokens_of(batch: Any) -> Tensor:
    tokens: Tensor = batch["input_ids"] if isinstance(batch, Mapping) else batch
    return tokens
