"""One resumable training loop for every task, model and method.

loop.py          `fit`: takes the steps, and evaluates, logs and saves where that is due
run.py           the state of a run, its evaluation, metrics and checkpoints
step.py          how a step moves the weights: gradients, the optimizer, CUDA graphs
objective.py     what the loop needs of a task; callbacks that follow a run
config.py        settings
checkpoint.py    the files of a checkpoint; records.py: the other files of a run
ranks.py         several processes; watchdog.py: one of them dies; interruption.py: one is told to stop
histograms.py    of gates, for metrics; trackers.py: metrics for TensorBoard and others
snapshots.py     models of several sizes from one run
"""

from rankwise.lab.training.config import LoopConfig, TrainingConfig, TuningConfig
from rankwise.lab.training.interruption import Interrupted
from rankwise.lab.training.loop import Outcome, fit
from rankwise.lab.training.objective import Progress, Watcher

__all__ = [
    "Interrupted", "LoopConfig", "Outcome", "Progress", "TrainingConfig", "TuningConfig", "Watcher", "fit",
]  # fmt: skip
