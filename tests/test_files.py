"""Files from outside: what only a mistake or malice writes is one error, and takes no time and no memory."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.errors import CheckpointError, InvalidValueError
from rankwise.files import DEEPEST_JSON, digest, exchange, is_abandoned, owning, parse_json, read_json

NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(), lambda s: st.lists(s) | st.dictionaries(st.text(), s)
)


@given(PLAIN)
def test_what_json_can_hold_is_read_as_it_is(content: object) -> None:
    for text in (json.dumps(content), json.dumps(content, ensure_ascii=False)):
        assert parse_json(text) == parse_json(text.encode()) == content


@given(st.binary())
def test_bytes_give_content_or_one_error(text: bytes) -> None:
    with suppress(InvalidValueError):
        assert parse_json(text) == json.loads(text.decode())


@pytest.mark.parametrize(
    "text, match",
    [
        ('{"a": NaN}', "NaN, which is no number of JSON"),
        ("[-Infinity]", "-Infinity, which is no number"),
        ("[1e999]", "the number 1e999, which is too large"),
        (f"[{2**63}]", "the number 9223372036854775808, which is too large"),
        ("9" * 10_000, "the number 999.*, which is too large"),
        ("[" * (DEEPEST_JSON + 1) + "]" * (DEEPEST_JSON + 1), "more than 100 lists and objects inside each other"),
        ("[" * 100_000, "more than 100 lists and objects|is not JSON"),
        ('{"a":' * 5_000 + "1" + "}" * 5_000, "more than 100 lists and objects"),
        (r'["\ud800"]', "half of a character"),
        (b'["\xed\xa0\x80"]', "is not JSON: .*invalid"),
        ("", "is not JSON"),
    ],
)
def test_what_no_program_of_good_will_writes_is_refused(text: str | bytes, match: str) -> None:
    with pytest.raises(InvalidValueError, match=match):
        parse_json(text)


def test_bytes_that_are_no_utf8_may_be_written_as_python_writes_them() -> None:
    token = b"\xff\xfe".decode(errors="surrogateescape")
    assert parse_json(json.dumps([token])) == [token]
    assert parse_json(json.dumps(["\U0001f600"])) == ["\U0001f600"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_a_pipe_or_a_device_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    os.symlink("/dev/zero", tmp_path / "zero.json")
    for name in ("pipe.json", "zero.json"):
        for read in (read_json, digest):
            with pytest.raises(CheckpointError, match=f"{name} is not a regular file"):
                read(tmp_path / name)


def test_a_file_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "long.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(InvalidValueError, match="longer than 16,777,216 bytes"):
        read_json(tmp_path / "long.json")


def test_two_folders_exchange_their_names(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if exchange(tmp_path / "one", tmp_path / "other"):
        assert (tmp_path / "one" / "other").exists()
        assert (tmp_path / "other" / "one").exists()
    assert not exchange(tmp_path / "one", tmp_path / "none")


@pytest.mark.skipif(os.name == "nt", reason="needs locks of folders")
def test_a_folder_is_abandoned_when_nobody_owns_it(tmp_path: Path) -> None:
    assert is_abandoned(tmp_path)
    with owning(tmp_path):
        assert not is_abandoned(tmp_path)
    assert is_abandoned(tmp_path)
    assert not is_abandoned(tmp_path / "none")
