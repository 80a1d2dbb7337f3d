"""What a model of transformers with gated or compact layers does otherwise: save, resize its vocabulary, know its ties.

The stock `save_pretrained` would write a folder that loads as random weights, the stock `resize_token_embeddings` would
fail. Both are wrapped once, where `PreTrainedModel` defines them: a model none of whose modules bears our mark goes
straight to the stock method, and one that took in a compact part does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from transformers.modeling_utils import PreTrainedModel

from rankwise.hf.layout import ties_of
from rankwise.hf.saving import save_with_layout
from rankwise.hf.vocabulary import resize_token_embeddings

MARK = "_rankwise"
"""An attribute of every module of a model whose layers changed; copies have it too."""


def adopt(model: nn.Module) -> None:
    """Mark what is in `model`, and tell each model of transformers in it its ties."""
    for part in model.modules():
        vars(part)[MARK] = True
        if isinstance(part, PreTrainedModel):
            declare_ties(part)


def is_adopted(model: nn.Module) -> bool:
    """Whether a model holds a part whose layers changed."""
    return any(MARK in vars(part) for part in model.modules())


def teach(kind: type[PreTrainedModel]) -> None:
    """Let models that hold such a part save and resize in our way."""
    stock = kind.save_pretrained

    def save(model: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        save_with_layout(model, stock, *args, **kwargs)

    kind.save_pretrained = _where_adopted(save, stock)  # type: ignore[method-assign]
    kind.resize_token_embeddings = _where_adopted(  # type: ignore[method-assign]
        resize_token_embeddings, kind.resize_token_embeddings
    )


def _where_adopted(ours: Callable[..., Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def method(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if not is_adopted(self):
            return stock(self, *args, **kwargs)
        declare_ties(self)
        return ours(self, *args, **kwargs)

    return method


def declare_ties(model: PreTrainedModel) -> None:
    """Tell transformers which of the model's tensors are one: its class names some that are gone."""
    ties = ties_of(model)
    model.all_tied_weights_keys = ties
    model._tied_weights_keys = {f"{re.escape(name)}$": f"{re.escape(source)}$" for name, source in ties.items()}
    # so that the Trainer, which loads a checkpoint by `load_state_dict`, does not miss them
    model._keys_to_ignore_on_save = {*(type(model)._keys_to_ignore_on_save or ()), *ties}
