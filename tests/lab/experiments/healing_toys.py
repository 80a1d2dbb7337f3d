"""Tiny models that have learned a text, and what is left of them: something to heal."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import rankwise as rw
from rankwise.hf.saving import save_pretrained

LETTERS = [f"w{i}" for i in range(12)]
SPECIAL = ["<unk>", "<s>", "[CLS]", "[SEP]"]
SHAPE: dict[str, Any] = {
    "vocab_size": len(SPECIAL) + len(LETTERS), "hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 28, "max_position_embeddings": 40, "pad_token_id": 0,
}  # fmt: skip


def text_file(path: Path, words: int = 4_000, seed: int = 0, first: str = "w") -> Path:
    """Each word is one of two that may come after the one before."""
    draw, place, found = random.Random(seed), 0, []
    for _ in range(words):
        place = (3 * place + draw.choice((1, 5))) % len(LETTERS)
        found.append(f"{first}{place}")
    path.write_text(" ".join(found))
    return path


def tokenizer(*, marks: bool = False, shift: int = 0) -> hf.PreTrainedTokenizerFast:
    """Words are tokens; `shift` gives them other numbers."""
    words = [*SPECIAL, *LETTERS[shift:], *LETTERS[:shift]]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    named = {"unk_token": "<unk>", "bos_token": "<s>"}
    if marks:
        ends = [("[CLS]", 2), ("[SEP]", 3)]
        made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
        named = {"unk_token": "<unk>", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, **named)


def decoder(**changes: Any) -> hf.PreTrainedModel:
    config = hf.LlamaConfig(
        **{**SHAPE, "bos_token_id": 1, "eos_token_id": None, "tie_word_embeddings": True, **changes}
    )
    return hf.LlamaForCausalLM(config)


def encoder(kind: Any = hf.BertModel, **changes: Any) -> hf.PreTrainedModel:
    return kind(hf.BertConfig(**{**SHAPE, **changes}))


def learned(model: Any, text: Path, steps: int = 100) -> Any:
    """A decoder that predicts the text somewhat."""
    numbers = torch.tensor(tokenizer()(text.read_text())["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(numbers) - 20, (16,), generator=generator)
        batch = torch.stack([numbers[start : start + 20] for start in starts])
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def make_place(folder: Path) -> Path:
    """Dense models of several kinds, with what `compress` leaves of them in `NAME-small`, and a text."""
    text = text_file(folder / "text.txt")
    torch.manual_seed(0)
    made = {"decoder": decoder(), "encoder": encoder(), "masked": encoder(hf.BertForMaskedLM)}
    for name, model in made.items():
        spread(model)
        if name == "decoder":
            learned(model, text)
        words = tokenizer(marks=name != "decoder")
        model.save_pretrained(folder / name)
        words.save_pretrained(folder / name)
        small = rw.compress(model, rw.Budget(removed=0.5), embeddings=name == "decoder")
        save_pretrained(small, folder / f"{name}-small", tokenizer=words)
    return folder


def spread(model: Any) -> None:
    """Weights of full rank, and large enough to tell inputs apart."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
