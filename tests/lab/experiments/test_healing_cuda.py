"""Healing on a GPU: bfloat16, steps recorded as graphs, activations computed twice; skipped where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lab.experiments.experiment_toys import Phases
from tests.lab.experiments.healing_toys import make_place
from tests.lab.experiments.test_healing import difference, healed, weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}, {"checkpointing": True}])
def test_a_decoder_is_healed_without_a_warning(place: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    """A step that cannot be recorded would warn."""
    result = healed(place, "decoder", tmp_path / "healed", steps=60, lr=3e-3, device="auto", **settings)
    assert result.after < result.before
    assert difference(place, tmp_path / "healed") < 0.5 * difference(place, place / "decoder-small")
    assert {tensor.dtype for tensor in weights(tmp_path / "healed").values()} == {torch.float32}


@pytest.mark.parametrize("name", ["encoder", "masked"])
def test_an_encoder_is_healed(place: Path, tmp_path: Path, name: str) -> None:
    result = healed(place, name, tmp_path / "healed", steps=40, lr=3e-3, device="auto")
    assert result.after < result.before


def test_a_stopped_healing_ends_near_to_one_that_was_not(place: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps": 20, "lr": 3e-3, "device": "auto"}
    healed(place, "decoder", tmp_path / "whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        healed(place, "decoder", tmp_path / "stopped", **settings, watcher=Phases("healing at a rate of 0.003", 11))
    healed(place, "decoder", tmp_path / "stopped", **settings)
    pairs = zip(weights(tmp_path / "whole").values(), weights(tmp_path / "stopped").values(), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=0.05, atol=2e-2)
