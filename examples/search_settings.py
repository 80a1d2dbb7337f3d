"""Search learning rates of pruning with Optuna: one dense model, many trials, the bad ones ended early.

python examples/search_settings.py [--trials 8] [--steps 300] [--out runs/search] [--storage sqlite:///search.db]

A trial is a run folder of its own. It reports its validation loss while it trains, and Optuna ends it when it is worse
than half of the others were at that step; all trials follow the same ramp, so at one step all have the same size. With
a storage, further processes take part in the search: give them the same command once the dense model is there.
"""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna

from rankwise.lab.experiments.pipeline import prune, train
from rankwise.lab.experiments.presets import preset
from rankwise.lab.tasks.base import Experiment
from rankwise.lab.training import Watcher

MEASURE = "bits_per_character"


class Reporter(Watcher):
    """Tells Optuna every evaluation on the validation text, and ends a trial that it gives up."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial = trial

    def report(self, line: Mapping[str, Any]) -> None:
        if f"valid_{MEASURE}" in line:
            self.trial.report(line[f"valid_{MEASURE}"], line["step"])
            if self.trial.should_prune():
                raise optuna.TrialPruned


def toy(steps: int) -> Experiment:
    """The preset `demo`, smaller; yours may be any preset."""
    demo = preset("demo")
    phase = replace(demo.training, steps=steps, distill=0.0, warmup_steps=steps // 10, eval_every=max(steps // 5, 1))
    return replace(
        demo,
        model=replace(demo.model, width=64, embedding_width=32, num_layers=2, rank=24),
        base=replace(phase, schedule="constant"),
        training=phase,
        method=replace(demo.method, anneal_steps=steps // 3),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("runs/search"))
    parser.add_argument("--storage", help="where Optuna keeps the trials; without: in memory")
    options = parser.parse_args()
    experiment = toy(options.steps)
    train(experiment, options.out)

    def objective(trial: optuna.Trial) -> float:
        lr, multiplier_lr = (trial.suggest_float(name, 1e-3, 0.1, log=True) for name in ("lr", "multiplier_lr"))
        own = replace(
            experiment,
            training=replace(experiment.training, lr=lr),
            method=replace(experiment.method, multiplier_lr=multiplier_lr),
        )
        row = prune(own, options.out / "base", options.out / f"trial-{trial.number}", watcher=Reporter(trial))
        # the test text chooses nothing
        return float(row["valid"][MEASURE])

    study = optuna.create_study(
        storage=options.storage,
        study_name="rankwise",
        load_if_exists=True,
        # processes that share a search must not all propose the same
        sampler=optuna.samplers.TPESampler(seed=0 if options.storage is None else None),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=2),
    )
    study.optimize(objective, n_trials=options.trials)
    for trial in study.trials:
        settings = ", ".join(f"{name} {value:.4f}" for name, value in trial.params.items())
        value = "-" if trial.value is None else f"{trial.value:.4f}"
        print(f"trial {trial.number}: {settings}: {value} {trial.state.name.lower()}")
    print(f"best: trial {study.best_trial.number}, {study.best_value:.4f} valid bits per character")


if __name__ == "__main__":
    main()
