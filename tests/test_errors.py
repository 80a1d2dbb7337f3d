"""What a message proposes is what was almost written."""

from __future__ import annotations

import re
from functools import cache

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rankwise.errors import nearest
from rankwise.methods import METHODS

WORDS = st.text("abcdefgh", min_size=1, max_size=12)
KNOWN = st.lists(WORDS, max_size=6, unique=True)


@cache
def distance(word: str, other: str) -> int:
    """Fewest insertions, removals and replacements, by definition."""
    if not word or not other:
        return len(word) + len(other)
    replaced = distance(word[1:], other[1:]) + (word[0] != other[0])
    return min(replaced, distance(word[1:], other) + 1, distance(word, other[1:]) + 1)


def proposed(word: str, known: list[str]) -> str | None:
    text = nearest(word, known)
    found = re.fullmatch(r" Did you mean '(.*)'\?", text)
    assert found or text == ""
    return found and found[1]


@given(st.text("abcd", min_size=1, max_size=7), st.lists(st.text("abcd", min_size=1, max_size=7), max_size=3))
def test_what_is_proposed_is_a_few_edits_away_and_shares_most_of_the_word(word: str, known: list[str]) -> None:
    found = proposed(word, known)
    if found is not None:
        # a swap of neighbours is two replacements
        assert distance(word, found) <= max(2, len(word) // 2)
        assert set(word) & set(found)


@given(st.data(), st.text("abcdefgh", min_size=3, max_size=12), st.sampled_from(["drop", "add", "change", "swap"]))
def test_one_slip_is_found(data: st.DataObject, meant: str, slip: str) -> None:
    place = data.draw(st.integers(0, len(meant) - 2))
    before, letter, following, after = meant[:place], meant[place], meant[place + 1], meant[place + 2 :]
    written = {
        "drop": before + following + after,
        "add": before + "z" + letter + following + after,
        "change": before + "z" + following + after,
        "swap": before + following + letter + after,
    }[slip]
    others = data.draw(st.lists(st.text("uvwxy", min_size=5), max_size=4))
    # `tpu` is not meant to be `cpu`
    assume(not (slip == "change" and place == 0 and len(meant) == 3))
    assert proposed(written, [*others, meant]) == meant


@given(st.text("uvwxyz.-", max_size=12), KNOWN)
def test_what_shares_no_letter_gets_no_proposal(garbage: str, known: list[str]) -> None:
    assume(garbage not in known)
    assert proposed(garbage, known) is None


@pytest.mark.parametrize("word", ["quantize", "prune", "lora", "training.foo", "tpu", "x", ""])
def test_a_word_of_its_own_gets_no_proposal(word: str) -> None:
    assert nearest(word, [*METHODS, "training.lr", "lr", "demo", "cpu"]) == ""


def test_another_ending_is_found() -> None:
    assert proposed("--calibrate", ["--corpus.calibrated", "--calibration", "--measure"]) == "--calibration"


def test_capitals_and_underscores_are_no_slips() -> None:
    assert proposed("WikiText_2", ["enwik8", "wikitext-2", "wikitext-103"]) == "wikitext-2"
