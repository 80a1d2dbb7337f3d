"""Compression block by block: each matrix is fitted to the dense model, and each block trained towards the dense one.

When a block is compressed, those before it are compressed already: it reads x, where the dense block reads x0. Its
matrices are chosen so that W' x is close to W x0 (`rankwise.core.factorize.anchored`), and then all its parameters are
trained for a few steps so that its outputs are close to the dense block's (`refine`). Only the hidden states between
two blocks are kept, so it takes the memory of one block more, and no gradient of the whole model.
Shapes: B = batch, T = tokens, D = width, I = inputs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from rankwise.core.blocks import Call, StopForward, inputs_of
from rankwise.core.factorize import Moments
from rankwise.core.plan import Site
from rankwise.errors import InvalidValueError
from rankwise.kernels.graphs import StepGraphs
from rankwise.measure import evaluating

HELD_OUT = 8
"""One in so many batches is not trained on and decides whether training a block has helped."""


@dataclass(frozen=True, kw_only=True)
class Refinement:
    """How a block is trained towards the outputs of the dense block."""

    steps: int = 200
    """Steps of AdamW for each block, of one batch each; 0: blocks are not trained."""
    learning_rate: float = 1e-4
    """At its highest; it rises for a tenth of the steps and falls to zero with a cosine."""
    floor: float = 0.1
    """What an error of any output feature costs at least, as a share of the mean by the loss."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or self.steps < 0:
            raise InvalidValueError(f"`steps` must be a whole number of at least 0, but is {self.steps!r} instead.")
        for name in ("learning_rate", "floor"):
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidValueError(f"`{name}` must be positive, but is {getattr(self, name)} instead.")


class RefinedBlocks(Protocol):
    """Keeps refined blocks, so that work that was stopped can go on."""

    def load(self, number: int) -> Mapping[str, Tensor] | None:
        """The state of a block that was refined before, or None."""
        ...

    def save(self, number: int, state: Mapping[str, Tensor]) -> None:
        """Keep the state of a block."""
        ...


class Blocks:
    """The blocks of a model while it is compressed: what each reads in the dense model, and in the compressed one."""

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        record: Callable[[], tuple[list[Tensor], list[list[Call]]]],
        *,
        anchor: bool,
    ) -> None:
        self.model, self.names, self.record, self.anchor = model, names, record, anchor
        self.dense_inputs, self.dense_calls = record()
        self.inputs, self.calls = self.dense_inputs, self.dense_calls

    def start(self) -> None:
        """Take up what layers before the first block give now that they are compressed."""
        self.inputs, self.calls = self.record()

    def sites(self, number: int, sites: Sequence[Site]) -> list[Site]:
        """Those of `sites` that are in a block, without embeddings, which are looked up."""
        return [site for site in sites if site.name.startswith(f"{self.names[number]}.") and not site.has_embedding]

    @torch.no_grad()
    def compress(
        self,
        number: int,
        sites: Sequence[Site],
        shrink: Callable[[Site, Moments], None],
        weights_DD: Tensor | None,
        refinement: Refinement,
        kept: RefinedBlocks | None = None,
        progress: Callable[[int], None] = lambda step: None,
    ) -> None:
        """Compress the sites of a block by `shrink`, refine it, and go on to what the next block reads."""
        block = self.model.get_submodule(self.names[number])
        dense, calls = copy.deepcopy(block), self.calls[number]
        with evaluating(block), evaluating(dense):
            for group in self._groups(number, dense, sites):
                moments = self._moments(number, dense, block, group)
                for site in group:
                    shrink(site, moments)
            given = zip(self.dense_calls[number], self.dense_inputs, strict=True)
            targets = [call(dense, x_BTD).detach() for call, x_BTD in given]
            del dense
            if refinement.steps:
                state = None if kept is None else kept.load(number)
                if state is not None and _shapes(state) == _shapes(block.state_dict()):
                    block.load_state_dict(state)
                else:
                    refine(block, calls, self.inputs, targets, weights_DD, refinement, progress)
                    if kept is not None:
                        kept.save(number, block.state_dict())
            self.inputs = [call(block, x_BTD).detach() for call, x_BTD in zip(calls, self.inputs, strict=True)]
        self.dense_inputs = targets
        # what was recorded for this block is not needed any more
        self.calls[number], self.dense_calls[number] = [], []

    def _local(self, number: int, site: Site) -> str:
        return site.name[len(self.names[number]) + 1 :]

    def _groups(self, number: int, dense: nn.Module, sites: Sequence[Site]) -> list[list[Site]]:
        """Sites that read the same input, in the order in which the block calls them; those not called come last."""
        names = {self._local(number, site): site for site in sites}
        with inputs_of(dense, list(names)) as found:
            self.dense_calls[number][0](dense, self.dense_inputs[0])
        groups: dict[int, list[Site]] = {}
        for name, x in found.items():
            groups.setdefault(id(x), []).append(names[name])
        missing = [site for name, site in names.items() if name not in found]
        return [*groups.values(), *([site] for site in missing)]

    def _moments(self, number: int, dense: nn.Module, block: nn.Module, group: Sequence[Site]) -> Moments:
        """Moments of the inputs of a group, in the compressed model and, if they are anchored, across the two."""
        name = self._local(number, group[0])
        inputs_II: Tensor | None = None
        cross_II: Tensor | None = None
        total, is_same = 0, self.anchor
        for i, call in enumerate(self.calls[number]):
            x = _read(block, call, self.inputs[i], name)
            if x is None:
                continue
            inputs_II = x.t() @ x if inputs_II is None else inputs_II.addmm_(x.t(), x)
            total += len(x)
            x0 = _read(dense, self.dense_calls[number][i], self.dense_inputs[i], name) if is_same else None
            # an expert may get other tokens in the two models
            is_same = x0 is not None and x0.shape == x.shape
            if is_same and x0 is not None:
                cross_II = x0.t() @ x if cross_II is None else cross_II.addmm_(x0.t(), x)
        if inputs_II is None or not total:
            return Moments()
        return Moments(inputs_II / total, cross_II=cross_II / total if is_same and cross_II is not None else None)


