"""A tiny encoder with a tokenizer, and a task that can be learned: whether two texts begin with the same letter."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from rankwise.core.budget import Budget
from rankwise.distill import Distillation
from rankwise.lab.experiments.glue.config import EncoderConfig, GlueExperiment
from rankwise.lab.training.tune import TuningConfig
from rankwise.methods import make_method

LETTERS = "abcdefgh"
WIDTHS: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 140,
}


def encoder(folder: Path, *, tokenizer: bool = True, labels: int | None = None, family: str = "bert") -> Path:
    """A folder with a random model of a few thousand parameters."""
    path = folder / "encoder"
    path.mkdir(parents=True, exist_ok=True)
    words = ["<s>", "[PAD]", "[UNK]", "[CLS]", "[SEP]", "<mask>", *LETTERS]
    torch.manual_seed(0)
    config = {
        "bert": lambda: hf.BertConfig(vocab_size=len(words), pad_token_id=1, **WIDTHS),
        "roberta": lambda: hf.RobertaConfig(vocab_size=len(words), pad_token_id=1, **WIDTHS),
        "mpnet": lambda: hf.MPNetConfig(vocab_size=len(words), pad_token_id=1, **WIDTHS),
    }[family]()
    if labels is None:
        model = hf.AutoModel.from_config(config)
    else:
        config.num_labels = labels
        model = hf.AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    model.save_pretrained(path)
    if tokenizer:
        from tokenizers import Tokenizer, models, pre_tokenizers, processors

        base = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
        base.pre_tokenizer = pre_tokenizers.Whitespace()
        base.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 3), ("[SEP]", 4)]
        )
        fast = hf.PreTrainedTokenizerFast(
            tokenizer_object=base, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
        )
        fast.save_pretrained(path)
    return path


def mrpc(folder: Path, rows: int = 60) -> Path:
    """Files in the form of MRPC; the development file begins with a byte-order mark, as the published one."""
    draw = random.Random(0)

    def text(first: str) -> str:
        return " ".join([first, *draw.choices(LETTERS, k=draw.randrange(2, 12))])

    (folder / "MRPC").mkdir(parents=True, exist_ok=True)
    for name, mark, number in (("train", "", rows), ("dev", "\ufeff", rows // 2)):
        lines = ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"]
        for row in range(number):
            a, b = draw.choice(LETTERS), draw.choice(LETTERS)
            b = a if row % 2 else b
            lines.append(f"{int(a == b)}\t{row}\t{row}\t{text(a)}\t{text(b)}")
        (folder / "MRPC" / f"{name}.tsv").write_text(mark + "\n".join(lines) + "\n", encoding="utf-8")
    return folder


def toy(folder: Path, **changes: Any) -> GlueExperiment:
    """A few steps of each phase."""
    phase = TuningConfig(max_steps=6, batch_size=8, lr=1e-3, log_every=2)
    experiment = GlueExperiment(
        name="glue-toy",
        data=str(mrpc(folder / "data")),
        model=EncoderConfig(name=str(encoder(folder)), max_length=32),
        base=phase,
        method=make_method("flop-l0", anneal_steps=5),
        budget=Budget(removed=0.4),
        training=replace(phase, max_steps=10),
        healing=replace(phase, max_steps=4),
        distillation=Distillation(),
        calibration_rows=16,
        device="cpu",
    )
    return replace(experiment, **changes)
