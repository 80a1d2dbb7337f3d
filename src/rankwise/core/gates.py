"""Gates: the vector z that opens and closes the components of a matrix.

Paper: section 3 "Background" (hard concrete distribution, eqs. 2 and 3) and section 4.4 "Inference".
Shapes: R = components of one gate.

Only the controller moves a gate. The state of a gate (`alpha`, or the learned diagonal) is a buffer, and `z` is a
leaf tensor outside the module registry, so that no optimizer, gradient clipping or weight decay over
`model.parameters()` changes either. `z.grad` collects dL/dz over all backward passes of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from rankwise.errors import InvalidValueError

if TYPE_CHECKING:
    from rankwise.core.controller import Controller

SELECT_UP_TO = 0.8
"""Up to this fraction of open components only those are multiplied; above it, selecting costs more than it saves."""


@dataclass(frozen=True, kw_only=True)
class HardConcrete:
    """The hard concrete distribution: a sigmoid of logistic noise, stretched and clamped to [0, 1]."""

    temperature: float = 1.0
    """beta; lower is closer to a binary gate."""
    stretch: float = 0.1
    """Samples live in (l, r) = (-stretch, 1 + stretch) before clamping."""

    def __post_init__(self) -> None:
        for name in ("temperature", "stretch"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InvalidValueError(f"`{name}` must be positive and finite, but is {value} instead.")

    def sample(self, alpha: Tensor, noise: Tensor) -> Tensor:
        """z = min(1, max(0, s (r - l) + l)), s = sigmoid((logit u + alpha) / beta).  Paper: section 3."""
        return self._stretched(alpha, noise)[1].clamp(0, 1)

    def sample_and_slope(self, alpha: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """z, and dz / dalpha = (r - l) s (1 - s) / beta where z is not clamped, else 0."""
        s, stretched = self._stretched(alpha, noise)
        z = stretched.clamp(0, 1)
        return z, s * (1 - s) * (z == stretched) * ((1 + 2 * self.stretch) / self.temperature)

    def _stretched(self, alpha: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """s, and s (r - l) + l."""
        s = torch.sigmoid((torch.logit(noise, eps=1e-6) + alpha) / self.temperature)
        return s, s * (1 + 2 * self.stretch) - self.stretch

    def open_probability(self, alpha: Tensor) -> Tensor:
        """P(z > 0) = sigmoid(alpha - beta log(-l / r)).  Paper: eq. (3)."""
        return torch.sigmoid(alpha - self._shift())

    def expected(self, alpha: Tensor) -> Tensor:
        """E[z], exact for every temperature and stretch.

        E[z] = int_0^1 P(z > t) dt; with t = (r - l) sigmoid(y) + l this is the integral of
        (r - l) sigmoid'(y) sigmoid(alpha - beta y) over |y| < log(r / -l): smooth, so Gauss-Legendre
        nodes give it to rounding.
        """
        y, weight = _quadrature(self.stretch, alpha.device)
        p = torch.sigmoid(alpha.double().unsqueeze(-1) - self.temperature * y)
        return (p @ weight).clamp(0, 1).to(alpha.dtype)

    def alpha(self, open_probability: float) -> float:
        """The alpha whose gate is open with the given probability: the inverse of `open_probability`."""
        if not 0 < open_probability < 1:
            raise InvalidValueError(f"`open_probability` must lie in (0, 1), but is {open_probability} instead.")
        return math.log(open_probability / (1 - open_probability)) + self._shift()

    def _shift(self) -> float:
        return self.temperature * math.log(self.stretch / (1 + self.stretch))


@lru_cache(maxsize=32)
def _quadrature(stretch: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Nodes y and weights of the integral in `HardConcrete.expected`."""
    import numpy as np

    node, weight = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(96))
    bound = math.log((1 + stretch) / stretch)
    y = bound * node
    weight = bound * weight * (1 + 2 * stretch) * torch.sigmoid(y) * torch.sigmoid(-y)
    return y.to(device), weight.to(device)


class Mask(NamedTuple):
    """What a layer multiplies its components by."""

    z: Tensor | None
    """One value per component; None if all values are one."""
    active: Tensor | None = None
    """The indices of the components to multiply, if only some are open; None for all."""


class LoadedOnce(nn.Module):
    """A module that several others may hold, and that loads what a checkpoint has under the first of its names.

    torch sends a checkpoint to other ranks and takes it into shards (`set_model_state_dict`) under that name alone.
    """

    _loaded: object = None

    def _load_from_state_dict(self, *args: Any) -> None:
        # the list of missing keys, of which every call of `load_state_dict` has one of its own
        if self._loaded is not args[4]:
            self._loaded = args[4]
            super()._load_from_state_dict(*args)


