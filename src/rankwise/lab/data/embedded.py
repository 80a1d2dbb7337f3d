"""The corpus "pydoc": English prose that every Python installation carries, so that a demo needs no download.

It is made of the `pydoc` topics and of the docstrings of the standard library. The sources are parsed, not imported:
no module of theirs runs. A docstring that occurs twice is taken once. The documents (a topic, or the docstrings of a
file) stand in the order of a hash of their names, so that the three splits are of one kind. Both differ between
versions of Python, so the version belongs to the record.
"""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rankwise.errors import DataError
from rankwise.lab.data.text import Text

RULES = "pydoc 1"
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "pydoc_data", "__pycache__"}


def python_text() -> Text:
    """The text of this Python; its label says which one."""
    version = f"{platform.python_implementation()} {platform.python_version()}"
    return Text(label=f"pydoc topics and docstrings of {version}", blocks=_blocks)


def provenance() -> dict[str, Any]:
    """What a record says of the corpus."""
    return {
        "source": "pydoc topics and docstrings of the standard library",
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
    }


def _blocks() -> Iterator[bytes]:
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
        inside[:] = sorted(set(inside) - LEFT_OUT)
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
    """A file that cannot be read or parsed has nothing to say."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            return None
