"""Deployment of compact models: save and load them, time them, round them, and export them to other engines.

`int8` and `bfloat16` copy a model for faster inference on a CPU, `fuse_layers` makes it faster on a GPU; `meet_latency`
finds the size for a time; `export` has ONNX, OpenVINO and torch.export; `compress_folder` is `rankwise compress`.
`rankwise.save` and `rankwise.load` are the format of saved models (`save`, `load`, `structure`).
"""

from rankwise.deploy import export
from rankwise.deploy.bench import ENGINES
from rankwise.deploy.compress import SavedModel, compress_folder
from rankwise.deploy.fuse import fuse_layers
from rankwise.deploy.inputs import Calibration, example_inputs
from rankwise.deploy.quantize import bfloat16, int8
from rankwise.latency import meet_latency

__all__ = [
    "ENGINES",
    "Calibration",
    "SavedModel",
    "bfloat16",
    "compress_folder",
    "example_inputs",
    "export",
    "fuse_layers",
    "int8",
    "meet_latency",
]
