"""Downloading: resumed where it stopped, checked, and under its name only when it is complete."""

from __future__ import annotations

import http.client
import os
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from rankwise.errors import DataError
from rankwise.lab.data.text import Progress, check_digest, reason

BLOCK_BYTES = 256 * 1024
TIMEOUT_SECONDS = 30.0
ATTEMPTS = 5
FIRST_PAUSE_SECONDS = 1.0

REMEDY = "If you have the files, name their folder: `data` of load_corpus, --corpus.data on the command line."

# some servers turn away the name that urllib gives itself
_HEADERS = {"User-Agent": "Mozilla/5.0 (compatible; rankwise)", "Accept-Encoding": "identity"}


def download(url: str, path: Path, *, digest: str | None = None, progress: Progress | None = None) -> None:
    """Fetch `url` to `path`.

    What has arrived waits in `path` + ".part": an interrupted transfer, in this call or an earlier one, goes on from
    there. A complete file with the wrong checksum is removed. One process at a time may fetch a file.
    """
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for attempt in range(ATTEMPTS):
            try:
                _transfer(url, part, progress)
                break
            except _InterruptedError as error:
                if attempt == ATTEMPTS - 1:
                    raise DataError(
                        f"{url} must arrive whole, but the transfer broke off {ATTEMPTS} times: {error}. "
                        f"Run the command again to go on from there. {REMEDY}"
                    ) from error
                time.sleep(FIRST_PAUSE_SECONDS * 2**attempt)
        if digest:
            try:
                check_digest(part, digest, f"It was removed; run the command again. {REMEDY}")
            except DataError:
                part.unlink()
                raise
        os.replace(part, path)
    except OSError as error:
        raise DataError(
            f"{url} must be written to {path}, but that failed: {reason(error)}. "
            f"Free some space or choose another folder. {REMEDY}"
        ) from error


class _InterruptedError(Exception):
    """The transfer stopped early; another attempt may go on."""


def _transfer(url: str, part: Path, progress: Progress | None) -> None:
    """One request, from the end of the part file on."""
    have = part.stat().st_size if part.exists() else 0
    headers = {**_HEADERS, "Range": f"bytes={have}-"} if have else _HEADERS
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        with error:
            _refused(url, part, have, error)
        return
    except (OSError, http.client.HTTPException) as error:
        raise _InterruptedError(reason(getattr(error, "reason", None) or error)) from error
    with response:
        total = _total(response, part, have)
        if have and response.status == 200:
            have = 0
        with part.open("r+b" if have else "wb") as file:
            file.seek(have)
            while block := _read(response):
                file.write(block)
                have += len(block)
                if progress:
                    progress(f"downloading {url}", have, total)
            file.flush()
            os.fsync(file.fileno())
    if total is not None and have != total:
        raise _InterruptedError(f"{have:,} of {total:,} bytes arrived")


def _read(response: Any) -> bytes:
    try:
        return bytes(response.read(BLOCK_BYTES))
    except (OSError, http.client.HTTPException) as error:
        raise _InterruptedError(reason(error)) from error


def _refused(url: str, part: Path, have: int, error: urllib.error.HTTPError) -> None:
    """Return if all had arrived before; otherwise say what happened."""
    if error.code == 416:
        if error.headers.get("Content-Range", "").rpartition("/")[2] == str(have):
            return
        part.unlink(missing_ok=True)
        raise _InterruptedError("what had arrived before does not belong to this file")
    if error.code in (408, 429) or error.code >= 500:
        raise _InterruptedError(f"the server answered {error.code} {error.reason}")
    raise DataError(f"{url} must be there, but the server answered {error.code} {error.reason}. {REMEDY}")


def _total(response: Any, part: Path, have: int) -> int | None:
    """The length of the whole file, where the server says it."""
    if response.status == 206:
        span, _, total = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
        if span.partition("-")[0] != str(have):
            part.unlink(missing_ok=True)
            raise _InterruptedError(f"the server sent bytes {span or '?'} instead of those from {have:,} on")
        return int(total) if total.isdigit() else None
    length = response.headers.get("Content-Length")
    return int(length) if length else None
