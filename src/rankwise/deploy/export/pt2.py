"""`torch.export`'s own file: runs in PyTorch without the model's code.

The format is torch's. Unlike what `rankwise.save` writes, it can hold code: load only files that you trust.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.deploy.export.check import Exported, Runner, check_folder, write_checked
from rankwise.deploy.export.program import Inputs, capture, flatten, one_line_errors, quiet
from rankwise.errors import CheckpointError

FILE = "model.pt2"
NAMES = "outputs.json"


def export(
    model: nn.Module,
    example_inputs: Inputs,
    path: str | os.PathLike[str],
    *,
    int8: bool = False,
    tolerance: float | None = None,
) -> Exported:
    """Write `path`/model.pt2."""
    if int8:
        raise CheckpointError("`int8` goes with onnx and openvino, but the format is pt2. Choose one of these.")
    captured = capture(model, example_inputs)

    def write(folder: Path) -> None:
        torch.export.save(captured.program, folder / FILE, extra_files={NAMES: json.dumps(captured.outputs)})

    return write_checked(captured, path, format="pt2", write=write, load=load, int8=False, tolerance=tolerance)


def load(path: str | os.PathLike[str], *, compile: bool = False) -> Runner:
    """An exported folder in PyTorch; with `compile`, by `torch.compile`."""
    file = check_folder(path, "pt2", FILE)
    extra = {NAMES: ""}
    with quiet(), one_line_errors(f"{file} must run in this torch, but it says"):
        module: Any = torch.export.load(file, extra_files=extra).module()
    outputs = json.loads(extra[NAMES])
    call = torch.compile(module) if compile else module

    def run(**given: Any) -> dict[str, Tensor]:
        with torch.inference_mode():
            return dict(zip(outputs, call(flatten(given)), strict=True))

    return run
