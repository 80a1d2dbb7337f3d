"""What a compressed model came to: its size, quality and speed, what it kept of each matrix, and blocks on the way."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from rankwise.core.budget import Budget, SizeAccount, SizeReport
from rankwise.core.placement import device_of, offload_of
from rankwise.core.plan import Plan, Site, get_module
from rankwise.deploy.devices import ROOM, free_memory
from rankwise.deploy.inputs import Quality, example_inputs, positions_of
from rankwise.deploy.structure import layer_of
from rankwise.errors import CheckpointError, RankwiseError
from rankwise.files import read_json, reason, sealed, write_json, write_tensors
from rankwise.measure import evaluating, slower_than_dense, time_together

REPEATS = 11
DOUBTFUL = 1.1
"""Up to this multiple of the dense one's time, a small model that did not take turns with it may only seem slower."""


@dataclass(frozen=True, kw_only=True)
class Compressed(SizeReport):
    """Size, quality and speed of a compressed model."""

    ranks: str = "global"
    """How ranks were shared out, as in `rankwise.compress`."""
    refined: int = 0
    """Steps by which each block was refined."""
    quality: Quality | None = None
    """None without calibration."""
    speed: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Milliseconds of a call, dense and small, by its number of tokens."""
    in_turns: bool = False
    """Whether the two were timed in turns, and not one after the other."""
    device: str = "cpu"

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Compressed:
        """What the record of a folder says."""
        given = {each.name: record[each.name] for each in fields(cls)}
        given["quality"] = None if given["quality"] is None else Quality(**given["quality"])
        given["speed"] = {int(number): (dense, small) for number, (dense, small) in given["speed"].items()}
        return cls(**given)

    def is_better(self, other: Compressed) -> bool:
        """Whether less is lost than in another model of the same size."""
        return self.quality is not None and other.quality is not None and self.quality.small < other.quality.small

    def remarks(self) -> list[str]:
        """A line for every number of tokens with which the small model is slower than the dense one."""
        lines = []
        for where, (dense, small) in self.named_speed().items():
            is_sure = self.in_turns or small > DOUBTFUL * dense
            reason = "" if is_sure else "or the machine was busy: the two did not take turns"
            lines.append(slower_than_dense("The small model", small, dense, where=where, reason=reason))
        return [line for line in lines if line is not None]

    def named_speed(self) -> dict[str, tuple[float, float]]:
        """`speed` by words for what was timed, and where."""
        return {f"{number} token{'s'[: number - 1]} on {self.device}": pair for number, pair in self.speed.items()}


def kept_by_shape(sites: Sequence[Site], small: nn.Module) -> dict[str, Any]:
    """What a compact model kept of each matrix, read from its layers; biases are not counted.

    `matrices` are parameters before and after. `ranks` are outputs, inputs, components kept and components in all: of
    rank, or the neurons of a layer that was made narrower.
    """
    matrices: dict[str, list[int]] = {}
    ranks: dict[str, list[int]] = {}
    for site in sites:
        module = get_module(small, site.uses[0])
        matrices[site.name] = [site.params, sum(p.numel() for p in module.parameters() if p.dim() > 1)]
        layer, full = layer_of(module), site.pair_rank or min(site.shape)
        kept = getattr(layer, "rank", getattr(layer, "kept", full))
        now = getattr(layer, "outputs", site.shape[0]), getattr(layer, "inputs", site.shape[1])
        narrowed = [pair for pair in zip(now, site.shape, strict=True) if pair[0] != pair[1]]
        ranks[site.name] = [*site.shape, *(narrowed[0] if narrowed else (min(kept, full), full))]
    return {"matrices": matrices, "ranks": ranks}


def versions(*paths: Path) -> list[tuple[str, int, int]]:
    """Sizes and times of files, and of the weights in folders, which tell them from later ones of the same names."""
    files = [
        file
        for path in paths
        for file in ([path] if path.is_file() else sorted(path.rglob("*.safetensors")))
        # unfinished work, such as the blocks themselves
        if not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


class RefinedFolder:
    """Keeps refined blocks beside the folder to be, until it is there."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self.place = folder.with_name(f".{folder.name}.refining")
        self.settings = dict(settings)

    def load(self, number: int) -> Mapping[str, Tensor] | None:
        file = self._file(number)
        try:
            # settings of another command, or a changed bit, make these differ
            if read_json(file.with_suffix(".json")) != sealed(self.settings, [file]):
                return None
            return load_file(file)
        except (OSError, ValueError, SafetensorError):
            return None

    def save(self, number: int, state: Mapping[str, Tensor]) -> None:
        file = self._file(number)
        unfinished = file.with_suffix(".part")
        try:
            if number == 0:
                self.remove()
                self.place.mkdir(parents=True)
            write_tensors(unfinished, {name: tensor.contiguous().cpu() for name, tensor in state.items()})
            unfinished.replace(file)
            write_json(file.with_suffix(".json"), sealed(self.settings, [file]))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"Blocks that were trained must be kept in {self.place}, but that failed: {reason(error)}. Free some "
                "space; the same command goes on from the last block."
            ) from error

    def remove(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)

    def _file(self, number: int) -> Path:
        return self.place / f"block-{number:04}.safetensors"


