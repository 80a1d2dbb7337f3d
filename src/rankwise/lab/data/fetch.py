"""A published corpus on this machine: its files in a folder, fetched and unpacked where they are not there yet."""

from __future__ import annotations

import shutil
import uuid
import zipfile
import zlib
from pathlib import Path

from rankwise.errors import DataError
from rankwise.lab.data.download import REMEDY, download
from rankwise.lab.data.published import Published
from rankwise.lab.data.text import Progress, check_digest, reason


class DamagedError(DataError):
    """An archive that does not hold what it should."""


def fetch(published: Published, folder: Path, progress: Progress | None = None) -> None:
    """Fill `folder` with the files of a published corpus; those already there are kept."""
    if all((folder / name).is_file() for name in published.files):
        return
    archive = folder / published.archive
    if not archive.exists():
        _download(published, archive, progress)
    try:
        unpack(archive, published, folder)
    except DamagedError:
        archive.unlink(missing_ok=True)
        raise
    archive.unlink(missing_ok=True)


def unpack(archive: Path, published: Published, folder: Path) -> None:
    """Take the files of a published corpus out of its archive; each appears when it is whole and right."""
    try:
        with zipfile.ZipFile(archive) as packed:
            members = {member.rpartition("/")[2]: member for member in packed.namelist()}
            missing = sorted(set(published.files) - set(members))
            if missing:
                raise DamagedError(f"{archive} must hold {missing[0]}, but does not. {REMEDY}")
            folder.mkdir(parents=True, exist_ok=True)
            for name, digest in published.files.items():
                _take(packed, members[name], folder / name, digest)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DamagedError(f"{archive} must be a whole zip archive, but is not: {reason(error)}. {REMEDY}") from error
    except OSError as error:
        raise DataError(
            f"{archive} must be unpacked into {folder}, but that failed: {reason(error)}. "
            "Free some space or choose another folder."
        ) from error


def _take(packed: zipfile.ZipFile, member: str, path: Path, digest: str) -> None:
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with packed.open(member) as source, unfinished.open("wb") as target:
            shutil.copyfileobj(source, target, 1024 * 1024)
        try:
            if digest:
                check_digest(unfinished, digest, REMEDY)
        except DataError as error:
            raise DamagedError(str(error).replace(str(unfinished), f"{member} in {packed.filename}")) from None
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _download(published: Published, archive: Path, progress: Progress | None) -> None:
    failures = []
    for url in published.urls:
        try:
            return download(url, archive, digest=published.digest, progress=progress)
        except DataError as error:
            failures.append(str(error).removesuffix(REMEDY).strip())
    raise DataError(" ".join([*failures, REMEDY]))
