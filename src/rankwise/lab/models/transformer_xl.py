"""Transformer-XL: relative positional attention over the current segment and a memory of earlier ones.

Dai et al. 2019, "Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context"; the defaults are its
12-layer base model for enwik8. Query i of a segment (position M + i) attends to key j <= M + i with the score

    A_ij = ((q_i + u) . k_j + (q_i + v) . W_r R_{M+i-j}) / sqrt(E),

R_d the sinusoid of the distance d, and u and v (the published code's r_w_bias and r_r_bias) shared by all layers.

Shapes: B = batch, T = time (the segment), M = memory, S = M + T keys, L = S + 1 distances, H = heads, E = head width,
A = H E, D = width, V = words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankwise.deploy.architectures import register
from rankwise.errors import InvalidValueError
from rankwise.kernels import linear
from rankwise.kernels.device import can_fuse, infers_on_cpu
from rankwise.kernels.linear import half_dtype
from rankwise.lab.kernels.layers import look_up, norm_of_sum
from rankwise.lab.kernels.relative_attention import cpu
from rankwise.modules import is_observed

Memory = tuple[Tensor, ...]
"""The last inputs of each layer, (B, at most `memory_length`, D) a layer, detached.

One tensor a layer, not a stack: each is a view of what the forward pass made anyway, so that keeping it copies nothing.
"""

INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class TransformerXLConfig:
    """Defaults are the published base model for enwik8.

    Weights know nothing of the three lengths, so a trained model may be evaluated with others, as the authors do:
    `model.config = dataclasses.replace(model.config, memory_length=2100, clamp_length=820, same_length=True)`.
    """

    num_words: int
    """Size of the vocabulary, V."""
    width: int = 512
    """D."""
    num_heads: int = 8
    """Heads of attention in each layer."""
    head_width: int = 64
    """Width of a query, a key or a value of one head."""
    inner: int = 2048
    """Width between the two layers of a feed-forward block."""
    num_layers: int = 12
    """L."""
    pre_norm: bool = False
    """Normalize what a block reads, not the sum it leaves."""
    dropout: float = 0.1
    """The dropout rate of embeddings, of what blocks add, inside feed-forward blocks, and of the output."""
    attention_dropout: float = 0.0
    """The dropout rate of attention probabilities."""
    memory_length: int = 512
    """Positions before a window that it can attend to."""
    same_length: bool = False
    """Let every query see at most `memory_length` keys, so that outputs do not depend on where a text is cut."""
    clamp_length: int | None = None
    """Distances above it count as this one."""

    def __post_init__(self) -> None:
        for name in ("num_words", "width", "num_heads", "head_width", "inner", "num_layers", "clamp_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidValueError(f"`{name}` must be positive, but is {value} instead.")
        if self.width % 2:
            raise InvalidValueError(f"`width` must be even (sines and cosines), but is {self.width} instead.")
        for name in ("dropout", "attention_dropout"):
            rate = getattr(self, name)
            if not 0 <= rate < 1:
                raise InvalidValueError(f"`{name}` must be at least 0 and below 1, but is {rate} instead.")
        if self.memory_length < self.same_length:
            least = "positive with `same_length`" if self.same_length else "at least 0"
            raise InvalidValueError(f"`memory_length` must be {least}, but is {self.memory_length} instead.")


@dataclass(frozen=True)
class Positions:
    """What all layers share: distances from S down to 0, in the order of the columns of `scores_BHTL`."""

    sinusoid_LD: Tensor
    mask_TL: Tensor
    """-inf where a query sees nothing at a distance, else 0."""
    content_bias_A: Tensor
    position_bias_A: Tensor
    reach: int | None
    """Keys that a query sees at most."""


class RelativeAttention(nn.Module):
    """Multi-head attention of T queries over S = M + T keys, with scores A_ij."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.head_width = config.head_width
        self.dropout = config.attention_dropout
        self.inference_dtype: torch.dtype | None = None
        """The dtype in which queries, keys and values are multiplied for inference on a CPU; None for their own."""
        width_A = config.num_heads * config.head_width
        self.qkv = nn.Linear(config.width, 3 * width_A, bias=False)
        self.position = nn.Linear(config.width, width_A, bias=False)
        self.out = nn.Linear(width_A, config.width, bias=False)

    def forward(self, x_BSD: Tensor, positions: Positions) -> Tensor:
        num_queries = positions.mask_TL.shape[0]
        qkv_BSA = linear.call(self.qkv, x_BSD)
        if self._can_fuse(qkv_BSA):
            return self._fused(qkv_BSA, positions)
        q_BSA, k_BSA, v_BSA = qkv_BSA.chunk(3, dim=-1)
        q_BTA = q_BSA[:, -num_queries:]
        # under autocast the biases are float32: without the cast they would make the queries float32 too
        content_BTHE = self.heads(q_BTA + positions.content_bias_A.to(q_BTA.dtype))
        position_BTHE = self.heads(q_BTA + positions.position_bias_A.to(q_BTA.dtype))
        r_LHE = self.heads(self.position(positions.sinusoid_LD))
        if infers_on_cpu(x_BSD) and not (self.training and self.dropout):
            keys_values = self.heads(k_BSA), self.heads(v_BSA)
            y_BTA = self.attend(content_BTHE, position_BTHE, *keys_values, r_LHE, reach=positions.reach)
            y: Tensor = self.out(y_BTA)
            return y

        scores_BHTL = torch.einsum("bthe,lhe->bhtl", position_BTHE / math.sqrt(self.head_width), r_LHE)
        # an addend, unlike `masked_fill`, costs no pass over the gradient, which is zero where the mask is -inf
        scores_BHTL += positions.mask_TL
        y_BHTE = F.scaled_dot_product_attention(
            content_BTHE.transpose(1, 2),
            self.heads(k_BSA).transpose(1, 2),
            self.heads(v_BSA).transpose(1, 2),
            attn_mask=by_key(scores_BHTL),
            dropout_p=self.dropout if self.training else 0.0,
        )
        y_BTD: Tensor = self.out(y_BHTE.transpose(1, 2).flatten(2))
        return y_BTD

    def _can_fuse(self, qkv_BSA: Tensor) -> bool:
        drops = self.training and self.dropout > 0
        if drops or not can_fuse(qkv_BSA) or qkv_BSA.dtype.itemsize != 2:
            return False
        from rankwise.lab.kernels.relative_attention.triton import fits

        return fits(self.head_width)

    def _fused(self, qkv_BSA: Tensor, positions: Positions) -> Tensor:
        """The same by Triton kernels, which never store the softmax and read no distance beyond the first key."""
        from rankwise.lab.kernels.relative_attention.triton import relative_attention

        y_BTHE = relative_attention(
            qkv_BSA.view(*qkv_BSA.shape[:2], 3, self.num_heads, self.head_width),
            self.heads(linear.call(self.position, positions.sinusoid_LD[1:])),
            self.heads(positions.content_bias_A),
            self.heads(positions.position_bias_A),
            positions.mask_TL.shape[0],
            positions.reach,
        )
        return linear.call(self.out, y_BTHE.flatten(2))

    def attend(self, *inputs: Any, reach: int | None) -> Tensor:
        """The attention output of each query, (B, T, A), by the kernel for inference on a CPU."""
        given: list[Any] = [*inputs, reach, self.inference_dtype]
        return cpu.relative_attention(*given).flatten(2)

    def heads(self, x_A: Tensor) -> Tensor:
        """(..., A) as (..., H, E)."""
        return x_A.view(*x_A.shape[:-1], self.num_heads, self.head_width)


