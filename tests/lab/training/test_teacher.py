"""Distillation of language models: the loss in closed form, and a teacher that reads what its student reads."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import rankwise as rw
from rankwise.lab.data.windows import IGNORED
from rankwise.lab.tasks.language import Streams, distillation_loss
from rankwise.lab.training import TrainingConfig, fit
from rankwise.lab.training.records import RunFolder
from tests.lab.training.training_toys import CONFIG, make_corpus, make_model, run

DISTILLED = dataclasses.replace(CONFIG, dense_steps=0, distill=0.5)


@settings(max_examples=30, deadline=None)
@given(share=st.sampled_from([0.0, 0.3, 1.0]), ignored=st.integers(0, 5), seed=st.integers(0, 99))
def test_the_loss_is_the_cross_entropy_against_a_mixture(share: float, ignored: int, seed: int) -> None:
    """(1 - w) L + w KL(t | s) is the cross entropy of s against (1 - w) text + w t, less w times the entropy of t."""
    torch.manual_seed(seed)
    logits = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    wanted, targets = torch.randn(2, 3, 7, dtype=torch.float64), torch.randint(7, (2, 3))
    targets.view(-1)[:ignored] = IGNORED
    got, on_text = distillation_loss(logits, wanted, targets, share)
    counted = targets.flatten() != IGNORED
    log_s, t = logits.flatten(0, 1)[counted].log_softmax(-1), wanted.flatten(0, 1)[counted].softmax(-1)
    mixture = (1 - share) * F.one_hot(targets.flatten()[counted], 7) + share * t
    entropy = -(t * t.log()).sum(-1).mean()
    want = -(mixture * log_s).sum(-1).mean() - share * entropy
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    text = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    torch.testing.assert_close(on_text.double(), text.detach(), rtol=1e-5, atol=1e-5)
    grads = [torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (got, want)]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


def teacher_of(folder: Path, kind: str = "sru") -> torch.nn.Module:
    return make_model(kind, len(make_corpus(folder / "data").vocabulary), dropout=0.0)


@pytest.mark.parametrize("kind", ["sru", "txl"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_student_that_is_its_teacher_has_nothing_to_learn(kind: str, accumulate: int, tmp_path: Path) -> None:
    """So both carry the same states through windows, parts of a batch and new beginnings."""
    config = dataclasses.replace(
        DISTILLED, distill=1.0, accumulate=accumulate, reset_every=3, lr=1e-12, eval_every=100, log_every=1
    )
    teacher = teacher_of(tmp_path, kind)
    outcome = run(kind, None, tmp_path / "run", config=config, dropout=0.0, teacher=teacher)
    norms = [line["gradient_norm"] for line in RunFolder(outcome.folder).lines()]
    assert len(norms) == config.steps
    assert max(norms) < 1e-5
    # the loss that is reported is that on the text, which an untrained model does not know
    losses = [line["loss"] for line in RunFolder(outcome.folder).lines()]
    assert min(losses) > 0.5 * math.log(8)


def test_a_teacher_is_left_as_it_was_and_is_listened_to(tmp_path: Path) -> None:
    teacher = teacher_of(tmp_path)
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    taught = run("sru", None, tmp_path / "taught", config=DISTILLED, teacher=teacher)
    alone = run("sru", None, tmp_path / "alone", config=dataclasses.replace(DISTILLED, distill=0.0))
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())
    pairs = zip(taught.model.parameters(), alone.model.parameters(), strict=True)
    assert not all(torch.equal(a, b) for a, b in pairs)


def test_bad_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`distill` must be a share of the loss, in \[0, 1\], but is 1.5"):
        TrainingConfig(steps=1, batch_size=1, window=1, lr=1.0, distill=1.5)
    with pytest.raises(ValueError, match="that is 0.5 without one. Give both, or neither"):
        run("sru", None, tmp_path / "run", config=DISTILLED)
    config = dataclasses.replace(DISTILLED, distill=0.0)
    with pytest.raises(ValueError, match="that is 0 with one. Give both, or neither"):
        run("sru", None, tmp_path / "run", config=config, teacher=teacher_of(tmp_path))
    corpus, model = make_corpus(tmp_path / "data"), teacher_of(tmp_path)
    with pytest.raises(ValueError, match="`teacher` must be another module than `model`"):
        fit(model, Streams(corpus), DISTILLED, tmp_path / "run", teacher=model)
    words = make_model("adaptive", 8)
    with pytest.raises(rw.RankwiseError, match="must give logits of all words, but an adaptive softmax"):
        run("adaptive", None, tmp_path / "run", config=DISTILLED, teacher=words)
