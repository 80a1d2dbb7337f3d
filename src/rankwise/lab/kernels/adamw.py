"""AdamW that clips gradients on the way: one pass over memory reads them, where clipping first takes three.

Its state and its numbers are those of `torch.optim.AdamW(fused=True, capturable=True)` after
`torch.nn.utils.clip_grad_norm_`, but gradients stay as they were. Nothing waits for the device, so that a CUDA graph
can hold a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

LARGE = 1 << 16
"""Numbers from which a parameter gets a kernel of its own; smaller ones share one of PyTorch's."""


class ClippedAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with its learning rate in a tensor on the device of the parameters."""

    def __init__(
        self, params: Iterable[Tensor], lr: Tensor, *, betas: tuple[float, float], weight_decay: float
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay, fused=True, capturable=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """A step without clipping."""
        assert closure is None
        self._update(None)

    @torch.no_grad()
    def clipped_step(self, max_norm: float) -> Tensor:
        """A step by the gradients scaled so that their norm is at most `max_norm`; the norm before that."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm: Tensor = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        self._update((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def _update(self, coefficient: Tensor | None) -> None:
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            large = [p for p in parameters if _is_large(p)]
            small = [p for p in parameters if not _is_large(p)]
            if large:
                self._update_large(large, group, coefficient)
            if small:
                self._update_small(small, group, coefficient)

    def _update_large(self, parameters: list[Tensor], group: dict[str, Any], coefficient: Tensor | None) -> None:
        from rankwise.lab.kernels.adamw_kernels import update

        states = [self._state_of(p) for p in parameters]
        torch._foreach_add_([state["step"] for state in states], 1)
        for p, state in zip(parameters, states, strict=True):
            assert p.grad is not None
            update(p, p.grad, state["exp_avg"], state["exp_avg_sq"], state["step"], group, coefficient)

    def _update_small(self, parameters: list[Tensor], group: dict[str, Any], coefficient: Tensor | None) -> None:
        states = [self._state_of(p) for p in parameters]
        grads = [p.grad for p in parameters if p.grad is not None]
        beta1, beta2 = group["betas"]
        adamw(
            parameters,
            grads if coefficient is None else list(torch._foreach_mul(grads, coefficient)),
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            capturable=True,
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


def _is_large(parameter: Tensor) -> bool:
    """Whether a parameter is worth a kernel, and lies in memory as that walks it."""
    grad = parameter.grad
    assert grad is not None
    is_plain = parameter.dtype == grad.dtype == torch.float32 and parameter.is_contiguous() and grad.is_contiguous()
    return is_plain and parameter.numel() >= LARGE
