"""A run is a folder: `config.json`, `metrics.jsonl` as it goes, `record.json` at the end, and `checkpoints/`.

`.lock` is an empty file, locked for as long as a process runs there.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rankwise.errors import CheckpointError, shortened
from rankwise.files import parse_json, reason, write_json
from rankwise.files import read_json as read_content

FORMAT, FORMAT_VERSION = "rankwise-run", 1
"""The format of the record of one training."""
LOCK = ".lock"
SKIPPED = "skipped_steps"
"""The key of metrics and records under which the number of skipped steps stands."""


class RunFolder:
    """The files of one run but its checkpoints."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.metrics = self.path / "metrics.jsonl"
        self.record = self.path / "record.json"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes out of the folder; one that is killed holds nothing.

        This process may hold it several times. A folder in which nothing was done is removed again.
        """
        missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        lock = FileLock(self.path / LOCK, timeout=0, is_singleton=True)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except Timeout:
            raise CheckpointError(
                f"One process may run in a folder, but another one is running in {self.path}. "
                "Wait until it has ended, or choose another folder."
            ) from None
        except OSError as error:
            # a finished run may be read where nobody can write
            if not self.path.is_dir() or error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise unwritable(self.path, error) from error
        try:
            yield
        finally:
            if missing and os.listdir(self.path) == [LOCK]:
                (self.path / LOCK).unlink()
            lock.release()
            for folder in missing:
                # which fails where something was done
                with suppress(OSError):
                    folder.rmdir()

    def append(self, line: Mapping[str, Any]) -> None:
        """Add a line of metrics."""
        try:
            with self.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")
        except OSError as error:
            raise unwritable(self.path, error) from error

    def cut(self, step: int) -> None:
        """Drop the lines after `step`, which a resumed run writes again, and a last one that was cut short."""
        if not self.metrics.exists():
            return
        kept = [line for line in self.lines() if line["step"] <= step]
        unfinished = self.metrics.with_name(".metrics.jsonl")
        try:
            unfinished.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
            os.replace(unfinished, self.metrics)
        except OSError as error:
            raise unwritable(self.path, error) from error

    def lines(self) -> list[dict[str, Any]]:
        """The metrics so far."""
        if not self.metrics.exists():
            return []
        found = []
        # only a line that ends is complete
        for number, line in enumerate(self.metrics.read_bytes().split(b"\n")[:-1], 1):
            try:
                content: dict[str, Any] = parse_json(line)
                is_metrics = type(content["step"]) is int
            except (ValueError, KeyError, TypeError):
                is_metrics = False
            if not is_metrics:
                raise CheckpointError(
                    f"Every line of {self.metrics} must be JSON with a `step`, but line {number} is "
                    f"{line.decode('utf-8', 'replace')[:40]!r}. Remove that line and run again."
                )
            found.append(content)
        return found

    def finished(self) -> dict[str, Any] | None:
        """The record of a finished run; None where there is none."""
        record = read_json(self.record, "format")
        if record is not None and record["format"] != FORMAT:
            raise foreign_file(self.record, f"is {record['format']}, not {FORMAT}")
        return record


def write_file(path: Path, content: Mapping[str, Any]) -> None:
    """Write a whole JSON file, and make the folders above it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, content)
    except OSError as error:
        raise unwritable(path.parent, error) from error


def unwritable(folder: Path, error: OSError) -> CheckpointError:
    """The error for a folder that cannot be written to."""
    return CheckpointError(
        f"A run must be able to write to its folder, but {folder} failed: {reason(error)}. "
        "Free some space or choose another place, and run again."
    )


def read_json(path: Path, *keys: str) -> dict[str, Any] | None:
    """The content of a JSON file, which must hold these keys; None where there is no file."""
    try:
        content = read_content(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise foreign_file(path, f"cannot be read: {reason(error)}") from error
    if not isinstance(content, dict):
        raise foreign_file(path, f"is a {type(content).__name__}")
    for key in keys:
        if key not in content:
            raise foreign_file(path, f"has no `{key}`")
    return content


def foreign_file(path: Path, found: str) -> CheckpointError:
    """The error for a file that rankwise did not write."""
    why = shortened(found).rstrip(".")
    return CheckpointError(f"{path} must be JSON that rankwise wrote, but {why}. Remove it, or choose another folder.")
