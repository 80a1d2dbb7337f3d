"""Where a model is compressed: on one device, on several by layer, or on one that is smaller, from disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from rankwise.core.placement import Offload, block_names, num_bytes, spread
from rankwise.errors import InvalidValueError, RankwiseError, first_line

Offloading = Literal["auto", "disk", "none"]
ROOM = 2
"""A model is compressed on a GPU by default if that has this many times its size free."""
LEAST_ROOM = 1.3
"""A model is not compressed on a device that has less than this many times its size free."""
MEMINFO, CONTAINER = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def find_device(device: str, model: nn.Module) -> torch.device:
    """The device of that name; "auto": a GPU on which the model fits, else where it is."""
    if device == "auto":
        fits = torch.cuda.is_available() and free_memory(torch.device("cuda")) > ROOM * num_bytes(model)
        return torch.device("cuda") if fits else next(model.parameters()).device
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        has_gpu = torch.cuda.is_available()
        known = "such as cpu or cuda:0" if has_gpu else "such as cpu (no GPU is found)"
        # of a word that is no device torch tells all that it was ever built for
        why = f": {first_line(error)}" if has_gpu and device.startswith("cuda") else " instead."
        raise RankwiseError(f"`device` must be one that torch has here, {known}, but is {device!r}{why}") from None
    return found


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device; 0 where nothing says it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu" or not MEMINFO.is_file():
        return 0
    lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
    free = 1024 * int(lines.get("MemAvailable", "0").split()[0])
    with suppress(OSError, ValueError):
        # what a container may have; "max" without a limit
        most, used = (int((CONTAINER / f"memory.{name}").read_text()) for name in ("max", "current"))
        # copies of files that were read count as used, but give way
        stat = dict(line.split() for line in (CONTAINER / "memory.stat").read_text().splitlines())
        cached = sum(int(stat.get(f"{kind}_file", 0)) for kind in ("active", "inactive"))
        free = min(free, most - used + cached)
    return free


@dataclass
class Placer:
    """Loads a model, as often as it is asked to, and puts it where it is compressed; `close` removes its files."""

    load: Callable[[], nn.Module]
    device: str
    """The name of a device; several, with commas between them: consecutive blocks are on each; or "auto"."""
    offload: Offloading
    """"disk": only one block at a time is on the device; "auto": where the model does not fit on it."""
    dtype: torch.dtype | None
    folder: Path
    """For files, if blocks are on disk."""
    low_rank: bool
    """Whether the model is compressed by calibrated low rank, which can be done from disk."""
    say: Callable[[str], None]
    """Told once what was decided."""
    placed: Offload | None = None

    def __post_init__(self) -> None:
        if self.offload not in ("auto", "disk", "none"):
            raise InvalidValueError(f'`offload` must be "auto", "disk" or "none", but is {self.offload!r} instead.')
        if self.offload == "disk" and ("," in self.device or not self.low_rank):
            raise RankwiseError(
                "A model is compressed from disk on one device, with --method svd and a calibration text. Use these, "
                'or --offload none (offload="none") with a device on which it fits, such as cpu.'
            )

    def __call__(self) -> nn.Module:
        """The model; the one before it must not be needed any more."""
        self.close()
        model = self.load()
        if "," in self.device:
            devices = [find_device(name, model) for name in self.device.split(",")]
            model = model if self.dtype is None else model.to(self.dtype)
            places = [str(place) for place in spread(model, devices)]
            numbers = ", ".join(f"{places.count(name)} on {name}" for name in dict.fromkeys(places))
            self._tell(f"Blocks by device: {numbers}.")
        elif (card := self._card(model)) is not None:
            self.placed = Offload(model if self.dtype is None else model.to(self.dtype), card, self.folder)
        else:
            model.to(device=find_device(self.device, model), dtype=self.dtype)
        return model

    def _card(self, model: nn.Module) -> torch.device | None:
        """The device on which one block at a time is compressed; None if the model is there as a whole."""
        where, has_gpu = find_device(self.device, model), torch.cuda.is_available()
        card = torch.device("cuda") if self.device == "auto" and has_gpu else where
        if self.offload == "disk":
            return card
        if self.offload == "none" or card.type != "cuda" or not self._can(model):
            return None
        size, free = num_bytes(model), free_memory(card)
        if (ROOM if self.device == "auto" else LEAST_ROOM) * size <= free:
            return None
        self._tell(
            f"The model has {size / 2**30:.1f} GiB and {card} {free / 2**30:.1f} GiB free, so it is compressed from "
            "disk, one block after the other."
        )
        return card

    def _can(self, model: nn.Module) -> bool:
        """Whether the model can be compressed from disk, as far as it can be seen."""
        blocks = sum(num_bytes(model.get_submodule(name)) for name in block_names(model))
        is_chain = not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        return self.low_rank and is_chain and 2 * blocks >= num_bytes(model)

    @property
    def on_one_device(self) -> bool:
        """Whether the model is on one device as a whole."""
        return self.placed is None and "," not in self.device

    def _tell(self, text: str) -> None:
        self.say(text)
        self.say = lambda text: None

    def close(self) -> None:
        """Take the model off the device, and remove files; blocks that were kept can still be read."""
        if self.placed is not None:
            self.placed.close()
        self.placed = None
        # those of a command that was killed too, which may be as large as a model
        shutil.rmtree(self.folder, ignore_errors=True)
