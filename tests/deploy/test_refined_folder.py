"""Compression that was stopped while blocks were refined goes on, unless its model or text is another by now."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import rankwise as rw
from rankwise.deploy.compress import Beside, Data, Listener, Source, compress_folder
from rankwise.deploy.compressed import Compressed
from rankwise.deploy.inputs import Calibration
from tests.oneshot.test_blockwise import Stack

NUM_BLOCKS, STEPS = 3, 4


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(NUM_BLOCKS)

    def forward(self, tokens: Tensor) -> tuple[Tensor]:
        return (self.stack(tokens),)


class Folder(Source):
    """A folder with a model; a text holds a number of a word on each line."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, str(folder)
        self.saved: dict[str, Tensor] = {}

    def load(self) -> nn.Module:
        model = Language()
        model.load_state_dict(load_file(self.folder / "model.safetensors"))
        return model

    def read(self, calibration: Calibration, progress: Any = None) -> Callable[[nn.Module], Data]:
        (file,) = calibration.files
        batches = list(torch.tensor([int(line) for line in file.read_text().split()]).view(-1, 2, 10))
        # nothing is kept back to compare: blocks stay refined
        return lambda model: Data(batches, batches, [], is_decoder=True, window=10)

    def check_target(self, folder: Path, overwrite: bool) -> None:
        pass

    def save(self, small: nn.Module, made: Compressed, folder: Path, overwrite: bool, beside: Beside) -> list[str]:
        self.saved = {name: tensor.clone() for name, tensor in small.state_dict().items()}
        return []


class Watched(Listener):
    def __init__(self, stops_at: int | None) -> None:
        self.stops_at, self.trained = stops_at, 0

    def progress(self, what: str, done: int, total: int) -> None:
        self.trained += what == "refining"
        if what == "refining" and done == self.stops_at:
            raise KeyboardInterrupt


def write(folder: Path, *, model: int = 0, text: int = 0) -> None:
    torch.manual_seed(model)
    save_file(Language().state_dict(), folder / "model.safetensors")
    torch.manual_seed(text)
    (folder / "text.txt").write_text("\n".join(map(str, torch.randint(10, 30, (120,)).tolist())))


def compressed(
    folder: Path, out: str, stops_at: int | None = None, ranks: str = "global"
) -> tuple[dict[str, Tensor], int]:
    """The weights that were saved, and the steps that blocks were trained."""
    source, listener = Folder(folder), Watched(stops_at)
    calibration = Calibration(file=folder / "text.txt")
    given: Any = {"calibration": calibration, "ranks": ranks, "refine": STEPS, "device": "cpu"}
    compress_folder(source, rw.Budget(removed=0.2), folder / out, listener=listener, **given)
    return source.saved, listener.trained


@pytest.mark.parametrize("change", [{}, {"model": 1}, {"text": 1}])
def test_work_goes_on_with_the_model_and_the_text_that_it_began_with(tmp_path: Path, change: dict[str, int]) -> None:
    write(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        compressed(tmp_path, "small", stops_at=2 * STEPS + 1)
    if change:
        write(tmp_path, **change)
    found, trained = compressed(tmp_path, "small")
    # only the block that was stopped, or all of them
    assert trained == (NUM_BLOCKS * STEPS if change else STEPS)
    want, _ = compressed(tmp_path, "fresh")
    assert want and all(torch.equal(found[name], tensor) for name, tensor in want.items())


def test_blocks_are_not_those_of_other_ranks(tmp_path: Path) -> None:
    """Also where the first block has the same ranks in both ways to share them out."""
    write(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        compressed(tmp_path, "small", stops_at=2 * STEPS + 1)
    found, trained = compressed(tmp_path, "small", ranks="blend")
    assert trained == NUM_BLOCKS * STEPS
    before, _ = compressed(tmp_path, "before")
    want, _ = compressed(tmp_path, "fresh", ranks="blend")
    assert all(torch.equal(found[name], tensor) for name, tensor in want.items())
    shapes = [{name: x.shape for name, x in each.items() if ".blocks.0." in name} for each in (before, want)]
    assert shapes[0] and shapes[0] == shapes[1]
