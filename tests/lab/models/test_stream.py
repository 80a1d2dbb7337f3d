"""A stream gives what the model gives with its state carried along, however the text is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rankwise.lab.kernels.relative_attention import cpu
from rankwise.lab.models.sru import SRUConfig, SRULanguageModel
from rankwise.lab.models.stream import open_stream
from rankwise.lab.models.transformer_xl import TransformerXL, TransformerXLConfig

V = 11


def transformer_xl(**changes: Any) -> nn.Module:
    sizes: dict[str, Any] = {"num_words": V, "width": 10, "num_heads": 3, "head_width": 5, "inner": 7, "num_layers": 2}
    return TransformerXL(TransformerXLConfig(**{**sizes, "memory_length": 6, **changes}))


def sru() -> nn.Module:
    return SRULanguageModel(SRUConfig(num_words=V, embedding_width=6, width=9, num_layers=2, rank=3, layer_norm=True))


MODELS = {
    "sru": sru,
    "post-norm": transformer_xl,
    "pre-norm": lambda: transformer_xl(pre_norm=True),
    "same length": lambda: transformer_xl(same_length=True, clamp_length=4),
    "no memory": lambda: transformer_xl(memory_length=0),
}


def lively(kind: str) -> nn.Module:
    """With weights so large that every key and distance matters."""
    torch.manual_seed(0)
    model = MODELS[kind]().double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


@pytest.mark.parametrize("kind", MODELS)
@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.sampled_from([1, 2, 5, 9, 140]), min_size=1, max_size=12), batch=st.integers(1, 3))
def test_a_stream_is_the_model_with_its_state_carried_along(kind: str, lengths: list[int], batch: int) -> None:
    model = lively(kind)
    stream, state = open_stream(model), None
    for length in lengths:
        tokens_BT = torch.randint(0, V, (batch, length))
        # with gradients the model takes the way of training
        want_BTV, state = model(tokens_BT, state)
        torch.testing.assert_close(stream.feed(tokens_BT), want_BTV.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", MODELS)
def test_inference_is_training_without_gradients(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lively(kind)
    # several blocks, the last one not full
    monkeypatch.setattr(cpu, "BLOCK", 4)
    tokens_BT = torch.randint(0, V, (2, 11))
    want_BTV, state = model(tokens_BT)
    want_next_BTV, _ = model(tokens_BT, state)
    with torch.inference_mode():
        got_BTV, state = model(tokens_BT)
        got_next_BTV, _ = model(tokens_BT, state)
    torch.testing.assert_close(got_BTV, want_BTV.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(got_next_BTV, want_next_BTV.detach(), rtol=1e-10, atol=1e-10)


def test_streams_of_one_model_do_not_know_each_other() -> None:
    model = lively("post-norm")
    first, second = open_stream(model), open_stream(model)
    tokens_BT = torch.randint(0, V, (1, 3))
    want_BTV = first.feed(tokens_BT)
    first.feed(tokens_BT)
    torch.testing.assert_close(second.feed(tokens_BT), want_BTV)


def test_memory_that_is_never_read_takes_no_room() -> None:
    """A folder from a stranger may ask for any length."""
    model = transformer_xl(memory_length=10**12).eval()
    stream, tokens_BT = open_stream(model), torch.randint(0, V, (1, 9))
    want_BTV, _ = model(tokens_BT)
    for t in range(9):
        torch.testing.assert_close(stream.feed(tokens_BT[:, t : t + 1]), want_BTV[:, t : t + 1])


def test_attention_dropout_is_drawn_without_gradients_too() -> None:
    torch.manual_seed(0)
    model = transformer_xl(dropout=0.0, attention_dropout=0.5).train()
    with torch.no_grad():
        tokens_BT = torch.randint(0, V, (1, 9))
        assert not torch.equal(model(tokens_BT)[0], model(tokens_BT)[0])
