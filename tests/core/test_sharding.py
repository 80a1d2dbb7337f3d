"""Sharded models (FSDP2) train, evaluate and export as one process does: every method, sharded before or after gating.

Ranks run once for each number of them: starting processes costs more than the steps they take.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import rankwise as rw
from tests.models import Spec
from tests.ranks import run_ranks, run_ranks_once

pytestmark = [
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
    # runs of a few steps, in which no gate can decide
    pytest.mark.filterwarnings("ignore:.* of the gates had not decided"),
    pytest.mark.filterwarnings("ignore:gates cannot decide"),
]

WORDS, STEPS = 20, 5
METHODS: dict[str, dict[str, Any]] = {
    "dense": {},
    "fac": {},
    "np-l0": {"anneal_steps": 3, "gate_lr": 4.0, "open_probability": 0.9},
    "agp": {"anneal_steps": 3, "mask_every": 2},
    "flop-agp": {"anneal_steps": 3, "mask_every": 2, "diagonal_lr": 0.02, "l1": 1e-3},
    "flop-l0": {"anneal_steps": 3, "gate_lr": 4.0, "open_probability": 0.9},
}


class Encoder(nn.Module):
    """A transformer of torch's own layers, whose attention is split into linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 12)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(12, 2, 16, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(12, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.words(tokens)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 12)
        self.blocks = nn.ModuleList([nn.LSTM(12, 10, batch_first=True)])
        self.head = nn.Linear(10, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks[0](self.words(tokens))[0])


