"""Text as it is read: blocks of bytes with a name, never the whole of it in memory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rankwise.errors import DataError

BLOCK_BYTES = 4 * 1024 * 1024

Progress = Callable[[str, int, int | None], None]
"""Called with what is being done, how many bytes of it are done, and of how many (None: not known)."""


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
    return Text(
        label=str(path),
        blocks=lambda: read_blocks(path),
        num_bytes=stat_of(path).st_size,
        path=path,
        digest=digest,
    )


def read_blocks(path: Path) -> Iterator[bytes]:
    """The bytes of a file, a few megabytes at a time."""
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                yield block
    except OSError as error:
        raise DataError(f"{path} must be a readable file, but: {reason(error)}. Check its name and rights.") from error


def stat_of(path: Path) -> os.stat_result:
    """Size and times of a file that must be there."""
    try:
        return path.stat()
    except OSError as error:
        raise DataError(f"{path} must be a readable file, but: {reason(error)}. Check its name and rights.") from error


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


def reason(error: BaseException) -> str:
    """Why a call of the system or of a library failed, in its words."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
