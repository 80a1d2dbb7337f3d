"""Tokenized texts: every example once an epoch, in batches of like length, as the tokenizer gave it."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import torch

from rankwise.lab.tasks.sentences import MULTIPLE, TokenizedTexts


class Letters:
    """A tokenizer of letters, with the face of transformers' own."""

    pad_token_id = 9

    def __call__(self, first: list[str], *, truncation: bool, max_length: int) -> dict[str, Any]:
        ids = [[ord(letter) - ord("a") for letter in text][:max_length] for text in first]
        return {"input_ids": ids, "attention_mask": [[1] * len(each) for each in ids]}


def texts(number: int = 230) -> list[tuple[str]]:
    draw = random.Random(0)
    return [("".join(draw.choices("abcdefgh", k=draw.randrange(1, 60))),) for _ in range(number)]


def row(batch: dict[str, torch.Tensor], place: int) -> tuple[int, ...]:
    return tuple(batch["input_ids"][place][batch["attention_mask"][place].bool()].tolist())


def test_an_epoch_holds_every_example_once_and_seeds_differ() -> None:
    found = TokenizedTexts(Letters(), texts(), list(range(230)), max_length=40)
    expected = Counter(tuple(ord(letter) - ord("a") for letter in text[:40]) for (text,) in texts())
    orders = []
    for seed in (0, 0, 1):
        batches = list(found.batches(16, seed))
        assert Counter(row(batch, i) for batch in batches for i in range(len(batch["labels"]))) == expected
        assert all(len(batch["labels"]) == 16 for batch in batches if batch is not batches[-1]) or len(batches) == 15
        orders.append([batch["labels"].tolist() for batch in batches])
    assert orders[0] == orders[1] != orders[2]


def test_batches_are_padded_to_few_lengths_and_no_further_than_needed() -> None:
    found = TokenizedTexts(Letters(), texts(), max_length=40)
    lengths, padded = set(), 0
    for batch in found.batches(8, 0):
        width, longest = batch["input_ids"].shape[1], int(batch["attention_mask"].sum(1).max())
        assert longest <= width < longest + MULTIPLE
        assert bool((batch["input_ids"][~batch["attention_mask"].bool()] == 9).all())
        lengths.add(width)
        padded += batch["input_ids"].numel()
    assert lengths <= {16, 32, 40}
    # a batch of any eight of these texts would hold a long one
    assert padded < 0.9 * 40 * len(found)


def test_evaluation_keeps_the_places() -> None:
    found = TokenizedTexts(Letters(), texts(), [float(i) for i in range(230)], regression=True)
    seen = []
    for places, batch in found.in_order(32):
        assert batch["labels"].tolist() == [float(place) for place in places]
        seen += places
    assert sorted(seen) == list(range(230))
