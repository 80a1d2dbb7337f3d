"""Calibration data of a model block by block: for models larger than the device, and whole Fisher matrices of others.

The loss depends on a block through the gradient g of its outputs. One pass over the blocks, forward, keeps what each
reads; one backward, of one block at a time, keeps the g of each in its place. With that, how much the loss depends on
the outputs of the layers of a block is found again whenever it is needed (`recall`), by a backward pass of this block
alone. So no more than one block, its moments and the hidden states of all batches have to be on the device.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from rankwise.core.blocks import NOT_A_CHAIN, Call, Chain, output_gradients
from rankwise.core.calibrate import OutputFisher, check_depends, has_room, loss_of, second_moments
from rankwise.core.factorize import Moments
from rankwise.core.host_memory import release_freed_memory
from rankwise.core.placement import Offload, offload_of
from rankwise.core.plan import Plan, Site
from rankwise.core.verify import Batch, verify_layers
from rankwise.errors import RankwiseError
from rankwise.files import write_tensors
from rankwise.measure import call_model, evaluating
from rankwise.oneshot.data import CalibrationData, Progress

OUTSIDE = 0.25
"""The share of the memory for matrices of a block that those of layers outside of blocks may take in a large model."""


class StreamedData(CalibrationData):
    """Calibration data of each site, one block at a time.

    Raises:
        RankwiseError: if the model is not a chain of blocks (`rankwise.core.blocks.Chain`).
    """

    def __init__(
        self, model: nn.Module, plan: Plan, batches: Sequence[Any], progress: Progress | None, *, refined: bool = False
    ) -> None:
        self.offload = offload_of(model)
        self.chain = Chain(model, batches[0]) if self.offload is None else self.offload.chain(batches[0])
        super().__init__(model, plan, batches, progress, in_blocks=True, refined=refined)
        if not self.blocks:
            raise RankwiseError(NOT_A_CHAIN.format("each layer of a block is called once, and tied to no other one"))
        before, after = self.around_blocks()
        self.around = [*before, *after]
        inside = tuple(f"{name}." for name in self.blocks)
        if any(use.name.startswith(inside) for site in self.around for use in site.uses):
            raise RankwiseError(NOT_A_CHAIN.format("no block has an embedding that is compressed"))
        with self.chain.without_blocks(), OutputFisher(model, Plan(tuple(self.around))).watching():
            self._entry(batches[0])
        self.states = _States(self.offload)
        self.loss_calls: list[list[Call]] = []
        self.firsts: list[Tensor] = []
        """What the first block of the dense model reads of each batch for the loss."""
        self.following: list[Tensor] = []
        """What the block gives that was recalled last."""
        self.drawn = False

    def _find_blocks(self) -> list[str]:
        return self.chain.names

    def _entry(self, batch: Any) -> Tensor:
        """What the first block reads of a batch, with its history."""
        x_BTD, call = self.chain.entry(batch)
        if any(isinstance(each, Tensor) and each.requires_grad for each in tree_leaves((call.args, call.kwargs))):
            raise RankwiseError(NOT_A_CHAIN.format("blocks depend on layers before them by hidden states alone"))
        return x_BTD

    def record(self) -> tuple[list[Tensor], list[list[Call]]]:
        return self.chain.start(self.batches or [])

    def weigh(self, loss: Callable[[Any], Tensor] | Literal["sampled"], batches: Sequence[Any]) -> None:
        self.drawn, loss = loss == "sampled", loss_of(self.model, loss)
        number, total = len(self.blocks), 2 * len(self.blocks)
        states, self.loss_calls = self.chain.start(batches)
        self.firsts = states
        self._check_disk(number * sum(x_BTD.nbytes for x_BTD in states))
        for i in range(number):
            self.progress("gradients", i, total)
            self.states[i] = states
            states = self._outputs(i, self.loss_calls[i], states)
        # an output layer has more outputs than others
        whole = has_room(self.plan.sites) or has_room(self.around, share=OUTSIDE)
        around = OutputFisher(self.model, Plan(tuple(self.around)), whole=whole, drawn=self.drawn)
        leaves = [x_BTD.detach().requires_grad_() for x_BTD in states]
        with self.chain.without_blocks(leaves), around.watching():
            for batch in batches:
                found = loss(call_model(self.model, batch))
                if found.requires_grad:
                    found.backward()  # type: ignore[no-untyped-call]
        grads = [_grad(leaf) for leaf in leaves]
        del leaves, states
        weights: dict[str, Moments] = {}
        for i in reversed(range(number)):
            self.progress("gradients", total - 1 - i, total)
            given, self.states[i] = self.states[i], grads
            fisher, grads, _ = self._gradients(i, given, grads, whole=False)
            weights |= fisher.weights()
        with self.chain.without_blocks(), around.watching():
            for batch, grad in zip(batches, grads, strict=True):
                x_BTD = self._entry(batch)
                if x_BTD.requires_grad:
                    x_BTD.backward(grad)  # type: ignore[no-untyped-call]
        self.progress("gradients", total, total)
        self._take(check_depends(weights | around.weights()))

    def _check_disk(self, num_bytes: int) -> None:
        """Refuse a disk that cannot take so many bytes of hidden states, and the blocks."""
        if self.offload is None:
            return
        needed, free = num_bytes + self.offload.num_bytes, shutil.disk_usage(self.offload.folder).free
        if needed > free:
            raise RankwiseError(
                f"A model is compressed from disk with {needed / 2**30:.1f} GiB of scratch files beside its folder, "
                f"but {free / 2**30:.1f} GiB are free there. Read fewer --windows, or choose another --out."
            )

    @torch.no_grad()
    def _outputs(self, number: int, calls: Sequence[Call], states: Sequence[Tensor]) -> list[Tensor]:
        """What a block gives."""
        block = self.model.get_submodule(self.blocks[number])
        with evaluating(block):
            return [call(block, x_BTD) for call, x_BTD in zip(calls, states, strict=True)]

    def _gradients(
        self, number: int, states: Sequence[Tensor], grads: Sequence[Tensor], *, whole: bool
    ) -> tuple[OutputFisher, list[Tensor], list[Tensor]]:
        """The weights of a block's sites, and the gradients of what it reads and what it gives."""
        block, plan = self.model.get_submodule(self.blocks[number]), Plan(tuple(self._sites(number)))
        fisher = OutputFisher(self.model, plan, whole=whole and has_room(plan.sites), drawn=self.drawn)
        before: list[Tensor] = []
        outputs: list[Tensor] = []
        with fisher.watching():
            for call, x_BTD, grad in zip(self.loss_calls[number], states, grads, strict=True):
                x_BTD = x_BTD.detach().requires_grad_()
                y_BTD = call(block, x_BTD)
                y_BTD.backward(grad)  # type: ignore[no-untyped-call]
                before.append(_grad(x_BTD))
                outputs.append(y_BTD.detach())
        return fisher, before, outputs

    def _sites(self, number: int) -> list[Site]:
        return [site for site in self.plan.sites if site.name.startswith(f"{self.blocks[number]}.")]

    def recall(self, number: int) -> None:
        name = self.blocks[number]
        if self.offload is not None:
            # the caller copies it
            self.offload.fetch(name)
        if not self.weights:
            return
        given = self.firsts if number == 0 else self.following
        with output_gradients(self.model, [name] if self.refined else []) as self.block_weights:
            fisher, _, self.following = self._gradients(number, given, self.states[number], whole=True)
        self.weights |= {name: found for name, found in fisher.weights().items() if found.rows_O is not None}

    def forget(self, site: Site) -> None:
        if site.name in self.weights:
            self.weights[site.name] = replace(self.weights[site.name], outputs_OO=None)

    def finish(self, number: int, call: Call, x_BTD: Tensor) -> None:
        self.block_weights = {}
        batch = Batch()
        batch.inputs = (x_BTD, *call.args), dict(call.kwargs)
        verify_layers(self.model.get_submodule(self.blocks[number]), batch)
        if self.offload is not None:
            self.offload.keep()

    def verify(self, example: Any) -> None:
        # blocks were verified one by one
        with self.chain.without_blocks():
            super().verify(example)

    def moments(
        self, sites: Sequence[Site] | None = None, *, dense: bool = False
    ) -> Iterator[tuple[Site, Moments | None]]:
        if sites is not None:
            yield from self._moments_around(sites)
            return
        states, calls = self.record()
        for number, name in enumerate(self.blocks):
            self.recall(number)
            block, outputs = self.model.get_submodule(name), list[Tensor]()

            def run(model: nn.Module, given: tuple[Call, Tensor], block: nn.Module = block) -> None:
                outputs.append(given[0](block, given[1]))  # noqa: B023 - called before the next block

            plan, batches = Plan(tuple(self._sites(number))), list(zip(calls[number], states, strict=True))
            found = second_moments(self.model, plan, batches, dtype=torch.float32, run=run)
            for site in plan.sites:
                yield site, self._reached(site, found.pop(site.name))
                self.forget(site)
            self.block_weights = {}
            release_freed_memory()
            states = outputs
        self.lasts = states
        yield from self._moments_around(self.around)

    def _moments_around(self, sites: Sequence[Site]) -> Iterator[tuple[Site, Moments | None]]:
        """Moments of sites before and after the blocks, by what the blocks gave when they were last run."""
        if not sites:
            return
        if self.lasts is None:
            self.lasts = self.chain.run(self.batches or [])
        with self.chain.without_blocks(self.lasts):
            found = second_moments(self.model, Plan(tuple(sites)), self.batches or [], dtype=torch.float32)
        for site in sites:
            yield site, self._reached(site, found.pop(site.name))


def _grad(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


class _States:
    """Hidden states of each block, of all batches: in files, where the model is on disk, otherwise in host memory."""

    def __init__(self, offload: Offload | None) -> None:
        self.offload = offload
        self.kept: dict[int, list[Tensor]] = {}
        self.devices: dict[int, list[torch.device]] = {}

    def __setitem__(self, number: int, states: Sequence[Tensor]) -> None:
        self.devices[number] = [x.device for x in states]
        if self.offload is None:
            self.kept[number] = [x.detach().cpu() for x in states]
        else:
            path = self.offload.folder / f"states-{number}.safetensors"
            # what is mapped from an earlier file stays as it is
            path.unlink(missing_ok=True)
            write_tensors(path, {str(i): x.detach().cpu() for i, x in enumerate(states)}, durable=False)

    def __getitem__(self, number: int) -> list[Tensor]:
        if self.offload is None:
            return [x.to(device) for x, device in zip(self.kept[number], self.devices[number], strict=True)]
        with safe_open(self.offload.folder / f"states-{number}.safetensors", framework="pt") as file:
            return [file.get_tensor(str(i)).to(device) for i, device in enumerate(self.devices[number])]
