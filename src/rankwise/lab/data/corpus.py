"""A corpus: three memory-mapped splits, their vocabulary and where they come from; and how it is prepared from text.

On the disk it is a folder: `train.npy`, `valid.npy`, `test.npy`, `vocabulary.json`, and `corpus.json` with the rest.

To prepare it, the text is read in blocks and split once, into provisional numbers in a scratch file. Counting those of
the training part gives the vocabulary; a second pass over the scratch file renumbers it by frequency. Memory holds a
block and the distinct tokens, never the text. The folder gets its name only when it is complete; one process at a time
prepares in a cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from filelock import FileLock

from rankwise.errors import DataError, InvalidValueError
from rankwise.files import read_json, reason, sync
from rankwise.lab.data.vocabulary import (
    SYMBOLS,
    Array,
    Kind,
    Progress,
    Symbols,
    Text,
    Vocabulary,
    by_frequency,
    check_digest,
)  # fmt: skip

FORMAT = "rankwise-corpus"
VERSION = 1
SPLITS = ("train", "valid", "test")
Unit = Literal["character", "word"]

BLOCK_TOKENS = 1024 * 1024
CORPORA = "corpora"
WRONG_FILE = "Fetch it again, or give its path as that of a text of your own."


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """The tokens of a training, a validation and a test text."""

    name: str

    unit: Unit
    """What a token counts as: bits per character, or perplexity per word."""

    train: Array
    valid: Array
    test: Array

    vocabulary: Vocabulary
    """Most frequent first."""

    provenance: Mapping[str, Any]
    """Where the text comes from: paths or addresses, checksums, versions."""

    fingerprint: str
    """The same for the same text and the same rules, whatever the machine or the path."""

    folder: Path

    def record(self) -> dict[str, Any]:
        """What a run record keeps of its corpus."""
        return {
            "name": self.name,
            "unit": self.unit,
            "tokens": {split: len(getattr(self, split)) for split in SPLITS},
            "vocabulary": len(self.vocabulary),
            "fingerprint": self.fingerprint,
            "provenance": dict(self.provenance),
        }


def open_corpus(folder: Path) -> Corpus:
    """Map a prepared corpus into memory; what is missing or cut short is refused."""
    try:
        about = read_json(folder / "corpus.json")
        if (about["format"], about["version"]) != (FORMAT, VERSION):
            raise InvalidValueError(f"its format is {about['format']} {about['version']}, not {FORMAT} {VERSION}")
        splits = {split: np.load(folder / f"{split}.npy", mmap_mode="r", allow_pickle=False) for split in SPLITS}
        for split, tokens in splits.items():
            if tokens.shape != (about["tokens"][split],):
                raise InvalidValueError(f"{split}.npy holds {tokens.shape} tokens, not {about['tokens'][split]}")
        return Corpus(
            name=about["name"],
            unit=about["unit"],
            vocabulary=Vocabulary.from_json(read_json(folder / "vocabulary.json")),
            provenance=about["provenance"],
            fingerprint=about["fingerprint"],
            folder=folder,
            **splits,
        )
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"A prepared corpus must be whole, but the one in {folder} is not: {reason(error)}. "
            "Remove the folder; it will be prepared again."
        ) from error


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a corpus is made of, and the rules for making it."""

    name: str

    kind: Kind

    texts: tuple[Text, ...]
    """Training, validation and test text; or one text, cut by position into 90%, 5% and 5%."""

    min_count: int = 1
    """Rarer words become `<unk>`."""

    rules: str = ""
    """Names the version of whatever makes the texts."""

    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def unit(self) -> Unit:
        return "word" if self.kind == "word" else "character"

    def key(self) -> str:
        """Tells whether a prepared corpus is still up to date, without reading the text: paths, sizes and times."""
        files: list[Any] = []
        for text in self.texts:
            if text.path is None:
                files.append(text.label)
            else:
                state = text.path.stat()
                files.append((str(text.path.resolve()), (state.st_size, state.st_mtime_ns)))
        return _hash([VERSION, self.name, self.kind, self.min_count, self.rules, files])[:16]


def prepare(source: Source, cache: Path, progress: Progress | None = None) -> Corpus:
    """The corpus of a source: the prepared one in `cache` if it is up to date, otherwise a new one."""
    corpora = cache / CORPORA
    slug = re.sub(r"[^\w.-]+", "-", source.name)
    target = corpora / f"{slug}-{source.key()}"
    if corpus := find_prepared(target):
        return corpus
    for text in source.texts:
        if text.path and text.digest:
            check_digest(text.path, text.digest, WRONG_FILE)
    try:
        corpora.mkdir(parents=True, exist_ok=True)
        with FileLock(corpora / ".lock"):
            # another process may have prepared it meanwhile
            return find_prepared(target) or _prepare(source, target, progress)
    except OSError as error:
        raise DataError(
            f"The corpus {source.name} must be written whole to {target}, but that failed: {reason(error)}. "
            "Nothing was kept; free some space or choose another folder."
        ) from error