def _shapes(state: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in state.items()}


def _read(block: nn.Module, call: Call, x_BTD: Tensor, name: str) -> Tensor | None:
    """What the layer `name` of a block reads, or None if it is not called."""
    with inputs_of(block, [name], last=name) as found, suppress(StopForward):
        call(block, x_BTD)
    return found[name].flatten(0, -2).float() if name in found else None


def refine(
    block: nn.Module,
    calls: Sequence[Call],
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    weights_DD: Tensor | None,
    settings: Refinement,
    progress: Callable[[int], None] = lambda step: None,
) -> tuple[float, float]:
    """Train the parameters of a block so that it gives `targets`; `weights_DD` says what errors cost the loss.

    Returns the relative error before and after, on batches that it was not trained on. A block that became worse on
    those is put back. Parameters that require no gradient stay as they are, unless none requires one. The parameters
    are trained in float32 at least, with products in half precision in a model of such and on a GPU.
    """
    held_out = list(range(0, len(calls), HELD_OUT)) if len(calls) > 1 else [0]
    train = [i for i in range(len(calls)) if i not in held_out] or held_out
    metric_DD = _metric(weights_DD, targets, settings.floor)
    sizes = torch.stack([_weighted_square(y_BTD, metric_DD) for y_BTD in targets])
    scale = sizes.mean().clamp(min=torch.finfo(torch.float32).tiny)

    def error(x_BTD: Tensor, call: Call, target_BTD: Tensor) -> Tensor:
        is_half = x_BTD.element_size() == 2
        # norms on a CPU do not take both kinds of half precision at once
        kind = x_BTD.dtype if is_half and not x_BTD.is_cuda else torch.bfloat16
        with torch.autocast(x_BTD.device.type, kind, enabled=is_half or x_BTD.is_cuda):
            given = call(block, x_BTD)
        return _weighted_square(given.float() - target_BTD.float(), metric_DD) / scale

    def measured() -> float:
        with torch.no_grad():
            return float(sum(error(inputs[i], calls[i], targets[i]) for i in held_out) / len(held_out))

    before = measured()
    if not settings.steps:
        return before, before
    is_frozen = not any(p.requires_grad for p in block.parameters())
    parameters = [p.requires_grad_() for p in block.parameters() if p.requires_grad or is_frozen]
    old = [p.detach().clone() for p in parameters]
    dtypes = [p.dtype for p in parameters]
    for parameter in parameters:
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    fused = all(p.is_cuda for p in parameters)
    # a graph reads the learning rate from the GPU
    lr = torch.tensor(settings.learning_rate, device=parameters[0].device) if fused else settings.learning_rate
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0, fused=fused, capturable=fused)

    def move(x_BTD: Tensor, call: Call, target_BTD: Tensor) -> None:
        error(x_BTD, call, target_BTD).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    generator = torch.Generator().manual_seed(settings.seed)
    order: list[int] = []
    steps = Steps(move)
    with torch.enable_grad():
        for step in range(settings.steps):
            for group in optimizer.param_groups:
                rate = settings.learning_rate * _schedule(step, settings.steps)
                group["lr"] = group["lr"].fill_(rate) if fused else rate
            order = order or torch.randperm(len(train), generator=generator).tolist()
            i = train[order.pop()]
            steps.take(inputs[i], calls[i], targets[i])
            progress(step + 1)
    steps.end()
    for parameter, dtype in zip(parameters, dtypes, strict=True):
        parameter.data = parameter.data.to(dtype)
        parameter.grad = None
        parameter.requires_grad_(not is_frozen)
    after = measured()
    if not after < before:
        for parameter, tensor in zip(parameters, old, strict=True):
            parameter.data = tensor
        return before, before
    return before, after


