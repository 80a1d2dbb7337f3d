"""A tiny experiment of every task: the table that the general tests run over. A new task is a row here."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import processors

from rankwise.core.budget import Budget
from rankwise.distill import Distillation
from rankwise.lab.tasks.base import Experiment
from rankwise.lab.tasks.causal import CausalExperiment
from rankwise.lab.tasks.pretrained import PretrainedConfig
from rankwise.lab.tasks.sentences import SentenceExperiment
from rankwise.lab.training import TuningConfig
from rankwise.methods import make_method
from tests.lab.experiments import experiment_toys, glue_toys

PHASE = TuningConfig(max_steps=6, batch_size=4, lr=1e-3, log_every=2, checkpoint_every=2)
SHARED: dict[str, Any] = {
    "base": PHASE,
    "method": make_method("flop-l0", anneal_steps=5),
    "budget": Budget(removed=0.2),
    "training": replace(PHASE, max_steps=10),
    "healing": replace(PHASE, max_steps=4),
    "distillation": Distillation(),
    "calibration_rows": 16,
    "device": "cpu",
}
LABELS = ("bad", "good", "neither")


def rows_file(path: Path, rows: int = 60, columns: tuple[str, str] = ("text", "label"), seed: int = 0) -> Path:
    """Texts with labels that can be learned, as CSV or JSONL; a text may hold commas, quotes and line breaks."""
    draw = random.Random(seed)
    table = []
    for row in range(rows):
        label = LABELS[row % 3]
        letters = draw.choices(glue_toys.LETTERS, k=draw.randrange(3, 9))
        table.append({columns[0]: f'{label[0]} "{letters[0]}", {" ".join(letters)}\n', columns[1]: label})
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        if path.suffix == ".jsonl":
            file.writelines(json.dumps(row) + "\n" for row in table)
        else:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(table)
    return path


def decoder(folder: Path, *, bos: bool = True, head: bool = True) -> Path:
    """A folder with a random decoder of a few thousand parameters, and a tokenizer of letters."""
    path = glue_toys.encoder(folder)
    tokenizer = hf.AutoTokenizer.from_pretrained(path)
    # as decoders have it: no marks around a text
    tokenizer.backend_tokenizer.post_processor = processors.Sequence([])
    tokenizer.save_pretrained(path)
    widths = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = hf.LlamaConfig(
        vocab_size=14, max_position_embeddings=64, bos_token_id=0 if bos else None, eos_token_id=None, pad_token_id=1,
        tie_word_embeddings=True, **widths,
    )  # fmt: skip
    torch.manual_seed(0)
    (hf.AutoModelForCausalLM if head else hf.AutoModel).from_config(config).save_pretrained(path)
    return path


def streams(folder: Path) -> Experiment:
    return experiment_toys.toy(folder, healing=replace(experiment_toys.PHASE, steps=4))


def glue(folder: Path) -> Experiment:
    return glue_toys.toy(folder, training=replace(PHASE, max_steps=10), base=PHASE, healing=replace(PHASE, max_steps=4))


def sentences(folder: Path, **changes: Any) -> SentenceExperiment:
    model = PretrainedConfig(name=str(glue_toys.encoder(folder)), max_length=32)
    experiment = SentenceExperiment(name="toy", data=str(rows_file(folder / "rows.csv")), model=model, **SHARED)
    return replace(experiment, **changes)


def causal(folder: Path, **changes: Any) -> CausalExperiment:
    model = PretrainedConfig(name=str(decoder(folder)), max_length=16)
    text = str(experiment_toys.text_file(folder))
    return replace(CausalExperiment(name="toy", text=text, model=model, **SHARED), **changes)


TASKS: dict[str, Callable[[Path], Experiment]] = {
    "streams": streams, "glue": glue, "sentences": sentences, "causal": causal,
}  # fmt: skip
