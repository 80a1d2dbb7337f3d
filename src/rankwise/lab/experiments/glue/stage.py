"""What all parts of a GLUE experiment share: the rows, a folder to keep things in, and how a model is trained there."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.core.budget import SizeReport
from rankwise.hf.saving import save_pretrained
from rankwise.lab.experiments.arms import Watcher
from rankwise.lab.experiments.fields import to_json
from rankwise.lab.experiments.folder import MODEL
from rankwise.lab.experiments.glue.config import GlueExperiment
from rankwise.lab.experiments.glue.data import Splits
from rankwise.lab.experiments.glue.encoder import load_encoder, quiet
from rankwise.lab.experiments.latency import Latency
from rankwise.lab.training.records import RunFolder
from rankwise.lab.training.tune import Loss, Precision, TuningConfig, tune
from rankwise.measure import time_together
from rankwise.pruner import Pruner

REPEATS = 20
"""Of every model, when they are timed."""


@dataclass(frozen=True, eq=False)
class Stage:
    """Where the parts of an experiment are played."""

    splits: Splits
    folder: Path
    watcher: Watcher
    device: torch.device
    precision: Precision
    latency: Latency | None = None

    def made_from(self, experiment: GlueExperiment, names: Sequence[str]) -> dict[str, Any]:
        """What a finished part depends on: the settings of these names, and the rows."""
        plain = described(experiment)
        return {**{name: plain[name] for name in names}, "fingerprint": self.splits.dataset.fingerprint}

    def encoder(self, place: str | Path, *, seed: int = 0) -> nn.Module:
        """The model of a folder or of the hub, with the task's head."""
        return load_encoder(place, self.splits.dataset.task, seed=seed).to(self.device)

    def train(
        self,
        name: str,
        of: Mapping[str, Any],
        model: nn.Module,
        config: TuningConfig,
        loss: Loss,
        *,
        seed: int,
        pruner: Pruner | None = None,
        after_step: Callable[[], None] | None = None,
    ) -> float:
        """One phase of training, with its configuration and its metrics in its folder; the seconds that it took."""
        folder = RunFolder(self.folder / name)

        def log(line: Mapping[str, Any]) -> None:
            folder.append(line)
            self.watcher.report(dict(line))

        taken = 0

        def advance() -> None:
            nonlocal taken
            if after_step is not None:
                after_step()
            taken += 1
            self.watcher.advance(taken)

        with folder.held():
            folder.metrics.unlink(missing_ok=True)
            folder.begin(of)
            self.watcher.begin(0, self.steps(config))
            try:
                return tune(
                    model, self.splits.train, config, loss,
                    seed=seed, precision=self.precision, pruner=pruner, after_step=advance, log=log,
                )  # fmt: skip
            finally:
                self.watcher.end()

    def steps(self, config: TuningConfig) -> int:
        """Of a phase over the training rows."""
        return config.steps(len(self.splits.train))

    def export(self, name: str, model: nn.Module, row: dict[str, Any], size: SizeReport | None) -> dict[str, Any]:
        """Evaluate a finished model and save it as a folder that `from_pretrained` loads; its row."""
        self.watcher.phase(f"evaluating {name}")
        valid, test = (self.splits.quality(model, split) for split in ("valid", "test"))
        with quiet():
            save_pretrained(
                model,  # type: ignore[arg-type]
                self.folder / name / MODEL,
                tokenizer=self.splits.tokenizer,
                size=size,
                overwrite=True,
            )
        return {**row, "valid": valid, "test": test, "folder": name}

    def longest(self) -> Tensor:
        """A text of the greatest length: what models are timed on."""
        tokens: Tensor = self.splits.train.tensors["input_ids"]
        return tokens[:1, :1].expand(1, tokens.shape[1]).contiguous()

    def add_timings(self, rows: list[dict[str, Any]]) -> None:
        """Milliseconds for one text of the greatest length, batch 1, and how much faster than the first row that is."""
        self.watcher.phase("timing")
        models = {row["folder"]: self.encoder(self.folder / row["folder"] / MODEL) for row in rows}
        tokens = self.longest()

        def call(model: nn.Module) -> Callable[[], object]:
            model.eval()

            @torch.inference_mode()
            def forward() -> object:
                return model(input_ids=tokens)

            return forward

        calls = {name: call(model) for name, model in models.items()}
        timings = time_together(calls, repeats=REPEATS, device=self.device)
        for row in rows:
            timing = timings[row["folder"]]
            row["milliseconds"] = dataclasses.asdict(timing)
            row["speedup"] = timings[rows[0]["folder"]].median / timing.median


def described(experiment: GlueExperiment) -> dict[str, Any]:
    """As JSON gives it back; where the data lies on this machine is no part of the experiment."""
    plain: dict[str, Any] = json.loads(json.dumps(to_json(replace(experiment, data=None))))
    return plain
