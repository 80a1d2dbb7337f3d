"""One training loop for every model and method: `fit`, and what it reads and writes."""

from rankwise.lab.training.config import TrainingConfig
from rankwise.lab.training.evaluate import Quality, evaluate
from rankwise.lab.training.interrupt import Interrupted
from rankwise.lab.training.language import LanguageModel
from rankwise.lab.training.loop import Outcome, fit
from rankwise.lab.training.progress import Progress

__all__ = ["Interrupted", "LanguageModel", "Outcome", "Progress", "Quality", "TrainingConfig", "evaluate", "fit"]
