"""How weights move: the gradients of a batch, clipped, and a step of the optimizer; on a GPU as a CUDA graph."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.kernels.graphs import StepGraphs
from rankwise.lab.training.config import LoopConfig, autocast
from rankwise.lab.training.objective import Objective
from rankwise.pruner import Pruner


@dataclass
class Skipped:
    """Batches whose loss or gradient was not finite, where they are skipped."""

    steps: int = 0
    in_a_row: int = 0
    unlogged: int = 0
    """Since the last line of metrics."""

    def count(self, finite: bool) -> None:
        """Take note of a step."""
        self.in_a_row = 0 if finite else self.in_a_row + 1
        self.steps += not finite
        self.unlogged += not finite


class WeightStep:
    """The step that moves the weights of a model.

    Args:
        prunes: whether the model has gates, or is to have them.
    """

    def __init__(self, objective: Objective, *, prunes: bool) -> None:
        self.objective, self.model, self.config = objective, objective.model, objective.config
        self.device, self.ranks, self.prunes = objective.device, objective.ranks, prunes
        self.pruner: Pruner | None = None
        self.parts: Sequence[Any] = ()
        """The batch of this step."""
        self.sums = torch.zeros(2, device=self.device)
        """Losses and gradient norms since the last line of metrics."""
        self.skipped = Skipped()
        self.graphs: StepGraphs | None = None
        self.gate_grads: dict[nn.Module, Tensor | None] = {}
        self.optimize_anew()

    def optimize_anew(self, pruner: Pruner | None = None) -> None:
        """Begin with a new optimizer, for the parameters that the model has now."""
        self.pruner, self.optimizer = pruner, make_optimizer(self.model, self.config, self.device)
        self.record_anew()

    def record_anew(self) -> None:
        """Forget recorded steps, whose weights are others now."""
        self.gate_grads.clear()
        if self.graphs is not None:
            self.graphs.forget()
        on_one_gpu = self.device.type == "cuda" and self.ranks.count == 1
        can_record = on_one_gpu and self.config.nonfinite == "stop" and self.objective.can_record(self.prunes)
        self.graphs = StepGraphs(self._move, share=not self.objective.carries) if can_record else None

    def take(self, step: int) -> None:
        """Move the weights by the batch of a step."""
        lr = self.config.lr_at(step + 1, pruning=self.pruner is not None)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        if not self.model.training:
            self.model.train()
        self.objective.begin_step(step)
        if self.graphs is None:
            self.parts = self.objective.batch(step)
            self._move()
        else:
            self.parts, key = self.objective.fixed_batch(step)
            self._move_by_graph(self.graphs, key)

    def _move(self) -> None:
        """Gradients of all `parts`, clipped, and a step of the optimizer. States that are carried keep their memory."""
        config, num_parts, share = self.config, self.config.accumulate, self.objective.share
        self.optimizer.zero_grad()
        states, sums = [], torch.zeros_like(self.sums)
        for index, part in enumerate(self.parts):
            with autocast(config.precision, self.device):
                loss, reported, state = self.objective.loss(part, index)
            if share != 1:
                loss, reported = loss * share, reported * share
            (loss / num_parts).backward()  # type: ignore[no-untyped-call]
            states.append(state)
            sums[0] += reported / num_parts
        self.ranks.average(self.model.parameters(), sums)
        if config.clip is not None:
            sums[1] += nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        if config.nonfinite == "skip" and not self._is_finite(sums):
            return
        for index, state in enumerate(states):
            self.objective.carry(state, index)
        self.sums += sums
        self.optimizer.step()
        if self.pruner is None:
            self.optimizer.zero_grad()

    def _is_finite(self, sums: Tensor) -> bool:
        """Whether the loss and the gradients of a step are finite; if not, the gradients are cleared."""
        grads = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        norm = sums[1] if self.config.clip is not None else nn.utils.get_total_norm(grads)
        finite = math.isfinite(float(sums[0] + norm))
        self.skipped.count(finite)
        if not finite:
            self.optimizer.zero_grad()
            # the ramp stays in time with the steps: the pruner goes on as after a batch that says nothing
            for gate in [] if self.pruner is None else self.pruner.controller.gates:
                if gate.z is not None and gate.z.grad is not None:
                    gate.z.grad.zero_()
        return finite

    def _move_by_graph(self, graphs: StepGraphs, key: Hashable) -> None:
        controller = None if self.pruner is None else self.pruner.controller
        signature = self.objective.carried_shapes(), None if controller is None else controller.mask_signature()
        if not graphs.run(key, signature):
            self.gate_grads.clear()
        elif controller is not None:
            for gate in controller.gates:
                if gate.z is not None:
                    # removed by every step of the pruner, and written to by the graph where it first lay
                    gate.z.grad = self.gate_grads.setdefault(gate, gate.z.grad)


def make_optimizer(model: nn.Module, config: LoopConfig, device: torch.device) -> torch.optim.AdamW:
    """AdamW over all parameters that are trained."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained, "weight_decay": config.weight_decay}]
    if not config.decays_vectors:
        matrices, vectors = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    on_gpu = device.type == "cuda"
    # on a CPU the fused update does not resume bit for bit; a graph reads the learning rate from the GPU
    lr = torch.tensor(config.lr, device=device) if on_gpu else config.lr
    return torch.optim.AdamW(groups, lr=lr, betas=config.betas, fused=on_gpu, capturable=on_gpu)
