"""Windows of a healing: what is held out is never trained on, and an epoch reads every window at most once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rankwise.deploy.documents import SpecialTokens
from rankwise.errors import DataError
from rankwise.lab.tasks.examples import TokenWindows
from rankwise.lab.tasks.healing import HELD_OUT, HealingText, check_known, read_healing_text

BOS = SpecialTokens(before=(0,))


def numbers(path: Path, first: int, last: int) -> Path:
    """A text in which every character occurs once."""
    path.write_text("".join(map(chr, range(first, last))), encoding="utf-8")
    return path


def encode(text: str) -> list[int]:
    return list(map(ord, text))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(30, 900), min_size=1, max_size=3), number=st.integers(1, 60), window=st.integers(2, 9)
)
def test_the_ends_of_texts_are_held_out(tmp_path: Path, sizes: list[int], number: int, window: int) -> None:
    starts = [1_000 * (place + 1) for place in range(len(sizes))]
    files = [numbers(tmp_path / f"{start}.txt", start, start + size) for start, size in zip(starts, sizes, strict=True)]
    found = read_healing_text(encode, files, [], number=number, window=window, special=BOS)
    train, held_out = (set(part[:, 1:].flatten().tolist()) for part in (found.train_NT, found.held_out_NT))
    assert not train & held_out
    assert found.window == found.held_out_NT.shape[1] == window
    assert (torch.cat([found.train_NT, found.held_out_NT])[:, 0] == 0).all()
    for start in starts:
        mine, back = ([n for n in part if n // 1_000 == start // 1_000] for part in (train, held_out))
        assert max(mine) < min(back)
    # no more than is asked for, but for what is rounded up in each text
    assert len(found.train_NT) <= number + len(files) + HELD_OUT
    assert len(found.held_out_NT) <= HELD_OUT + len(files)


def test_documents_of_a_jsonl_file_are_kept_apart(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": chr(300 + i) * 7}) + "\n" for i in range(60)))
    found = read_healing_text(encode, [path], [], number=20, window=8, special=BOS)
    for window in torch.cat([found.train_NT, found.held_out_NT]):
        assert len(set(window.tolist())) == 2 and int(window[0]) == 0


def test_texts_of_their_own_are_held_out_if_they_are_given(tmp_path: Path) -> None:
    text, other = numbers(tmp_path / "a", 100, 200), numbers(tmp_path / "b", 500, 600)
    found = read_healing_text(encode, [text], [other], number=20, window=6, special=BOS)
    # all of the text is trained on then
    assert found.train_NT.numel() == 20 * 6 and int(found.train_NT.max()) == 199
    assert int(found.held_out_NT[:, 1:].min()) == 500
    assert found.fingerprint != read_healing_text(encode, [text], [], number=20, window=6, special=BOS).fingerprint


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(30, 900), max_size=3),
    number=st.integers(8, 90),
    most=st.integers(2, 40),
    has_valid=st.booleans(),
)
def test_what_the_dense_model_writes_has_the_share_of_a_text(
    tmp_path: Path, sizes: list[int], number: int, most: int, has_valid: bool
) -> None:
    """Also beside short texts, which have fewer windows than are asked for."""
    files = [numbers(tmp_path / f"{i}.txt", 1_000 * i, 1_000 * i + size) for i, size in enumerate(sizes, 1)]
    valid = [numbers(tmp_path / "valid.txt", 9_000, 9_100)] if has_valid else []

    def write(wanted: int) -> Tensor:
        rows = min(wanted, most)
        return torch.arange(20_000, 20_000 + 6 * rows).view(rows, 6)

    found = read_healing_text(encode, files, valid, number=number, window=6, special=BOS, generate=write)
    own = [tuple(window) for window in found.train_NT.tolist() if window[1] >= 20_000]
    of_texts = len(found.train_NT) - len(own)
    if sizes:
        # no more than the average text, and a share of what is asked for where texts are long enough
        assert len(own) <= of_texts / len(sizes)
        assert len(own) >= min(of_texts // len(sizes), number // (len(sizes) + 1)) or most == 2
    else:
        assert len(own) == number
    # each about as often as the others, and none that is held out
    times = [own.count(window) for window in set(own)]
    assert not times or max(times) - min(times) <= 1
    held_out = [tuple(window) for window in found.held_out_NT.tolist() if window[1] >= 20_000]
    assert bool(held_out) != has_valid
    assert not set(held_out) & set(own)
    # what is said of them: how many tokens there are, each counted once
    different = {tuple(window) for window in found.train_NT.tolist()}
    assert found.record()["tokens"]["train"] == 6 * len(different)
    assert found.own == len(own) and (not own or found.times == len(own) / len(set(own)))
    # and how many windows of its own were read, if any were: to train on, or held out
    said = [name for name in found.name.split(", ") if name.endswith("of the dense model's own")]
    read = len({*own, *held_out})
    assert said in ([], [f"{read} window{'s' * (read > 1)} of the dense model's own"]) and bool(said) == bool(read)


@given(number=st.integers(1, 40), size=st.integers(1, 8), seed=st.integers(0, 2**64))
def test_an_epoch_has_full_batches_of_different_windows(number: int, size: int, seed: int) -> None:
    size = min(size, number)
    windows = TokenWindows(torch.arange(number)[:, None], ["input_ids"], multiple=size)
    batches = [batch["input_ids"].flatten().tolist() for batch in windows.batches(size, seed)]
    assert [len(batch) for batch in batches] == [size] * (number // size)
    seen = [place for batch in batches for place in batch]
    assert len(set(seen)) == len(seen) == len(windows)
    assert batches == [batch["input_ids"].flatten().tolist() for batch in windows.batches(size, seed)]


def test_a_text_that_the_tokenizer_does_not_know_is_refused() -> None:
    known = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9, 0]])
    text = HealingText(name="a.txt", train_NT=known, held_out_NT=known)
    check_known(text, 0, "<unk>", 10, "small")
    with pytest.raises(DataError, match=r"but 30% of the tokens of a.txt are <unk>, which stands for all it does not"):
        check_known(HealingText(name="a.txt", train_NT=known % 3, held_out_NT=known % 3), 1, "<unk>", 10, "small")
    with pytest.raises(DataError, match="numbers below 9, the words of the model, but gives 9"):
        check_known(text, None, None, 9, "small")
