"""Windows of a calibration text: where they lie in it, what stands around them, and which are kept back."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rankwise.errors import DataError, InvalidValueError
from rankwise.files import not_utf8

BYTES_PER_TOKEN = 16
"""More than a token of text has, nearly always."""
BYTES_PER_CHARACTER = 4
"""The most that UTF-8 has."""
MOST_KEPT_BACK = 16


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
class Marks:
    """Special tokens that a model expects around every text."""

    before: tuple[int, ...] = ()
    """Such as BOS or [CLS]."""
    after: tuple[int, ...] = ()
    """Such as [SEP]."""

    def around(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor([*self.before, *tokens, *self.after], dtype=torch.long)

    def shortened(self, window: Tensor, length: int) -> Tensor:
        """The first tokens of a window, with the marks of the whole."""
        last = len(self.after)
        if length >= len(window):
            return window
        return torch.cat([window[: max(length - last, 1)], window[len(window) - last :]])


def text_windows(
    encode: Callable[[str], list[int]],
    calibration: Calibration,
    *,
    bytes_per_token: int = BYTES_PER_TOKEN,
    marks: Marks | None = None,
    more: int = 0,
) -> list[Tensor]:
    """Windows of tokens at equal distances in a text, none of which overlap; of a long one only those places are read.

    Args:
        marks: they are part of a window.
        more: windows beside those that `calibration` asks for. A short text may hold fewer of either.
    """
    marks = marks or Marks()
    wanted = calibration.num_windows + more
    length = calibration.window - len(marks.before) - len(marks.after)
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
    whole = [marks.around(window) for window in found if len(window) == length]
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
