"""What a record keeps of where it was made."""

from __future__ import annotations

import pytest
import torch

from rankwise.surroundings import surroundings


def test_the_commit_is_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    found = surroundings(torch.device("cpu"))["commit"]
    monkeypatch.setenv("RANKWISE_COMMIT", "a copy without its history")
    assert surroundings(torch.device("cpu"))["commit"] == "a copy without its history" != found