class FixedDtypeModule(LoadedOnce):
    """A module whose buffers keep their dtype when the model around them is cast to bf16 or fp16."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return self


class Gate(FixedDtypeModule):
    """The vector z over the components of one matrix. This base class is always open."""

    def __init__(self, num_components: int) -> None:
        super().__init__()
        self.num_components = num_components
        self.most_components = num_components
        """Components before any were dropped."""
        self.z: Tensor | None = None
        self.active: Tensor | None = None
        self.is_binary = False
        """Whether every component in `active` has z = 1, so that z need not be multiplied."""
        self.eval_mask: Mask | None = None
        # in a list, so that the module registry does not see it: only the first gate of a model registers it
        self._controller: list[Controller] = []

    def set_controller(self, controller: Controller) -> None:
        """Let `controller` move this gate from now on."""
        self._controller = [controller]

    @property
    def num_active(self) -> int | None:
        """The number of components to multiply; None for all."""
        return None if self.active is None else len(self.active)

    def narrow(self, kept: Tensor) -> None:
        """Drop all other components; masks are made again when they are next used."""
        self._change(len(kept), lambda tensor: tensor.index_select(0, kept))

    def widen(self, number: int) -> None:
        """Make room for the values of so many components, which the caller fills in."""
        self._change(number, lambda tensor: tensor.new_zeros(number))

    def _change(self, number: int, change: Callable[[Tensor], Tensor]) -> None:
        for name, buffer in self._buffers.items():
            if buffer is not None and buffer.shape == (self.num_components,):
                self._buffers[name] = change(buffer)
        if self.z is not None:
            self.z = change(self.z.detach()).requires_grad_(self.z.requires_grad)
        self.num_components = number
        self.active, self.is_binary, self.eval_mask = None, False, None

    def move_mask(self, device: torch.device) -> None:
        """Have z on `device`, where it is filled next."""
        if self.z is not None and self.z.device != device:
            self.z = torch.ones(self.num_components, device=device).requires_grad_(self.z.requires_grad)

    def forward(self) -> Mask:
        """The mask of this training step; in evaluation mode the mask that would be exported now."""
        compiled = torch.compiler.is_compiling()
        for controller in self._controller:
            controller.ensure_masks(evaluation=not self.training)
            # a compiled model does not make masks; if there are none, this is a guard that traces it again, which does
            if compiled and not controller.has_masks(evaluation=not self.training):
                raise RuntimeError("masks must be ready before they are used.")
        mask = Mask(None if self.is_binary else self.z, self.active)
        if not self.training and self.eval_mask is not None:
            mask = self.eval_mask
        # while a gate learns, its number of active components changes, and each would be another graph
        learns = self.z is not None and self.z.requires_grad
        return Mask(mask.z) if compiled and learns else mask

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        if self.z is not None:
            device = fn(self.z.detach()).device
            self.z = self.z.detach().to(device).requires_grad_(self.z.requires_grad)
        self._invalidate_masks()
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._invalidate_masks()

    def _invalidate_masks(self) -> None:
        for controller in self._controller:
            controller.invalidate_masks()

    def extra_repr(self) -> str:
        return f"{self.num_components}"


class HardConcreteGate(Gate):
    """A learned gate (L0): z is drawn from the hard concrete distribution with parameter alpha."""

    alpha: Tensor

    def __init__(
        self, num_components: int, distribution: HardConcrete | None = None, *, open_probability: float = 0.9999
    ) -> None:
        super().__init__(num_components)
        self.distribution = distribution or HardConcrete()
        start = self.distribution.alpha(open_probability)
        self.register_buffer("alpha", torch.full((num_components,), start))
        self.worth: Tensor | None = None
        """What each component is worth per parameter, where that is known before training."""
        self.z = torch.ones(num_components).requires_grad_()


class MagnitudeGate(Gate):
    """A gate that keeps the components of largest magnitude (AGP); the controller chooses them.

    With `learned=True` there is a diagonal that the controller trains (FLOP-AGP). Otherwise z is one for every kept
    component, and the magnitudes are those of the weights (AGP).
    """

    kept: Tensor
    diagonal: Tensor

    def __init__(self, num_components: int, *, learned: bool) -> None:
        super().__init__(num_components)
        self.learned = learned
        self.register_buffer("kept", torch.ones(num_components, dtype=torch.bool))
        if learned:
            self.register_buffer("diagonal", torch.ones(num_components))
            self.z = torch.ones(num_components).requires_grad_()

    def forward(self) -> Mask:
        mask = super().forward()
        return mask if mask.z is not None else Mask(self.kept)
