"""Which texts a corpus is made of: the known names, any text file, any folder with three splits.

Two of the known corpora are made here. "pydoc" is English prose that every Python installation has, so that a
demonstration needs no download: the `pydoc` topics and the docstrings of the standard library, whose sources are
parsed, not imported. A docstring that occurs twice is taken once. The documents (a topic, or the docstrings of a file)
are sorted by a hash of their names, so that the three splits are alike. They differ between versions of Python, so the
version belongs to the record.

"enwik8-words" is the words of enwik8 without its markup; it is neither text8 nor WikiText. The rules, in this order:

1. Only what stands in a `<text>` element counts; redirects do not. Entities are resolved (twice: XML, then HTML).
2. Comments, `<ref>`, `<math>` and the like go with their contents, other tags without.
3. Templates (two levels deep) and tables go; so do images, categories and links to other languages.
4. A link leaves the text it shows; addresses go.
5. A word is a run of letters or digits, in lower case. Everything else separates words.
6. A line of text is a line of words; lines without words go.
"""

from __future__ import annotations

import ast
import hashlib
import html
import os
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rankwise.errors import DataError, nearest
from rankwise.files import cache_folder
from rankwise.lab.data.corpus import CORPORA, SPLITS, Corpus, Source, Unit, find_prepared, prepare
from rankwise.lab.data.download import PUBLISHED, fetch, unpack
from rankwise.lab.data.vocabulary import Progress, Text, read_blocks, text_of

NAMES = ("pydoc", "enwik8", "enwik8-words", "wikitext-2", "wikitext-103")

_ALIASES = {"train": ("train",), "valid": ("valid", "validation", "val", "dev"), "test": ("test",)}
_FORMS = ("{}.txt", "{}.tokens", "wiki.{}.tokens", "wiki.{}.txt")
PYDOC_RULES = "pydoc 1"
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "pydoc_data", "__pycache__"}
WORDS_RULES = "enwik8-words 1"
WORDS_MIN_COUNT = 5

_TEXT = re.compile(rb"<text[^>]*>(.*?)</text>", re.DOTALL)
_END = b"</text>"
_TEMPLATE = (re.compile(r"\{\{[^{}]*\}\}"), " ")
_MARKUP = (
    (re.compile(r"<!--.*?-->", re.DOTALL), " "),
    (re.compile(r"<(ref|math|nowiki|pre|code|gallery|timeline)\b[^>]*(?<!/)>.*?</\1>", re.DOTALL | re.IGNORECASE), " "),
    (re.compile(r"<[^<>]*>"), " "),
    _TEMPLATE,
    _TEMPLATE,
    (re.compile(r"\{\|.*?\|\}", re.DOTALL), " "),
    (re.compile(r"\[\[(?:[Ii]mage|[Ff]ile|[Cc]ategory|[a-z-]{2,12}):[^][]*(?:\[\[[^][]*\]\][^][]*)*\]\]"), " "),
    (re.compile(r"\[\[(?:[^][|]*\|)?([^][|]*)\]\]"), r"\1"),
    (re.compile(r"\[\w+://\S+([^]]*)\]"), r"\1"),
    (re.compile(r"\w+://\S+"), " "),
)
_WORD = re.compile(r"[^\W_]+")


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
    training text has fewer than `min_count` times become `<unk>`; 0 also keeps those that only the other texts have.
    Of several processes that want the same corpus one prepares it, and the others wait.
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
        guess = nearest(str(corpus).lower(), NAMES) or " Check the path."
        raise DataError(
            f"A corpus must be one of {', '.join(NAMES)}, a text file or a folder, but is {str(corpus)!r}, "
            f"which is none of them.{guess}"
        )
    return prepare(_own(path, unit, 1 if min_count is None else min_count), store, progress)


def load_prepared(fingerprint: str, *, cache: str | os.PathLike[str] | None = None) -> Corpus | None:
    """The corpus with this fingerprint, where `load_corpus` has prepared it in `cache` before; no text is opened."""
    store = Path(cache) if cache is not None else cache_folder()
    found = map(find_prepared, sorted(about.parent for about in (store / CORPORA).glob("*/corpus.json")))
    return next((corpus for corpus in found if corpus and corpus.fingerprint == fingerprint), None)


