"""The published figures, on the real data where it is at hand: RANKWISE_DATA, or ../shared/data beside the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankwise.lab.data import load_corpus


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that does not outlive the tests: pytest would keep some hundred megabytes of each of the last runs."""
    folder = tmp_path_factory.mktemp("real")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def data(scratch: Path) -> Path:
    """A folder with the data, unpacked where it has to be."""
    if named := os.environ.get("RANKWISE_DATA"):
        return Path(named)
    packed = Path(__file__).resolve().parents[4] / "shared" / "data"
    if not (packed / "unpack").is_file() or not shutil.which("xz"):
        pytest.skip(f"no real data: set RANKWISE_DATA to its folder, or put it into {packed}")
    subprocess.run([packed / "unpack", scratch / "data"], check=True, capture_output=True, timeout=120)
    return scratch / "data"


def test_enwik8_has_205_bytes_and_the_standard_split(data, scratch):
    corpus = load_corpus("enwik8", data=data, cache=scratch / "cache")
    assert [len(corpus.train), len(corpus.valid), len(corpus.test)] == [90_000_000, 5_000_000, 5_000_000]
    assert len(corpus.vocabulary) == 205
    assert corpus.vocabulary.decode(corpus.train[:10].tolist()) == "<mediawiki"


def test_wikitext_2_has_the_published_counts(data, scratch):
    corpus = load_corpus("wikitext-2", data=data, cache=scratch / "cache")
    assert [len(corpus.train), len(corpus.valid), len(corpus.test)] == [2_088_628, 217_646, 245_569]
    assert len(corpus.vocabulary) == 33_278
    unknown = corpus.vocabulary.numbers[b"<unk>"]
    # the published files hold every word of valid and test in train, or write <unk> themselves
    written = (data / "wikitext-2" / "valid.txt").read_text(encoding="utf-8").split().count("<unk>")
    assert int((corpus.valid == unknown).sum()) == written
