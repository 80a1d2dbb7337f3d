"""Attention with relative positions on a CPU, for inference: blocks of queries whose scores stay in the cache.

Per head and block, position scores are written by one product in the layout that makes them content scores' addend
(see `rankwise.lab.models.transformer_xl.by_key`), content scores are added by a second, and keys that no query of the
block may see are never multiplied. Nothing is kept for a backward pass. Many queries go through `cpu.c`, few through
products of torch.

Shapes: B = batch, T = queries, S = keys, M = S - T, L = S + 1 distances, H = heads, E = head width.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from pathlib import Path

import torch
from torch import Tensor

from rankwise.kernels import native

BLOCK = 128
"""Queries of a block: with 1,024 keys half a megabyte of scores."""
MANY = 24
"""Queries that are worth laying out keys and values for."""

_SOURCE = Path(__file__).with_name("cpu.c")


def relative_attention(
    content_BTHE: Tensor, position_BTHE: Tensor, k_BSHE: Tensor, v_BSHE: Tensor, r_LHE: Tensor,
    reach: int | None = None, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """softmax_j((content_i . k_j + position_i . r_{M+i-j}) / sqrt(E)) v_j over keys j <= M + i, (B, T, H, E).

    Args:
        r_LHE: by distance, from S down to 0.
        reach: the number of keys that a query sees at most.
        dtype: what is multiplied, where that is not the dtype of the inputs.
    """
    dtype = dtype or content_BTHE.dtype
    by_c = content_BTHE.shape[1] >= MANY and _can_run_c(dtype)
    inputs = [x.to(torch.float32 if by_c else dtype) for x in (content_BTHE, position_BTHE, k_BSHE, v_BSHE, r_LHE)]
    y_BTHE = _by_c(inputs, reach, half=dtype == torch.bfloat16) if by_c else _by_torch(inputs, reach)
    return y_BTHE.to(content_BTHE.dtype)


def _can_run_c(dtype: torch.dtype) -> bool:
    if dtype not in (torch.float32, torch.bfloat16) or not native.is_ready(_SOURCE, "relative attention"):
        return False
    return dtype == torch.float32 or bool(native.library(_SOURCE).relative_attention_has_half())


class _Strided(ctypes.Structure):
    """`Strided` of `cpu.c`."""

    _fields_ = (("p", ctypes.c_void_p), *((name, ctypes.c_long) for name in ("b", "row", "h")))


class _Arguments(ctypes.Structure):
    """`Arguments` of `cpu.c`."""

    _fields_ = (
        *((name, ctypes.c_long) for name in ("B", "T", "S", "H", "E", "reach", "half")),
        ("scale", ctypes.c_float),
        *((name, _Strided) for name in ("content", "position", "k", "v", "r", "y")),
        *((name, ctypes.c_void_p) for name in ("panels", "values", "rooms")),
        ("room", ctypes.c_long),
    )


def _by_c(inputs: list[Tensor], reach: int | None, *, half: bool) -> Tensor:
    content_BTHE, position_BTHE, k_BSHE, v_BSHE, r_LHE = inputs
    size_B, size_T, size_H, size_E = content_BTHE.shape
    size_S = k_BSHE.shape[1]
    y_BTHE = content_BTHE.new_empty(content_BTHE.shape)
    # a dense copy must live until the call is over
    tensors = [content_BTHE, position_BTHE, k_BSHE, v_BSHE, r_LHE[None], y_BTHE]
    tensors = [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]
    strided = [_Strided(x.data_ptr(), *x.stride()[:-1]) for x in tensors]
    sizes = (size_B, size_T, size_S, size_H, size_E)
    arguments = _Arguments(*sizes, size_S if reach is None else reach, half, 1 / math.sqrt(size_E), *strided)

    library, num_threads = native.library(_SOURCE), torch.get_num_threads()
    needed = (ctypes.c_long * 3)()
    library.relative_attention_sizes(ctypes.byref(arguments), needed)
    panels, values, arguments.room = needed
    room = content_BTHE.new_empty(panels + values + num_threads * arguments.room)
    arguments.panels = room.data_ptr()
    arguments.values = arguments.panels + panels * room.itemsize
    arguments.rooms = arguments.values + values * room.itemsize
    library.relative_attention(ctypes.byref(arguments), native.parallel(), num_threads)
    return y_BTHE


def _by_torch(inputs: list[Tensor], reach: int | None) -> Tensor:
    content_BTHE, position_BTHE, k_BSHE, v_BSHE, r_LHE = inputs
    size_B, size_T, size_H, size_E = content_BTHE.shape
    size_M = k_BSHE.shape[1] - size_T
    scale = 1 / math.sqrt(size_E)
    content_BHTE, position_BHTE = (x_BTHE.transpose(1, 2) * scale for x_BTHE in (content_BTHE, position_BTHE))
    k_BHSE, v_BHSE, r_HLE = k_BSHE.transpose(1, 2), v_BSHE.transpose(1, 2), r_LHE.transpose(0, 1)
    y_BHTE = torch.empty_like(content_BTHE).transpose(1, 2)
    # a few queries fill no cache, so then all heads go together; one at a time, products take strides as they are
    together = size_T * size_H <= BLOCK
    heads: list[int | slice] = [slice(None)] if together else list(range(size_H))
    room = content_BTHE.new_empty((size_H if together else 1) * min(BLOCK, size_T) * r_LHE.shape[0])
    for start in range(0, size_T, BLOCK):
        stop = min(start + BLOCK, size_T)
        first = 0 if reach is None else max(size_M + start - reach + 1, 0)
        last = size_M + stop
        hidden_TS = _hidden(stop - start, last - first, reach, content_BTHE)
        for b, h in itertools.product(range(size_B), heads):
            content, position, y = (
                x_BHTE[b, h, ..., start:stop, :] for x_BHTE in (content_BHTE, position_BHTE, y_BHTE)
            )
            k, v = (x_BHSE[b, h, ..., first:last, :] for x_BHSE in (k_BHSE, v_BHSE))
            scores = _scores(content, position, k, r_HLE[h], room)
            edge = scores[..., -hidden_TS.shape[1] :]
            edge += hidden_TS
            y.copy_(torch.softmax(scores, -1) @ v)
    return y_BHTE.transpose(1, 2)


def _scores(content: Tensor, position: Tensor, k: Tensor, r: Tensor, room: Tensor) -> Tensor:
    """Scores (T, S) of a head, or (H, T, S) of all, in `room`; not yet masked."""
    *some_H, size_T, _ = content.shape
    size_S = k.shape[-2]
    room = room[: math.prod(some_H) * size_T * (size_S + 1)]
    torch.matmul(position, r[..., -(size_S + 1) :, :].mT, out=room.view(*some_H, size_T, size_S + 1))
    # the same numbers by key: all rows moved by T places, and each one shorter
    scores = room.view(*some_H, -1)[..., size_T:].view(*some_H, size_T, size_S)
    return scores.baddbmm_(content, k.mT) if some_H else scores.addmm_(content, k.mT)


def _hidden(size_T: int, size_S: int, reach: int | None, like: Tensor) -> Tensor:
    """-inf where a query of a block may not see a key, else 0; of the last keys only, where all see the others."""
    size_edge = size_T if reach is None else size_S
    distance_TS = torch.arange(size_T)[:, None] + (size_edge - size_T) - torch.arange(size_edge)
    hidden_TS = distance_TS < 0
    if reach is not None:
        hidden_TS |= distance_TS >= reach
    return torch.zeros_like(hidden_TS, dtype=like.dtype).masked_fill_(hidden_TS, -math.inf)
