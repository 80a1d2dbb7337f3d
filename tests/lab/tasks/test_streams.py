"""Calibration of a language model on a text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rankwise.lab.tasks.streams import NUM_CALIBRATION_WINDOWS, StreamTask
from tests.lab.experiments.experiment_toys import PHASE, toy


@pytest.mark.parametrize("length", [10, 3_000, 2**24 + 6, 103_227_021])
@pytest.mark.parametrize("window", [3, 8])
def test_calibration_windows_are_whole_however_long_the_text_is(length: int, window: int, tmp_path: Path) -> None:
    experiment = toy(tmp_path, training=replace(PHASE, window=window))
    # a text of any length in the memory of one token
    text = np.broadcast_to(np.uint8(1), (length,))
    task = StreamTask(experiment, replace(experiment.read(), train=text))
    windows = [tuple(batch.shape) for batch in task.calibration().batches]
    assert sum(number for number, _ in windows) == NUM_CALIBRATION_WINDOWS
    assert {size for _, size in windows} == {window}
