"""Sharded models of transformers: under the Trainer, and one of the shape of 7B parameters from the meta device."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rankwise as rw
from rankwise.hf import PruningCallback
from tests.hf.hf_families import DECODER, QUIET, WORDS
from tests.hf.test_trainer import STEPS, Sentences
from tests.ranks import run_ranks, run_ranks_once

pytestmark = [
    *QUIET,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
    pytest.mark.filterwarnings("ignore:gates cannot decide"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.* argument is set as true:UserWarning"),
]

PRELOAD = ("accelerate", "transformers.models.llama.modeling_llama", "transformers.trainer")


class Sharding(hf.Trainer):
    """The Trainer on a CPU, where Accelerate would not shard."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.args.fsdp:
            shard_on_cpu(self.accelerator, FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args))
            self.is_fsdp_enabled = True


def shard_on_cpu(accelerator: Any, plugin: FullyShardedDataParallelPlugin) -> None:
    """Let Accelerate do on gloo what it does on GPUs."""
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin


def trained(folder: Path, tied: bool, batch_size: int, resume: bool = False, **settings: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model: Any = hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER, tie_word_embeddings=tied, use_cache=False))
    pruner = rw.Pruner(model, rw.Budget(removed=0.4), anneal_steps=4, gate_lr=4.0)
    arguments = {
        "max_steps": STEPS,
        "per_device_train_batch_size": batch_size,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_steps": 3,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        **settings,
    }
    trainer = Sharding(
        model=model,
        args=hf.TrainingArguments(output_dir=str(folder), **arguments),
        train_dataset=Sentences(model),
        callbacks=[PruningCallback(pruner)],
    )
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3") if resume else None)
    ranks = torch.tensor([*pruner.ranks().values()])
    small = pruner.compact()
    is_first = not next(small.parameters()).is_meta
    tokens = torch.arange(WORDS).unsqueeze(0)
    logits = small.eval()(tokens).logits.detach() if is_first else torch.zeros(0)
    losses = torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    return {"ranks": ranks, "logits": logits, "losses": losses, "size": rw.count(small)}


def on_two(rank: int, count: int, folder: Path) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    os.environ.update({name: str(value) for name, value in launched.items()})
    settings = {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}, "ddp_backend": "gloo"}
    seen = {}
    for tied in (False, True):
        seen[f"tied {tied}"] = trained(folder / str(tied), tied, 4, **settings)
    seen["resumed"] = trained(folder / "True", True, 4, resume=True, **settings)
    return seen


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks_once(tmp_path_factory, "trainer-2", on_two, 2, preload=PRELOAD)[0]


@pytest.mark.parametrize("tied", [False, True])
def test_the_trainer_shards_and_gives_what_one_process_gives(two: Any, tied: bool, tmp_path: Path) -> None:
    """Also if it is resumed from its own sharded checkpoint."""
    alone = trained(tmp_path, tied, 8)
    for case in [f"tied {tied}"] + (["resumed"] if tied else []):
        first, second = (results[case] for results in two)
        for name in ("ranks", "logits", "losses"):
            torch.testing.assert_close(first[name], alone[name], rtol=1e-3, atol=1e-4)
        assert torch.equal(first["ranks"], second["ranks"])
        assert first["size"] == second["size"] == alone["size"]
        assert not len(second["logits"])


@pytest.mark.parametrize(
    "settings, environment, message",
    [
        ({"fsdp_version": 1}, {}, "are sharded by FSDP2, but FSDP1 is set"),
        ({"fsdp_version": 2, "cpu_ram_efficient_loading": True}, {}, "`cpu_ram_efficient_loading` is set"),
        (None, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "are sharded by FSDP2, but FSDP1 is set"),
        (
            None,
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"},
            "`cpu_ram_efficient_loading` is set",
        ),
    ],
)
def test_settings_that_would_not_work_are_refused_when_the_trainer_is_made(
    monkeypatch: pytest.MonkeyPatch, settings: Any, environment: dict[str, str], message: str
) -> None:
    model: Any = hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER))
    callback = PruningCallback(rw.Pruner(model, rw.Budget(removed=0.4), anneal_steps=100))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    arguments: Any = SimpleNamespace(deepspeed=None, fsdp=settings is not None, fsdp_plugin_args=settings)
    with pytest.raises(rw.RankwiseError, match=message):
        callback.on_init_end(arguments, None, None)


SHAPE_7B = hf.LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=43,
    num_hidden_layers=32,
    num_attention_heads=4,
    tie_word_embeddings=False,
    use_cache=False,
)
"""LLaMA's with 7B parameters, with every width divided by 256."""
TOKENS = torch.randint(0, 32, (8, 6), generator=torch.Generator().manual_seed(0))


def dense_7b() -> hf.LlamaForCausalLM:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(SHAPE_7B)


def one_step(pruner: rw.Pruner, tokens: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(pruner.weight_parameters(), lr=0.1)
    pruner.model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    pruner.step()


def prune_7b(model: Any) -> rw.Pruner:
    return rw.Pruner(model, rw.Budget(removed=0.5), anneal_steps=2, gate_lr=8.0, open_probability=0.9)


def compact_7b(pruner: rw.Pruner) -> Any:
    return pruner.compact(rw.Budget(params=pruner.controller.target_size())).eval()


def on_eight(rank: int, count: int, folder: Path) -> dict[str, Any]:
    """Built on the meta device, sharded, loaded by the first rank, gated, stepped and compacted."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (count,))
    with torch.device("meta"):
        model: Any = hf.LlamaForCausalLM(SHAPE_7B)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    # what no checkpoint holds
    model.model.rotary_emb = type(model.model.rotary_emb)(SHAPE_7B)
    state = dense_7b().state_dict() if rank == 0 else {}
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    pruner = prune_7b(model)
    one_step(pruner, TOKENS.chunk(count)[rank])
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    small = compact_7b(pruner)
    logits = torch.zeros(0) if rank else small(TOKENS).logits.detach()
    return {"held": held, "whole": rw.count(model), "size": rw.count(small), "logits": logits}


def test_the_shape_of_7b_parameters_is_pruned_from_the_meta_device_on_eight_ranks(tmp_path: Path) -> None:
    """Gated, sharded, stepped and compacted, as on one process; no rank holds more than its part."""
    results = run_ranks(on_eight, 8, tmp_path, preload=PRELOAD)
    pruner = prune_7b(dense_7b())
    one_step(pruner, TOKENS)
    small = compact_7b(pruner)
    torch.testing.assert_close(results[0]["logits"], small(TOKENS).logits.detach(), rtol=1e-3, atol=1e-4)
    for result in results:
        assert result["size"] == rw.count(small) < rw.count(dense_7b())
        # rows are not always a multiple of the ranks
        assert result["held"] <= 1.2 * result["whole"] / 8
