"""Real toy runs, made once: a sweep over seeds, two networks, and a compressed folder."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest

import rankwise as rw
from rankwise.core.budget import Budget
from rankwise.deploy.compress import SavedModel, compress_folder
from rankwise.lab.experiments import pipeline
from rankwise.lab.experiments.sweeps import sweep
from rankwise.lab.models.transformer_xl import TransformerXL
from rankwise.methods import make_method
from tests.lab.experiments.experiment_toys import MODELS, PHASE, toy


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all of them: sweep, words, attention, compressed. Nobody may change it."""
    folder = tmp_path_factory.mktemp("runs")
    texts = tmp_path_factory.mktemp("texts")
    phase = replace(PHASE, steps=12, log_every=1, eval_every=4)
    settings = {"base": phase, "training": phase, "method": make_method("flop-l0", anneal_steps=6)}
    with warnings.catch_warnings():
        # so few steps decide nothing
        warnings.simplefilter("ignore")
        sizes = {"methods": ("flop-l0", "fac"), "removed": (0.5, 0.7), "seeds": (0, 1)}
        sweep(toy(texts, "sru", **settings), folder / "sweep", **sizes)
        for name, kind in (("words", "words"), ("attention", "transformer-xl")):
            pipeline.run(toy(texts, kind, **settings, compare=("dense",)), folder / name)
    dense = TransformerXL(MODELS["transformer-xl"])  # type: ignore[arg-type]
    source = SavedModel(dense, None, {}, lambda: rw.load(folder / "compressed"))
    compress_folder(source, Budget(removed=0.2), folder / "compressed", device="cpu")
    return folder
