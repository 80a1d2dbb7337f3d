"""Kernels in C, built by the machine's C compiler when they are first needed and kept in the cache folder.

A shared library runs with the rights of the user who opens it, so only files that nobody else can write are opened.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from rankwise.files import cache_folder

# `contract`: ISO C would not fuse a * b + c. `errno`, `trapping`: so that loops with choices and divisions vectorize;
# NaN and infinity stay what they are. `thread`: gcc would make a case of its own out of each side of a clamp.
_FLAGS = ["-std=c11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fno-thread-jumps"]
_FLAGS += ["-fopenmp-simd", "-fPIC", "-shared"]
_HEADERS = Path(__file__).parent
"""The folder of the headers that kernels share."""


@cache
def is_ready(source: Path, what: str) -> bool:
    """Whether `source` is built or could be built; a warning, once, where it could not."""
    try:
        library(source)
    except _BuildError as error:
        warnings.warn(
            f"The fast kernel of {what} for CPUs could not be built: {error}. Plain PyTorch runs instead: "
            "same results, slower. Install a C compiler such as gcc, or name one in the environment variable CC.",
            RuntimeWarning,
            stacklevel=3,
        )
        return False
    return True


@cache
def library(source: Path) -> ctypes.CDLL:
    """`source` as machine code for this processor: from the cache folder, or built and put there."""
    options = shlex.split(os.environ.get("CC", ""))
    names = options[:1] or ["cc", "gcc", "clang"]
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise _BuildError(f"there is no C compiler ({' or '.join(names)}) on this machine")
    command = [compiler, *options[1:]]
    try:
        name = f"{source.parent.name}-{source.stem}-{_fingerprint(source, command)}.so"
        with _open_store(cache_folder() / "kernels") as store:
            with suppress(OSError):
                if store is not None:
                    return store.load(name)
            # new and the user's own; what is loaded stays so when its file is gone
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                fresh = Path(folder) / name
                _build(source, command, fresh)
                with suppress(OSError):
                    if store is not None:
                        store.keep(fresh)
                        return store.load(name)
                return ctypes.CDLL(str(fresh))
    except OSError as error:
        raise _BuildError(str(error)) from None


@cache
def parallel() -> ctypes.c_void_p | None:
    """`GOMP_parallel` as torch itself finds it: a runtime of our own would be a second pool on the same cores."""
    try:
        # searched with all that it depends on, torch's OpenMP runtime among them
        return ctypes.cast(ctypes.CDLL(torch._C.__file__).GOMP_parallel, ctypes.c_void_p)
    except (OSError, AttributeError):
        return None


class _BuildError(Exception):
    pass


def _build(source: Path, command: list[str], fresh: Path) -> None:
    # some compilers know no `native` for some processors
    for flags in (["-march=native", *_FLAGS], _FLAGS):
        run = subprocess.run(
            [*command, *flags, f"-I{_HEADERS}", "-o", str(fresh), str(source)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
        if run.returncode == 0:
            return
    raise _BuildError(f"{command[0]} failed: {run.stderr.strip()[-500:]}")


@dataclass(frozen=True)
class _Store:
    """A folder of libraries that only this user can write to."""

    folder: Path
    descriptor: int | None
    """A descriptor of the folder that was checked, because its path may be changed meanwhile; None on Windows."""

    def load(self, name: str) -> ctypes.CDLL:
        """Open a library; raises OSError where there is none, or where others could have written it."""
        if self.descriptor is None:
            return ctypes.CDLL(str(self.folder / name))
        status = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode) or not _only_ours(status):
            raise PermissionError(f"others may have written {self.folder / name}")
        place = Path(f"/proc/self/fd/{self.descriptor}")
        return ctypes.CDLL(str((place if place.exists() else self.folder) / name))

    def keep(self, fresh: Path) -> None:
        """Put a library there under its name by a rename, so that another process sees all of it or nothing."""
        unfinished, name = f".{fresh.name}.{uuid.uuid4().hex[:8]}", fresh.name
        if self.descriptor is None:
            unfinished, name = str(self.folder / unfinished), str(self.folder / name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        handle = os.open(unfinished, flags, 0o700, dir_fd=self.descriptor)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(fresh.read_bytes())
            os.replace(unfinished, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        except OSError:
            os.unlink(unfinished, dir_fd=self.descriptor)
            raise


@contextmanager
def _open_store(folder: Path) -> Iterator[_Store | None]:
    """The folder of libraries; None where it cannot be made, and None with a warning where others could write to it."""
    descriptor = None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Windows has no such permission bits, and the cache is in the user's own profile there
        if os.name == "posix":
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield None
        return
    try:
        if descriptor is None or _only_ours(os.fstat(descriptor)):
            yield _Store(folder, descriptor)
            return
        warnings.warn(
            f"The folder of built kernels must be yours, and writable by nobody else, but {folder} is not. Nothing in "
            "it is opened, and every process builds its own kernels. Remove it, or make it writable by you alone "
            "(chmod 700), or name another folder in the environment variable RANKWISE_CACHE.",
            RuntimeWarning,
            stacklevel=2,
        )
        yield None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _only_ours(status: os.stat_result) -> bool:
    """Whether this user owns a file or folder, and nobody else may write to it."""
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _fingerprint(source: Path, command: list[str]) -> str:
    """A hash of all that the machine code depends on, the processor included: machines may share a home folder."""
    status = os.stat(os.path.realpath(command[0]))
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    except OSError:
        processor = [platform.processor()]
    sources = [source, *sorted({*_HEADERS.glob("*.h"), *source.parent.glob("*.h")})]
    parts = [
        *(path.read_text() for path in sources),
        *_FLAGS,
        *command,
        status.st_size,
        status.st_mtime_ns,
        platform.machine(),
        *processor,
    ]
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]