class Decoder(nn.Module):
    """A decoder of transformers', of which only the logits are asked for."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        sizes = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = LlamaConfig(vocab_size=WORDS, tie_word_embeddings=True, use_cache=False, **sizes)
        self.inner = LlamaForCausalLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens).logits


def tied() -> nn.Module:
    """Every kind of layer; the output layer is tied to the embedding."""
    parts = ("linear", "pair", "conv1d", "norm", "nested")
    return Spec(width=12, num_words=WORDS, back="bias-tied", parts=parts).build()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "transformer": Encoder,
    "tied": tied,
    "lstm": Recurrent,
    "decoder": Decoder,
}


def build(model: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[model]().double()


def blocks_of(model: nn.Module) -> nn.ModuleList:
    inner = getattr(model, "inner", None)
    return inner.model.layers if inner is not None else model.body if hasattr(model, "body") else model.blocks


def shard(model: nn.Module, mesh: DeviceMesh, **policy: Any) -> None:
    """As users do: every block, then what is left."""
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, **policy)
    fully_shard(model, mesh=mesh, **policy)


def tokens_of(step: int, size: int = 8) -> Tensor:
    return torch.randint(0, WORDS, (size, 5), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, -2).float(), tokens.flatten())


def prune(model: nn.Module, method: str = "flop-l0", **extra: Any) -> rw.Pruner:
    budget = rw.Budget(params=rw.count(model)) if method == "dense" else rw.Budget(removed=0.4)
    return rw.Pruner(model, budget, method, **METHODS[method], **extra)


@dataclass
class Share:
    """Which part of every batch a process computes, and what of."""

    rank: int = 0
    ranks: int = 1

    def of(self, tokens: Tensor) -> Tensor:
        return tokens.chunk(self.ranks)[self.rank]


def train(pruner: rw.Pruner, steps: range, share: Share, parts: int = 1) -> list[Tensor]:
    """The loss of every step on the whole batch."""
    optimizer = torch.optim.SGD(pruner.weight_parameters(), lr=0.1)
    losses = []
    for step in steps:
        total = torch.zeros(())
        for part in share.of(tokens_of(step)).chunk(parts):
            loss = loss_of(pruner.model, part) / parts
            loss.backward()
            total += loss.detach() / share.ranks
        optimizer.step()
        optimizer.zero_grad()
        pruner.step()
        together = pruner.controller.distributed
        if together.groups and share.ranks > 1:
            together.sum(total)
        elif share.ranks > 1:
            # nothing is gated by the dense method
            dist.all_reduce(total)
        losses.append(total)
    return losses


State = dict[str, Tensor]


def state_of(model: nn.Module) -> State:
    """Weights and all that gates and controller hold, whole."""
    return {name: getattr(each, "full_tensor", each.clone)().detach() for name, each in model.state_dict().items()}


def outcome(pruner: rw.Pruner, losses: list[Tensor]) -> dict[str, Any]:
    """What two runs are compared by: losses, gates and weights, an evaluation, the compact model and what it gives."""
    model, seen = pruner.model, tokens_of(99)
    state = state_of(model)
    masks = {str(i): gate.z.detach().clone() for i, gate in enumerate(pruner.controller.gates) if gate.z is not None}
    model.eval()
    with torch.no_grad():
        evaluated = model(seen)
        small = pruner.compact()
        sizes = {name: list(each.shape) for name, each in small.state_dict().items()}
        is_meta = any(each.is_meta for each in small.parameters())
        given = evaluated[:0] if is_meta else small(seen)
    model.train()
    plain = {} if is_meta else {name: each.clone() for name, each in small.state_dict().items()}
    return {
        "losses": torch.stack(losses),
        "state": state,
        "masks": masks,
        "evaluated": evaluated,
        "sizes": sizes,
        "given": given,
        "small": plain,
    }


def alone(model: str, method: str, **extra: Any) -> dict[str, Any]:
    """The same on one process."""
    pruner = prune(build(model), method, **extra)
    return outcome(pruner, train(pruner, range(STEPS), Share()))


def together(name: str, method: str, mesh: DeviceMesh, share: Share, order: str, parts: int = 1) -> dict[str, Any]:
    model = build(name)
    if order == "after":
        shard(model, mesh)
    pruner = prune(model, method)
    if order == "before":
        shard(model, mesh)
    return outcome(pruner, train(pruner, range(STEPS), share, parts))


TWO = {f"{model} {method}": (model, method, "before") for model in MODELS for method in METHODS}
FOUR = {
    **{f"tied {method} after": ("tied", method, "after") for method in METHODS},
    **{f"decoder {method} after": ("decoder", method, "after") for method in ("flop-l0", "agp")},
    **{f"{model} flop-l0": (model, "flop-l0", "before") for model in ("transformer", "lstm", "decoder")},
}


def runs(rank: int, count: int, folder: Path, table: dict[str, tuple[str, str, str]], parts: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    mesh, share = init_device_mesh("cpu", (count,)), Share(rank, count)
    return {key: together(*case[:2], mesh, share, case[2], parts) for key, case in table.items()}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    preload = ("transformers.models.llama.modeling_llama",)
    return run_ranks_once(tmp_path_factory, "sharding-2", runs, 2, TWO, 1, preload=preload)[0]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """With batches in two parts."""
    return run_ranks_once(tmp_path_factory, "sharding-4", runs, 4, FOUR, 2)[0]


TRUTH: dict[tuple[str, str], dict[str, Any]] = {}


def truth(model: str, method: str) -> dict[str, Any]:
    if (model, method) not in TRUTH:
        TRUTH[model, method] = alone(model, method)
    return TRUTH[model, method]


def assert_same(results: list[dict[str, Any]], key: str, expected: dict[str, Any]) -> None:
    first, *others = (result[key] for result in results)
    for name in ("losses", "state", "masks", "evaluated", "given", "small"):
        torch.testing.assert_close(
            first[name], expected[name], rtol=1e-4, atol=1e-5, msg=lambda text, at=name: f"{at}: {text}"
        )
    for other in others:
        assert other["sizes"] == first["sizes"] == expected["sizes"]
        assert not other["small"]
        for name in ("state", "masks"):
            for part, value in first[name].items():
                assert torch.equal(value, other[name][part]), f"{name}: {part}"


@pytest.mark.parametrize("key", TWO)
def test_two_ranks_give_what_one_gives(two: Any, key: str) -> None:
    """Losses, gates, weights, evaluation and compact model; the ranks agree bit for bit."""
    assert_same(two, key, truth(*TWO[key][:2]))


@pytest.mark.parametrize("key", FOUR)
def test_four_ranks_give_what_one_gives(four: Any, key: str) -> None:
    """Gated after `fully_shard` too, and with gradients of two backward passes."""
    assert_same(four, key, truth(*FOUR[key][:2]))


def on_gpu(rank: int, count: int, folder: Path) -> dict[str, Any]:
    """One rank: compact models of shards on the GPU, of shards on the host that the GPU computes with, and of neither.

    Gates are made on the host, and `fully_shard` moves their buffers.
    """
    warnings.simplefilter("ignore")
    mesh, seen = init_device_mesh("cuda", (1,)), {}
    cases: dict[str, Any] = {"plain": None, "sharded": {}, "offloaded": {"offload_policy": CPUOffloadPolicy()}}
    for method in METHODS:
        for case, policy in cases.items():
            pruner = prune(build("tied"), method)
            # masks are drawn on the host
            pruner.model.train()
            if policy is None:
                pruner.model.cuda()
            else:
                shard(pruner.model, mesh, **policy)
            optimizer = torch.optim.SGD(pruner.weight_parameters(), lr=0.1)
            for step in range(STEPS):
                loss_of(pruner.model, tokens_of(step).cuda()).backward()
                optimizer.step()
                optimizer.zero_grad()
                pruner.step()
            small = pruner.compact()
            seen[f"{method} {case}"] = {name: each.clone() for name, each in small.state_dict().items()}
    return seen


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_shards_on_a_gpu_give_what_the_whole_model_gives_there(tmp_path: Path) -> None:
    """Noise differs between host and GPU, so both are on the GPU. The compact model of shards is on the host."""
    (seen,) = run_ranks(on_gpu, 1, tmp_path)
    for method in METHODS:
        for case in ("sharded", "offloaded"):
            small = seen[f"{method} {case}"]
            assert all(each.device.type == "cpu" for each in small.values())
            whole = {name: each.cpu() for name, each in seen[f"{method} plain"].items()}
            torch.testing.assert_close(small, whole, rtol=1e-4, atol=1e-5)
