"""Kernels in C: built by the machine's C compiler when they are first needed, and kept in the cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from rankwise.files import cache_folder

# `contract`: ISO C would not fuse a * b + c. `errno`, `trapping`: so that loops with choices and divisions vectorize;
# NaN and infinity stay what they are. `thread`: gcc would make a case of its own out of each side of a clamp.
_FLAGS = ["-std=c11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fno-thread-jumps"]
_FLAGS += ["-fopenmp-simd", "-fPIC", "-shared"]


@cache
def is_ready(source: Path, what: str) -> bool:
    """Whether `source` is built, or could be; a word where not, once."""
    try:
        library(source)
    except _BuildError as error:
        warnings.warn(
            f"The fast kernel of {what} for CPUs could not be built: {error}. Plain PyTorch takes its place: same "
            "results, slower. Install a C compiler such as gcc, or name one in the environment variable CC.",
            RuntimeWarning,
            stacklevel=3,
        )
        return False
    return True


@cache
def library(source: Path) -> ctypes.CDLL:
    """`source` as machine code for this processor: from the cache folder, or else built and left there."""
    options = shlex.split(os.environ.get("CC", ""))
    names = options[:1] or ["cc", "gcc", "clang"]
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise _BuildError(f"there is no C compiler ({' or '.join(names)}) on this machine")
    command = [compiler, *options[1:]]
    try:
        built = cache_folder() / "kernels" / f"{source.parent.name}-{source.stem}-{_fingerprint(source, command)}.so"
        with suppress(OSError):
            return ctypes.CDLL(str(built))
        with _workshop(built.parent) as folder:
            return _build(source, command, Path(folder), built)
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


def _build(source: Path, command: list[str], folder: Path, built: Path) -> ctypes.CDLL:
    fresh = folder / built.name
    # some compilers know no `native` for some processors
    for flags in (["-march=native", *_FLAGS], _FLAGS):
        run = subprocess.run(
            [*command, *flags, "-o", str(fresh), str(source)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
        if run.returncode == 0:
            break
    else:
        raise _BuildError(f"{command[0]} failed: {run.stderr.strip()[-500:]}")
    try:
        # at once, so that another process sees all of it or nothing
        os.replace(fresh, built)
    except OSError:
        # what is loaded stays so when its file is gone
        return ctypes.CDLL(str(fresh))
    return ctypes.CDLL(str(built))


def _workshop(folder: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder to build in: in the cache, where a file can be moved into place, or else where temporary files go."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=folder)
    except OSError:
        return tempfile.TemporaryDirectory()


def _fingerprint(source: Path, command: list[str]) -> str:
    """Differs wherever the machine code may: source, compiler, processor (a home folder may be shared by machines)."""
    status = os.stat(os.path.realpath(command[0]))
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    except OSError:
        processor = [platform.processor()]
    sources = [source, *sorted(Path(__file__).parent.rglob("*.h"))]
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
