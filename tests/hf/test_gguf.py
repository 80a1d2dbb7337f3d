"""Narrow models become GGUF files by llama.cpp's own converter, which knows nothing of rankwise.

    RANKWISE_LLAMA_CPP=.../llama.cpp pytest tests/hf/test_gguf.py

names a folder of llama.cpp with `convert_hf_to_gguf.py` (the source package of llama-cpp-python carries one in
`vendor/llama.cpp`); the packages `gguf`, `sentencepiece` and `accelerate` must be installed. Without them it skips.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf

import rankwise as rw
from rankwise.hf import save_pretrained
from tests.hf.test_widths import build, tokens

LLAMA_CPP = os.environ.get("RANKWISE_LLAMA_CPP", "")
pytestmark = pytest.mark.skipif(not LLAMA_CPP, reason="RANKWISE_LLAMA_CPP names no folder of llama.cpp")
WORDS = 320


def vocabulary() -> bytes:
    """A sentencepiece model of single letters, which every family's converter reads."""
    sentencepiece = pytest.importorskip("sentencepiece")
    made = io.BytesIO()
    text = [" ".join(f"{a}{b}" for a in "abcdefghijklm" for b in "nopqrstuvwxyz") for _ in range(4)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text),
        model_writer=made,
        vocab_size=WORDS,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return made.getvalue()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3"])
def test_the_converter_of_llama_cpp_takes_a_narrow_model(family: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    more = {"attention_bias": False, "mlp_bias": False} if family == "llama" else {}
    dense = build(family, vocab_size=WORDS, eos_token_id=2, **more)
    small = rw.compress(dense, rw.Budget(removed=0.15), [tokens(i) for i in range(3)], method="width", ranks="even")
    assert small.config.num_key_value_heads == 1 and small.config.intermediate_size <= 24
    assert isinstance(small, hf.PreTrainedModel)
    save_pretrained(small.eval(), tmp_path / "small")
    (tmp_path / "small" / "tokenizer.model").write_bytes(vocabulary())
    script = Path(LLAMA_CPP) / "convert_hf_to_gguf.py"
    done = subprocess.run(
        [sys.executable, script, tmp_path / "small", "--outfile", tmp_path / "small.gguf", "--outtype", "f32"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(LLAMA_CPP) / "gguf-py"), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    check_file(tmp_path / "small.gguf", small)
    if family in ("llama", "mistral"):
        # transformers reads these back; of other families it does not read the size of a head
        again = hf.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="small.gguf", dtype=torch.float32).eval()
        with torch.no_grad():
            torch.testing.assert_close(again(tokens()).logits, small(tokens()).logits, rtol=1e-4, atol=1e-4)


def check_file(file: Path, small: hf.PreTrainedModel) -> None:
    """What llama.cpp builds a model from: widths, the size of a head, and every tensor."""
    import gguf

    config, reader = small.config, gguf.GGUFReader(file)
    architecture = reader.fields["general.architecture"].contents()
    head_dim = small.model.layers[0].self_attn.head_dim
    numbers = {
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
    }
    assert {name: reader.fields[f"{architecture}.{name}"].contents() for name in numbers} == numbers
    layers = {"ffn_down": "mlp.down_proj", "ffn_gate": "mlp.gate_proj", "attn_output": "self_attn.o_proj"}
    written = {tensor.name: torch.tensor(tensor.data) for tensor in reader.tensors}
    for name, ours in layers.items():
        for i, layer in enumerate(small.model.layers):
            torch.testing.assert_close(written[f"blk.{i}.{name}.weight"], layer.get_submodule(ours).weight.detach())
