"""Documents of a JSONL file: texts, and conversations by the tokenizer's chat template, packed into windows of tokens.

A window begins with a document, or goes on in one that is longer than a window. Between two documents stand the tokens
that the model expects there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankwise.errors import DataError, first_line
from rankwise.files import not_utf8, parse_json

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

    A place within a document that is longer than the distance gives the next window of this document.

    Args:
        special: tokens that the model expects around a document.
        length: tokens of a window, without these at its ends.
        span: bytes that a window takes at most.
    """
    size = path.stat().st_size
    end = [] if special.after else getattr(encode, "end", [])
    between = [*special.after, *special.before]

    with path.open("rb") as file:

        def windows(first: int) -> Iterator[list[int]]:
            return packed(_documents(path, file, first, encode, special.before, end), length, between)

        if size < wanted * span:
            found = list(windows(0))
            number = min(wanted, len(found))
            return [found[i * len(found) // number] for i in range(number)]
        current: Iterator[list[int]] = iter(())
        found = list[list[int]]()
        for first in (i * size // wanted for i in range(wanted)):
            # what was read already is not read again
            current = windows(first) if first >= file.tell() else current
            found += islice(current, 1)
        return found


def packed(documents: Iterable[list[int]], length: int, between: Sequence[int]) -> Iterator[list[int]]:
    """Windows of documents one behind the other, with `between` between two.

    What does not fit of a document that is shorter than a window is left out.
    """
    current: list[int] = []
    for document in documents:
        current += [*between, *document] if current else document
        while len(current) >= length:
            yield current[:length]
            current = current[length:] if len(document) > length else []


def _documents(
    path: Path,
    file: BufferedReader,
    first: int,
    encode: Callable[[str], list[int]],
    before: Sequence[int],
    end: Sequence[int],
) -> Iterator[list[int]]:
    """The tokens of each line that has any, from the first one that begins at or behind byte `first`."""
    # back by one: a line may begin right there
    file.seek(max(0, first - 1))
    if first:
        file.readline()
    for line in file:
        if line.strip() and (tokens := _tokens(path, file, line, encode, before, end)):
            yield tokens


def _tokens(
    path: Path,
    file: BufferedReader,
    line: bytes,
    encode: Callable[[str], list[int]],
    before: Sequence[int],
    end: Sequence[int],
) -> list[int]:
    document: Any = None
    try:
        # some editors begin a file with a byte order mark
        found = parse_json(line.decode("utf-8-sig"))
        if b"\\u" in line:
            # bytes that are no text, as Python escapes them, are nothing that a tokenizer reads
            json.dumps(found, ensure_ascii=False).encode()
        document = found
    except UnicodeDecodeError as error:
        raise not_utf8(path, file.tell() - len(line), error) from None
    except ValueError:
        pass
    text, messages = (document.get(name) if isinstance(document, dict) else None for name in ("text", "messages"))
    if isinstance(text, str):
        return [*encode(text), *end] if text.strip() else []
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f'Each line of {path} must be a JSON object with "text", or with "messages", a list of {{"role": ..., '
            f'"content": ...}}, but line {_number(path, file)} is {line.strip()[:40].decode("utf-8", "replace")!r}.'
        )
    converse = getattr(encode, "conversation", None)
    if converse is None:
        raise DataError(NO_TEMPLATE.format(path))
    tokens: list[int] = converse(messages, path)
    # a template may begin as every window does
    return tokens[len(before) :] if before and tokens[: len(before)] == list(before) else tokens


def _number(path: Path, file: BufferedReader) -> int:
    """The number of the line that was just read."""
    last = file.tell()
    with path.open("rb") as again:
        return again.read(last).rstrip(b"\n").count(b"\n") + 1
