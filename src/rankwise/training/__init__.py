"""One training loop for every model and method: `fit`, and what it reads and writes."""

from rankwise.training.config import TrainingConfig
from rankwise.training.evaluate import Quality, evaluate
from rankwise.training.interrupt import Interrupted
from rankwise.training.language import LanguageModel
from rankwise.training.loop import Outcome, fit
from rankwise.training.progress import Progress

__all__ = ["Interrupted", "LanguageModel", "Outcome", "Progress", "Quality", "TrainingConfig", "evaluate", "fit"]
