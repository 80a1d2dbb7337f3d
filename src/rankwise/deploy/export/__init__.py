"""Compact models in the formats of other engines: `onnx`, `openvino` and `pt2`, each a `Format` with two methods.

export(model, example_inputs, path, int8=False) -> Exported     a new folder, kept only if outputs are equal
load(path) -> runner                                            runner(**inputs) gives outputs by name
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import torch
from torch import Tensor

from rankwise.deploy.export.check import Exported, Format, Runner, as_flat_numpy, imported
from rankwise.deploy.export.program import Captured, flatten, one_line_errors, quiet
from rankwise.errors import CheckpointError, first_line
from rankwise.files import parse_json

__all__ = ["FORMATS", "Exported", "Format", "Runner", "onnx", "openvino", "pt2"]

SETTINGS = {"session.force_spinning_stop": "1"}
"""Without it the threads of a session spin for tens of milliseconds after an answer, and slow down what runs next."""
SLOW = ["SkipLayerNormFusion"]
"""Rewritings of the runtime to leave out: on CPUs its kernel for an addition and a layer norm is slower than both."""
LARGE = 1.5e9
"""Bytes of weights that need a file of their own: one of ONNX holds two gigabytes at most."""
PRECISE = {"INFERENCE_PRECISION_HINT": "f32"}
"""Without it OpenVINO computes in bfloat16 wherever the processor can."""
UNFUSED = {"SNIPPETS_MODE": "DISABLE"}
"""Without it OpenVINO (2026.4, on an AMD EPYC) gives wrong outputs, or NaN, for attention with wide heads."""
WIDE_HEAD = 128
"""Of so many numbers; heads of 96 are right."""
NAMES = "outputs.json"


class Onnx(Format):
    """ONNX, by torch's exporter on top of `torch.export`; runs in ONNX Runtime on the CPU.

    With `int8`, weights are stored in 8 bits and activations quantized dynamically.
    """

    name, file, packages = "onnx", "model.onnx", ("onnx", "onnxscript", "onnxruntime")

    def has_loops(self) -> bool:
        # torch's exporter, in newer versions
        hop = "torch.onnx._internal.exporter._torchlib.ops.hop"
        return find_spec(hop) is not None and hasattr(imported(hop), "higher_order_scan")

    def convert(self, captured: Captured, int8: bool) -> Callable[[Path], None]:
        _allow_any_strides(captured.program)
        try:
            made: Any = torch.onnx.export(
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
        is_large = sum(p.numel() * p.element_size() for p in captured.reference.parameters()) > LARGE

        def write(folder: Path) -> None:
            if not int8:
                made.save(folder / self.file, external_data=is_large)
                return
            with TemporaryDirectory(dir=folder) as scratch:
                dense = Path(scratch) / self.file
                made.save(dense, external_data=is_large)
                self._quantize(dense, folder / self.file, is_large)

        return write

    def _quantize(self, dense: Path, file: Path, is_large: bool) -> None:
        onnx, quantization = imported("onnx"), imported("onnxruntime.quantization")
        model = onnx.load(dense)
        # shapes that the exporter notes of matrices which it transposes later stop the quantizer, which infers its own
        del model.graph.value_info[:]
        # products with what is transposed as they run stay in float: with a tied embedding, which gets a copy
        stored = {tensor.name: tensor for tensor in model.graph.initializer}
        for node in [node for node in model.graph.node if node.op_type == "Transpose" and node.input[0] in stored]:
            order = next((list(each.ints) for each in node.attribute if each.name == "perm"), None)
            values = onnx.numpy_helper.to_array(stored[node.input[0]]).transpose(order)
            model.graph.initializer.append(onnx.numpy_helper.from_array(values, node.output[0]))
            model.graph.node.remove(node)
        onnx.save(model, dense, save_as_external_data=is_large, location=f"dense-{self.file}.data")
        settings = {"weight_type": quantization.QuantType.QInt8, "per_channel": True}
        quantization.quantize_dynamic(dense, file, use_external_data_format=is_large, **settings)

    def load(self, path: str | os.PathLike[str], *, threads: int | None = None) -> Runner:
        """An exported folder in ONNX Runtime on the CPU."""
        runtime = imported("onnxruntime")
        file = self.found(path)
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads or torch.get_num_threads()
        for name, value in SETTINGS.items():
            options.add_session_config_entry(name, value)
        with one_line_errors(f"{file} must run in ONNX Runtime, but it says"):
            session = runtime.InferenceSession(
                str(file), options, providers=["CPUExecutionProvider"], disabled_optimizers=SLOW
            )
        inputs, outputs = ([port.name for port in ports] for ports in (session.get_inputs(), session.get_outputs()))

        def run(**given: Any) -> dict[str, Tensor]:
            found = session.run(None, as_flat_numpy(given, inputs))
            return {name: torch.from_numpy(value) for name, value in zip(outputs, found, strict=True)}

        return run


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


class OpenVino(Format):
    """OpenVINO, straight from `torch.export`, in float32 on the CPU; with `int8`, weights in 8 bits (by NNCF)."""

    name, file, packages, int8_packages = "openvino", "model.xml", ("openvino",), ("nncf",)

    def convert(self, captured: Captured, int8: bool) -> Callable[[Path], None]:
        openvino = imported("openvino")
        with one_line_errors("The model must be one that OpenVINO can represent, but its converter says"):
            made = openvino.convert_model(captured.program)
            for port, shape in zip(made.inputs, captured.shapes.values(), strict=True):
                port.node.set_partial_shape(openvino.PartialShape([-1 if isinstance(n, str) else n for n in shape]))
            made.validate_nodes_and_infer_types()
        for ports, names in ((made.inputs, captured.inputs), (made.outputs, captured.outputs)):
            for port, name in zip(ports, names, strict=True):
                port.tensor.set_names({name})

        def write(folder: Path) -> None:
            small = made
            if int8:
                nncf = imported("nncf")
                small = nncf.compress_weights(made, mode=nncf.CompressWeightsMode.INT8_SYM)
            openvino.save_model(small, folder / self.file, compress_to_fp16=False)

        return write

    def settings(self, path: str | os.PathLike[str]) -> dict[str, str]:
        return PRECISE | (UNFUSED if _has_wide_heads(imported("openvino").Core().read_model(self.found(path))) else {})

    def load(self, path: str | os.PathLike[str], *, threads: int | None = None) -> Runner:
        """An exported folder in OpenVINO on the CPU, in float32."""
        openvino = imported("openvino")
        file = self.found(path)
        speed = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads or torch.get_num_threads()}
        settings = {**self.settings(path), **speed}
        with one_line_errors(f"{file} must run in OpenVINO, but it says"):
            read = openvino.Core().read_model(file)
            compiled = openvino.compile_model(read, "CPU", settings)
        # not from the compiled model, whose ports also carry the names of operations that were optimized away
        inputs, outputs = ([port.any_name for port in ports] for ports in (read.inputs, read.outputs))

        def run(**given: Any) -> dict[str, Tensor]:
            found = compiled(as_flat_numpy(given, inputs))
            return {name: torch.from_numpy(found[i].copy()) for i, name in enumerate(outputs)}

        return run


def _has_wide_heads(model: Any) -> bool:
    """Whether an OpenVINO model has attention with heads of `WIDE_HEAD` numbers or more."""
    attention = (node for node in model.get_ops() if node.get_type_name() == "ScaledDotProductAttention")
    widths = (node.input(0).get_partial_shape()[-1] for node in attention)
    return any(width.is_dynamic or width.get_length() >= WIDE_HEAD for width in widths)


class _UnfailingFile(io.RawIOBase):
    """A file that takes note of an error and goes on: torch's writer ends the process where a disk is full."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            if self.error is None:
                self.file.write(data)
                self.file.flush()
        except OSError as error:
            self.error = error
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        # torch rewinds what it has written, for readers that this file has not
        return 0


