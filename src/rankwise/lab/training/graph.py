"""Steps recorded as a CUDA graph, so that the host issues one command in place of hundreds.

A small model keeps a GPU busy for less time than the host takes to issue its work. A graph is the work of one step on
fixed memory. It is valid as long as the *signature* stays the same: the shapes of what is carried from step to step,
and what of the gates is known to the host.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch


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
        """Drop the graph and free its memory."""
        if self._graph is not None:
            self._graph.reset()
            self._graph = None

    def _record(self) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads, such as a tracker's, may continue with theirs
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self.step()
        except RuntimeError as error:
            self.refused = True
            reason = str(error).split("\n")[0]
            warnings.warn(f"This model trains without a CUDA graph, and slower: {reason}", stacklevel=6)
            return None
        return graph


class StepGraphs:
    """A graph for each shape of batch.

    Args:
        share: the graphs share the memory of a step. Then `step` must leave nothing behind that it made, such as
            gradients, and no signature may change: memory is not shared with a graph that was dropped.
    """

    def __init__(self, step: Callable[[], None], *, share: bool) -> None:
        self.step = step
        self._pool = torch.cuda.graph_pool_handle() if share else None
        self._graphs: dict[Hashable, StepGraph] = {}
        self._refused = False

    @property
    def num_recorded(self) -> int:
        return sum(graph._graph is not None for graph in self._graphs.values())

    def run(self, key: Hashable, signature: Hashable) -> bool:
        """Take a step on the batch of that key; whether it was one of a graph."""
        if self._refused:
            self.step()
            return False
        graph = self._graphs.setdefault(key, StepGraph(self.step, self._pool))
        # a signature of None would look like one that was run before
        replayed = graph.run((key, signature))
        self._refused = graph.refused
        return replayed

    def forget(self) -> None:
        """Drop all graphs and free their memory."""
        for graph in self._graphs.values():
            graph.forget()
        self._graphs.clear()
