"""Which texts a corpus is made of: the known names, any text file, any folder with three splits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rankwise.errors import DataError, nearest
from rankwise.files import cache_folder
from rankwise.lab.data import embedded, wiki
from rankwise.lab.data.corpus import SPLITS, Corpus, Unit
from rankwise.lab.data.fetch import fetch, unpack
from rankwise.lab.data.prepare import Source, find_prepared, prepare
from rankwise.lab.data.published import PUBLISHED
from rankwise.lab.data.text import Progress, text_of

NAMES = ("pydoc", "enwik8", "enwik8-words", "wikitext-2", "wikitext-103")

_ALIASES = {"train": ("train",), "valid": ("valid", "validation", "val", "dev"), "test": ("test",)}
_FORMS = ("{}.txt", "{}.tokens", "wiki.{}.tokens", "wiki.{}.txt")


def load_corpus(
    corpus: str | os.PathLike[str] = "pydoc",
    *,
    data: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    unit: Unit | None = None,
    min_count: int | None = None,
    progress: Progress | None = None,
) -> Corpus:
    """A corpus by name (`NAMES`), or that of a text file, or of a folder with train, valid and test files.

    A published corpus is taken from the folder `data` if one is given, and downloaded otherwise. Prepared corpora and
    downloads are kept in `cache`, by default the user's cache folder. `unit` and `min_count` say how the text of a
    file or folder is split: "character" (the default, except for `.tokens` files) or "word", of which those that the
    training text has fewer than `min_count` times become `<unk>`; 0 also keeps those that only the other texts have. In
    a distributed run one process goes first.
    """
    store = Path(cache) if cache is not None else cache_folder()
    if str(corpus) in NAMES:
        if unit is not None or min_count is not None:
            raise DataError(
                f"`unit` and `min_count` are for texts of your own, but were given for {corpus}. Leave them out."
            )
        return prepare(_named(str(corpus), Path(data) if data is not None else None, store, progress), store, progress)
    path = Path(corpus)
    if not path.exists():
        raise DataError(
            f"A corpus must be one of {', '.join(NAMES)}, a text file or a folder, but is {str(corpus)!r}, "
            f"which is none of them.{nearest(str(corpus).lower(), NAMES) or ' Check the path.'}"
        )
    return prepare(_own(path, unit, 1 if min_count is None else min_count), store, progress)


def load_prepared(fingerprint: str, *, cache: str | os.PathLike[str] | None = None) -> Corpus | None:
    """The corpus with this fingerprint, where `load_corpus` has prepared it in `cache` before; no text is opened."""
    return find_prepared(fingerprint, Path(cache) if cache is not None else cache_folder())


def _named(name: str, data: Path | None, store: Path, progress: Progress | None) -> Source:
    if name == "pydoc":
        return Source(
            name=name,
            kind="character",
            texts=(embedded.python_text(),),
            rules=embedded.RULES,
            provenance=embedded.provenance(),
        )
    archive = name.removesuffix("-words")
    published = PUBLISHED[archive]
    folder = _folder_of(archive, data, store, progress)
    provenance = {"source": published.urls[0]}
    digests = list(published.files.values())
    if archive != "enwik8":
        files = _find_splits([folder, folder / name], "Add it, or leave `data` out to download the corpus.")
        texts = tuple(text_of(path, digest) for path, digest in zip(files, digests, strict=True))
        return Source(name=name, kind="word", texts=texts, provenance=provenance)
    file = _first_file([folder, folder / "enwik8", folder / "enwik8" / "enwik8"])
    if file is None:
        raise DataError(
            f"`data` must hold the file enwik8, but {folder} does not. "
            "Add it, or leave `data` out to download the corpus."
        )
    if name == "enwik8":
        return Source(name=name, kind="byte", texts=(text_of(file, digests[0]),), provenance=provenance)
    text = wiki.words_of(file, digests[0])
    return Source(
        name=name, kind="word", texts=(text,), min_count=wiki.MIN_COUNT, rules=wiki.RULES, provenance=provenance
    )


def _folder_of(archive: str, data: Path | None, store: Path, progress: Progress | None) -> Path:
    """Where the files of a published corpus are; packed ones are unpacked into the store."""
    published = PUBLISHED[archive]
    folder = store / "downloads" / archive
    if data is None:
        fetch(published, folder, progress)
        return folder
    packed = data / published.archive
    if not packed.is_file():
        return data
    if not all((folder / name).is_file() for name in published.files):
        unpack(packed, published, folder)
    return folder


def _own(path: Path, unit: Unit | None, min_count: int) -> Source:
    if unit not in (None, "character", "word"):
        raise DataError(f"`unit` must be 'character' or 'word', but is {unit!r} instead.")
    if min_count < 0 or (min_count != 1 and unit != "word"):
        raise DataError(
            f"`min_count` must not be negative, and 1 unless `unit` is 'word', but is {min_count} instead. "
            "Leave it out."
        )
    remedy = "Add it, or give a single text file, which is split by position."
    files = _find_splits([path], remedy) if path.is_dir() else [path]
    if unit is None:
        unit = "word" if files[0].suffix == ".tokens" else "character"
    name = path.resolve().name if path.is_dir() else path.stem
    texts = tuple(text_of(file) for file in files)
    return Source(name=name, kind=unit, texts=texts, min_count=min_count, provenance={"source": str(path.resolve())})


def _find_splits(folders: list[Path], remedy: str) -> list[Path]:
    """Training, validation and test file of the first folder that has one of them."""
    for folder in folders:
        found = {split: _first_file(_candidates(folder, split)) for split in SPLITS}
        if any(found.values()):
            break
    else:
        folder, found = folders[0], dict.fromkeys(SPLITS)
    for split, path in found.items():
        if path is None:
            raise DataError(
                f"A folder with a corpus must hold train.txt, valid.txt and test.txt, but {folder} has no {split}.txt. "
                f"{remedy}"
            )
    return [path for path in found.values() if path]


def _candidates(folder: Path, split: str) -> Iterator[Path]:
    for alias in _ALIASES[split]:
        for form in _FORMS:
            yield folder / form.format(alias)


def _first_file(paths: list[Path] | Iterator[Path]) -> Path | None:
    return next((path for path in paths if path.is_file()), None)
