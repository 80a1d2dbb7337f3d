"""The snippets on many GPUs (docs/scaling.md) run as they are printed: two ranks, started as torchrun does, on gloo."""

from __future__ import annotations

import os
import re
import socket
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file
from torch import Tensor, nn

import rankwise as rw

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")

PAGE = (Path(__file__).parent.parent / "docs/scaling.md").read_text()


def snippet(name: str) -> str:
    """The code that the page marks, with a run of a few steps."""
    found = re.search(rf"<!-- {name} -->\s*```python\n(.*?)```\s*<!-- /{name} -->", PAGE, re.DOTALL)
    assert found is not None, name
    shorter = {"4_000": "4, gate_lr=4.0", "1_000": "2", "checkpoint-1000": "checkpoint-2", "20_000": "6"}
    return re.sub("|".join(shorter), lambda match: shorter[match[0]], found[1])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    _no_split_modules = ["Block"]  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def batches_of(rank: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [(torch.randn(4, 12, generator=generator), torch.randint(0, 5, (4,))) for _ in range(6)]


def run_snippets(rank: int, count: int, folder: str, port: int, names: list[str]) -> None:
    """As a script of `torchrun`."""
    import accelerate
    import transformers

    from tests.hf.hf_families import DECODER
    from tests.hf.test_sharded import Sharding, shard_on_cpu
    from tests.hf.test_trainer import Sentences

    class Accelerator(accelerate.Accelerator):
        def __init__(self, fsdp_plugin: Any) -> None:
            super().__init__(cpu=True)
            shard_on_cpu(self, fsdp_plugin)

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in launched.items()})
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.chdir(folder)
    accelerate.Accelerator, transformers.Trainer = Accelerator, Sharding  # type: ignore[misc]
    scope: dict[str, Any] = {"build": build, "criterion": nn.CrossEntropyLoss(), "batches": batches_of(rank)}
    for name in names:
        if name == "accelerate":
            rows = torch.utils.data.TensorDataset(*map(torch.cat, zip(*batches_of(0) * 2, strict=True)))
            scope["batches"] = torch.utils.data.DataLoader(rows, batch_size=4)
        if name == "trainer":
            torch.manual_seed(0)
            scope["model"] = transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER, use_cache=False))
            scope["sentences"] = Sentences(scope["model"])
        code = snippet(name)
        if name == "trainer":
            code = code.replace('"out", ', '"out", use_cpu=True, report_to="none", disable_tqdm=True, ')
        exec(compile(code, name, "exec"), scope)
        if name == "resume":
            assert scope["pruner"].steps == 2
        if name == "meta":
            assert [type(block).__name__ for block in scope["model"].blocks] == 2 * ["FSDPBlock"]
            assert rw.count(scope["model"]) > rw.count(build())
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.parametrize("names", [["own loop", "resume", "meta"], ["accelerate", "trainer"]], ids="+".join)
def test_the_snippets_run_on_two_ranks(names: list[str], tmp_path: Path) -> None:
    """What they save loads, and is as small as asked for."""
    save_file(build().state_dict(), tmp_path / "dense.safetensors")
    mp.start_processes(run_snippets, (2, str(tmp_path), free_port(), names), nprocs=2, start_method="forkserver")
    if "own loop" in names:
        small = rw.load(tmp_path / "small", build())
        assert rw.count(small) <= 0.5 * rw.count(build())
    else:
        import transformers

        import rankwise.hf  # noqa: F401

        small = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small")
        assert 0 < rw.count(small) < rw.count(transformers.AutoModelForCausalLM.from_config(small.config))
