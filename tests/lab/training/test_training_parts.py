"""Schedules, configuration, losses and evaluation against their closed forms."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rankwise.lab.data.windows import IGNORED, Evaluation
from rankwise.lab.tasks.language import LanguageModel, evaluate
from rankwise.lab.tasks.states import carry, shape_of
from rankwise.lab.training.config import SCHEDULES, lr_factor
from tests.lab.training.training_toys import CONFIG, make_model

steps = st.integers(1, 10_000)


@pytest.mark.parametrize("training", [False, True])
def test_an_evaluation_leaves_every_module_in_its_mode(training: bool) -> None:
    model = make_model("sru", 7).train(training)
    model.dropout.eval()  # type: ignore[operator,union-attr]
    modes = [module.training for module in model.modules()]
    evaluate(LanguageModel(model), Evaluation(np.zeros(9, dtype=np.uint8), unroll=4), "character")
    assert [module.training for module in model.modules()] == modes


@given(k=steps, w=steps)
def test_inverse_sqrt_is_the_papers_up_to_its_peak(k: int, w: int) -> None:
    assert lr_factor("inverse-sqrt", k, w, 1) == pytest.approx(min(k**-0.5, k / w**1.5) * w**0.5)


@given(w=st.integers(0, 100), n=st.integers(1, 10_000))
def test_cosine_rises_to_one_and_falls_to_zero(w: int, n: int) -> None:
    n += w
    assert lr_factor("cosine", n, w, n) == pytest.approx(0, abs=1e-12)
    if w:
        assert lr_factor("cosine", w, w, n) == 1
        assert lr_factor("cosine", 1, w, n) == 1 / w
    middle = w + (n - w) // 2
    if (n - w) % 2 == 0:
        assert lr_factor("cosine", middle, w, n) == pytest.approx(0.5)


@given(k=steps, w=st.integers(0, 100), name=st.sampled_from(sorted(SCHEDULES)))
def test_no_schedule_leaves_the_range_from_zero_to_its_peak(k: int, w: int, name: str) -> None:
    assert 0 <= lr_factor(name, k, w, 20_000) <= 1
    assert lr_factor("constant", k, w, 1) == min(1, k / max(w, 1))


def test_a_schedule_may_begin_anew_with_pruning() -> None:
    config = dataclasses.replace(CONFIG, steps=100, dense_steps=40, schedule="cosine", warmup_steps=5)
    assert config.lr_at(40) > 0
    again = dataclasses.replace(config, restart_schedule=True)
    assert again.lr_at(40) == pytest.approx(0)
    assert again.lr_at(45, pruning=True) == again.lr
    assert again.lr_at(100, pruning=True) == pytest.approx(0)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"steps": 0}, "`steps` must be a whole number of at least 1, but is 0"),
        ({"batch_size": 2.0}, "`batch_size` must be a whole number of at least 1, but is 2.0"),
        ({"seed": True}, "`seed` must be a whole number"),
        ({"lr": 0.0}, "`lr` must be positive and finite, but is 0.0"),
        ({"lr": math.nan}, "`lr` must be positive and finite, but is nan"),
        ({"clip": -1.0}, "`clip` must be positive and finite, but is -1.0"),
        ({"weight_decay": -1.0}, "`weight_decay` must be at least 0"),
        ({"betas": (0.9, 1.0)}, "`betas` must be two numbers"),
        ({"schedule": "steep"}, "`schedule` must be one of 'inverse-sqrt', .*, 'linear', but is 'steep'"),
        ({"precision": "fp16"}, "`precision` must be one of 'no', 'bf16', but is 'fp16'"),
        ({"accumulate": 3}, "`batch_size` must be a multiple of `accumulate`, but is 4 with accumulate=3"),
        ({"dense_steps": 13}, r"`dense_steps` must be at most `steps` \(12\), but is 13"),
    ],
)
def test_a_bad_setting_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(CONFIG, **change)


class Unigram(nn.Module):
    """Predicts words by their frequency, whatever it reads."""

    def __init__(self, num_words: int) -> None:
        super().__init__()
        self.log_prob = nn.Parameter(torch.randn(num_words, dtype=torch.float64).log_softmax(0))

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.log_prob.expand(*tokens.shape, -1), torch.zeros(1)


@given(length=st.integers(2, 300), unroll=st.integers(1, 40), streams=st.integers(1, 64))
def test_evaluation_counts_every_target_once(length: int, unroll: int, streams: int) -> None:
    tokens = np.random.default_rng(length).integers(0, 7, length).astype(np.uint8)
    model = LanguageModel(Unigram(7)).train()
    quality = evaluate(model, Evaluation(tokens, unroll=unroll, streams=streams), "character")
    expected = -model.model.log_prob[torch.from_numpy(tokens[1:]).long()].mean().item()  # type: ignore[index]
    assert quality.num_targets == length - 1
    assert quality.loss == pytest.approx(expected, rel=1e-12)
    assert quality.value == pytest.approx(expected / math.log(2))
    assert model.training


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_evaluation_leaves_the_precision_of_products_as_it_was(precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        evaluate(LanguageModel(Unigram(7)), Evaluation(np.zeros(9, dtype=np.uint8), unroll=4), "word")
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)


def test_perplexity_is_the_exponential_of_the_loss() -> None:
    tokens = np.zeros(9, dtype=np.uint8)
    quality = evaluate(LanguageModel(Unigram(7)), Evaluation(tokens, unroll=4), "word")
    assert quality.measure == "perplexity"
    assert quality.value == pytest.approx(math.exp(quality.loss))


@pytest.mark.parametrize("kind", ["sru", "txl", "adaptive"])
@pytest.mark.parametrize("all_count", [True, False])
def test_the_loss_is_the_mean_over_targets_that_count(kind: str, all_count: bool) -> None:
    model = make_model(kind, 11).eval()
    tokens, targets = torch.randint(0, 11, (2, 3, 5))
    if not all_count:
        targets[0, 2:] = targets[2, 4] = IGNORED
    language = LanguageModel(model)
    loss, state = language(tokens, targets)
    scores, _ = model(tokens)
    counted = targets != IGNORED
    expected = F.cross_entropy(scores[counted], targets[counted])
    torch.testing.assert_close(loss, expected)
    # the state goes on as the model's own does
    torch.testing.assert_close(language(tokens, targets, state)[1], model(tokens, model(tokens)[1])[1])


def test_a_state_is_carried_in_the_memory_of_the_one_before() -> None:
    first = carry(None, torch.ones(2, 3, requires_grad=True) * 2)
    assert not first.requires_grad
    second = carry(first, torch.full((2, 3), 5.0, requires_grad=True) * 1)
    assert second is first
    assert second.eq(5).all()
    assert carry(first, torch.zeros(2, 4)).shape == (2, 4)
    several = carry(None, (torch.zeros(2), torch.ones(3)))
    again = carry(several, (torch.full((2,), 7.0), torch.zeros(4)))
    assert again[0] is several[0]
    assert again[0].eq(7).all()
    assert shape_of(again) == ((2,), (4,))
    assert shape_of(None) == ()
