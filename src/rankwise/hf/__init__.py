"""Hugging Face: plans in PEFT's words, a callback for the stock `Trainer`, distillation, folders that load anywhere."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankwise.adapters.plans import peft_plan as find_plan
    from rankwise.hf.callback import PruningCallback as PruningCallback
    from rankwise.hf.distill import Distillation as Distillation
    from rankwise.hf.distill import distillation_loss as distillation_loss
    from rankwise.hf.pretrained import save_pretrained as save_pretrained

__all__ = ["Distillation", "PruningCallback", "distillation_loss", "find_plan", "save_pretrained"]

_HOMES = {
    "Distillation": ("rankwise.hf.distill", "Distillation"),
    "distillation_loss": ("rankwise.hf.distill", "distillation_loss"),
    "PruningCallback": ("rankwise.hf.callback", "PruningCallback"),
    "find_plan": ("rankwise.adapters.plans", "peft_plan"),
    "save_pretrained": ("rankwise.hf.pretrained", "save_pretrained"),
}


# imported when first used: `import rankwise` passes here and must not import transformers, which takes seconds
def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, word = _HOMES[name]
    return getattr(import_module(home), word)
