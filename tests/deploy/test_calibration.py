"""The text that a model is calibrated on: blocks of it are read, wherever they begin and end."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.deploy.inputs import Calibration, text_windows
from rankwise.errors import DataError


def code_points(text: str) -> list[int]:
    return [ord(character) for character in text]


@given(text=st.text(st.sampled_from("aé☃😀"), min_size=40, max_size=200), number=st.integers(1, 9))
def test_a_block_may_cut_characters_at_its_ends(
    text: str, number: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "calibration.txt"
    path.write_text(text, encoding="utf-8")
    windows = text_windows(code_points, Calibration(file=path, num_windows=number, window=3), bytes_per_token=5)
    read = ["".join(map(chr, window.tolist())) for window in windows]
    assert text.startswith(read[0])
    assert all(part in text for part in read)


@pytest.mark.parametrize("place", [0, 7, 500, 1_990])
def test_what_is_no_utf8_is_refused(place: int, tmp_path: Path) -> None:
    content = bytearray(b"abcd" * 500)
    content[place] = 0xE9
    (tmp_path / "latin.txt").write_bytes(content)
    calibration = Calibration(file=tmp_path / "latin.txt", num_windows=4, window=10)
    with pytest.raises(DataError, match=f"must be UTF-8, but .*latin.txt has the byte 0xe9 at position {place:,}[.]"):
        text_windows(code_points, calibration, bytes_per_token=50)
