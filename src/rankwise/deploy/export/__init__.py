"""Compact models in the formats of other engines: `onnx`, `openvino` and `pt2`. Each has the same two functions:

export(model, example_inputs, path, int8=False) -> Exported     a new folder, kept only if outputs are equal
load(path) -> runner                                            runner(**inputs) gives outputs by name
"""

from types import ModuleType

from rankwise.deploy.export import onnx, openvino, pt2

FORMATS: dict[str, ModuleType] = {"onnx": onnx, "openvino": openvino, "pt2": pt2}

__all__ = ["FORMATS", "onnx", "openvino", "pt2"]
