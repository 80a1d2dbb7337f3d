"""The published corpora: where they are, what is in them, and what each file must hash to. Data, no code.

The checksums are of the files inside an archive, not of the archive: a mirror may have packed them anew.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Published:
    """A zip archive on the network."""

    urls: tuple[str, ...]
    """Mirrors, in the order they are tried."""

    megabytes: int
    """What is downloaded, about."""

    files: dict[str, str]
    """Checksum of each file that is taken out, by its name without folders; empty: that of the archive must do."""

    digest: str | None = None
    """Checksum of the archive itself, where it has one home."""

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
