"""Texts as tokens in memory: tokenized once, batches of like length, few shapes, nothing moved while training.

Shapes: N = examples, B = batch, L = tokens of the longest example.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

POOL = 50
"""Batches whose examples are sorted by length together: enough that they are alike, and still in random company."""
MULTIPLE = 16
"""Lengths of batches are multiples of it, so that there are few."""


class TokenizedTexts:
    """Examples on a device."""

    def __init__(
        self,
        tokenizer: Any,
        texts: Sequence[tuple[str, ...]],
        labels: Sequence[float] | None = None,
        *,
        max_length: int = 128,
        regression: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        columns = [list(column) for column in zip(*texts, strict=True)]
        found = tokenizer(*columns, truncation=True, max_length=max_length)
        self.lengths = [len(ids) for ids in found["input_ids"]]
        self.device = torch.device(device)
        width = min(_rounded(max(self.lengths)), max_length)
        pads = {"input_ids": tokenizer.pad_token_id, "attention_mask": 0, "token_type_ids": 0}
        self.tensors = {name: self._padded(found[name], pad, width) for name, pad in pads.items() if name in found}
        if labels is not None:
            kind = torch.float32 if regression else torch.long
            self.tensors["labels"] = torch.tensor(labels, dtype=kind, device=self.device)

    def __len__(self) -> int:
        return len(self.lengths)

    def batches(self, batch_size: int, seed: int) -> Iterator[dict[str, Tensor]]:
        """One epoch: the order and the company of the examples are random, but those of a batch are of like length."""
        generator = torch.Generator().manual_seed(seed % 2**63)
        order = torch.randperm(len(self), generator=generator).tolist()
        chunks = []
        for start in range(0, len(order), POOL * batch_size):
            pool = sorted(order[start : start + POOL * batch_size], key=self.lengths.__getitem__)
            chunks += [pool[i : i + batch_size] for i in range(0, len(pool), batch_size)]
        mixed = [chunks[i] for i in torch.randperm(len(chunks), generator=generator).tolist()]
        yield from self._cut(mixed)

    def in_order(self, batch_size: int) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        """Every example once, the shortest first, with their places."""
        order = sorted(range(len(self)), key=self.lengths.__getitem__)
        chunks = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
        yield from zip(chunks, self._cut(chunks), strict=True)

    def _cut(self, chunks: list[list[int]]) -> Iterator[dict[str, Tensor]]:
        # one copy to the device for the whole epoch
        places = torch.tensor([place for chunk in chunks for place in chunk], device=self.device)
        start = 0
        for chunk in chunks:
            index, start = places[start : start + len(chunk)], start + len(chunk)
            length = _rounded(max(self.lengths[place] for place in chunk))
            picked = {name: tensor.index_select(0, index) for name, tensor in self.tensors.items()}
            yield {name: tensor[:, :length] if tensor.dim() > 1 else tensor for name, tensor in picked.items()}

    def _padded(self, rows: list[list[int]], pad: int, width: int) -> Tensor:
        padded_NL = torch.full((len(rows), width), pad, dtype=torch.long)
        for place, row in enumerate(rows):
            padded_NL[place, : len(row)] = torch.tensor(row)
        return padded_NL.to(self.device)


def _rounded(length: int) -> int:
    return -(-length // MULTIPLE) * MULTIPLE
