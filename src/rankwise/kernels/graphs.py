"""Training steps recorded as CUDA graphs: the host issues one command in place of hundreds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch


class StepGraphs:
    """Recorded steps, one graph for each shape of batch.

    A small model keeps a GPU busy for less time than the host takes to issue its work. `step` must read and write the
    same memory for every batch of a shape. A graph of it is valid as long as the *signature* stays the same: the shapes
    of what is carried from step to step, and what of the gates is known to the host. A signature is run once before it
    is recorded, so that kernels are compiled and state is made by then.

    Args:
        share: the graphs share the memory of a step. Then `step` must leave nothing behind that it made, such as
            gradients, and no signature may change: memory is not shared with a graph that was dropped.
    """

    def __init__(self, step: Callable[[], None], *, share: bool) -> None:
        self.step = step
        self.recorded: dict[Hashable, torch.cuda.CUDAGraph] = {}
        """The graph of each shape of batch."""
        self._share = share
        self._pool: Any = None
        self._seen: dict[Hashable, Hashable] = {}
        """The last signature of each shape."""
        self._refused = False
        """Whether the step does what no graph can hold, such as waiting for the GPU."""

    def run(self, key: Hashable, signature: Hashable) -> bool:
        """Take a step on the batch of that key; whether it was one of a graph, so that what it wrote lies as before."""
        is_new = key not in self._seen or self._seen[key] != signature
        if is_new and key in self.recorded:
            self.recorded.pop(key).reset()
        self._seen[key] = signature
        if not is_new and not self._refused and key not in self.recorded:
            self._record(key)
        if key not in self.recorded:
            self.step()
            return False
        self.recorded[key].replay()
        return True

    def forget(self) -> None:
        """Drop all graphs and free their memory."""
        for graph in self.recorded.values():
            graph.reset()
        self.recorded.clear()
        self._seen.clear()

    def _record(self, key: Hashable) -> None:
        graph = torch.cuda.CUDAGraph()
        # not before, so that objects can be made without a GPU
        if self._share and self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            # other threads, such as a tracker's, may continue with theirs
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self.step()
        except RuntimeError as error:
            self._refused = True
            reason = str(error).split("\n")[0]
            warnings.warn(f"This model trains without a CUDA graph, and slower: {reason}", stacklevel=5)
        else:
            self.recorded[key] = graph
