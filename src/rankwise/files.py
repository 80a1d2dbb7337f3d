"""Files: written so that a reader sees the old or the new one, never a part, with checksums that tell a changed bit.

A JSON file that describes others holds the SHA-256 of each under `files`, and one of itself under `checksum`: that of
its content without this entry, so white space and the order of keys do not matter.

A folder may come from a stranger. All JSON from outside is read by `read_json` or `parse_json`, which take no more
memory and time than its bytes justify.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import shutil
import stat
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rankwise.errors import CheckpointError, DataError, InvalidValueError

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
CHECKSUM, FILES = "checksum", "files"
BLOCK = 1 << 18
"""Bytes that are read at a time."""
LARGEST_JSON = 16 << 20
"""Bytes of a JSON file, at most: as objects of Python they take up to thirty times as many."""
DEEPEST_JSON = 100
"""Lists and objects inside each other, at most: far below what makes Python's recursion fail."""


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """A regular file, open for reading; a pipe would make us wait for ever, and a device may have no end."""
    # before it is opened, because to open a pipe or a device may already wait or act
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise CheckpointError(f"{path.name} is not a regular file")
    with path.open("rb") as file:
        yield file


def read_json(path: Path) -> Any:
    """The content of a JSON file that may come from a stranger; see `parse_json`."""
    with opened(path) as file:
        # one byte more tells a file that is too long, also where its size is not known
        text = file.read(LARGEST_JSON + 1)
    if len(text) > LARGEST_JSON:
        raise InvalidValueError(f"it is longer than {LARGEST_JSON:,} bytes")
    return parse_json(text)


def parse_json(text: bytes | str) -> Any:
    """The content of JSON that may come from a stranger; InvalidValueError for what only a mistake or malice writes.

    That is NaN and infinite numbers, whole numbers of more than 64 bits, more than `DEEPEST_JSON` lists and objects
    inside each other, and halves of surrogate pairs, which no UTF-8 can hold; those by which Python writes bytes that
    are no UTF-8 (`surrogateescape`) are allowed.
    """
    try:
        decoded = text.decode() if isinstance(text, bytes) else text
        content = json.loads(decoded, parse_constant=_refuse_constant, parse_float=_float, parse_int=_int)
        if "\\u" in decoded:
            json.dumps(content, ensure_ascii=False).encode(errors="surrogateescape")
    except RecursionError:
        raise _too_deep() from None
    except UnicodeEncodeError as error:
        raise InvalidValueError(f"it holds {error.object[error.start]!r}, which is half of a character") from None
    except InvalidValueError:
        raise
    except ValueError as error:
        raise InvalidValueError(f"it is not JSON: {error}") from None
    inside = [content]
    for _ in range(DEEPEST_JSON):
        inside = [
            value
            for each in inside
            if isinstance(each, dict | list)
            for value in (each.values() if isinstance(each, dict) else each)
            if isinstance(value, dict | list)
        ]
        if not inside:
            return content
    raise _too_deep()


def _too_deep() -> InvalidValueError:
    return InvalidValueError(f"it holds more than {DEEPEST_JSON} lists and objects inside each other")


def _refuse_constant(name: str) -> Any:
    raise InvalidValueError(f"it holds {name}, which is no number of JSON")


def _float(text: str) -> float:
    if math.isinf(number := float(text)):
        raise InvalidValueError(f"it holds the number {text[:40]}, which is too large")
    return number


