"""Attention in which a query may see no key, as where a causal model reads a text that is padded on the left.

Torch gives zeros for such a query. Engines give the mean of all values, or NaN, which the next layer spreads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

ARGUMENTS = ("query", "key", "value", "attn_mask")


class NothingSeen(TorchFunctionMode):
    """While it is entered, a graph of torch's attention function says what it gives for queries that see nothing."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is not F.scaled_dot_product_attention:
            return found
        mask = {**dict(zip(ARGUMENTS, args, strict=False)), **(kwargs or {})}.get("attn_mask")
        return found if mask is None else torch.where(_sees(mask), found, 0.0)


def _sees(mask: Tensor) -> Tensor:
    """Which queries see a key; the last dimension, that of keys, has become 1."""
    is_seen = mask if mask.dtype is torch.bool else mask > -math.inf
    return is_seen.any(-1, keepdim=True)
