"""Published corpora: where they are, what each file must hash to, and how they get to this machine (by pooch).

The checksums are of the files inside an archive where mirrors may have packed them again, otherwise of the archive.
"""

from __future__ import annotations

import re
import shutil
import time
import uuid
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from rankwise.errors import DataError, install_extra
from rankwise.files import reason
from rankwise.lab.data.vocabulary import Progress, check_digest

ATTEMPTS = 5
FIRST_PAUSE_SECONDS = 1.0
TIMEOUT_SECONDS = 30.0
CHUNK_BYTES = 256 * 1024

REMEDY = "If you have the files, name their folder: `data` of load_corpus, --corpus.data on the command line."


@dataclass(frozen=True, kw_only=True)
class Published:
    """A zip archive on the network."""

    urls: tuple[str, ...]
    """Mirrors, in the order they are tried."""
    megabytes: int
    """The size of the download, about."""
    files: dict[str, str]
    """The checksum of each file to unpack, by its name without folders; "" where that of the archive is enough."""
    digest: str | None = None
    """The checksum of the archive itself, where all mirrors have the same one."""

    @property
    def archive(self) -> str:
        return self.urls[0].rpartition("/")[2]


PUBLISHED = {
    "enwik8": Published(
        urls=("https://mattmahoney.net/dc/enwik8.zip", "http://mattmahoney.net/dc/enwik8.zip"),
        megabytes=36,
        files={"enwik8": "sha256:2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"},
    ),
    # the first home of WikiText (s3.amazonaws.com/research.metamind.io) has been closed; this one is its author's
    "wikitext-2": Published(
        urls=("https://wikitext.smerity.com/wikitext-2-v1.zip",),
        megabytes=4,
        files={
            "wiki.train.tokens": "sha256:9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
            "wiki.valid.tokens": "sha256:f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
            "wiki.test.tokens": "sha256:d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
        },
    ),
    "wikitext-103": Published(
        urls=("https://wikitext.smerity.com/wikitext-103-v1.zip",),
        megabytes=190,
        files={
            "wiki.train.tokens": "sha1:b7497e2dfe77e72cfef5e3dbc61b7b53712ac211",
            "wiki.valid.tokens": "sha256:9aee9f52d6e77de6c7751fc5e7c44287db3ec0eaf15477098acc6b93c1c4250b",
            "wiki.test.tokens": "sha256:56db52eb157b1ab5c89646eef70510c1eca6e12a3bfdb99f0d6b05b4eacb75b9",
        },
    ),
}


def fetch(published: Published, folder: Path, progress: Progress | None = None) -> None:
    """Fill `folder` with the files of a published corpus; files that are there already are kept."""
    if all((folder / name).is_file() for name in published.files):
        return
    archive = folder / published.archive
    if not archive.exists():
        failures = []
        for url in published.urls:
            try:
                download(url, archive, digest=published.digest, progress=progress)
                break
            except DataError as error:
                failures.append(str(error).removesuffix(REMEDY).strip())
        else:
            raise DataError(" ".join([*failures, REMEDY]))
    try:
        unpack(archive, published, folder)
    except DamagedError:
        archive.unlink(missing_ok=True)
        raise
    archive.unlink(missing_ok=True)


def download(url: str, path: Path, *, digest: str | None = None, progress: Progress | None = None) -> None:
    """Download `url` to `path`, which appears only when it is complete and has the checksum `digest`."""
    try:
        import pooch
        import requests
    except ImportError as error:
        raise DataError(f"A download needs the package pooch, which is missing. {install_extra('train')}") from error

    pooch.get_logger().setLevel("ERROR")
    bar = False if progress is None else _ProgressBar(f"downloading {url}", progress)
    get = pooch.HTTPDownloader(
        progressbar=bar,
        chunk_size=CHUNK_BYTES,
        timeout=TIMEOUT_SECONDS,
        # some servers refuse the default name of a library, and compressed answers have another length
        headers={"User-Agent": "Mozilla/5.0 (compatible; rankwise)", "Accept-Encoding": "identity"},
    )
    for attempt in range(1, ATTEMPTS + 1):
        try:
            pooch.retrieve(url, digest, path.name, path.parent, downloader=get)
            return
        except requests.HTTPError as error:
            answer = error.response
            if answer is not None and answer.status_code not in (408, 429) and answer.status_code < 500:
                told = f"{answer.status_code} {answer.reason}"
                raise DataError(f"{url} must be there, but the server answered {told}. {REMEDY}") from error
            failure: Exception = error
        except requests.RequestException as error:
            failure = error
        except ValueError as error:
            found = re.search(r"got (\w+)", str(error))
            raise DataError(
                f"{url} must have the checksum {digest}, but has {found[1] if found else 'another'} instead. "
                f"Run the command again. {REMEDY}"
            ) from error
        except OSError as error:
            raise DataError(
                f"{url} must be written to {path}, but that failed: {reason(error)}. "
                f"Free some space or choose another folder. {REMEDY}"
            ) from error
        if attempt < ATTEMPTS:
            time.sleep(FIRST_PAUSE_SECONDS * 2 ** (attempt - 1))
    raise DataError(
        f"{url} must arrive whole, but the transfer failed {ATTEMPTS} times: {reason(failure)}. "
        f"Run the command again when the network is back. {REMEDY}"
    ) from failure


class _ProgressBar:
    """What pooch reports, passed on to `progress`."""

    def __init__(self, what: str, progress: Progress) -> None:
        self.what, self.progress = what, progress
        self.total = self.done = 0

    def update(self, num_bytes: int) -> None:
        # pooch adds whole chunks, also for the last one; and a total of 0 where the server does not say it
        self.done = min(self.done + num_bytes, self.total) if self.total else self.done + num_bytes
        self.progress(self.what, self.done, self.total or None)

    def reset(self) -> None:
        self.done = 0

    def close(self) -> None:
        self.reset()


LARGEST_RATIO = 50
"""Bytes of text for every byte of an archive, at most: far less than in one that was made to fill a disk."""


class DamagedError(DataError):
    """An archive that does not hold what it should."""


def unpack(archive: Path, published: Published, folder: Path) -> None:
    """Unpack the files of a published corpus; each appears only when it is complete and has its checksum."""
    try:
        with zipfile.ZipFile(archive) as packed:
            members = {member.rpartition("/")[2]: member for member in packed.namelist()}
            missing = sorted(set(published.files) - set(members))
            if missing:
                raise DamagedError(f"{archive} must hold {missing[0]}, but does not. {REMEDY}")
            # no more is unpacked of a member than the archive says it holds
            size = sum(packed.getinfo(members[name]).file_size for name in published.files)
            most = LARGEST_RATIO * archive.stat().st_size + 1024 * 1024
            if size > most:
                raise DamagedError(f"{archive} must unpack to at most {most:,} bytes, but has {size:,}. {REMEDY}")
            folder.mkdir(parents=True, exist_ok=True)
            for name, digest in published.files.items():
                _unpack_file(packed, members[name], folder / name, digest)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DamagedError(f"{archive} must be a whole zip archive, but is not: {reason(error)}. {REMEDY}") from error
    except OSError as error:
        raise DataError(
            f"{archive} must be unpacked into {folder}, but that failed: {reason(error)}. "
            "Free some space or choose another folder."
        ) from error


def _unpack_file(packed: zipfile.ZipFile, member: str, path: Path, digest: str) -> None:
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
