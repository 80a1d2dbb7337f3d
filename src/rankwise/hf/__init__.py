"""Hugging Face: once this is imported, stock `from_pretrained` and `save_pretrained` load and save compact models.

Importing this package registers a loader with transformers, and wraps three methods of `PreTrainedModel` (`quantizer`).
It offers a callback for the stock `Trainer`, distillation, and plans in PEFT's words.
"""

from rankwise.errors import MissingPackageError, install_extra

try:
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise MissingPackageError(
        f"`rankwise.hf` needs transformers, which is not installed. {install_extra('hf')}"
    ) from error

from rankwise.adapters.families import ON_CHANGE as _ON_CHANGE
from rankwise.adapters.plans import peft_plan as find_plan
from rankwise.distill import Distillation, distillation_loss
from rankwise.hf import quantizer as _quantizer
from rankwise.hf.callback import PruningCallback
from rankwise.hf.saving import save_pretrained

__all__ = ["Distillation", "PruningCallback", "distillation_loss", "find_plan", "save_pretrained"]

_quantizer.patch()
_ON_CHANGE.append(_quantizer.mark_changed)