class FeedForward(nn.Module):
    """FF2(dropout(relu(FF1(x))))."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.first = nn.Linear(config.width, config.inner)
        self.second = nn.Linear(config.inner, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return linear.call(self.second, self._relu_dropout(linear.call(self.first, x_BTD)))

    def _relu_dropout(self, x: Tensor) -> Tensor:
        if not can_fuse(x) or is_observed(self.dropout):
            y: Tensor = self.dropout(F.relu(x))
            return y
        from rankwise.lab.kernels.dropout import relu_dropout

        return relu_dropout(x, self.dropout.p if self.dropout.training else 0.0)


class TransformerXLLayer(nn.Module):
    """Attention and feed-forward, each with dropout and a residual connection.

    Post-norm, as published: h <- LN(h + f(h)); pre-norm: h <- h + f(LN(h)). Memory holds h as the layer gets it.
    """

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.pre_norm = config.pre_norm
        self.attention = RelativeAttention(config)
        self.attention_norm = nn.LayerNorm(config.width)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, h_BTD: Tensor, h_BSD: Tensor, positions: Positions) -> Tensor:
        """The layer's output for its T inputs, which are the last of the S that it attends to."""
        if self.pre_norm:
            h_BTD = h_BTD + self.dropout(self.attention(self.attention_norm(h_BSD), positions))
            h_BTD = h_BTD + self.dropout(self.feed_forward(self.feed_forward_norm(h_BTD)))
        else:
            h_BTD = norm_of_sum(self.attention_norm, h_BTD, self.attention(h_BSD, positions), self.dropout)
            h_BTD = norm_of_sum(self.feed_forward_norm, h_BTD, self.feed_forward(h_BTD), self.dropout)
        return h_BTD


