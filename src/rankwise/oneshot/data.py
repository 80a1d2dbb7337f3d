"""Calibration data of a model's matrices: their inputs, and how much the loss depends on their outputs.

A few matrices at a time: data run through the model once for each group, whose moments are all that is held.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.core.blocks import Call, find_blocks, output_gradients, record_calls
from rankwise.core.calibrate import Loss, count_calls, loss_weights, moment_bytes, second_moments, weighed
from rankwise.core.factorize import Moments
from rankwise.core.host_memory import release_freed_memory
from rankwise.core.plan import Plan, Site
from rankwise.core.verify import Batch, verify_layers
from rankwise.errors import InvalidValueError

Progress = Callable[[str, int, int], None]
SHARE = 0.08
"""Moments may take this share of the model's memory at a time."""
LEAST_BYTES = 2**24
"""Moments may always take this much memory."""
LEAST_BYTES_DENSE = 2**30
"""They may take this much while the model stays dense: larger groups are the same then, and save passes."""


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


class CalibrationData:
    """Calibration data of each site, a few sites at a time and in the order in which a batch reaches them."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        batches: Sequence[Any] | None,
        progress: Progress | None,
        *,
        in_blocks: bool = False,
        refined: bool = False,
    ) -> None:
        self.model, self.plan, self.batches, self.refined = model, plan, batches, refined
        self.progress: Progress = progress or (lambda what, done, total: None)
        self.weights: dict[str, Moments] = {}
        """What the loss depends on (`output_fisher`), for the sites that it depends on; empty without a loss."""
        self.lasts: list[Tensor] | None = None
        """What the last block gave for each batch when the blocks were last run one by one."""
        self.unreached: set[str] = set()
        self.calls = [count_calls(model, plan, batch) for batch in (batches or [])[:1]]
        """Calls of the first batch, and of the others where they are needed."""
        self.blocks = self._called_once(self._find_blocks()) if in_blocks and batches else []
        """Names of blocks that are compressed one after the other; empty if the model has none."""
        self.block_weights: dict[str, Tensor] = {}
        """How much the loss depends on the outputs of each block."""
        self.smoothing = Smoothing()
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        self.room = max(int(SHARE * size), LEAST_BYTES)

    def weigh(self, loss: Loss, batches: Sequence[Any]) -> None:
        """Weigh the outputs of every site by how much `loss` depends on them."""

        def counted() -> Iterator[Any]:
            for done, batch in enumerate(batches):
                self.progress("gradients", done, len(batches))
                yield batch
            self.progress("gradients", len(batches), len(batches))

        with output_gradients(self.model, self.blocks if self.refined else []) as self.block_weights:
            weights = loss_weights(self.model, self.plan, counted(), loss)
        self._take(weights)

    def _take(self, weights: Mapping[str, Moments]) -> None:
        self.weights = {name: found for name, found in weights.items() if found.rows_O is not None}
        self.unreached = {site.name for site in self.plan.sites if site.name not in weights}
        release_freed_memory()

    def recall(self, number: int) -> None:
        """Have the weights of a block, of which the one before was recalled before, if there are any."""

    def forget(self, site: Site) -> None:
        """Let go of the weights of a site that take memory, if they can be recalled."""

    def finish(self, number: int, call: Call, x_BTD: Tensor) -> None:
        """Go on from a block that is compressed; it reads `x_BTD`."""

    def record(self) -> tuple[list[Tensor], list[list[Call]]]:
        """What the first block reads of each batch, and for each block and batch what else it is called with."""
        return record_calls(self.model, self.blocks, self.batches or [])

    def verify(self, example: Any) -> None:
        """Refuse a model whose code does with its compressed layers what it would not do with stock layers."""
        verify_layers(self.model, Batch(example))

    def _find_blocks(self) -> list[str]:
        assert self.batches
        return find_blocks(self.model, self.batches[0])

    def _called_once(self, names: list[str]) -> list[str]:
        """The blocks of the model, if every site in them is called once for each batch."""
        for site in self.plan.sites:
            inside = [use for use in site.uses if use.name.startswith(tuple(f"{name}." for name in names))]
            if inside and (len(site.uses) > 1 or self.calls[0].get(site.name, 1) > 1):
                return []
        return names

    def around_blocks(self) -> tuple[list[Site], list[Site]]:
        """Sites that are called before the first block, and those after the last one."""
        inside = tuple(f"{name}." for name in self.blocks)
        order = list(self.calls[0])
        first = next((i for i, name in enumerate(order) if name.startswith(inside)), len(order))
        early = set(order[:first])
        outside = [site for site in self.plan.sites if site.has_embedding or not site.name.startswith(inside)]
        before = [site for site in outside if any(use.name in early or use.is_embedding for use in site.uses)]
        return before, [site for site in outside if site not in before]

    def moments(
        self, sites: Sequence[Site] | None = None, *, dense: bool = False
    ) -> Iterator[tuple[Site, Moments | None]]:
        """Every site once. The moments of later groups are of the model as the caller has changed it by then.

        Args:
            dense: whether the caller leaves the model as it is.
        """
        room = max(self.room, LEAST_BYTES_DENSE) if dense else self.room
        sites = self.plan.sites if sites is None else sites
        if self.batches is None:
            yield from ((site, None) for site in sites)
            return
        groups = list(self._groups(sites, room))
        if len(groups) > 1:
            self.calls += [count_calls(self.model, self.plan, batch) for batch in self.batches[len(self.calls) :]]
        for group in groups:
            stops = self._stops(group) if len(groups) > 1 else None
            found = second_moments(self.model, Plan(tuple(group)), self.batches, last_calls=stops, dtype=torch.float32)
            for site in group:
                yield site, self._reached(site, found.pop(site.name))
            release_freed_memory()

    def _reached(self, site: Site, moments: Moments) -> Moments:
        if moments.inputs_II is None and moments.rows_O is None:
            self.unreached.add(site.name)
        return self.weighed(site, moments)

    def weighed(self, site: Site, moments: Moments) -> Moments:
        """The moments of a site with the weights of its outputs, smoothed."""
        return self.smoothing(site, weighed(moments, self.weights.get(site.name)))

    def _stops(self, group: Sequence[Site]) -> list[tuple[str, int] | None]:
        """For each batch the call behind which it may stop; None if it does not call all uses, and may yet."""
        uses = {use.name for site in group for use in site.uses}
        return [
            next(call for call in reversed(seen.items()) if call[0] in uses) if uses <= seen.keys() else None
            for seen in self.calls
        ]

    def _groups(self, sites: Sequence[Site], room: int) -> Iterator[list[Site]]:
        place = {name: i for i, name in enumerate(self.calls[0] if self.calls else ())}

        def last_place(site: Site) -> int:
            return max((place[use.name] for use in site.uses if use.name in place), default=len(place))

        order = sorted(sites, key=last_place)
        group: list[Site] = []
        for site in order:
            if group and moment_bytes([*group, site], torch.float32) > room:
                yield group
                group = []
            group.append(site)
        if group:
            yield group
