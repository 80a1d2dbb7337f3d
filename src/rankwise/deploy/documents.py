"""Documents of a JSONL file: texts, and conversations by the tokenizer's chat template, packed into windows of tokens.

A window begins with a document, or goes on in one that is longer than a window. Between two documents stand the tokens
that the model expects there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankwise.errors import DataError, first_line
from rankwise.files import not_utf8, parse_json

BLOCK = 1 << 16
"""Bytes that are read at a time to find where a line begins."""
MOST_UNKNOWN = 0.2
"""The largest share of tokens that a tokenizer may not know."""
NO_TEMPLATE = (
    '{} holds conversations ("messages"), which need a tokenizer with a chat template, but this model has none. Give '
    'each as "text", written as the model expects it.'
)


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


NO_TOKENS = SpecialTokens()


@dataclass(frozen=True)
class TextEncoder:
    """From a text or a conversation to tokens, without special ones around it."""

    tokenizer: Any

    def __call__(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return tokens

    @property
    def end(self) -> list[int]:
        """What stands behind a document."""
        end = self.tokenizer.eos_token_id
        return [end] if isinstance(end, int) else []

    def conversation(self, messages: Any, path: Path) -> list[int]:
        """A list of messages, written as the chat template of the tokenizer says."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise DataError(NO_TEMPLATE.format(path))
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False)
        # templates are programs, which fail in ways of their own
        except Exception as error:
            raise DataError(
                f"The messages of {path} must suit the model's chat template, but do not: {first_line(error)}"
            ) from None
        return self(text)


def check_known(tokens: Tensor, unknown: int | None, token: str | None, what: str, text: str) -> None:
    """Refuse a text most of whose characters the tokenizer does not know; `what` is the argument that gave it."""
    share = 0.0 if unknown is None else float((tokens == unknown).float().mean())
    if share > MOST_UNKNOWN:
        raise DataError(
            f"The tokenizer must know the characters of {what}, but {share:.0%} of the tokens of {text} are {token}, "
            "which stands for all it does not know. Give a text in a language of the model."
        )


def document_windows(
    path: Path,
    encode: Callable[[str], list[int]],
    special: SpecialTokens,
    *,
    wanted: int,
    length: int,
    span: int,
) -> list[list[int]]:
    """As many windows as are wanted, at equal distances, none of which overlap; of a long file only places are read.

    Args:
        special: tokens that the model expects around a document.
        length: tokens of a window, without these at its ends.
        span: bytes that a window takes at most.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        reader = _Reader(path, file, encode, special, length)
        if size < wanted * span:
            every = list(iter(reader.window, None))
            number = min(wanted, len(every))
            return [every[i * len(every) // number] for i in range(number)]
        found = (reader.window(i * size // wanted) for i in range(wanted))
        return [window for window in found if window is not None]


class _Reader:
    """Cuts documents into windows. What does not fit of one that is no longer than a window is left out."""

    def __init__(
        self,
        path: Path,
        file: BufferedReader,
        encode: Callable[[str], list[int]],
        special: SpecialTokens,
        length: int,
    ) -> None:
        self.path, self.file, self.encode, self.length = path, file, encode, length
        self.before = list(special.before)
        self.end: list[int] = [] if special.after else getattr(encode, "end", [])
        self.between = [*special.after, *special.before]
        self.first = self.last = 0
        """Where the line that was read last begins and ends."""
        self.tokens: list[int] = []
        """The document in this line."""
        self.used = 0
        """How many of its tokens are in earlier windows, or were passed by."""

    def window(self, place: int = 0) -> list[int] | None:
        """The first window at or behind a byte of the file, and behind earlier windows; None at the end of the file."""
        if place >= self.last:
            self._seek(place)
            self._read()
        if self._is_long:
            self.used = max(self.used, (place - self.first) * len(self.tokens) // (self.last - self.first))
        window: list[int] = []
        while len(window) < self.length:
            if self.used >= len(self.tokens):
                if not self._read():
                    return None
                continue
            window += self.between if window else []
            if room := max(self.length - len(window), 0):
                window += self.tokens[self.used : self.used + room]
                self.used = self.used + room if self._is_long else len(self.tokens)
        return window[: self.length]

    @property
    def _is_long(self) -> bool:
        return len(self.tokens) > self.length

    def _seek(self, place: int) -> None:
        """Go to the beginning of the line that holds a byte."""
        block, found = place, 0
        while block and not found:
            block, last = max(0, block - BLOCK), block
            self.file.seek(block)
            found = self.file.read(last - block).rfind(b"\n") + 1
        self.last = block + found
        self.file.seek(self.last)

    def _read(self) -> bool:
        """Read the next line, if there is one."""
        line = self.file.readline()
        self.first, self.last, self.used = self.last, self.last + len(line), 0
        self.tokens = self._tokens(line) if line.strip() else []
        return bool(line)

    def _tokens(self, line: bytes) -> list[int]:
        document: Any = None
        try:
            # some editors begin a file with a byte order mark
            found = parse_json(line.decode("utf-8-sig"))
            if b"\\u" in line:
                # bytes that are no text, as Python escapes them, are nothing that a tokenizer reads
                json.dumps(found, ensure_ascii=False).encode()
            document = found
        except UnicodeDecodeError as error:
            raise not_utf8(self.path, self.first, error) from None
        except ValueError:
            pass
        text, messages = (document.get(name) if isinstance(document, dict) else None for name in ("text", "messages"))
        if isinstance(text, str):
            return [*self.encode(text), *self.end] if text.strip() else []
        if not isinstance(messages, list) or not messages:
            raise DataError(
                f'Each line of {self.path} must be a JSON object with "text", or with "messages", a list of '
                f'{{"role": ..., "content": ...}}, but line {self._number()} is '
                f"{line.strip()[:40].decode('utf-8', 'replace')!r}."
            )
        converse = getattr(self.encode, "conversation", None)
        if converse is None:
            raise DataError(NO_TEMPLATE.format(self.path))
        tokens: list[int] = converse(messages, self.path)
        # a template may begin as every window does
        size = len(self.before)
        return tokens[size:] if tokens[:size] == self.before else tokens

    def _number(self) -> int:
        """The number of the line that was just read."""
        with self.path.open("rb") as again:
            return next(number for number, _ in enumerate(again, 1) if again.tell() > self.first)
