"""Heads that did not come with the checkpoint: random weights, of which no pruning can tell what is worth keeping.

`transformers` marks every tensor that a checkpoint brought. Where no mark is left (a copy, a model built from its
configuration), a task head is known by the class of its model.
"""

from __future__ import annotations

import re

from torch import nn

_TASK = re.compile(r".*For(Sequence|Token|Image|Audio)Classification|.*For(QuestionAnswering|MultipleChoice)")
_MARK = "_is_hf_initialized"


def fresh(model: nn.Module) -> dict[int, str]:
    """Modules of a pretrained model whose weights are most likely random, by identity, and why we think so."""
    found: dict[int, str] = {}
    for part in model.modules():
        # a `PreTrainedModel` of transformers, which need not be installed
        if not hasattr(part, "base_model_prefix") or not hasattr(part, "config"):
            continue
        loaded = {id(p) for p in part.parameters() if getattr(p, _MARK, False)}
        if loaded:
            found |= dict.fromkeys(_without(part, loaded), "its weights did not come with the checkpoint")
        elif _TASK.fullmatch(type(part).__name__):
            base = getattr(part, str(part.base_model_prefix), None)
            inside = {id(p) for p in base.parameters()} if isinstance(base, nn.Module) else set()
            reason = f"a task head of {type(part).__name__} is most likely fresh; include it by name to prune it"
            found |= dict.fromkeys(_without(part, inside) if inside else [], reason)
    return found


def _without(part: nn.Module, known: set[int]) -> list[int]:
    """Modules that have parameters, none of them a known one."""
    owned = ((module, [id(p) for p in module.parameters()]) for module in part.modules())
    return [id(module) for module, parameters in owned if parameters and known.isdisjoint(parameters)]