def _int(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= (number := int(text)) < 2**63:
        raise InvalidValueError(f"it holds the number {text[:40]}, which is too large")
    return number


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a JSON file by a new one, whole."""
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        unfinished.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        sync(unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], *, durable: bool = True) -> None:
    """Write tensors as safetensors takes them: contiguous, and no two in the same memory.

    With `durable`, they are on the disk when this returns.
    """
    # here, so that reading JSON needs no torch
    from safetensors.torch import save_file

    plain = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    memory: set[int] = set()
    for name, tensor in plain.items():
        # an empty tensor has no memory to share
        if tensor.numel() and (address := tensor.untyped_storage().data_ptr()) in memory:
            plain[name] = tensor.clone()
        elif tensor.numel():
            memory.add(address)
    save_file(plain, path, metadata={"format": "pt"})
    # safetensors writes files that only their owner can read
    shutil.copymode(path.parent, path)
    path.chmod(path.stat().st_mode & ~0o111)
    if durable:
        sync(path)


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    sha = hashlib.sha256()
    block = memoryview(bytearray(BLOCK))
    with opened(path) as file:
        while size := file.readinto(block):
            sha.update(block[:size])
    return sha.hexdigest()


def sealed(content: Mapping[str, Any], paths: Iterable[Path]) -> dict[str, Any]:
    """`content` with the checksums of these files, and one of itself."""
    described = {**content, FILES: {path.name: digest(path) for path in paths}}
    return {**described, CHECKSUM: fingerprint(described)}


def check_seal(content: Mapping[str, Any]) -> None:
    """Refuse content that changed since `sealed` gave it."""
    _check(fingerprint({key: value for key, value in content.items() if key != CHECKSUM}), content.get(CHECKSUM))
    if not isinstance(content.get(FILES), dict):
        raise CheckpointError(f"it has no `{FILES}`")


def check_file(path: Path, files: Mapping[str, str]) -> None:
    """Refuse a file that changed since its checksum was taken."""
    if path.name not in files:
        raise CheckpointError("it has no checksum, so it was not written with the others")
    _check(digest(path), files[path.name])


def check_header(path: Path) -> None:
    """Refuse a file of tensors whose header does not account for all of its bytes; reads no more than the header."""
    from safetensors import SafetensorError, safe_open

    try:
        with opened(path), safe_open(path, framework="pt"):
            pass
    except SafetensorError as error:
        raise CheckpointError(f"its header says: {error}") from None


def verifies() -> bool:
    """Whether checksums are compared: unless `RANKWISE_VERIFY=0` is in the environment."""
    return os.environ.get("RANKWISE_VERIFY") != "0"


def fingerprint(content: Mapping[str, Any]) -> str:
    """The SHA-256 of what JSON says, whatever its white space and the order of its keys."""
    # as it is read back from JSON, with strings as keys
    plain = json.loads(json.dumps(content))
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _check(found: str, written: object) -> None:
    if found != written:
        raise CheckpointError(f"its checksum is {found[:12]}..., but was {str(written)[:12]}... when it was written")


def same_tensors(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor once, under its first name; and that name for every other."""
    first: dict[tuple[Any, ...], str] = {}
    distinct: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and key in first:
            tied[name] = first[key]
        else:
            first[key] = name
            distinct[name] = tensor
    return distinct, tied


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders in one step, so that neither is ever missing; False where that fails.

    Linux and macOS can, on all file systems in common use but NFS.
    """
    name, before, after = ("renamex_np", (), (2,)) if sys.platform == "darwin" else ("renameat2", (-100,), (2,))
    call = getattr(ctypes.CDLL(None), name, None) if sys.platform != "win32" else None
    if call is None:
        return False
    # -100: paths are relative to the working directory; 2: exchange
    return bool(call(*before, os.fsencode(one), *before, os.fsencode(other), *after) == 0)


@contextmanager
def owning(folder: Path) -> Iterator[None]:
    """Mark a folder as one that a living process works on; the system takes the mark from a process that is killed."""
    if sys.platform == "win32":
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        # some file systems have no locks; there nothing is ever taken for abandoned
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def is_abandoned(folder: Path) -> bool:
    """Whether no living process works on a folder (`owning`); False where that cannot be told."""
    if sys.platform == "win32":
        return False
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def identity(folder: Path) -> tuple[int, ...] | None:
    """What tells a folder from another that took its place; None where there is none."""
    try:
        found = os.stat(folder)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def read_whole(folder: Path, read: Callable[[], T]) -> T:
    """What `read` makes of a folder; it reads again if it failed because another folder took the place meanwhile."""
    while True:
        before = identity(folder)
        try:
            return read()
        except CheckpointError:
            if identity(folder) == before:
                raise


def reason(error: Exception) -> str:
    """What went wrong, in a few words."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def cache_folder() -> Path:
    """The cache: `RANKWISE_CACHE`, or a folder in the place that this system has for caches."""
    if named := os.environ.get("RANKWISE_CACHE"):
        return Path(named)
    home = Path(os.path.expanduser("~"))
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "rankwise"


def not_utf8(label: object, position: int, error: UnicodeDecodeError) -> DataError:
    """The error for bytes that are not UTF-8; what could not be decoded begins at `position`."""
    return DataError(
        f"A text of characters or words must be UTF-8, but {label} has the byte 0x{error.object[error.start]:02x} at "
        f"position {position + error.start:,}. Convert it to UTF-8 first."
    )
