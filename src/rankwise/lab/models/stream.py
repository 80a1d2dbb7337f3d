"""Language models fed piece by piece, a token or a segment at a time: the state stays inside.

    stream = open_stream(model)
    logits_BTV = stream.feed(prompt_BT)
    logits_BTV = stream.feed(next_B1)

The logits are those of `model(tokens, state)` with the state carried along. What that call would compute again for a
Transformer-XL, the keys and values of remembered tokens and the projections of distances, is computed once.

Shapes: those of `transformer_xl.py`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.lab.models.transformer_xl import TransformerXL, TransformerXLLayer


class Stream:
    """A model in evaluation mode, and the state that it carries. Weights must not change under it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.state: Any = None

    @torch.inference_mode()
    def feed(self, tokens_BT: Tensor) -> Tensor:
        """Logits (B, T, V) of the next word after each token."""
        logits_BTV: Tensor
        logits_BTV, self.state = self.model(tokens_BT, self.state)
        return logits_BTV


def open_stream(model: nn.Module) -> Stream:
    """A fresh stream of any model that is called as `model(tokens, state)` and returns logits and state."""
    model.eval()
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    return _TransformerXLStream(model) if isinstance(model, TransformerXL) and on_cpu else Stream(model)


class _TransformerXLStream(Stream):
    model: TransformerXL

    def __init__(self, model: TransformerXL) -> None:
        super().__init__(model)
        self.remembered = [_Remembered() for _ in model.layers]
        self.distances: list[Tensor] = []
        """W_r R_d of each layer, (L, A), from the largest distance so far down to 0."""

    @torch.inference_mode()
    def feed(self, tokens_BT: Tensor) -> Tensor:
        model = self.model
        h_BTD = model.embedding(tokens_BT) * math.sqrt(model.config.width)
        for i, layer in enumerate(model.layers):
            assert isinstance(layer, TransformerXLLayer)
            h_BTD = self._layer(i, layer, h_BTD)
        logits_BTV: Tensor = model.head(h_BTD)
        return logits_BTV

    def _layer(self, i: int, layer: TransformerXLLayer, h_BTD: Tensor) -> Tensor:
        if layer.pre_norm:
            h_BTD = h_BTD + self._attention(i, layer, layer.attention_norm(h_BTD))
            h_BTD = h_BTD + layer.feed_forward(layer.feed_forward_norm(h_BTD))
        else:
            h_BTD = layer.attention_norm(h_BTD + self._attention(i, layer, h_BTD))
            h_BTD = layer.feed_forward_norm(h_BTD + layer.feed_forward(h_BTD))
        return h_BTD

    def _attention(self, i: int, layer: TransformerXLLayer, x_BTD: Tensor) -> Tensor:
        attention, config = layer.attention, self.model.config
        q_BTA, kv_BTA = attention.qkv(x_BTD).tensor_split([config.num_heads * config.head_width], -1)
        k_BSA, v_BSA = self.remembered[i].add(kv_BTA, config.memory_length).chunk(2, -1)
        y_BTA = attention.attend(
            attention.heads(q_BTA + self.model.content_bias),
            attention.heads(q_BTA + self.model.position_bias),
            attention.heads(k_BSA),
            attention.heads(v_BSA),
            attention.heads(self._distances(k_BSA.shape[1], x_BTD)[i]),
            reach=config.memory_length if config.same_length else None,
        )
        y_BTD: Tensor = attention.out(y_BTA)
        return y_BTD

    def _distances(self, size_S: int, x_BTD: Tensor) -> list[Tensor]:
        if not self.distances or len(self.distances[0]) < size_S + 1:
            # twice as many, so that they are computed anew only now and then
            largest = min(2 * size_S, self.model.config.memory_length + x_BTD.shape[1])
            sinusoid_LD = self.model.sinusoid(torch.arange(largest, -1, -1), x_BTD.dtype)
            self.distances = [layer.attention.position(sinusoid_LD) for layer in self.model.layers]  # type: ignore[union-attr, operator]
        return [r_LA[-(size_S + 1) :] for r_LA in self.distances]


class _Remembered:
    """Keys and values of one layer, in a buffer with spare room: old ones are copied only when it is full."""

    def __init__(self) -> None:
        self.room: Tensor | None = None
        self.start = self.stop = 0

    def add(self, kv_BTA: Tensor, limit: int) -> Tensor:
        """Append new keys and values; those of the last `limit` tokens before them and the new ones, (B, S, 2 A)."""
        size_B, size_T, width = kv_BTA.shape
        kept = min(self.stop - self.start, limit)
        self.start = self.stop - kept
        if self.room is None or self.stop + size_T > self.room.shape[1]:
            # a model may remember far more than it ever reads
            room = kv_BTA.new_empty(size_B, 2 * min(limit, kept + size_T) + size_T, width)
            if self.room is not None:
                room[:, :kept] = self.room[:, self.start : self.stop]
            self.room, self.start, self.stop = room, 0, kept
        self.room[:, self.stop : self.stop + size_T] = kv_BTA
        self.stop += size_T
        return self.room[:, self.start : self.stop]
