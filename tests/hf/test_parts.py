"""Compact parts inside other models: whoever holds one saves and resizes as the part itself would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import rankwise as rw
from tests.hf.hf_families import ENCODER, QUIET, WORDS, batch, build, compact, logits

pytestmark = QUIET


def holder(layout: str = "pair") -> Any:
    """A dense classifier whose encoder was compressed on its own and put back."""
    model: Any = build("bert")
    model.bert = rw.compress(model.bert, rw.Budget(removed=0.4), embeddings=True, layout=layout)
    return model


@pytest.mark.parametrize("layout", ["pair", "pivot"])
def test_a_model_with_a_compact_part_saves_it(layout: str, tmp_path: Path) -> None:
    model = holder(layout)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert rw.count(again) == rw.count(model)
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-5, atol=1e-5)


def test_the_part_need_not_be_a_model_of_transformers(tmp_path: Path) -> None:
    model: Any = build("bert")
    model.bert.encoder = rw.compress(model.bert.encoder, rw.Budget(removed=0.4))
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(type(model).from_pretrained(tmp_path)), logits(model), rtol=1e-5, atol=1e-5)


def test_a_part_whose_layers_are_stock_but_others_than_the_class_builds_is_saved(tmp_path: Path) -> None:
    """GPT-2's `Conv1D` became `nn.Linear`, which holds the transposed matrix."""
    model: Any = build("gpt2")
    model.transformer = compact("gpt2", "agp").transformer
    model.lm_head.weight = model.transformer.wte.weight
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(type(model).from_pretrained(tmp_path)), logits(model), rtol=1e-5, atol=1e-5)


def test_an_encoder_and_a_decoder_joined_are_saved(tmp_path: Path) -> None:
    compact("bert").bert.save_pretrained(tmp_path / "encoder")
    decoder = hf.BertLMHeadModel(hf.BertConfig(**ENCODER, is_decoder=True, add_cross_attention=True))
    decoder.save_pretrained(tmp_path / "decoder")
    both: Any = hf.EncoderDecoderModel.from_encoder_decoder_pretrained(tmp_path / "encoder", tmp_path / "decoder")
    both.save_pretrained(tmp_path / "both")
    again = hf.EncoderDecoderModel.from_pretrained(tmp_path / "both")
    tokens = batch(both)["input_ids"]
    inputs = {"input_ids": tokens, "decoder_input_ids": tokens}
    torch.testing.assert_close(logits(again, **inputs), logits(both, **inputs), rtol=1e-5, atol=1e-5)


def test_a_model_with_a_gated_part_says_so(tmp_path: Path) -> None:
    model: Any = build("bert")
    rw.Pruner(model.bert, rw.Budget(removed=0.4), anneal_steps=3)
    model.save_pretrained(tmp_path)
    with pytest.raises(rw.CheckpointError, match="this folder holds a gated one"):
        type(model).from_pretrained(tmp_path)
    with pytest.raises(rw.RankwiseError, match="before `rankwise.Pruner`, or on the compact model"):
        model.resize_token_embeddings(WORDS + 4)


def test_a_model_with_a_compact_part_takes_another_vocabulary(tmp_path: Path) -> None:
    model = holder()
    want = logits(model)
    model.resize_token_embeddings(WORDS + 4)
    torch.testing.assert_close(logits(model), want, rtol=1e-5, atol=1e-5)
    assert model.get_input_embeddings().num_embeddings == model.config.vocab_size == WORDS + 4
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(type(model).from_pretrained(tmp_path)), want, rtol=1e-5, atol=1e-5)


def test_what_a_class_does_of_its_own_on_another_vocabulary_is_done() -> None:
    """BART lengthens a bias that it keeps beside its output layer."""
    shape = {f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    config = hf.BartConfig(vocab_size=WORDS, d_model=16, encoder_ffn_dim=24, decoder_ffn_dim=24, **shape)
    small: Any = rw.compress(
        hf.BartForConditionalGeneration(config), rw.Budget(removed=0.4, of="prunable"), embeddings=True
    )
    small.resize_token_embeddings(WORDS + 4)
    assert logits(small, input_ids=batch(small)["input_ids"]).shape[-1] == WORDS + 4


def test_a_model_that_rankwise_loaded_saves_itself(tmp_path: Path) -> None:
    small = compact("bert")
    rw.save(small, tmp_path / "one")
    again: Any = rw.load(tmp_path / "one", build("bert", seed=1))
    again.save_pretrained(tmp_path / "two")
    torch.testing.assert_close(logits(type(small).from_pretrained(tmp_path / "two")), logits(small))


class Particular(hf.BertModel):
    """Its configuration alone does not build it."""

    def __init__(self, config: Any, word: str) -> None:
        super().__init__(config)
        self.word = word


def test_a_dense_model_is_saved_by_transformers_alone(tmp_path: Path) -> None:
    model: Any = Particular(hf.BertConfig(**ENCODER), "any")
    model.resize_token_embeddings(WORDS + 1)
    model.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    assert not {"quantization_config", "transformers_weights"} & content.keys()
    assert hf.BertModel.from_pretrained(tmp_path).get_input_embeddings().num_embeddings == WORDS + 1


def head_of(model: Any) -> Any:
    return model.get_output_embeddings()


@pytest.mark.parametrize("method", ["fac", "svd pivot", "agp"])
@pytest.mark.parametrize(
    "family, base", [("gpt2", "transformer"), ("llama-tied", "model"), ("bert-mlm", "bert"), ("t5", "encoder")]
)
def test_a_base_saved_alone_gets_its_output_layer_from_its_words(
    family: str, base: str, method: str, tmp_path: Path
) -> None:
    """As transformers does it for dense models: the output layer is the table of words, not a fresh one."""
    small: Any = compact(family, method)
    bare = getattr(small, base)
    if family == "t5":
        bare = hf.T5EncoderModel(small.config)
        bare.shared, bare.encoder = small.shared, small.encoder
    bare.save_pretrained(tmp_path)
    model: Any = type(small).from_pretrained(tmp_path)
    words, head = model.get_input_embeddings(), head_of(model)
    hidden = torch.randn(2, small.config.hidden_size)
    bias = 0 if head.bias is None else head.bias
    with torch.no_grad():
        want = hidden @ words(torch.arange(WORDS)).T + bias
        torch.testing.assert_close(head(hidden), want, rtol=1e-4, atol=1e-5)
        assert torch.equal(words(torch.arange(WORDS)), bare.get_input_embeddings()(torch.arange(WORDS)))
    # counted once, trained as one, and so saved
    assert {id(p) for p in words.parameters()} <= {id(p) for p in head.parameters()}
    if family == "t5":
        assert torch.equal(model.decoder.embed_tokens(torch.arange(WORDS)), words(torch.arange(WORDS)))
    model.save_pretrained(tmp_path / "again")
    again = type(small).from_pretrained(tmp_path / "again")
    assert rw.count(again) == rw.count(model)
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-5, atol=1e-5)


def test_an_output_layer_that_was_saved_by_itself_stays_so(tmp_path: Path) -> None:
    """Its class ties it to the words, but the folder holds one that had become another."""
    model: Any = build("bert-mlm")
    model.bert = rw.compress(model.bert, rw.Budget(removed=0.4), embeddings=True)
    model.save_pretrained(tmp_path)
    other: Any = hf.BertForPreTraining.from_pretrained(tmp_path)
    assert torch.equal(head_of(other).weight, head_of(model).weight)
