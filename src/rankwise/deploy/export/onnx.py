"""ONNX, by torch's exporter on top of `torch.export`; runs in ONNX Runtime."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.deploy.export.check import Exported, Runner, as_flat_numpy, check_folder, imported, write_checked
from rankwise.deploy.export.program import Captured, Inputs, capture, one_line_errors, quiet
from rankwise.errors import CheckpointError, first_line

FILE = "model.onnx"
SETTINGS = {"session.force_spinning_stop": "1"}
"""Without it the threads of a session spin for tens of milliseconds after an answer, and slow down what runs next."""
SLOW = ["SkipLayerNormFusion"]
"""Rewritings of the runtime to leave out: on CPUs its kernel for an addition and a layer norm is slower than both."""


def export(
    model: nn.Module,
    example_inputs: Inputs,
    path: str | os.PathLike[str],
    *,
    int8: bool = False,
    tolerance: float | None = None,
) -> Exported:
    """Write `path`/model.onnx. With `int8`, weights are stored in 8 bits and activations quantized dynamically."""
    imported("onnx")
    imported("onnxscript")
    imported("onnxruntime")
    captured = capture(model, example_inputs)
    made = _convert(captured)

    def write(folder: Path) -> None:
        made.save(folder / FILE, external_data=_is_large(model))
        if int8:
            _quantize(folder)

    return write_checked(captured, path, format="onnx", write=write, load=load, int8=int8, tolerance=tolerance)


def load(path: str | os.PathLike[str], *, threads: int | None = None) -> Runner:
    """An exported folder in ONNX Runtime on the CPU."""
    runtime = imported("onnxruntime")
    file = check_folder(path, "onnx", FILE)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads or torch.get_num_threads()
    for name, value in SETTINGS.items():
        options.add_session_config_entry(name, value)
    with one_line_errors(f"{file} must run in ONNX Runtime, but it says"):
        session = runtime.InferenceSession(
            str(file), options, providers=["CPUExecutionProvider"], disabled_optimizers=SLOW
        )
    inputs = [value.name for value in session.get_inputs()]
    outputs = [value.name for value in session.get_outputs()]

    def run(**given: Any) -> dict[str, Tensor]:
        found = session.run(None, as_flat_numpy(given, inputs))
        return {name: torch.from_numpy(value) for name, value in zip(outputs, found, strict=True)}

    return run


def _convert(captured: Captured) -> Any:
    _allow_any_strides(captured.program)
    with quiet():
        try:
            return torch.onnx.export(
                captured.program,
                (captured.inputs,),
                dynamo=True,
                verbose=False,
                input_names=list(captured.inputs),
                output_names=captured.outputs,
            )
        except Exception as error:
            cause = error.__cause__ or error
            raise CheckpointError(
                f"The model must be one that ONNX can represent, but its exporter says: {first_line(cause)}"
            ) from error


def _allow_any_strides(program: torch.export.ExportedProgram) -> None:
    """Make views valid for any strides: the exporter splits attention into products whose results have others.

    ONNX has no strides, so the exported graph copies nothing.
    """
    aten = torch.ops.aten
    views = (aten.view.default, aten.reshape.default, aten.flatten.using_ints)
    for node in list(program.graph.nodes):
        if node.op == "call_function" and node.target in views:
            source = node.args[0]
            with program.graph.inserting_before(node):
                contiguous = program.graph.call_function(
                    aten.clone.default, (source,), {"memory_format": torch.contiguous_format}
                )
            contiguous.meta.update(source.meta)
            node.args = (contiguous, *node.args[1:])


def _is_large(model: nn.Module) -> bool:
    """Whether the weights need a file of their own: one of ONNX holds two gigabytes at most."""
    return sum(p.numel() * p.element_size() for p in model.parameters()) > 1.5e9


def _quantize(folder: Path) -> None:
    quantization = imported("onnxruntime.quantization", package="onnxruntime")
    onnx = imported("onnx")
    dense = folder / f"dense-{FILE}"
    graph = onnx.load(folder / FILE)
    # the exporter notes shapes of matrices that it transposes later; the quantizer stops at them, and infers its own
    del graph.graph.value_info[:]
    onnx.save(graph, dense)
    quantization.quantize_dynamic(dense, folder / FILE, weight_type=quantization.QuantType.QInt8, per_channel=True)
    dense.unlink()
