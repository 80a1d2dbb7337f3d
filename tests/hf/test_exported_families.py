"""Compact models of every family in the formats of other engines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rankwise.deploy.export import FORMATS
from rankwise.deploy.inputs import example_inputs
from tests.hf.hf_families import FAMILIES, QUIET, compact

pytestmark = QUIET
ALL = "RANKWISE_EXPORT_ALL"
EVERY_DAY = [
    ("mpnet", "flop-l0", "onnx"),
    ("bert-mlm", "np-l0", "pt2"),
    ("qwen2", "flop-l0", "openvino"),
    ("mixtral", "flop-l0", "pt2"),
]
CASES = [
    (family, method, to) for family in FAMILIES for method in ("flop-l0", "np-l0") for to in ("onnx", "openvino", "pt2")
]


@pytest.mark.parametrize("family, method, to", CASES if os.environ.get(ALL) else EVERY_DAY)
def test_an_exported_family_gives_the_same(family: str, method: str, to: str, tmp_path: Path) -> None:
    """With RANKWISE_EXPORT_ALL=1 all of them, which takes minutes."""
    for package in {"onnx": ["onnx", "onnxscript", "onnxruntime"], "openvino": ["openvino"]}.get(to, []):
        pytest.importorskip(package)
    model = compact(family, method)
    inputs = example_inputs(model, 2, 6)
    # so that padding is compared, on either side
    assert inputs["attention_mask"].sum(1).tolist() == [4, 4]
    made = FORMATS[to].export(model, inputs, tmp_path / "out")
    assert made.difference < 1e-4
    assert made.outputs[0] == "logits"
    assert made.shapes["input_ids"] == ["n0", "n1"]
    # words and their mask come in one batch, and engines know it
    assert made.shapes["attention_mask"] == made.shapes["input_ids"]
    if to == "onnx":
        ports = pytest.importorskip("onnx").load(tmp_path / "out" / "model.onnx").graph.input
        words, mask = ([size.dim_param for size in port.type.tensor_type.shape.dim] for port in ports)
        assert words == mask and len(set(words)) == 2


@pytest.mark.parametrize("width", [96, 128, 256])
def test_attention_with_wide_heads_is_right_in_openvino(width: int, tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(**sizes, head_dim=width, num_hidden_layers=1, vocab_size=60, use_cache=False)
    model = LlamaForCausalLM(config).eval()
    made = FORMATS["openvino"].export(model, example_inputs(model, 2, 16), tmp_path / "out")
    assert made.difference < 1e-4
    assert ("SNIPPETS_MODE" in made.settings) == (width >= 128)
