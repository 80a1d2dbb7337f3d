"""Text as it is read, in blocks of bytes; what one token of it is (a byte, a character, a word); and the vocabulary.

A text is split once, block by block, into provisional numbers (a byte's value, a character's code point, the order in
which words are first seen). When all of it has been seen, they are replaced by those of the vocabulary, in which the
most frequent token comes first, as the adaptive softmax needs it.
"""

from __future__ import annotations

import codecs
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from rankwise.errors import DataError
from rankwise.files import not_utf8, reason

Array: TypeAlias = NDArray[Any]
Kind = Literal["byte", "character", "word"]
Progress = Callable[[str, int, int | None], None]
"""Called with what is being done, how many bytes of it are done, and of how many (None: not known)."""

BLOCK_BYTES = 4 * 1024 * 1024
END_OF_LINE = b"<eos>"
UNKNOWN = b"<unk>"


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text that can be read more than once."""

    label: str
    """The path or a description of the text, for messages and records."""
    blocks: Callable[[], Iterator[bytes]]
    """Reads it from the start; a block may end inside a word or a character."""
    num_bytes: int | None = None
    """The length of the text, where it is known before reading."""
    path: Path | None = None
    """The file it comes from, if any."""
    digest: str | None = None
    """What that file must hash to, as `algorithm:hexadecimal`."""


def text_of(path: Path, digest: str | None = None) -> Text:
    """The text of a file as it stands."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise unreadable(path, error) from error
    return Text(label=str(path), blocks=lambda: read_blocks(path), num_bytes=size, path=path, digest=digest)


def read_blocks(path: Path) -> Iterator[bytes]:
    """The bytes of a file, a few megabytes at a time."""
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                yield block
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> DataError:
    """The error for a file that cannot be read."""
    return DataError(f"{path} must be a readable file, but: {reason(error)}. Check its name and rights.")


def digest_of(path: Path, algorithm: str = "sha256") -> str:
    """`algorithm:hexadecimal` of a file."""
    digest = hashlib.new(algorithm, usedforsecurity=False)
    for block in read_blocks(path):
        digest.update(block)
    return f"{algorithm}:{digest.hexdigest()}"


def check_digest(path: Path, expected: str, remedy: str) -> None:
    """Refuse a file that is not the expected one, bit for bit."""
    found = digest_of(path, expected.partition(":")[0])
    if found != expected:
        raise DataError(f"{path} must have the checksum {expected}, but has {found} instead. {remedy}")


class Bytes:
    """Each byte is a token; any file can be read.

    As the other two kinds: `number` yields the provisional numbers of a text in order, all below `num_numbers`, in
    `dtype`; `spell` gives the tokens of such numbers. The first `num_special` numbers belong to the vocabulary however
    rare they are.
    """

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


Symbols: TypeAlias = Bytes | Characters | Words
SYMBOLS: dict[Kind, type[Symbols]] = {"byte": Bytes, "character": Characters, "word": Words}


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


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a corpus; a token's number is its place."""

    kind: Kind
    tokens: tuple[bytes, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"Vocabulary({len(self):,} {self.kind}s)"

    @cached_property
    def numbers(self) -> dict[bytes, int]:
        """The number of each token."""
        return {token: number for number, token in enumerate(self.tokens)}

    def encode(self, text: str) -> list[int]:
        """The numbers of a text. An unknown word becomes `<unk>`; an unknown character is refused."""
        if self.kind == "word":
            return self._encode(split_words(text.encode("utf-8", "surrogateescape")))
        if self.kind == "byte":
            return self._encode([bytes([byte]) for byte in text.encode("utf-8", "surrogateescape")])
        return self._encode([character.encode("utf-8", "backslashreplace") for character in text])

    def renumber(self, numbers: Array, of: Vocabulary) -> Array:
        """The numbers here of a text that has `numbers` in another vocabulary; what is unknown, as in `encode`."""
        if self.kind == "byte" and of.kind == "character":
            text = b"".join(of.tokens[number] for number in numbers.tolist())
            numbers, of = np.frombuffer(text, np.uint8), Vocabulary("byte", tuple(bytes([i]) for i in range(256)))
        if self.kind != of.kind:
            raise DataError(f"The text must be read in {self.kind}s, as the model does, but is read in {of.kind}s.")
        used = np.unique(numbers)
        table = np.zeros(len(of), smallest_dtype(len(self)))
        table[used] = self._encode([of.tokens[number] for number in used.tolist()])
        return table[numbers]

    def _encode(self, tokens: Iterable[bytes]) -> list[int]:
        if self.kind == "word":
            unknown = self.numbers[UNKNOWN]
            return [self.numbers.get(token, unknown) for token in tokens]
        try:
            return [self.numbers[token] for token in tokens]
        except KeyError as error:
            raise DataError(
                f"The text must be written in the {len(self):,} {self.kind}s of the corpus, but has "
                f"{error.args[0].decode('utf-8', 'backslashreplace')!r}. Leave it out."
            ) from None

    def decode(self, numbers: Iterable[int]) -> str:
        """The text of some numbers; bytes that are not UTF-8 appear as the replacement character."""
        tokens = (self.tokens[number] for number in numbers)
        if self.kind != "word":
            return b"".join(tokens).decode("utf-8", "replace")
        lines = b" ".join(b"\n" if token == END_OF_LINE else token for token in tokens)
        return lines.decode().replace(" \n", "\n").replace("\n ", "\n")

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "tokens": [token.decode("utf-8", "surrogateescape") for token in self.tokens]}

    @classmethod
    def from_json(cls, data: Any) -> Vocabulary:
        try:
            kind, tokens = data["kind"], tuple(token.encode("utf-8", "surrogateescape") for token in data["tokens"])
        except (KeyError, TypeError, AttributeError, UnicodeEncodeError) as error:
            raise DataError("A saved vocabulary must hold its `kind` and a list of texts, `tokens`.") from error
        if kind not in get_args(Kind):
            raise DataError(f"The `kind` of a vocabulary must be one of {', '.join(get_args(Kind))}, but is {kind!r}.")
        return cls(kind, tokens)


def by_frequency(
    kind: Kind, symbols: Symbols, train_counts: Array, all_counts: Array, min_count: int
) -> tuple[Vocabulary, Array]:
    """The vocabulary, and the final number of every provisional one.

    Words are those that the training text has `min_count` times; all others are `<unk>`. Characters and bytes are
    those of the whole text, so that each of them can be predicted. Equally frequent tokens stand in the
    order of their bytes: the result does not depend on how the text was cut into blocks.
    """
    chosen = train_counts >= min_count if kind == "word" else all_counts > 0
    chosen[: symbols.num_special] = True
    kept = np.flatnonzero(chosen)
    spelled = symbols.spell(kept)
    counts = dict(zip(spelled, train_counts[kept].tolist(), strict=True))
    if kind == "word":
        counts[UNKNOWN] += int(train_counts[~chosen].sum())
    vocabulary = Vocabulary(kind, tuple(sorted(counts, key=lambda token: (-counts[token], token))))
    table = np.full(symbols.num_numbers, vocabulary.numbers.get(UNKNOWN, 0), smallest_dtype(len(vocabulary)))
    table[kept] = [vocabulary.numbers[token] for token in spelled]
    return vocabulary, table


def smallest_dtype(num_types: int) -> type[np.uint8] | type[np.uint16] | type[np.int32]:
    """The smallest of the three that holds every number below `num_types`."""
    if num_types <= 2**8:
        return np.uint8
    return np.uint16 if num_types <= 2**16 else np.int32
