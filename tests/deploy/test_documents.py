"""Documents of a JSONL file: windows keep them apart, and conversations are written as the model expects."""

from __future__ import annotations

import json
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from rankwise.deploy.documents import SpecialTokens, TextEncoder, check_known, document_windows
from rankwise.deploy.inputs import Calibration, text_windows
from rankwise.errors import DataError

WORDS = ["<unk>", "<s>", "</s>", "user", "bot", *(f"w{i}" for i in range(40))]
NUMBER = {word: i for i, word in enumerate(WORDS)}
TEMPLATE = "<s> {% for each in messages %}{{ each['role'] }} {{ each['content'] }} </s> {% endfor %}"


def encoder(template: str | None = TEMPLATE) -> TextEncoder:
    made = Tokenizer(models.WordLevel(NUMBER, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = hf.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="</s>")
    words.chat_template = template
    return TextEncoder(words)


def numbers(text: str) -> list[int]:
    return [NUMBER[word] for word in text.split()]


def lines(path: Path, *documents: Any) -> Path:
    path.write_text("\n".join(map(json.dumps, documents)) + "\n", encoding="utf-8")
    return path


def windows(path: Path, length: int, number: int = 50, **given: Any) -> list[list[int]]:
    calibration = Calibration(file=path, num_windows=number, window=length)
    found = text_windows(given.pop("encode", encoder()), calibration, **given)
    return [window.tolist() for window in found]


def numbered(folder: Path, sizes: list[int], first: int = 0) -> Path:
    """Documents of these sizes, whose words are numbered through the whole file."""
    words = iter(range(first, first + sum(sizes)))
    return lines(folder / "numbers.jsonl", *({"text": " ".join(str(next(words)) for _ in range(n))} for n in sizes))


def places(text: str) -> list[int]:
    return [int(word) for word in text.split()]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 15), st.integers(0, 2))
def test_a_window_begins_with_a_document_or_goes_on_in_a_long_one(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], length: int, marks: int
) -> None:
    path = numbered(tmp_path_factory.getbasetemp(), sizes)
    given: dict[str, Any] = {"wanted": 2_000, "length": length, "span": 1_000}
    found = document_windows(path, places, SpecialTokens(before=(-1,) * marks), **given)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    size_of = [size for size in sizes for _ in range(size)]
    assert all(len(window) == length for window in found)
    for window in found:
        assert window[0] in starts or size_of[window[0]] > length
        for one, other in pairwise(window):
            # a document goes on, or ends where the next one or its marks begin
            assert other == one + 1 or (other == -1 if marks else other in starts) or one == -1
    tokens = [token for window in found for token in window if token != -1]
    assert tokens == sorted(set(tokens))
    # no more is left out than the ends of short documents and the last window
    assert len(found) >= sum(size // length for size in sizes if size > length)


@given(st.lists(st.integers(2_000, 9_000), min_size=1, max_size=6), st.integers(1, 25))
def test_long_documents_give_windows_by_their_length(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], number: int
) -> None:
    """Windows lie at equal distances in the whole text, also where places lie within a few long documents."""
    # all of them as wide
    path = numbered(tmp_path_factory.getbasetemp(), sizes, first=10_000)
    found = document_windows(path, places, SpecialTokens(), wanted=number, length=10, span=50)
    content = path.read_bytes()
    assert len(found) == number
    for i, window in enumerate(found):
        # the brackets of JSON are no words
        assert abs(content.index(str(window[0]).encode()) - i * len(content) // number) < 25


def test_documents_end_as_the_model_knows_it(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"text": "w1 w2"}, {"text": "w3 w4 w5"}, {"text": "w6"})
    bos = SpecialTokens(before=(1,))
    assert windows(path, 9, special=bos) == [numbers("<s> w1 w2 </s> <s> w3 w4 w5 </s>")]
    around = SpecialTokens(before=(1,), after=(0,))
    assert windows(path, 9, special=around) == [numbers("<s> w1 w2 <unk> <s> w3 w4 w5 <unk>")]