def _named(name: str, data: Path | None, store: Path, progress: Progress | None) -> Source:
    if name == "pydoc":
        what = "pydoc topics and docstrings"
        python, version = platform.python_implementation(), platform.python_version()
        text = Text(label=f"{what} of {python} {version}", blocks=_pydoc_blocks)
        provenance = {"source": f"{what} of the standard library", "python": version, "implementation": python}
        return Source(name=name, kind="character", texts=(text,), rules=PYDOC_RULES, provenance=provenance)
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
    text = enwik8_words(file, digests[0])
    return Source(
        name=name, kind="word", texts=(text,), min_count=WORDS_MIN_COUNT, rules=WORDS_RULES, provenance=provenance
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
        found = {
            split: _first_file(folder / form.format(alias) for alias in _ALIASES[split] for form in _FORMS)
            for split in SPLITS
        }
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


def _first_file(paths: Iterable[Path]) -> Path | None:
    return next((path for path in paths if path.is_file()), None)


def _pydoc_blocks() -> Iterator[bytes]:
    library = Path(sysconfig.get_path("stdlib"))
    documents = {**_topics(library), **_docstrings(library)}
    if not documents:
        raise DataError(
            f"The corpus pydoc needs the sources of Python's standard library, but {library} holds none. "
            "Give the path of a text of your own instead."
        )
    for name in sorted(documents, key=lambda name: hashlib.sha256(name.encode()).digest()):
        yield (documents[name].strip("\n") + "\n\n").encode("utf-8", "replace")


def _topics(library: Path) -> dict[str, str]:
    """The one literal in `pydoc_data/topics.py`; none where the installation leaves it out."""
    tree = _parsed(library / "pydoc_data" / "topics.py")
    for node in tree.body if tree else ():
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            return {f"topic {name}": text for name, text in ast.literal_eval(node.value).items()}
    return {}


def _docstrings(library: Path) -> dict[str, str]:
    documents: dict[str, str] = {}
    seen: set[str] = set()
    for path in _sources(library):
        found = [text for text in dict.fromkeys(_found(_parsed(path))) if text not in seen]
        seen.update(found)
        if found:
            documents[f"module {path.relative_to(library).as_posix()}"] = "\n\n".join(found)
    return documents


def _sources(library: Path) -> Iterator[Path]:
    for folder, inside, files in os.walk(library):
        inside[:] = sorted(set(inside) - _LEFT_OUT)
        yield from (Path(folder, file) for file in sorted(files) if file.endswith(".py"))


def _found(tree: ast.Module | None) -> Iterator[str]:
    """The docstrings of a module, in order. Only statements are followed: no expression holds a docstring."""
    nodes: list[Any] = [tree] if tree else []
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text
        for block in ("finalbody", "orelse", "handlers", "body"):
            inner = getattr(node, block, None)
            if isinstance(inner, list):
                nodes.extend(reversed(inner))


def _parsed(path: Path) -> ast.Module | None:
    """The syntax tree of a file; None if it cannot be read or parsed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            return None


def enwik8_words(path: Path, digest: str | None = None) -> Text:
    """The words of a Wikipedia dump, a line of text to a line."""
    return Text(label=f"the words of {path}", blocks=lambda: _articles(read_blocks(path)), path=path, digest=digest)


def strip_markup(article: str) -> str:
    """The words of an article: rules 1 (entities) to 6."""
    if article[:9].lower() == "#redirect":
        return ""
    article = html.unescape(html.unescape(article))
    for pattern, left in _MARKUP:
        article = pattern.sub(left, article)
    lines = (" ".join(_WORD.findall(line)) for line in article.lower().split("\n"))
    return "".join(line + "\n" for line in lines if line)


def _articles(blocks: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for block in blocks:
        rest += block
        cut = rest.rfind(_END) + len(_END)
        if cut >= len(_END):
            whole, rest = rest[:cut], rest[cut:]
            articles = (match[1].decode("utf-8", "replace") for match in _TEXT.finditer(whole))
            yield "".join(map(strip_markup, articles)).encode()
