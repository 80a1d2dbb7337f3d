"""What can be said of an experiment before anything is run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outline:
    """Sizes in parameters, for the vocabulary that the preset expects."""

    parameters: int
    """Of the dense model."""
    prunable: int
    exported: int
    """What the exported model may have."""
    steps: int
    """Dense and pruning steps of the method itself, comparisons not counted."""
    tokens: int
    """Tokens that are read in them."""
    corpus: str
    download_megabytes: int
    """0 where nothing is downloaded."""