def milliseconds(model: nn.Module, length: int) -> dict[int, float]:
    """The time of a call with `length` tokens, and with one token; empty where no inputs can be made up."""
    return {number: times[0] for number, times in _milliseconds([model], length).items()}


def times_in_turns(
    load: Callable[[], nn.Module], small: nn.Module, length: int, num_bytes: int
) -> dict[int, tuple[float, float]]:
    """Times of the dense and the small model, which take turns; empty where there is no memory for both.

    Args:
        load: gives the dense model, of `num_bytes`.
    """
    device = next(small.parameters()).device
    if free_memory(device) < ROOM * num_bytes:
        return {}
    try:
        dense = load()
    except (RankwiseError, OSError, RuntimeError):
        return {}
    is_beside = device_of(dense) == device and offload_of(dense) is None
    times = _milliseconds([dense, small], length) if is_beside else {}
    return {number: (one, other) for number, (one, other) in times.items()}


def _milliseconds(models: Sequence[nn.Module], length: int) -> dict[int, list[float]]:
    """The times of models on one device, which take turns: those of the fastest fifth of calls, because what else runs
    on the machine makes calls slower.
    """
    device = next(models[0].parameters()).device
    found: dict[int, list[float]] = {}
    for number in sorted({_readable(models[0], length), 1}, reverse=True):
        try:
            inputs = example_text(models[0], number)
            with torch.inference_mode(), ExitStack() as stack:
                for model in models:
                    stack.enter_context(evaluating(model))
                calls = {str(i): partial(model, **inputs) for i, model in enumerate(models)}
                timings = time_together(calls, repeats=REPEATS, device=device)
        # models that read other things than text refuse tokens with errors of many types
        except Exception:
            return {}
        found[number] = [timing.p20 for timing in timings.values()]
    return found


def _readable(model: nn.Module, length: int) -> int:
    """`length`, or the most tokens that the model reads."""
    most = positions_of(model) if hasattr(model, "get_input_embeddings") else None
    return length if most is None else min(length, most)


def example_text(model: nn.Module, length: int) -> dict[str, Any]:
    """Inputs of one made-up text, on the model's device."""
    device = next(model.parameters()).device
    inputs = example_inputs(model, 1, _readable(model, length))
    return {
        name: value.to(device) if isinstance(value, Tensor) else tuple(part.to(device) for part in value)
        for name, value in inputs.items()
    }


def left_out_lines(plan: Plan, account: SizeAccount, budget: Budget) -> list[str]:
    """Lines about large layers that stay as they are, and what the others lose instead."""
    large = [item for item in plan.left_out if item.params >= 0.01 * account.dense]
    lines = []
    for item in sorted(large, key=lambda item: -item.params)[:8]:
        share = f"{item.params:,} parameters, {item.params / account.dense:.1%} of the model"
        lines.append(f"Left out: {item.name} ({share}): {item.reason}.")
    if lines:
        lost = (account.dense - budget.resolve(account)) / account.prunable
        lines.append(f"So the layers that are compressed lose {lost:.1%} of their parameters.")
    return lines
