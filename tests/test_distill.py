"""Distillation: nothing to learn from a teacher that one equals, and its closed forms elsewhere."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, kl_divergence

import rankwise as rw
from rankwise import distill
from rankwise.distill import (
    Distillation,
    answer_difference,
    distillation_loss,
    divergence_reference,
    hidden_difference,
    softmax_divergence,
)  # fmt: skip
from tests.hf.hf_families import ENCODER, QUIET, WORDS, batch, build

pytestmark = QUIET


@pytest.mark.parametrize("family", ["bert", "roberta", "mpnet", "distilbert", "deberta-v3"])
def test_a_gated_model_equals_its_teacher_when_its_gates_are_open(family: str) -> None:
    """So hidden states match one to one, and the loss is that of the labels alone."""
    model = build(family)
    loss = distillation_loss(copy.deepcopy(model), Distillation(labels=0.25))
    rw.Pruner(model, rw.Budget(removed=0.3), plan=rw.find_plan(model), anneal_steps=50)
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
    torch.testing.assert_close(answer_difference(given, wanted, 2.0, "single_label_classification"), by_hand.float())
    one = answer_difference(torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [4.0]]), 2.0, "regression")
    assert float(one) == pytest.approx((1 + 4) / 2)
    # each class by itself is a choice of two
    pairs = [torch.stack([x, torch.zeros_like(x)], -1).flatten(0, 1) for x in (given, wanted)]
    each = answer_difference(*pairs, 2.0, "single_label_classification")
    torch.testing.assert_close(answer_difference(given, wanted, 2.0, "multi_label_classification"), each)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 9),
    classes=st.integers(1, 7),
    chunk=st.integers(1, 80),
    temperature=st.sampled_from([0.5, 1, 2]),
)
def test_chunks_give_the_value_and_the_gradient_of_the_whole(
    rows: int, classes: int, chunk: int, temperature: float
) -> None:
    """Wherever it is cut, one row at a time included; every answer has a weight of its own."""
    torch.manual_seed(rows)
    given, wanted = (3 * torch.randn(2, rows, classes, dtype=torch.float64) for _ in range(2))
    weights = torch.rand(2, rows, dtype=torch.float64)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distill, "CHUNK", chunk)
        for function in (divergence_reference, softmax_divergence):
            x = given.clone().requires_grad_()
            values = function(x, wanted, temperature)
            (weights * values).sum().backward()
            found.append((values.detach(), x.grad))
        torch.testing.assert_close(found[1], found[0])
        x = given.clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda x: softmax_divergence(x, wanted, temperature), x)


def test_divergence_is_computed_in_float32_whatever_the_logits_are() -> None:
    given, wanted = (torch.randn(5, 300).bfloat16() for _ in range(2))
    given.requires_grad_()
    values = softmax_divergence(given, wanted, 1.0)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, divergence_reference(given.double(), wanted.double(), 1.0).float())
    values.sum().backward()
    assert given.grad is not None and given.grad.dtype == torch.bfloat16


def test_the_pooled_output_counts_where_there_is_one() -> None:
    student = hf.BertModel(hf.BertConfig(**ENCODER)).eval()
    teacher = copy.deepcopy(student)
    loss = distillation_loss(teacher, Distillation(labels=0, logits=0))
    rows = {"input_ids": batch(student)["input_ids"]}
    with torch.no_grad():
        assert float(loss(student, rows)) == pytest.approx(0, abs=1e-6)
        student.pooler.dense.weight.normal_()
        assert float(loss(student, rows)) > 1e-3


def token_classifier(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return hf.BertForTokenClassification(hf.BertConfig(**ENCODER, num_labels=5, initializer_range=1.0)).eval()


def answers_alone(teacher: Any, student: Any, batch: dict[str, Tensor]) -> float:
    """The difference of answers, with nothing beside it."""
    with torch.no_grad():
        return float(distillation_loss(teacher, Distillation(labels=0, hidden=0, temperature=1))(student, batch))


def by_hand(teacher: Any, student: Any, batch: dict[str, Tensor], counts: Tensor) -> float:
    """The mean of KL(teacher | student) over the answers that count, each taken by itself."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "decoder_input_ids") if name in batch}
    with torch.no_grad():
        wanted, given = (Categorical(logits=model(**inputs).logits) for model in (teacher, student))
    return float(kl_divergence(wanted, given)[counts].mean())


def test_answers_for_tokens_are_compared_token_by_token() -> None:
    teacher, student = token_classifier(1), token_classifier()
    rows = batch(student)
    rows["labels"] = rows["input_ids"] % 5
    rows["labels"][0, 2:4] = -100
    rows["attention_mask"][1, 5:] = 0
    counts = (rows["labels"] != -100) & (rows["attention_mask"] == 1)
    assert answers_alone(teacher, student, rows) == pytest.approx(by_hand(teacher, student, rows, counts), rel=1e-4)
    del rows["labels"]
    counts = rows["attention_mask"] == 1
    assert answers_alone(teacher, student, rows) == pytest.approx(by_hand(teacher, student, rows, counts), rel=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "bert-mlm", "t5"])
def test_answers_for_words_are_compared_where_a_label_asks_for_one(family: str) -> None:
    """A causal model's answer is about the token after it, so its label stands one place on."""
    teacher, student = build(family, seed=1).eval(), build(family).eval()
    rows = batch(student)
    rows["labels"] = rows["labels"].clone()
    rows["labels"][:, :3] = -100
    counts = rows["labels"] != -100
    plain = dict(rows)
    if family == "gpt2":
        counts = torch.cat([counts[:, 1:], torch.zeros(len(counts), 1, dtype=torch.bool)], 1)
    if family == "t5":
        plain["decoder_input_ids"] = student.prepare_decoder_input_ids_from_labels(labels=rows["labels"])
    assert answers_alone(teacher, student, rows) == pytest.approx(by_hand(teacher, student, plain, counts), rel=1e-4)