def test_conversations_go_through_the_chat_template(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "w1 w2"}, {"role": "bot", "content": "w3"}]
    path = lines(tmp_path / "a.jsonl", {"messages": said}, {"messages": said[:1]})
    # the template begins as a window does, which is not done twice
    wanted = "<s> user w1 w2 </s> bot w3 </s> <s> user w1 w2 </s>"
    assert windows(path, 13, special=SpecialTokens(before=(1,))) == [numbers(wanted)]
    with pytest.raises(DataError, match=r"a.jsonl holds conversations .* need a tokenizer with a chat template"):
        windows(path, 5, encode=encoder(None))
    with pytest.raises(DataError, match=r"a.jsonl holds conversations"):
        windows(path, 5, encode=numbers)
    with pytest.raises(DataError, match="must suit the model's chat template, but do not: .*alternate"):
        windows(path, 5, encode=encoder("{{ raise_exception('roles must alternate') }}"))


@pytest.mark.parametrize(
    "line", ["w1 w2", "[1]", '{"content": "w1"}', '{"messages": []}', '{"messages": 3}', '{"text": 3}', '{"text": "w']
)
def test_a_line_that_is_no_document_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "w1"}\n\n' + line + '\n{"text": "w2"}\n')
    with pytest.raises(DataError, match=r'a list of \{"role": ..., "content": ...\}, but line 3 is') as refused:
        windows(path, 2)
    assert "\n" not in str(refused.value)


def test_a_wrong_line_of_a_long_file_is_named_in_little_memory(tmp_path: Path) -> None:
    path, good = tmp_path / "a.jsonl", b'{"text": "w1 w2 w3 w4"}\n' * 60_000
    content = good + b"wrong\n" * (len(good) // 10)
    path.write_bytes(content)
    # the last of four places is behind what is good
    number = content[: 3 * len(content) // 4].count(b"\n") + 1
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=f"but line {number} is 'wrong'"):
            windows(path, 4, number=4)
        assert tracemalloc.get_traced_memory()[1] < len(content) / 2
    finally:
        tracemalloc.stop()


def test_of_a_long_file_only_places_are_read(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", *({"text": f"w{10 + i // 200} " * 4} for i in range(4_000)))
    found = windows(path, 4, number=4)
    assert found == [numbers(f"w{i} " * 4) for i in (10, 15, 20, 25)]
    # what lies between is not looked at
    content = bytearray(path.read_bytes())
    content[len(content) // 8] = 0xE9
    path.write_bytes(content)
    assert windows(path, 4, number=4) == found
    with pytest.raises(DataError, match="must be UTF-8, but .*a.jsonl has the byte 0xe9"):
        windows(path, 4, number=4_000)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=30), st.integers(1, 12), st.integers(1, 20))
def test_windows_of_long_files_do_not_overlap(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], length: int, number: int
) -> None:
    """Also where places lie in one long document: what is kept back must not be what calibrates."""
    assume(sum(sizes) >= length)
    path = numbered(tmp_path_factory.getbasetemp(), sizes)
    calibration = Calibration(file=path, num_windows=number, window=length)
    found = text_windows(places, calibration, bytes_per_token=1)
    seen = torch.cat(found).tolist()
    assert len(seen) == len(set(seen)) and all(len(window) == length for window in found)
    if len(sizes) == 1:
        assert len(found) == min(number, sizes[0] // length)


@pytest.mark.parametrize("line", ['{"text": "w1 \\udc80"}', '{"text": "w1 \\ud800"}'])
def test_half_of_a_character_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.jsonl").write_text(line + "\n")
    with pytest.raises(DataError, match="but line 1 is"):
        windows(tmp_path / "a.jsonl", 2)


def test_files_of_other_systems_and_empty_documents_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "w1 w2"}\r\n\r\n{"text": ""}\r\n{"text": "w3 w4"}')
    assert windows(path, 6) == [numbers("w1 w2 </s> w3 w4 </s>")]


def test_an_empty_file_is_told_to_be_longer(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n")
    with pytest.raises(DataError, match="at least one window of 4 tokens, but .*a.jsonl has 0. Give a longer text"):
        windows(path, 4)


def test_a_text_in_characters_that_the_tokenizer_does_not_know_is_refused() -> None:
    tokens = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 1, 2])
    check_known(tokens, 0, "<unk>", "`calibration`", "a.txt")
    check_known(tokens, None, None, "`calibration`", "a.txt")
    with pytest.raises(DataError, match="characters of `calibration`, but 30% of the tokens of a.txt are <unk>"):
        check_known(tokens % 3, 0, "<unk>", "`calibration`", "a.txt")
