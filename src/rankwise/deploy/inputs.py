"""What a model reads: made-up inputs, to export and time it, and windows of a text, to calibrate and measure it.

Windows lie at equal distances in the text. Compression sees most of them; those that are kept back tell what was lost.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankwise.deploy.documents import NO_TOKENS, SpecialTokens, TextEncoder, document_windows
from rankwise.errors import CheckpointError, DataError, InvalidValueError
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
MUCH = {PERPLEXITY: 1.1, ANSWERS: 1.1, ERROR: 0.1}
"""Above this loss other ranks are worth a try: the factor by which a perplexity grows, or the error itself."""
LARGEST = 700.0
"""Nats whose exponential is a number."""


def example_inputs(model: nn.Module, batch: int, length: int) -> dict[str, Any]:
    """Random tokens, and a state or a mask where the model takes one, by the names of its arguments.

    The model must be one of transformers that reads tokens, or offer `example_inputs(tokens)`. Of several texts the
    first is padded on the left and the second on the right.
    """
    for name, value in (("batch", batch), ("length", length)):
        if type(value) is not int or value < 1:
            raise InvalidValueError(f"`{name}` must be a whole number of at least 1, but is {value!r} instead.")
    generator = torch.Generator().manual_seed(0)

    def tokens(num_words: int) -> Tensor:
        return torch.randint(0, num_words, (batch, length), generator=generator)

    config: Any = getattr(model, "config", None)
    if callable(own := getattr(model, "example_inputs", None)):
        inputs: dict[str, Any] = own(tokens(config.num_words))
        return inputs
    if config is None or not hasattr(model, "get_input_embeddings"):
        raise CheckpointError(
            f"Inputs can be made up for language models of rankwise and of transformers, but not for a "
            f"{type(model).__name__}. Give your own."
        )
    most, num_words = positions_of(model), config.get_text_config().vocab_size
    if most is not None and length > most:
        raise CheckpointError(f"`length` must be at most {most} for this model, but is {length} instead.")
    ids = tokens(num_words)
    mask, padding = torch.ones_like(ids), length // 3
    if batch > 1 and padding:
        mask[0, :padding] = 0
        mask[1, -padding:] = 0
    more = {"decoder_input_ids": tokens(num_words)} if config.is_encoder_decoder else {}
    return {"input_ids": ids, "attention_mask": mask, **more}


def positions_of(model: Any) -> int | None:
    """How many tokens a model of transformers is sure to read; None where it sets no bound."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 0:
        return None
    # positions begin after the padding row, where the table has one (RoBERTa, MPNet); it may be a low-rank pair
    tables = (module for name, module in model.named_modules() if "position_embeddings" in name)
    pads = [int(table.padding_idx) for table in tables if getattr(table, "padding_idx", None) is not None]
    return positions - max(pads, default=-1) - 1


def model_class(config: Any) -> Any:
    """The class of transformers that a configuration names in `architectures`; None where it names none."""
    import transformers

    names = config.architectures
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        return None
    # a configuration may name anything that transformers has: only a model that it makes itself is one
    found = getattr(transformers, names[0], None) if names[0].isidentifier() else None
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return found if is_model and isinstance(config, getattr(found, "config_class", None) or ()) else None