class TransformerXL(nn.Module):
    """Causal language model: tokens and memory in, logits and new memory out. Embedding and head share one matrix."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.num_words, config.width)
        self.layers = nn.ModuleList(TransformerXLLayer(config) for _ in range(config.num_layers))
        self.head = nn.Linear(config.width, config.num_words)
        self.dropout = nn.Dropout(config.dropout)
        # u and v of all heads, as vectors: they are not matrices to prune
        self.content_bias = nn.Parameter(torch.empty(config.num_heads * config.head_width))
        self.position_bias = nn.Parameter(torch.empty(config.num_heads * config.head_width))
        self.head.weight = self.embedding.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights as published: N(0, 0.02), N(1, 0.02) for the scales of norms, zero for biases but u and v."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm):
                nn.init.normal_(module.weight, 1.0 if isinstance(module, nn.LayerNorm) else 0.0, INIT_STD)
            if isinstance(module, nn.Linear | nn.LayerNorm) and module.bias is not None:
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.content_bias, std=INIT_STD)
        nn.init.normal_(self.position_bias, std=INIT_STD)

    output_names = ("logits", "new_memory")
    """What an exported graph calls the outputs."""

    def example_inputs(self, tokens_BT: Tensor) -> dict[str, Any]:
        """The inputs of a call, for an export or a timing; the memory is random."""
        config, generator = self.config, torch.Generator().manual_seed(1)
        memory = torch.randn(config.num_layers, len(tokens_BT), config.memory_length, config.width, generator=generator)
        return {"tokens_BT": tokens_BT} | ({"memory": tuple(memory)} if config.memory_length else {})

    def forward(self, tokens_BT: Tensor, memory: Sequence[Tensor] | None = None) -> tuple[Tensor, Memory]:
        """Logits (B, T, V) of the next word after each token, and the memory to give with the next segment."""
        num_remembered = self._num_remembered(tokens_BT, memory)
        h_BTD = self.dropout(look_up(self.embedding, tokens_BT) * math.sqrt(self.config.width))
        if can_fuse(h_BTD):
            h_BTD = h_BTD.to(half_dtype(h_BTD) or h_BTD.dtype)
        positions = self._positions(num_remembered, h_BTD)
        new_memory: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            h_BSD = h_BTD if memory is None else torch.cat([memory[i].detach(), h_BTD], dim=1)
            # the segment alone where it is long enough, so that a view of it does not keep the old memory alive
            kept = h_BTD if h_BTD.shape[1] >= self.config.memory_length else h_BSD
            new_memory.append(_last(kept.detach(), self.config.memory_length))
            h_BTD = layer(h_BTD, h_BSD, positions)
        return linear.call(self.head, self.dropout(h_BTD)), tuple(new_memory)

    def _positions(self, num_remembered: int, h_BTD: Tensor) -> Positions:
        config, num_queries = self.config, h_BTD.shape[1]
        num_keys = num_remembered + num_queries
        distance_L = torch.arange(num_keys, -1, -1, device=h_BTD.device)
        sinusoid_LD = self.dropout(self.sinusoid(distance_L, h_BTD.dtype))
        query_T1 = torch.arange(num_queries, device=h_BTD.device)[:, None]
        # before the first key; `by_key` makes of these the keys after the query
        hidden_TL = distance_L > num_remembered + query_T1
        if config.same_length:
            hidden_TL = hidden_TL | (distance_L >= config.memory_length)
        mask_TL = torch.zeros_like(hidden_TL, dtype=h_BTD.dtype).masked_fill_(hidden_TL, -math.inf)
        reach = config.memory_length if config.same_length else None
        return Positions(sinusoid_LD, mask_TL, self.content_bias, self.position_bias, reach)

    def sinusoid(self, distance_L: Tensor, dtype: torch.dtype) -> Tensor:
        """R_d of distances, as this model counts them."""
        if self.config.clamp_length is not None:
            distance_L = distance_L.clamp(max=self.config.clamp_length)
        # distances beyond 256 need more than bfloat16
        return sinusoid(distance_L.to(torch.promote_types(dtype, torch.float32)), self.config.width).to(dtype)

    def _num_remembered(self, tokens_BT: Tensor, memory: Sequence[Tensor] | None) -> int:
        """The length M of the memory; refuses tokens and memory whose shapes do not fit together."""
        if tokens_BT.dim() != 2 or tokens_BT.shape[1] == 0:
            raise InvalidValueError(
                f"`tokens_BT` must be of shape (batch, time), time at least 1, but is {tuple(tokens_BT.shape)} instead."
            )
        if memory is None:
            return 0
        shapes = [tuple(tensor.shape) for tensor in memory]
        length = shapes[0][1] if shapes and len(shapes[0]) == 3 else 0
        if shapes != [(tokens_BT.shape[0], length, self.config.width)] * len(self.layers):
            raise InvalidValueError(
                f"`memory` must hold {len(self.layers)} tensors of shape ({tokens_BT.shape[0]}, any one length, "
                f"{self.config.width}), but holds {shapes} instead. Give what the segment before returned, or None."
            )
        return length


register("transformer-xl", TransformerXLConfig, TransformerXL)


def _last(h_BSD: Tensor, length: int) -> Tensor:
    """The last positions, all of them where there are fewer."""
    return h_BSD[:, -length:] if length else h_BSD[:, :0]


def sinusoid(distance_L: Tensor, width: int) -> Tensor:
    """R_d = [sin(d w_0), ..., sin(d w_{D/2-1}), cos(d w_0), ...], w_k = 10000^(-2k/D); (L, D)."""
    power = torch.arange(0, width, 2, device=distance_L.device, dtype=distance_L.dtype) / width
    angle = distance_L[:, None] * 10_000**-power
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


def by_key(scores_BHTL: Tensor) -> Tensor:
    """Scores by distance as scores by key, (B, H, T, S), without a copy.

    Query i has distance d in column S - d, and needs it in column j = M + i - d of rows that are one shorter. Both are
    the same place but for a move of all rows together: i (S + 1) + S - d = i S + j + T. What stands before the first
    key in row i + 1 (d > M + i + 1) thereby comes to stand at the keys after query i, which it must not see.
    """
    size_B, size_H, size_T, size_L = scores_BHTL.shape
    return scores_BHTL.flatten(2)[..., size_T:].view(size_B, size_H, size_T, size_L - 1)
