"""What one token is: a byte, a character or a word; and how text becomes numbers, block by block.

The numbers given here are provisional (a byte's value, a character's code point, a word's order of first sight).
They are renumbered by frequency when the whole text has been seen, so text is read and split only once.
"""

from __future__ import annotations

import codecs
from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rankwise.files import not_utf8
from rankwise.lab.data.text import Text

Array: TypeAlias = NDArray[Any]
Kind = Literal["byte", "character", "word"]

END_OF_LINE = b"<eos>"
UNKNOWN = b"<unk>"


class Symbols(Protocol):
    """Numbers the tokens of texts."""

    dtype: Any
    """Holds every provisional number."""

    num_special: int
    """The first numbers, which belong to the vocabulary however rare they are."""

    @property
    def num_numbers(self) -> int:
        """All numbers given so far are below this."""

    def number(self, text: Text) -> Iterator[Array]:
        """The provisional numbers of a text, in order."""

    def spell(self, numbers: Array) -> list[bytes]:
        """The tokens that have these numbers."""


class Bytes:
    """Each byte is a token; any file will do."""

    dtype = np.uint8
    num_special = 0
    num_numbers = 256

    def number(self, text: Text) -> Iterator[Array]:
        for block in text.blocks():
            yield np.frombuffer(block, np.uint8)

    def spell(self, numbers: Array) -> list[bytes]:
        return [bytes([number]) for number in numbers.tolist()]


class Characters:
    """Each Unicode character of a UTF-8 text is a token."""

    dtype = np.int32
    num_special = 0
    num_numbers = 0x110000

    def number(self, text: Text) -> Iterator[Array]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        position = 0
        for block in text.blocks():
            waiting = len(decoder.getstate()[0])
            yield _code_points(_decoded(text, block, position - waiting, decoder))
            position += len(block)
        waiting = len(decoder.getstate()[0])
        yield _code_points(_decoded(text, b"", position - waiting, decoder, final=True))

    def spell(self, numbers: Array) -> list[bytes]:
        return [chr(number).encode() for number in numbers.tolist()]


class Words:
    """White space separates words; the end of a line is a word of its own, as in the published WikiText counts."""

    dtype = np.int32
    num_special = 2

    def __init__(self) -> None:
        self._numbers: defaultdict[bytes, int] = defaultdict(count(self.num_special).__next__)
        self._numbers.update({END_OF_LINE: 0, UNKNOWN: 1})

    @property
    def num_numbers(self) -> int:
        return len(self._numbers)

    def number(self, text: Text) -> Iterator[Array]:
        position, rest, block = 0, b"", b""
        for block in text.blocks():
            whole = rest + block
            # white space of one byte: a cut there splits neither a word nor a character
            cut = max(whole.rfind(b" "), whole.rfind(b"\n")) + 1
            yield self._number(text, whole[:cut], position)
            position, rest = position + cut, whole[cut:]
        if block and not block.endswith(b"\n"):
            yield self._number(text, rest + b"\n", position)

    def _number(self, text: Text, block: bytes, position: int) -> Array:
        _decoded(text, block, position)
        words = split_words(block)
        return np.fromiter(map(self._numbers.__getitem__, words), self.dtype, len(words))

    def spell(self, numbers: Array) -> list[bytes]:
        words = list(self._numbers)
        return [words[number] for number in numbers.tolist()]


def split_words(text: bytes) -> list[bytes]:
    """The words of a text, the ends of its lines among them."""
    return text.replace(b"\n", b" " + END_OF_LINE + b" ").split()


def symbols_of(kind: Kind) -> Symbols:
    """A fresh numbering of one kind of token."""
    kinds: dict[Kind, type[Symbols]] = {"byte": Bytes, "character": Characters, "word": Words}
    return kinds[kind]()


def _code_points(text: str) -> Array:
    return np.frombuffer(text.encode("utf-32-le"), "<i4")


def _decoded(
    text: Text, block: bytes, position: int, decoder: codecs.IncrementalDecoder | None = None, final: bool = False
) -> str:
    """A block that starts at `position` of the text, as UTF-8."""
    try:
        return decoder.decode(block, final) if decoder else block.decode()
    except UnicodeDecodeError as error:
        raise not_utf8(text.label, position, error) from None