def is_decoder(config: Any) -> bool:
    """Whether the model of a configuration predicts the next token of a text, or names no class."""
    kind = model_class(config)
    return not config.is_encoder_decoder and (kind is None or bool(kind.can_generate()))


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Texts, and how much of them is read."""

    file: Path | None
    """A text, or a JSONL file of documents; None: windows that a decoder generates itself."""
    also: tuple[Path, ...] = ()
    """Further texts; each text gives equally many windows."""
    generated: bool = False
    """Whether as many windows as of each text are those that a decoder generates itself."""
    elsewhere: tuple[Path, ...] = ()
    """Texts of other kinds, on which the models are compared too, and which are for nothing else."""
    num_windows: int = 64
    """Windows, at equal distances in a text. A quarter as many more are kept back, to say what was lost."""
    window: int = 256
    """Tokens of a window."""
    loss_window: int = 256
    """Tokens at the start of a window by which gradients are measured: they take more memory and time."""

    def __post_init__(self) -> None:
        for name in ("num_windows", "window", "loss_window"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                option = " (--windows)" if name == "num_windows" else ""
                raise InvalidValueError(
                    f"`{name}`{option} must be a whole number of at least 1, but is {value!r} instead."
                )

    @property
    def files(self) -> tuple[Path, ...]:
        """All texts."""
        return () if self.file is None else (self.file, *self.also)

    @property
    def num_kept_back(self) -> int:
        """Windows that are kept back from calibration, to compare the models on."""
        return max(1, min(self.num_windows // 4, MOST_KEPT_BACK))


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


def encoder(tokenizer: Any) -> TextEncoder:
    """From a text to its tokens, without special ones around it."""
    return TextEncoder(tokenizer)


class Windows(NamedTuple):
    """Windows of a text."""

    used: list[Tensor]
    shortened: list[Tensor]
    """The beginnings of those that are used, by which gradients are measured."""
    kept_back: list[Tensor]
    """They lie between the others; of a single window none is kept back."""
    notes: list[str]
    """What a user should know about them."""
    elsewhere: Mapping[str, list[Tensor]] = MappingProxyType({})
    """Windows of texts of other kinds, by name."""

    def mixed(self, other: Windows, name: str) -> Windows:
        """These and the windows of another text, on which models are then compared under its name."""
        used, shortened = (
            [window for both in zip_longest(*parts) for window in both if window is not None]
            for parts in ((self.used, other.used), (self.shortened, other.shortened))
        )
        elsewhere = {**self.elsewhere, name: other.kept_back}
        return Windows(used, shortened, self.kept_back, [*self.notes, *other.notes], elsewhere)

    @property
    def compared(self) -> Mapping[str, list[Tensor]]:
        """Those on which models are compared, by name; those kept back are ""."""
        return {"": self.kept_back, **self.elsewhere} if self.kept_back else {}


def read_windows(
    encode: Callable[[str], list[int]],
    calibration: Calibration,
    *,
    bytes_per_token: int = BYTES_PER_TOKEN,
    special: SpecialTokens = NO_TOKENS,
) -> Windows:
    """Windows of the texts of a calibration, and those that are kept back."""
    more = calibration.num_kept_back
    files = calibration.files
    parts = []
    for i, file in enumerate(files):
        # the first ones give one more where the number cannot be divided
        number, back = (whole // len(files) + (i < whole % len(files)) for whole in (calibration.num_windows, more))
        part = replace(calibration, file=file, also=(), num_windows=max(number, 1))
        parts.append(text_windows(encode, part, bytes_per_token=bytes_per_token, special=special, more=back))
    # in turns, so that windows kept back are of all texts
    found = [window for some in zip_longest(*parts) for window in some if window is not None]
    elsewhere = windows_elsewhere(encode, calibration, bytes_per_token=bytes_per_token, special=special)
    return kept_apart(found, calibration, special=special)._replace(elsewhere=elsewhere)


def windows_elsewhere(
    encode: Callable[[str], list[int]], calibration: Calibration, **how: Any
) -> dict[str, list[Tensor]]:
    """Windows of each text of another kind, as many as are kept back; `how` as for `text_windows`."""
    part = replace(calibration, num_windows=calibration.num_kept_back)
    given = {path: replace(part, file=path) for path in calibration.elsewhere}
    return {str(path): text_windows(encode, one, **how, what="`measure`") for path, one in given.items()}


def kept_apart(found: Sequence[Tensor], calibration: Calibration, *, special: SpecialTokens = NO_TOKENS) -> Windows:
    """Windows for calibration, and those that are kept back."""
    more = calibration.num_kept_back
    wanted, number = calibration.num_windows + more, len(found)
    num_back = max(number * more // wanted, 1) if number > 1 else 0
    places = {(2 * i + 1) * number // (2 * num_back) for i in range(num_back)}
    used = [window for i, window in enumerate(found) if i not in places]
    texts = ", ".join(map(str, calibration.files))
    note = (
        f"{texts} holds {number} windows of {calibration.window} tokens, fewer than the {wanted} asked for: "
        f"{len(used)} calibrate, {num_back} are kept back."
    )
    return Windows(
        used=used,
        shortened=[special.shortened(window, calibration.loss_window) for window in used],
        kept_back=[found[i] for i in sorted(places)],
        notes=[note] if number < wanted else [],
    )


def text_windows(
    encode: Callable[[str], list[int]],
    calibration: Calibration,
    *,
    bytes_per_token: int = BYTES_PER_TOKEN,
    special: SpecialTokens = NO_TOKENS,
    more: int = 0,
    what: str = "`calibration`",
) -> list[Tensor]:
    """Windows of tokens at equal distances in a text, none of which overlap; of a long one only those places are read.

    A JSONL file holds documents (`rankwise.deploy.documents`).

    Args:
        special: tokens around every window; they count as part of it.
        more: windows beside those that `calibration` asks for. A short text may hold fewer of either.
        what: how errors call the text.
    """
    assert calibration.file is not None
    wanted = calibration.num_windows + more
    length = calibration.window - len(special.before) - len(special.after)
    if length < 1:
        raise DataError(
            f"`window` must be longer than the {calibration.window - length} special tokens of the model, "
            f"but is {calibration.window} instead."
        )
    span = length * bytes_per_token
    try:
        path = calibration.file
        size = path.stat().st_size
        with path.open("rb") as file:

            def tokens(first: int, num_bytes: int) -> list[int]:
                file.seek(first)
                return encode(_decoded(path, file.read(num_bytes), first))

            if path.suffix.lower() == ".jsonl":
                found = document_windows(path, encode, special, wanted=wanted, length=length, span=span) or [[]]
            elif size >= wanted * span:
                found = [tokens(i * size // wanted, span)[:length] for i in range(wanted)]
            else:
                every = tokens(0, size)
                whole = len(every) // length
                number = min(wanted, whole)
                starts = [i * whole // number * length for i in range(number)]
                found = [every[start : start + length] for start in starts] or [every]
    except OSError as error:
        raise DataError(f"{what} must be a text, but {calibration.file} is not: {error.strerror}.") from None
    windows = [special.around(window) for window in found if len(window) == length]
    if not windows:
        raise DataError(
            f"{what} must hold at least one window of {calibration.window} tokens, but {calibration.file} has "
            f"{max(map(len, found))}. Give a longer text, or shorter windows."
        )
    return windows


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
    elsewhere: dict[str, tuple[float, float]] = field(default_factory=dict)
    """The measure of both on texts of other kinds, by name."""

    @property
    def is_bad(self) -> bool:
        """Whether so much was lost that other ranks are worth a try."""
        return self.small > MUCH[self.measure] * (1.0 if self.measure == ERROR else self.dense)

    def __str__(self) -> str:

        def both(dense: float, small: float) -> str:
            return f"{small:.4g}" if self.measure == ERROR else f"{dense:.4g} dense, {small:.4g} small"

        others = "".join(f", {both(*pair)} on {name}" for name, pair in self.elsewhere.items())
        return f"{self.measure} {both(self.dense, self.small)} on {self.windows} windows kept back{others}"


class KeptBack:
    """Windows that calibration does not see. They measure a decoder by the text, and other models by the dense one.

    Args:
        texts: for each batch the name of the text of another kind that it is of, or "".
    """

    def __init__(
        self, model: nn.Module, batches: Sequence[Any], *, is_decoder: bool, texts: Sequence[str] | None = None
    ) -> None:
        self.batches, self.measure, self.texts = batches, PERPLEXITY, texts or [""] * len(batches)
        if is_decoder:
            inputs = (batch["input_ids"] if isinstance(batch, Mapping) else batch for batch in batches)
            self.wanted = [tokens[:, 1:] for tokens in inputs]
        else:
            self.wanted = [answer.cpu() for answer in self._answers(model, likeliest=True)]
            self.measure = ERROR if self.wanted[0].is_floating_point() else ANSWERS
        self.dense_on = self.measured_on(model)
        self.dense = self.dense_on[""]

    def quality(self, small: nn.Module) -> Quality:
        """The small model beside the dense one."""
        found = self.measured_on(small)
        elsewhere = {name: (self.dense_on[name], value) for name, value in found.items() if name}
        windows = sum(len(wanted) for name, wanted in zip(self.texts, self.wanted, strict=True) if not name)
        return Quality(self.measure, self.dense, found[""], windows, elsewhere)

    def measured(self, model: nn.Module) -> float:
        """The measure of a model, on the device where it is."""
        return self.measured_on(model)[""]

    def measured_on(self, model: nn.Module) -> dict[str, float]:
        """The measure on each text of another kind, and as "" on the windows kept back."""
        totals, numbers = dict.fromkeys(self.texts, 0.0), dict.fromkeys(self.texts, 0.0)
        for name, wanted, answer in zip(self.texts, self.wanted, self._answers(model), strict=True):
            answer, wanted = answer.float(), wanted.to(answer.device)
            if self.measure == ERROR:
                totals[name] += (answer - wanted.float()).square().sum().item()
                numbers[name] += wanted.float().square().sum().item()
            else:
                # of a decoder all but the last position say what comes next
                logits = answer[:, : wanted.shape[1]].flatten(0, 1)
                totals[name] += F.cross_entropy(logits, wanted.flatten(), reduction="sum").item()
                numbers[name] += wanted.numel()
        return {name: self._figure(total, numbers[name]) for name, total in totals.items()}

    def _figure(self, total: float, number: float) -> float:
        if self.measure == ERROR:
            return math.sqrt(total / number) if number else 0.0
        mean = total / max(number, 1)
        # NaN counts as the worst
        return math.exp(min(mean, LARGEST)) if math.isfinite(mean) else math.inf

    def _answers(self, model: nn.Module, *, likeliest: bool = False) -> Iterator[Tensor]:
        with torch.inference_mode(), evaluating(model):
            for batch in self.batches:
                output = call_model(model, batch)
                answer = output.logits if hasattr(output, "logits") else output[0]
                words = getattr(getattr(model, "config", None), "vocab_size", None)
                yield answer.argmax(-1) if likeliest and answer.shape[-1] == words else answer
