"""What is patched into `PreTrainedModel`, and why.

    save_pretrained           the stock one would write a folder that loads as random weights
    resize_token_embeddings   the stock one fails where the embedding is a product of two matrices
    from_pretrained           notes `ignore_mismatched_sizes`, which transformers does not pass on to a quantizer

The first two act only on models that hold a layer which rankwise changed; all others go straight to the stock method.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from rankwise.errors import RankwiseError
from rankwise.hf.format import is_gated, ties_of
from rankwise.hf.saving import save_changed
from rankwise.modules import LowRankHead, PivotLinear, SelectedLinear, linear
from rankwise.swap import become

CHANGED = "_rankwise"
"""An attribute of every module of a model whose layers changed; copies have it too."""
SIZES_MAY_DIFFER: ContextVar[bool] = ContextVar("ignore_mismatched_sizes", default=False)
"""Whether the model that is being loaded may differ in sizes from the one that was saved."""


def patch() -> None:
    """Replace the three methods of `PreTrainedModel`."""
    kind: Any = PreTrainedModel
    save, load = kind.save_pretrained, kind.from_pretrained.__func__

    def our_save(model: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        save_changed(model, save, *args, **kwargs)

    def from_pretrained(cls: Any, *args: Any, ignore_mismatched_sizes: bool = False, **kwargs: Any) -> Any:
        token = SIZES_MAY_DIFFER.set(ignore_mismatched_sizes)
        try:
            return load(cls, *args, ignore_mismatched_sizes=ignore_mismatched_sizes, **kwargs)
        finally:
            SIZES_MAY_DIFFER.reset(token)

    kind.save_pretrained = _if_changed(our_save, save)
    kind.resize_token_embeddings = _if_changed(resize_token_embeddings, kind.resize_token_embeddings)
    kind.from_pretrained = classmethod(wraps(load)(from_pretrained))  # type: ignore[arg-type]


def _if_changed(ours: Callable[..., Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def method(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        # a model may also have taken in a compact part after it was made
        if not any(CHANGED in vars(part) for part in self.modules()):
            return stock(self, *args, **kwargs)
        declare_ties(self)
        return ours(self, *args, **kwargs)

    return method


def mark_changed(model: nn.Module) -> None:
    """Mark every module of `model`, and tell each model of transformers in it which tensors are tied."""
    for part in model.modules():
        vars(part)[CHANGED] = True
        if isinstance(part, PreTrainedModel):
            declare_ties(part)


def declare_ties(model: PreTrainedModel) -> None:
    """Tell transformers which tensors of the model are tied: its class names some that are gone."""
    ties = ties_of(model)
    model.all_tied_weights_keys = ties
    model._tied_weights_keys = {f"{re.escape(name)}$": f"{re.escape(source)}$" for name, source in ties.items()}
    # so that the Trainer, which loads a checkpoint by `load_state_dict`, does not miss them
    model._keys_to_ignore_on_save = {*(type(model)._keys_to_ignore_on_save or ()), *ties}


def resize_token_embeddings(
    model: PreTrainedModel,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
) -> nn.Module:
    """Like the method of transformers; new rows are drawn from the mean and covariance of the old rows of the factor.

    For a low-rank embedding its first factor is returned: BART and similar models count the rows of its weight.
    """
    if is_gated(model):
        raise RankwiseError(
            "A gated model cannot take another vocabulary, because its size is being counted. "
            "Call `resize_token_embeddings` before `rankwise.Pruner`, or on the compact model."
        )
    table = model.get_input_embeddings()
    if new_num_tokens is None and pad_to_multiple_of is None:
        return table
    words = table[0] if isinstance(table, nn.Sequential) else table
    assert isinstance(words, nn.Embedding)
    weight = words.weight
    # in place, so that every layer tied to it follows
    model._get_resized_embeddings(words, new_num_tokens, pad_to_multiple_of, mean_resizing)
    size = words.weight.shape[0]
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.weight is weight:
            module.num_embeddings = size
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is not None:
        _resize_head(model, head, size, mean_resizing)
    model.config.get_text_config().vocab_size = size
    model.vocab_size = size
    model.tie_weights()
    return words


def _resize_head(model: PreTrainedModel, head: nn.Module, size: int, mean_resizing: bool) -> None:
    last = head[-1] if isinstance(head, nn.Sequential) else head
    if isinstance(last, PivotLinear):
        # rows that come and go are those of a plain pair
        become(last, linear(nn.Parameter(last.weight.detach(), last.coefficients.requires_grad), last.bias))
    assert isinstance(last, nn.Linear | LowRankHead | SelectedLinear)
    bias = last.bias
    stored = last.columns if isinstance(last, SelectedLinear) else last.weight
    if not isinstance(last, LowRankHead) and stored.shape[0] != size:
        # a stock layer around the same rows, for transformers to lengthen
        rows = linear(nn.Parameter(stored.detach()), None)
        longer = model._get_resized_lm_head(rows, size, mean_resizing=mean_resizing)
        stored.data = longer.weight.data
    if bias is not None and bias.shape[0] != size:
        value = float(bias.detach().mean()) if mean_resizing else 0.0
        bias.data = F.pad(bias.data, (0, size - bias.shape[0]), value=value)
    if isinstance(last, nn.Linear):
        last.out_features = size
