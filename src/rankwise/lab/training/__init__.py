"""One resumable training loop for every task, model and method: `fit`, and what it reads and writes."""

from rankwise.lab.training.config import LoopConfig, TrainingConfig, TuningConfig
from rankwise.lab.training.interruption import Interrupted
from rankwise.lab.training.loop import Outcome, fit
from rankwise.lab.training.objective import Progress, Watcher

__all__ = [
    "Interrupted", "LoopConfig", "Outcome", "Progress", "TrainingConfig", "TuningConfig", "Watcher", "fit",
]  # fmt: skip
