"""OpenVINO, straight from `torch.export`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.deploy.export.check import Exported, Runner, as_flat_numpy, check_folder, imported, write_checked
from rankwise.deploy.export.program import Captured, Inputs, capture, one_line_errors, quiet

FILE = "model.xml"
PRECISE = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
"""Without the hint OpenVINO computes in bfloat16 wherever the processor can."""


def export(
    model: nn.Module,
    example_inputs: Inputs,
    path: str | os.PathLike[str],
    *,
    int8: bool = False,
    tolerance: float | None = None,
) -> Exported:
    """Write `path`/model.xml and model.bin. With `int8`, weights are stored in 8 bits (by NNCF)."""
    openvino = imported("openvino")
    nncf = imported("nncf") if int8 else None
    captured = capture(model, example_inputs)
    made = _convert(openvino, captured)

    def write(folder: Path) -> None:
        small = made if nncf is None else nncf.compress_weights(made, mode=nncf.CompressWeightsMode.INT8_SYM)
        openvino.save_model(small, folder / FILE, compress_to_fp16=False)

    return write_checked(captured, path, format="openvino", write=write, load=load, int8=int8, tolerance=tolerance)


def load(path: str | os.PathLike[str], *, threads: int | None = None) -> Runner:
    """An exported folder in OpenVINO on the CPU, in float32."""
    openvino = imported("openvino")
    file = check_folder(path, "openvino", FILE)
    settings = {**PRECISE, "INFERENCE_NUM_THREADS": threads or torch.get_num_threads()}
    with one_line_errors(f"{file} must run in OpenVINO, but it says"):
        read = openvino.Core().read_model(file)
        compiled = openvino.compile_model(read, "CPU", settings)
    # not from the compiled model, whose ports also carry the names of operations that were optimized away
    inputs, outputs = ([port.any_name for port in ports] for ports in (read.inputs, read.outputs))

    def run(**given: Any) -> dict[str, Tensor]:
        found = compiled(as_flat_numpy(given, inputs))
        return {name: torch.from_numpy(found[i].copy()) for i, name in enumerate(outputs)}

    return run


def _convert(openvino: Any, captured: Captured) -> Any:
    with quiet(), one_line_errors("The model must be one that OpenVINO can represent, but its converter says"):
        made = openvino.convert_model(captured.program)
        for port, shape in zip(made.inputs, captured.shapes.values(), strict=True):
            port.node.set_partial_shape(openvino.PartialShape([-1 if isinstance(n, str) else n for n in shape]))
        made.validate_nodes_and_infer_types()
    for ports, names in ((made.inputs, captured.inputs), (made.outputs, captured.outputs)):
        for port, name in zip(ports, names, strict=True):
            port.tensor.set_names({name})
    return made
