"""Windows that are kept back from calibration: which they are, what they measure, and the ranks that they choose."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import rankwise as rw
from rankwise.deploy.compress import Beside, Data, Listener, Source, compress_folder
from rankwise.deploy.compressed import Compressed, milliseconds
from rankwise.deploy.documents import SpecialTokens
from rankwise.deploy.inputs import ERROR, MUCH, Calibration, KeptBack, read_windows, text_windows
from rankwise.errors import DataError
from rankwise.oneshot import loss_of_choices


def numbers(text: str) -> list[int]:
    """Each word of a text is its own place in it; what is left of a word at the ends of a block is none."""
    return [int(word) for word in text.split() if len(word) == 4]


@given(
    words=st.integers(2, 400),
    num_windows=st.integers(1, 30),
    window=st.integers(4, 12),
    before=st.integers(0, 2),
    after=st.integers(0, 1),
    bytes_per_token=st.sampled_from([5, 40]),
)
def test_no_word_is_in_two_windows_and_all_have_their_special_tokens(
    words: int,
    num_windows: int,
    window: int,
    before: int,
    after: int,
    bytes_per_token: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.getbasetemp() / "numbers.txt"
    path.write_text("".join(f"{i} " for i in range(1000, 1000 + words)))
    calibration = Calibration(file=path, num_windows=num_windows, window=window)
    special = SpecialTokens((1, 2)[:before], (3,)[:after])
    length = window - before - after
    whole = words // length
    try:
        found = read_windows(numbers, calibration, bytes_per_token=bytes_per_token, special=special)
    except DataError:
        assert whole == 0
        return
    windows = [*found.used, *found.kept_back]
    for each in windows:
        assert len(each) == window
        assert tuple(each[:before].tolist()) == special.before
        assert tuple(each[window - after :].tolist()) == special.after
        short = special.shortened(each, 3)
        assert len(short) == 3
        assert torch.equal(short[: 3 - after], each[: 3 - after])
        assert tuple(short[3 - after :].tolist()) == special.after
    inside = [word for each in windows for word in each[before : window - after].tolist()]
    if words * 5 < (num_windows + calibration.num_kept_back) * length * bytes_per_token:
        assert len(inside) == len(set(inside))
        assert len(windows) == min(whole, num_windows + calibration.num_kept_back)
    assert len(found.used) <= num_windows
    assert len(found.kept_back) == 0 if len(windows) == 1 else 1 <= len(found.kept_back) < len(windows)
    assert bool(found.notes) == (len(windows) < num_windows + calibration.num_kept_back)


def test_a_text_with_fewer_windows_than_asked_for_is_used_whole_and_said(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text(" ".join(map(str, range(1000, 1100))))
    found = read_windows(numbers, Calibration(file=path, num_windows=64, window=10))
    assert sorted(word for each in (*found.used, *found.kept_back) for word in each.tolist()) == list(range(1000, 1100))
    assert (len(found.used), len(found.kept_back)) == (8, 2)
    (note,) = found.notes
    assert "holds 10 windows of 10 tokens, fewer than the 80 asked for: 8 calibrate, 2 are kept back." in note


def test_a_window_of_special_tokens_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("1 2 3")
    with pytest.raises(DataError, match="longer than the 2 special tokens of the model, but is 2 instead"):
        text_windows(numbers, Calibration(file=tmp_path / "text.txt", window=2), special=SpecialTokens((1,), (2,)))


class Bigram(nn.Module):
    """Says the next word by a head on a body, or on the word itself and next to nothing of the body."""

    def __init__(self, *, skips: bool = False) -> None:
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(12, 12), nn.Linear(12, 12), nn.Linear(12, 12)
        self.skips = skips

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        word = self.words(tokens)
        h = word + 0.01 * self.body(word) if self.skips else self.body(word)
        return self.head(h), h


def test_the_perplexity_of_a_decoder_is_that_of_the_next_words() -> None:
    model, batches = Bigram(), [torch.randint(0, 12, (1, 9)) for _ in range(3)]
    chances = [model(batch)[0].softmax(-1)[0] for batch in batches]
    logs = [chances[i][t, batches[i][0, t + 1]].log() for i in range(3) for t in range(8)]
    kept = KeptBack(model, batches, is_decoder=True)
    assert kept.dense == pytest.approx(math.exp(-torch.stack(logs).mean().item()), rel=1e-5)
    worse = copy.deepcopy(model)
    nn.init.normal_(worse.head.weight, std=20)
    assert kept.quality(worse).is_bad and not kept.quality(model).is_bad
    nn.init.constant_(worse.head.weight, torch.nan)
    assert kept.quality(worse).small == math.inf


def test_other_models_are_measured_by_what_the_dense_one_says() -> None:
    model, x = nn.Sequential(nn.Linear(6, 5)), torch.randn(1, 4, 6)
    wrapped = nn.Module()
    wrapped.forward = lambda x: (model(x),)  # type: ignore[method-assign]
    wrapped.model = model
    kept = KeptBack(wrapped, [x], is_decoder=False)
    assert kept.measure == ERROR and kept.dense == 0
    want = model(x)
    with torch.no_grad():
        model[0].weight.mul_(0.9)
        model[0].bias.mul_(0.9)
    assert kept.quality(wrapped).small == pytest.approx(0.1, rel=1e-4)
    assert want.shape == (1, 4, 5)


def misled(output: tuple[Tensor, Tensor]) -> Tensor:
    """A loss that is told nearly nothing of what the head says."""
    return output[1].square().sum() + 1e-9 * output[0].square().sum()


def attempts(loss: Any, *, skips: bool) -> tuple[Compressed, list[tuple[str, float]], list[str], KeptBack]:
    """What comes of a model that counts modulo 12, what was saved on the way, and what was said."""
    torch.manual_seed(0)
    model = Bigram(skips=skips)
    with torch.no_grad():
        model.words.weight.copy_(torch.eye(12))
        model.body.weight.copy_(torch.eye(12) + 0.1 * torch.randn(12, 12))
        model.head.weight.copy_(9 * torch.eye(12).roll(1, 0))
    batches = [(torch.arange(9) + start)[None] % 12 for start in range(12)]
    kept = KeptBack(model, batches, is_decoder=True)
    saved: list[tuple[str, float]] = []
    said: list[str] = []

    class Toy(Source):
        name = "toy"

        def load(self) -> nn.Module:
            return copy.deepcopy(model)

        def read(self, calibration: Calibration, progress: Any = None) -> Any:
            given = {"batches": batches, "loss_batches": batches, "kept_back": batches, "loss": loss}
            return lambda _: Data(**given, is_decoder=True, window=9)

        def check_target(self, folder: Path, overwrite: bool) -> None:
            assert not overwrite

        def save(self, small: nn.Module, made: Compressed, folder: Path, overwrite: bool, beside: Beside) -> list[str]:
            assert overwrite == bool(saved)
            saved.append((made.ranks, kept.measured(small)))
            return []

    listener = Listener()
    listener.say = said.append  # type: ignore[method-assign]
    text = Calibration(file=Path("unread"))
    settings: Any = {"calibration": text, "layout": "pair", "device": "cpu", "listener": listener}
    made = compress_folder(Toy(), rw.Budget(removed=0.25), "nowhere", **settings)
    return made, saved, said, kept


def test_even_ranks_are_taken_where_they_lose_less() -> None:
    made, saved, said, kept = attempts(misled, skips=False)
    assert made.ranks == "even"
    # only the best one is saved, at the end
    ((ranks, second),) = saved
    assert ranks == "even" and kept.dense < second
    assert made.quality is not None
    assert (made.quality.dense, made.quality.small) == (pytest.approx(kept.dense), pytest.approx(second))
    assert [line.split(":")[0] for line in said] == ["Ranks by the loss", "Even ranks", "Ranks between the two"]
    assert f"{second:.4g} small" in said[1]


@pytest.mark.parametrize("compared", [False, True])
def test_the_first_ranks_stay_where_little_is_lost_or_they_are_better(
    compared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compared:
        monkeypatch.setitem(MUCH, "perplexity", 0.0)
    generator = torch.Generator().manual_seed(0)
    made, saved, said, _ = attempts(lambda output: loss_of_choices(output[0], generator), skips=True)
    assert made.ranks == "global"
    assert [ranks for ranks, _ in saved] == ["global"]
    assert any("Even ranks" in line for line in said) == compared


@given(st.integers(0, 50))
def test_no_choice_is_one_that_cannot_be(seed: int) -> None:
    logits = torch.randn(64, 7, generator=torch.Generator().manual_seed(seed))
    logits[:, [0, 3, 6]] = -torch.inf
    loss = loss_of_choices(logits, torch.Generator().manual_seed(seed))
    assert torch.isfinite(loss)


def test_speed_is_measured_where_inputs_are_known() -> None:
    assert milliseconds(nn.Sequential(nn.Linear(3, 3)), 8) == {}
