"""Smoothing: calibration data that count as less special than they are, so that a model loses less on other texts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from rankwise.core.factorize import Moments
from rankwise.core.plan import Site
from rankwise.errors import InvalidValueError


@dataclass(frozen=True, kw_only=True)
class Smoothing:
    """How far calibration data count as if they were less special than they are, for the sake of other texts.

    Each number is what is added to every variance, as a share of the mean: 0 trusts the data, and with a large one all
    directions, or all words, count alike.
    """

    inputs: float = 0.0
    """Of the second moments of what a matrix reads."""
    outputs: float = 0.0
    """Of the weights of errors in what it gives."""
    words: float = 0.0
    """Of the weights of the rows of an embedding, by which words that the data lack are kept too."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < math.inf:
                raise InvalidValueError(f"`{name}` of a smoothing must be at least 0, but is {value} instead.")

    def __call__(self, site: Site, moments: Moments) -> Moments:
        """The moments of a site, smoothed."""
        inputs_II, cross_II = moments.inputs_II, moments.cross_II
        more = 0.0 if inputs_II is None else self.inputs * float(inputs_II.diagonal().mean())
        rows_O, outputs_OO = moments.rows_O, moments.outputs_OO
        share = self.words if site.has_embedding else self.outputs
        least = 0.0 if rows_O is None else share * float(rows_O.mean())
        return replace(
            moments,
            inputs_II=_raised(inputs_II, more),
            # where the dense model reads the same, a matrix stays what it is
            cross_II=_raised(cross_II, more),
            rows_O=rows_O + least if rows_O is not None and least else rows_O,
            outputs_OO=_raised(outputs_OO, least),
        )


def _raised(square: Tensor | None, by: float) -> Tensor | None:
    """A matrix with `by` added to its diagonal."""
    if square is None or not by:
        return square
    raised = square.clone()
    raised.diagonal().add_(by)
    return raised
