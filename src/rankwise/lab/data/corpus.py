"""A corpus: three memory-mapped splits, their vocabulary and where they come from.

On the disk it is a folder: `train.npy`, `valid.npy`, `test.npy`, `vocabulary.json`, and `corpus.json` with the rest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rankwise.errors import DataError, InvalidValueError
from rankwise.lab.data.symbols import Array
from rankwise.lab.data.text import reason
from rankwise.lab.data.vocabulary import Vocabulary

FORMAT = "rankwise-corpus"
VERSION = 1
SPLITS = ("train", "valid", "test")

Unit = Literal["character", "word"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """The tokens of a training, a validation and a test text."""

    name: str

    unit: Unit
    """What a token counts as: bits per character, or perplexity per word."""

    train: Array
    valid: Array
    test: Array

    vocabulary: Vocabulary
    """Most frequent first."""

    provenance: Mapping[str, Any]
    """Where the text comes from: paths or addresses, checksums, versions."""

    fingerprint: str
    """The same for the same text and the same rules, whatever the machine or the path."""

    folder: Path

    def record(self) -> dict[str, Any]:
        """What a run record keeps of its corpus."""
        return {
            "name": self.name,
            "unit": self.unit,
            "tokens": {split: len(getattr(self, split)) for split in SPLITS},
            "vocabulary": len(self.vocabulary),
            "fingerprint": self.fingerprint,
            "provenance": dict(self.provenance),
        }


def open_corpus(folder: Path) -> Corpus:
    """Map a prepared corpus into memory; what is missing or cut short is refused."""
    try:
        about = json.loads((folder / "corpus.json").read_bytes())
        if (about["format"], about["version"]) != (FORMAT, VERSION):
            raise InvalidValueError(f"its format is {about['format']} {about['version']}, not {FORMAT} {VERSION}")
        splits = {split: np.load(folder / f"{split}.npy", mmap_mode="r", allow_pickle=False) for split in SPLITS}
        for split, tokens in splits.items():
            if tokens.shape != (about["tokens"][split],):
                raise InvalidValueError(f"{split}.npy holds {tokens.shape} tokens, not {about['tokens'][split]}")
        return Corpus(
            name=about["name"],
            unit=about["unit"],
            vocabulary=Vocabulary.from_json(json.loads((folder / "vocabulary.json").read_bytes())),
            provenance=about["provenance"],
            fingerprint=about["fingerprint"],
            folder=folder,
            **splits,
        )
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"A prepared corpus must be whole, but the one in {folder} is not: {reason(error)}. "
            "Remove the folder; it will be prepared again."
        ) from error
