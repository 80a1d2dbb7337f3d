"""The vocabulary: tokens and their numbers, the most frequent first, as the adaptive softmax needs them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

import numpy as np

from rankwise.errors import DataError
from rankwise.lab.data.symbols import END_OF_LINE, UNKNOWN, Array, Kind, Symbols, split_words


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
        """The text of some numbers; bytes that are no UTF-8 appear as the replacement character."""
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
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError("A saved vocabulary must hold its `kind` and a list of texts, `tokens`.") from error
        if kind not in get_args(Kind):
            raise DataError(f"The `kind` of a vocabulary must be one of {', '.join(get_args(Kind))}, but is {kind!r}.")
        return cls(kind, tokens)


def by_frequency(
    kind: Kind, symbols: Symbols, train_counts: Array, all_counts: Array, min_count: int
) -> tuple[Vocabulary, Array]:
    """The vocabulary, and the final number of every provisional one.

    Words are those that the training text has `min_count` times; all others are `<unk>`. Characters and bytes are
    those of the whole text, so that every one of them has its price in bits. Equally frequent tokens stand in the
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