def find_prepared(folder: Path) -> Corpus | None:
    """The corpus in a folder; None where there is none, or a damaged one."""
    try:
        return open_corpus(folder) if folder.exists() else None
    except DataError:
        return None


def _prepare(source: Source, target: Path, progress: Progress | None) -> Corpus:
    # always the same name, so that the next preparation takes the place of one that was killed
    unfinished = target.with_name(f".{target.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir()
        _write(source, unfinished, progress)
        shutil.rmtree(target, ignore_errors=True)
        os.rename(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return open_corpus(target)


def _write(source: Source, folder: Path, progress: Progress | None) -> None:
    symbols = SYMBOLS[source.kind]()
    scratch = folder / "scratch"
    ends, digests = _number(source, symbols, scratch, progress)
    if len(ends) == 1:
        held_out = ends[0] // 20
        ends = [ends[0] - 2 * held_out, ends[0] - held_out, ends[0]]
    ranges = dict(zip(SPLITS, zip([0, *ends], ends, strict=False), strict=True))
    for place, (split, (start, end)) in enumerate(ranges.items()):
        if start == end:
            text = source.texts[min(place, len(source.texts) - 1)]
            raise DataError(
                f"Each split of a corpus must hold at least one token, but {split} of {source.name} is empty "
                f"({text.label} is too short). Give it more text."
            )
    counts = {split: _count(scratch, symbols, *limits) for split, limits in ranges.items()}
    all_counts = sum(counts.values(), np.zeros_like(counts["train"]))
    vocabulary, table = by_frequency(source.kind, symbols, counts["train"], all_counts, source.min_count)
    descr = np.lib.format.dtype_to_descr(table.dtype)
    for split, (start, end) in ranges.items():
        with (folder / f"{split}.npy").open("wb") as file:
            header = {"descr": descr, "fortran_order": False, "shape": (end - start,)}
            np.lib.format.write_array_header_1_0(file, header)
            for numbers in _blocks(scratch, symbols, start, end):
                _append(file, table[numbers])
    scratch.unlink()
    num_tokens = {split: end - start for split, (start, end) in ranges.items()}
    rules = [VERSION, source.kind, source.min_count, source.rules, num_tokens]
    about = {
        "format": FORMAT,
        "version": VERSION,
        "name": source.name,
        "unit": source.unit,
        "tokens": num_tokens,
        "vocabulary": len(vocabulary),
        "fingerprint": _hash([rules, list(digests.values())]),
        "provenance": {**source.provenance, "sha256": digests},
    }
    (folder / "vocabulary.json").write_text(json.dumps(vocabulary.to_json()), encoding="ascii")
    (folder / "corpus.json").write_text(json.dumps(about, indent=1) + "\n", encoding="ascii")
    for path in folder.iterdir():
        sync(path)


def _number(
    source: Source, symbols: Symbols, scratch: Path, progress: Progress | None
) -> tuple[list[int], dict[str, str]]:
    """Write the provisional numbers of all texts; where each text ends, and what it hashes to."""
    sizes = [text.num_bytes for text in source.texts]
    total = None if None in sizes else sum(size for size in sizes if size)
    ends: list[int] = []
    digests: dict[str, str] = {}
    num_tokens = num_bytes = 0
    with scratch.open("wb") as file:
        for text in source.texts:
            digest = hashlib.sha256()

            def hashed(text: Text = text, digest: Any = digest) -> Iterator[bytes]:
                nonlocal num_bytes
                for block in text.blocks():
                    digest.update(block)
                    yield block
                    num_bytes += len(block)
                    if progress:
                        progress(f"preparing {source.name}", num_bytes, total)

            for numbers in symbols.number(Text(label=text.label, blocks=hashed)):
                _append(file, numbers)
                num_tokens += len(numbers)
            ends.append(num_tokens)
            # without its folder, which is a matter of the machine
            digests[text.path.name if text.path else text.label] = digest.hexdigest()
    return ends, digests


def _count(scratch: Path, symbols: Symbols, start: int, end: int) -> Array:
    """How often each provisional number occurs from token `start` to token `end`."""
    counts = np.zeros(symbols.num_numbers, np.int64)
    for numbers in _blocks(scratch, symbols, start, end):
        counts += np.bincount(numbers, minlength=len(counts))
    return counts


def _blocks(scratch: Path, symbols: Symbols, start: int, end: int) -> Iterator[Array]:
    size = np.dtype(symbols.dtype).itemsize
    with scratch.open("rb") as file:
        file.seek(start * size)
        for first in range(start, end, BLOCK_TOKENS):
            yield np.frombuffer(file.read(min(BLOCK_TOKENS, end - first) * size), symbols.dtype)


def _append(file: BinaryIO, numbers: Array) -> None:
    # written, not mapped: a full disk then raises, where a mapped page would kill the process
    file.write(np.ascontiguousarray(numbers).data)


def _hash(data: Any) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()
