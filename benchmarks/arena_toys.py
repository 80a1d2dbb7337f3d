"""Tiny models of the arena's two families, with texts, to try its queue."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = 60
SHAPE = {"vocab_size": WORDS + 4, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "eos_token_id": 1}


def make(folder: Path, texts: Sequence[str]) -> None:
    """Fill a folder as `arena_queue.py` expects it."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    kinds = {
        "smollm2": transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**SHAPE, **HEADS, bos_token_id=1, tie_word_embeddings=True)
        ),
        "gemma": transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SHAPE, **HEADS, bos_token_id=2)),
    }
    words = {"<unk>": 0, "<eos>": 1, "<bos>": 2, "<pad>": 3, **{f"w{i}": i + 4 for i in range(WORDS)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    for name, model in kinds.items():
        model.save_pretrained(folder / name)
        transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>").save_pretrained(folder / name)
        names = {*texts, "train", "prose", "sentences", "code"}
        found = {
            text: torch.randint(4, WORDS + 4, (2000,), generator=generator).int().numpy() for text in sorted(names)
        }
        np.savez_compressed(folder / f"{name}-tokens.npz", **found)
    drawn = torch.randint(0, WORDS, (60_000,), generator=generator).tolist()
    (folder / "train.txt").write_text(" ".join(f"w{i}" for i in drawn), encoding="utf-8")
