"""Downloads, from a small server on this machine: tried again, checked, whole or not at all."""

from __future__ import annotations

import hashlib
import io
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rankwise.errors import DataError
from rankwise.lab.data import download as downloading
from rankwise.lab.data import load_corpus
from rankwise.lab.data.download import PUBLISHED, Published, download, fetch

CONTENT = bytes(range(256)) * 4000
DIGEST = "sha256:" + hashlib.sha256(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves `content` at /file; breaks off the first `breaks` transfers half-way."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = CONTENT
        self.breaks = 0
        self.num_requests = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/file"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.num_requests += 1
        if self.path != "/file":
            return self.send_error(404)
        content = self.server.content
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.server.breaks:
            self.server.breaks -= 1
            content = content[: len(content) // 2]
        self.wfile.write(content)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(downloading, "FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(downloading, "TIMEOUT_SECONDS", 5.0)
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield running
        finally:
            running.shutdown()
            thread.join(timeout=5)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_arrives_whole_and_says_how_far_it_is(server, tmp_path):
    calls: list[tuple[str, int, int | None]] = []
    download(server.url, tmp_path / "new" / "file", digest=DIGEST, progress=lambda *call: calls.append(call))
    assert (tmp_path / "new" / "file").read_bytes() == CONTENT
    assert names(tmp_path / "new") == ["file"]
    assert len(calls) > 1
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)
    assert calls[-1] == (f"downloading {server.url}", len(CONTENT), len(CONTENT))


def test_an_interrupted_transfer_is_tried_again(server, tmp_path):
    server.breaks = 2
    download(server.url, tmp_path / "file", digest=DIGEST)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.num_requests == 3


def test_a_transfer_that_keeps_breaking_off_is_given_up_and_leaves_nothing(server, tmp_path):
    server.breaks = 5
    with pytest.raises(DataError, match=r"must arrive whole, but the transfer failed 5 times: .* --corpus.data"):
        download(server.url, tmp_path / "file")
    assert names(tmp_path) == []
    download(server.url, tmp_path / "file", digest=DIGEST)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_wrong_checksum_is_refused_and_nothing_is_kept(server, tmp_path):
    with pytest.raises(DataError, match=f"checksum sha256:00, but has {DIGEST[7:]} instead. Run .* --corpus.data"):
        download(server.url, tmp_path / "file", digest="sha256:00")
    assert names(tmp_path) == []


def test_a_file_that_is_not_there_is_refused_at_once(server, tmp_path):
    with pytest.raises(DataError, match=r"file/none must be there, but .* 404 Not Found. .* --corpus.data"):
        download(server.url + "/none", tmp_path / "file")
    assert names(tmp_path) == []
    assert server.num_requests == 1


def test_a_server_that_is_not_there_is_refused(server, tmp_path):
    server.shutdown()
    server.server_close()
    with pytest.raises(DataError, match="failed 5 times: .*Connection refused"):
        download(server.url, tmp_path / "file")


def test_a_file_that_cannot_be_written_is_refused(server, tmp_path):
    (tmp_path / "folder").write_text("a file")
    with pytest.raises(DataError, match="must be written to .*file, but that failed: "):
        download(server.url, tmp_path / "folder" / "file")


def zipped(**files: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(f"folder/{name}", content)
    return packed.getvalue()


def published(server: Server, **files: bytes) -> Published:
    digests = {name: "sha256:" + hashlib.sha256(content).hexdigest() for name, content in files.items()}
    return Published(urls=(server.url + "/gone", server.url), megabytes=1, files=digests)


def test_an_archive_is_fetched_from_the_first_mirror_that_has_it_and_only_once(server, tmp_path):
    server.content = zipped(a=b"one", b=b"two", c=b"not asked for")
    wanted = published(server, a=b"one", b=b"two")
    fetch(wanted, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"one", "b": b"two"}
    num_requests = server.num_requests
    fetch(wanted, tmp_path)
    assert server.num_requests == num_requests == 2


def test_when_no_mirror_has_it_each_failure_is_told(server, tmp_path):
    urls = (server.url + "/1", server.url + "/2")
    with pytest.raises(DataError, match=r"file/1 must be there.*file/2 must be there.*--corpus.data"):
        fetch(Published(urls=urls, megabytes=1, files={"a": "sha256:0"}), tmp_path)


@pytest.mark.parametrize("damage, message", [
    ("content", "folder/a in .* must have the checksum sha256:.*, but has"),
    ("member", "must hold b, but does not"),
    ("cut", "must be a whole zip archive, but is not"),
    ("bits", "must be a whole zip archive, but is not: Bad CRC-32"),
])  # fmt: skip
def test_a_damaged_archive_is_refused_and_removed(server, tmp_path, damage, message):
    server.content = zipped(a=b"other" if damage == "content" else b"one", b=b"two")
    wanted = published(server, a=b"one", b=b"two")
    if damage == "member":
        server.content = zipped(a=b"one")
    elif damage == "cut":
        server.content = server.content[:-30]
    elif damage == "bits":
        # the stored checksum of the first member
        position = server.content.index(b"PK\x01\x02") + 16
        server.content = server.content[:position] + b"\0\0\0\0" + server.content[position + 4 :]
    with pytest.raises(DataError, match=message):
        fetch(wanted, tmp_path)
    assert names(tmp_path) in ([], ["a"])
    assert not (tmp_path / "b").exists()


def test_an_archive_that_was_made_to_fill_the_disk_is_refused(server, tmp_path):
    bomb = bytes(200_000_000)
    server.content = zipped(a=bomb)
    with pytest.raises(DataError, match=r"must unpack to at most 1\d,\d+,\d+ bytes, but has 200,000,000"):
        fetch(published(server, a=bomb), tmp_path)
    assert names(tmp_path) == []


def test_an_archive_that_cannot_be_unpacked_for_want_of_space_is_kept(server, tmp_path, monkeypatch):
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    server.content = zipped(a=b"one")
    monkeypatch.setattr("shutil.copyfileobj", full)
    with pytest.raises(DataError, match="must be unpacked into .*, but that failed: No space left on device"):
        fetch(published(server, a=b"one"), tmp_path)
    assert names(tmp_path) == ["gone"]


def test_a_published_corpus_is_downloaded_prepared_and_kept(server, tmp_path, monkeypatch):
    text = b"abcdefghij" * 10
    server.content = zipped(enwik8=text)
    monkeypatch.setitem(PUBLISHED, "enwik8", published(server, enwik8=text))
    for _ in range(2):
        corpus = load_corpus("enwik8", cache=tmp_path)
        assert corpus.vocabulary.decode(corpus.train.tolist()).encode() == text[:90]
    assert server.num_requests == 2


def test_a_packed_corpus_in_the_data_folder_is_unpacked_into_the_cache(server, tmp_path, monkeypatch):
    text = b"abcdefghij" * 10
    wanted = published(server, enwik8=text)
    monkeypatch.setitem(PUBLISHED, "enwik8", wanted)
    data = tmp_path / "data"
    data.mkdir()
    (data / wanted.archive).write_bytes(zipped(enwik8=text))
    assert len(load_corpus("enwik8", data=data, cache=tmp_path / "cache").valid) == 5
    assert names(data) == [wanted.archive]
    assert server.num_requests == 0
