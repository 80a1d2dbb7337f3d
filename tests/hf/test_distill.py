"""Distillation: nothing to learn from a teacher that one equals, and its closed forms elsewhere."""

from __future__ import annotations

import copy

import pytest
import torch
from hf_families import QUIET, batch, build

import rankwise as rw
from rankwise.hf.distill import Distillation, answer_difference, distillation_loss, hidden_difference

pytestmark = QUIET


@pytest.mark.parametrize("family", ["bert", "roberta", "mpnet", "distilbert", "deberta-v3"])
def test_a_gated_model_equals_its_teacher_when_its_gates_are_open(family: str) -> None:
    """So hidden states match one to one, and the loss is that of the labels alone."""
    model = build(family)
    loss = distillation_loss(copy.deepcopy(model), Distillation(labels=0.25))
    rw.Pruner(model, rw.Budget(removed=0.3), anneal_steps=50)
    # as it starts, every gate is open
    inputs = batch(model)
    with torch.no_grad():
        model.eval()
        expected = 0.25 * model(**inputs).loss
        assert float(loss(model, inputs)) == pytest.approx(float(expected), rel=1e-3)


def test_no_gradient_reaches_the_teacher() -> None:
    teacher, student = build("bert", seed=1), build("bert")
    distillation_loss(teacher)(student, batch(student)).backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert any(parameter.grad is not None for parameter in student.parameters())


def test_training_on_the_teacher_alone_brings_answers_and_states_closer() -> None:
    teacher, student = build("bert", seed=1), build("bert")
    loss = distillation_loss(teacher, Distillation(labels=0))
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    values = []
    for _ in range(30):
        value = loss(student, batch(student))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(float(value.detach()))
    assert values[-1] < 0.6 * values[0]


def test_answers_are_compared_by_the_closed_form() -> None:
    given, wanted = torch.randn(5, 3).double(), torch.randn(5, 3).double()
    p, q = torch.softmax(wanted / 2, 1), torch.softmax(given / 2, 1)
    by_hand = 4 * (p * (p / q).log()).sum(1).mean()
    torch.testing.assert_close(answer_difference(given, wanted, 2.0), by_hand.float())
    one = answer_difference(torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [4.0]]), 2.0)
    assert float(one) == pytest.approx((1 + 4) / 2)


def test_padding_does_not_count() -> None:
    given, wanted = [torch.randn(2, 4, 3) for _ in range(3)], [torch.randn(2, 4, 3) for _ in range(3)]
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    before = hidden_difference(given, wanted, mask)
    for state in given:
        state[0, 3] += 100
    for state in wanted:
        state[1, 2:] -= 100
    torch.testing.assert_close(hidden_difference(given, wanted, mask), before)
    # twice a state is away from it by as much as it is long
    assert float(hidden_difference([2 * state for state in wanted], wanted, None)) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"labels": -1.0}, "`labels` must be at least 0 and finite, but is -1.0"),
        ({"temperature": 0.0}, "`temperature` must be positive and finite, but is 0.0"),
        ({"labels": 0.0, "logits": 0.0, "hidden": 0.0}, "must be above 0, but all are 0"),
    ],
)
def test_bad_settings_are_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Distillation(**wrong)