class Steps:
    """Steps of training on batches of a block; on a GPU by graphs, which find each batch of a shape in the same memory.

    Args:
        move: takes a step on the inputs of a block, what else it is called with, and the outputs that are wanted.
    """

    def __init__(self, move: Callable[[Tensor, Call, Tensor], None]) -> None:
        self.move = move
        self.places: dict[Hashable, tuple[Any, ...]] = {}
        """Of each shape."""
        self.batch: tuple[Any, ...] = ()
        self.graphs = StepGraphs(self._move, share=True)

    def take(self, x_BTD: Tensor, call: Call, target_BTD: Tensor) -> None:
        batch = (x_BTD, call.args, dict(call.kwargs), target_BTD)
        key = _shape_of(batch)
        if key is None:
            self.batch = batch
            self._move()
            return
        if key not in self.places:
            self.places[key] = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)
        self.batch = self.places[key]
        with torch.no_grad():
            for place, leaf in zip(tree_leaves(self.batch), tree_leaves(batch), strict=True):
                if isinstance(leaf, Tensor):
                    place.copy_(leaf)
        with torch.cuda.device(x_BTD.device):
            self.graphs.run(key, None)

    def end(self) -> None:
        """Free the memory of the graphs."""
        self.graphs.forget()
        self.places.clear()

    def _move(self) -> None:
        x_BTD, args, kwargs, target_BTD = self.batch
        self.move(x_BTD, Call(args, kwargs), target_BTD)


def _shape_of(batch: tuple[Any, ...]) -> Hashable | None:
    """What batches must have in common to share a graph; None if no graph can hold the step.

    A graph keeps plain values as they were, and so those of tensors on the host; other objects may hold anything.
    """
    leaves, structure = tree_flatten(batch)
    device = batch[0].device
    if device.type != "cuda" or not all(
        leaf.device == device
        if isinstance(leaf, Tensor)
        else leaf is None or isinstance(leaf, bool | int | float | str)
        for leaf in leaves
    ):
        return None
    shapes = (
        (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves
    )
    return str(structure), *shapes


def _metric(weights_DD: Tensor | None, targets: Sequence[Tensor], floor: float) -> Tensor | None:
    """K with K K^T = G / mean(diag G) + floor I: an error e of a block's outputs costs |K^T e|^2. None for K = I."""
    like = targets[0]
    if weights_DD is None or not bool(weights_DD.any()):
        return None
    g = weights_DD.to(like.device, torch.float64)
    g = g / g.diagonal().mean()
    g.diagonal().add_(floor)
    root: Tensor = torch.linalg.cholesky(g)
    return root.float()


def _weighted_square(x_BTD: Tensor, metric_DD: Tensor | None) -> Tensor:
    x_BTD = x_BTD.float()
    return (x_BTD if metric_DD is None else x_BTD @ metric_DD).square().mean()


def _schedule(step: int, steps: int) -> float:
    """The learning rate of a step as a share of the highest: a short rise, then a cosine to zero."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
