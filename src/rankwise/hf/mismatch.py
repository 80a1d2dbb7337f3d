"""`from_pretrained(..., ignore_mismatched_sizes=True)` of a compact model: what has another size than saved is fresh.

transformers leaves sizes to the quantizer, but does not tell it what was asked for. So `from_pretrained` is wrapped to
remember it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.utils import logging

from rankwise.errors import CheckpointError
from rankwise.hf.layout import OTHER_SIZES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IGNORED: ContextVar[bool] = ContextVar("ignore_mismatched_sizes", default=False)
"""Whether the model that is being loaded may differ in sizes from the one that was saved."""

logger = logging.get_logger(__name__)


def remember_flag(kind: type[PreTrainedModel]) -> None:
    """Let `from_pretrained` of a class and its heirs note the flag while it runs."""
    stock = kind.from_pretrained.__func__  # type: ignore[attr-defined]

    @wraps(stock)
    def from_pretrained(cls: Any, *args: Any, ignore_mismatched_sizes: bool = False, **kwargs: Any) -> Any:
        token = IGNORED.set(ignore_mismatched_sizes)
        try:
            return stock(cls, *args, ignore_mismatched_sizes=ignore_mismatched_sizes, **kwargs)
        finally:
            IGNORED.reset(token)

    kind.from_pretrained = classmethod(from_pretrained)  # type: ignore[assignment, arg-type]


def settle(model: PreTrainedModel, shapes: Mapping[str, torch.Size]) -> None:
    """Give parameters that came in another shape than their own fresh values, or refuse them."""
    found = {name: t for name, t in model.state_dict(keep_vars=True).items() if t.shape != shapes[name]}
    for name, tensor in found.items():
        if not IGNORED.get() or not isinstance(tensor, nn.Parameter):
            raise CheckpointError(
                f"{name} must be {list(shapes[name])} as the configuration says, but was saved as "
                f"{list(tensor.shape)}. {OTHER_SIZES}"
            )
        _renew(model, name, shapes[name])
    if found:
        # it passes by every module that has its values
        model.initialize_weights()  # type: ignore[no-untyped-call]
        model.tie_weights(recompute_mapping=False)
        logger.warning(f"Fresh, because the configuration asks for another size than saved: {', '.join(found)}.")


def _renew(model: PreTrainedModel, name: str, shape: torch.Size) -> None:
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    tensor = getattr(module, key)
    setattr(module, key, nn.Parameter(torch.empty(shape, dtype=tensor.dtype, device=tensor.device)))
    vars(module)["_is_hf_initialized"] = False
