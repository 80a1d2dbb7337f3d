"""What a gated or compact model of transformers does for itself: save, resize its vocabulary, know its ties.

Its own `save_pretrained` and `resize_token_embeddings` would write a folder that loads as random weights, and fail.
The model keeps its class; the two methods are set on the instance, and copies of it have their own.
"""

from __future__ import annotations

import re
from functools import partial

from torch import nn
from transformers import PreTrainedModel

from rankwise.hf.layout import ties_of
from rankwise.hf.saving import save_with_layout
from rankwise.hf.vocabulary import resize_token_embeddings


def adopt(model: nn.Module) -> None:
    """Teach every model of transformers in `model` these manners."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            # a partial, not a bound method: it survives pickling as it survives copying
            vars(part)["save_pretrained"] = partial(save_with_layout, part)
            vars(part)["resize_token_embeddings"] = partial(resize_token_embeddings, part)
            declare_ties(part)


def declare_ties(model: PreTrainedModel) -> None:
    """Tell transformers which of the model's tensors are one: its class names some that are gone."""
    ties = ties_of(model)
    model.all_tied_weights_keys = ties
    model._tied_weights_keys = {f"{re.escape(name)}$": f"{re.escape(source)}$" for name, source in ties.items()}
    # so that the Trainer, which loads a checkpoint by `load_state_dict`, does not miss them
    model._keys_to_ignore_on_save = {*(type(model)._keys_to_ignore_on_save or ()), *ties}
