"""A compact model is written and read shard by shard: no second copy of it is ever in memory.

A child process saves or loads; this one reads how much memory of its own it takes meanwhile. Pages of a file that is
mapped do not count: the system may take them back at any time.
"""

from __future__ import annotations

import json
import re
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from rankwise.hf import save_pretrained
from rankwise.hf.quantizer import mark_changed
from rankwise.modules import LowRankLinear
from tests.hf.hf_families import DECODER

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
ROOT = Path(__file__).parents[2]
SHARD = 12_000_000
ALLOWED = 0.2
"""Memory beside the model itself, as a share of it: parts of a shard, and what allocators keep."""


def large() -> Any:
    """A compact decoder of 100 MB, nearly all of it in pairs."""
    torch.manual_seed(0)
    config = hf.LlamaConfig(**{**DECODER, "hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 4})
    model = hf.LlamaForCausalLM(config)
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            old = getattr(layer.mlp, name)
            first, second = (
                torch.nn.Linear(*sizes, bias=False) for sizes in ((old.in_features, 448), (448, old.out_features))
            )
            setattr(layer.mlp, name, LowRankLinear(first, second))
    mark_changed(model)
    return model.eval()


CHILD = """
import sys
import torch
import rankwise.hf
from rankwise.core.host_memory import return_large_blocks
from tests.hf.test_shards import SHARD, large
return_large_blocks()
{prepare}
print("ready", flush=True)
sys.stdin.readline()
{work}
print("done", flush=True)
sys.stdin.readline()
"""


def held_bytes(prepare: str, work: str) -> tuple[int, int]:
    """The most memory that `work` takes beyond what was held before it, and what it keeps."""
    code = CHILD.format(prepare=prepare, work=work)
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None

        def now() -> int:
            found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{child.pid}/status").read_text())
            return 1024 * int(found[1]) if found else 0

        assert child.stdout.readline() == "ready\n"
        before = most = now()

        child.stdin.write("\n")
        child.stdin.flush()
        while not select.select([child.stdout], [], [], 0.0005)[0]:
            most = max(most, now())
        assert child.stdout.readline() == "done\n"
        kept = now() - before
        child.stdin.close()
    return max(most - before, kept), kept


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards") / "small"
    save_pretrained(large(), folder, max_shard_size=SHARD)
    return folder


def size_of(model: torch.nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def test_no_shard_is_larger_than_asked_for_and_the_index_names_all(saved: Path) -> None:
    files = {path.name: path.stat().st_size for path in saved.glob("*.safetensors")}
    model = large()
    assert max(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values()) < SHARD
    # a file also holds names and shapes
    assert len(files) >= size_of(model) / SHARD
    assert max(files.values()) < SHARD + 10_000
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    again = hf.LlamaForCausalLM.from_pretrained(saved)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())


CASES = {
    "saving": ("model = large()", "rankwise.hf.save_pretrained(model, FOLDER, max_shard_size=SHARD)", 0.0),
    # the dtype changes, so no weight can stay in the file that it is read from
    "loading": (
        "import transformers",
        "m = transformers.LlamaForCausalLM.from_pretrained(SAVED, dtype='bfloat16')",
        0.5,
    ),
    "a copy": ("model = large()", "copy = [p.detach().clone() for p in model.parameters()]", 1.0),
}


@pytest.mark.parametrize("case", CASES)
def test_the_memory_that_is_taken_is_the_model_s_alone(case: str, saved: Path, tmp_path: Path) -> None:
    """A copy that is made on purpose is seen, so one that is made by mistake would be."""
    prepare, work, share = CASES[case]
    folders = f"FOLDER, SAVED = {str(tmp_path / 'small')!r}, {str(saved)!r}\n"
    most, kept = held_bytes(folders + prepare, work)
    size = size_of(large())
    assert most < (share + ALLOWED) * size
    assert kept > (share - ALLOWED) * size
