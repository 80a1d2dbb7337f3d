"""`resize_token_embeddings` for a compact model, whose table of words may be a product of two."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import nn

from rankwise.errors import RankwiseError
from rankwise.hf.layout import is_gated
from rankwise.modules import LowRankHead, PivotLinear, SelectedLinear, linear
from rankwise.swap import become

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def resize_token_embeddings(
    model: PreTrainedModel,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
) -> nn.Module:
    """As the method of transformers; new words come from the mean and covariance of the old in the factors' space.

    Of a pair that has new words, its table is returned: BART and its like count the rows of the weight that it has.
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