class Shifted(nn.Module):
    """The same distribution over words at each position, by other numbers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        output = self.model(**inputs)
        output.logits = output.logits + torch.arange(output.logits.shape[1])[:, None]
        return output


def test_a_teacher_of_the_same_distribution_teaches_nothing() -> None:
    student = build("gpt2").eval()
    assert answers_alone(Shifted(student), student, batch(student)) == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("kind", ["regression", "multi_label_classification", None])
def test_the_configuration_says_what_is_asked_for(kind: str | None) -> None:
    """What transformers finds by itself: numbers for several classes are labels that do not exclude each other."""
    config = hf.BertConfig(**ENCODER, num_labels=3, problem_type=kind)
    student = hf.BertForSequenceClassification(config).eval()
    teacher = copy.deepcopy(student)
    with torch.no_grad():
        teacher.classifier.bias.add_(3)
    rows = {**batch(student), "labels": torch.tensor([[0.0, 1, 1], [1, 0, 0], [1, 1, 0]])}
    with torch.no_grad():
        wanted, given = teacher(rows["input_ids"]).logits, student(rows["input_ids"]).logits
    loss = answers_alone(teacher, student, rows)
    if kind == "regression":
        assert loss == pytest.approx(9, rel=1e-4)
    else:
        apart = kl_divergence(Bernoulli(logits=wanted), Bernoulli(logits=given)).mean()
        assert loss == pytest.approx(float(apart), rel=1e-4)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_a_batch_without_labels_is_enough_where_they_do_not_count(family: str) -> None:
    teacher, student = build(family, seed=1), build(family).eval()
    rows = batch(student)
    labelled = distillation_loss(teacher, Distillation(labels=0, logits=0))(student, rows)
    del rows["labels"]
    torch.testing.assert_close(distillation_loss(teacher, Distillation(labels=0, logits=0))(student, rows), labelled)
    assert answers_alone(teacher, student, rows) > 0
    with pytest.raises(rw.RankwiseError, match="must have `labels`, but has none. Add them, or set"):
        distillation_loss(teacher)(student, rows)


def bart() -> Any:
    """A classifier of an encoder and a decoder."""
    shape = {f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    config = hf.BartConfig(vocab_size=WORDS, d_model=16, encoder_ffn_dim=24, decoder_ffn_dim=24, **shape)
    return hf.BartForSequenceClassification(config).eval()


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_the_states_of_encoder_and_decoder_count(part: str) -> None:
    student = bart()
    teacher = copy.deepcopy(student)
    rows = batch(student)
    rows["input_ids"][:, -1] = student.config.eos_token_id
    loss = distillation_loss(teacher, Distillation(labels=0))
    with torch.no_grad():
        assert float(loss(student, rows)) == pytest.approx(0, abs=1e-6)
        getattr(student.model, part).layers[0].fc2.weight.normal_()
        assert float(loss(student, rows)) > 1e-3


def test_answers_of_another_form_are_refused_in_one_line() -> None:
    student = hf.BertForQuestionAnswering(hf.BertConfig(**ENCODER)).eval()
    rows = {"input_ids": batch(student)["input_ids"]}
    with pytest.raises(rw.RankwiseError, match=r"with `logits` .*QuestionAnswering.* None.*logits=0") as refusal:
        distillation_loss(copy.deepcopy(student), Distillation(labels=0))(student, rows)
    assert "\n" not in str(refusal.value)
    assert not distillation_loss(copy.deepcopy(student), Distillation(labels=0, logits=0))(student, rows).detach()
    two, three = (hf.BertForSequenceClassification(hf.BertConfig(**ENCODER, num_labels=n)) for n in (2, 3))
    with pytest.raises(rw.RankwiseError, match=r"of one shape.* are \[3, 2\] and \[3, 3\]"):
        distillation_loss(three)(two, batch(two))
    deeper = hf.BertForSequenceClassification(hf.BertConfig(**{**ENCODER, "num_hidden_layers": 3}))
    with pytest.raises(rw.RankwiseError, match="alike in all layers of student and teacher.*hidden=0"):
        distillation_loss(deeper)(two, batch(two))
    tokens = token_classifier()
    with pytest.raises(rw.RankwiseError, match=r"`labels` must be \[3, 7\].*, but is \[3, 6\]"):
        answers_alone(tokens, Unlabelled(tokens), {**batch(tokens), "labels": torch.zeros(3, 6)})


class Unlabelled(nn.Module):
    """A model that leaves labels to others."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, labels: Tensor, **inputs: Any) -> Any:
        return self.model(**inputs)


def test_padding_does_not_count() -> None:
    given, wanted = [torch.randn(2, 4, 3) for _ in range(3)], [torch.randn(2, 4, 3) for _ in range(3)]
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    before = hidden_difference(given, wanted, mask)
    assert before.shape == (3,)
    for state in given:
        state[0, 3] += 100
    for state in wanted:
        state[1, 2:] -= 100
    torch.testing.assert_close(hidden_difference(given, wanted, mask), before)
    # twice a state is away from it by as much as it is long
    assert hidden_difference([2 * state for state in wanted], wanted, None).tolist() == pytest.approx([1.0] * 3)


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
