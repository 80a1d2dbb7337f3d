"""Steps recorded as a CUDA graph, so that the host issues one command in place of hundreds.

A small model keeps a GPU busy for less time than the host takes to issue its work. A graph is the work of one step on
fixed memory: it holds for as long as the *signature* stays the same, that is the shapes of what is carried from step to
step, and what of the gates is known to the host.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor


class StepGraph:
    """Runs `step`, which must read and write the same memory every time: as it is at first, then as a graph of it.

    A signature is run once before it is recorded, so that kernels are compiled and state is made by then.
    """

    def __init__(self, step: Callable[[], None], pool: Any = None) -> None:
        self.step = step
        self.refused = False
        """Whether the step does what no graph can hold, such as waiting for the GPU."""
        self._pool = pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self._seen: Hashable = None

    def run(self, signature: Hashable) -> bool:
        """Take a step; whether it was one of a graph, so that all that it wrote lies where it lay before."""
        if self._graph is None or signature != self._seen:
            self.forget()
            if signature != self._seen or self.refused:
                self._seen = signature
                self.step()
                return False
            self._graph = self._record()
            if self._graph is None:
                self.step()
                return False
        self._graph.replay()
        return True

    def forget(self) -> None:
        """Drop the graph and give its memory back."""
        if self._graph is not None:
            self._graph.reset()
            self._graph = None

    def _record(self) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads, such as a tracker's, may go on with theirs
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self.step()
        except RuntimeError as error:
            self.refused = True
            reason = str(error).split("\n")[0]
            warnings.warn(f"This model trains without a CUDA graph, and slower: {reason}", stacklevel=6)
            return None
        return graph


class BatchGraphs:
    """Steps on batches of a few shapes: a graph for each shape, and the memory of a step shared by all of them.

    `step` is given a batch, and must leave nothing behind that it made, such as gradients.
    """

    def __init__(self, step: Callable[[dict[str, Tensor]], None]) -> None:
        self.step = step
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, tuple[dict[str, Tensor], StepGraph]] = {}
        self._refused = False

    def run(self, batch: dict[str, Tensor]) -> None:
        """Take a step."""
        if self._refused:
            self.step(batch)
            return
        shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in batch.items())
        if shapes not in self._graphs:
            there = {name: tensor.clone() for name, tensor in batch.items()}
            self._graphs[shapes] = there, StepGraph(partial(self.step, there), self._pool)
        there, graph = self._graphs[shapes]
        for name, tensor in batch.items():
            there[name].copy_(tensor)
        graph.run(shapes)
        self._refused = graph.refused