class Pt2(Format):
    """`torch.export`'s own file: runs in PyTorch without the model's code.

    The format is torch's. Unlike what `rankwise.save` writes, it can hold code: load only files that you trust.
    """

    name, file, int8_packages = "pt2", "model.pt2", None

    def convert(self, captured: Captured, int8: bool) -> Callable[[Path], None]:
        names = {NAMES: json.dumps(captured.outputs)}

        def write(folder: Path) -> None:
            with (folder / self.file).open("wb") as file:
                target = _UnfailingFile(file)
                torch.export.save(captured.program, target, extra_files=names)  # type: ignore[arg-type]
                if target.error is not None:
                    raise target.error

        return write

    def load(self, path: str | os.PathLike[str]) -> Runner:
        """An exported folder in PyTorch."""
        file, extra = self.found(path), {NAMES: ""}
        with quiet(), one_line_errors(f"{file} must run in this torch, but it says"):
            module: Any = torch.export.load(file, extra_files=extra).module()
        outputs = parse_json(extra[NAMES])

        def run(**given: Any) -> dict[str, Tensor]:
            with torch.inference_mode():
                return dict(zip(outputs, module(flatten(given)), strict=True))

        return run


onnx, openvino, pt2 = Onnx(), OpenVino(), Pt2()
FORMATS: dict[str, Format] = {format.name: format for format in (onnx, openvino, pt2)}
