"""Compression block by block: what is replayed, what is fitted, and what training a block may do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankwise as rw
from rankwise.adapters.plans import find_plan
from rankwise.core.blocks import Call, find_blocks, output_gradients, record_calls
from rankwise.core.factorize import Moments, anchored, svd
from rankwise.oneshot.blockwise import Blocks, Refinement, refine
from tests.hf.hf_families import build as family


class Block(nn.Module):
    """A residual block that is called with a scale besides its hidden states, and may remember earlier calls."""

    def __init__(self, width: int, *, remembers: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 24), nn.Linear(24, width), nn.LayerNorm(width)
        self.calls, self.remembers = 0, remembers

    def forward(self, x: Tensor, *, scale: Tensor) -> tuple[Tensor, None]:
        self.calls += self.remembers
        return x + scale * self.down(torch.relu(self.up(self.norm(x)))) + self.calls, None


class Stack(nn.Module):
    def __init__(self, num_blocks: int = 3, width: int = 16, *, skips: bool = False, remembers: bool = False) -> None:
        super().__init__()
        self.words, self.skips = nn.Embedding(30, width), skips
        self.blocks = nn.ModuleList(Block(width, remembers=remembers) for _ in range(num_blocks))
        self.head = nn.Linear(width, 30)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            given = x + 0 if self.skips else x
            x, _ = block(given, scale=torch.tensor(0.5))
        y: Tensor = self.head(x)
        return y


def texts(number: int = 9) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 30, (2, 12), generator=generator) for _ in range(number)]


def test_blocks_are_a_chain_that_can_be_repeated() -> None:
    names = ["blocks.0", "blocks.1", "blocks.2"]
    assert find_blocks(Stack(), texts()[0]) == names
    assert find_blocks(Stack(skips=True), texts()[0]) == []
    assert find_blocks(Stack(remembers=True), texts()[0]) == []
    assert find_blocks(nn.Linear(4, 4), torch.randn(2, 4)) == []


def test_recorded_calls_give_the_model_again() -> None:
    model = Stack()
    names = find_blocks(model, texts()[0])
    inputs, calls = record_calls(model, names, texts())
    for number, tokens in enumerate(texts()):
        x = inputs[number]
        for name, each in zip(names, calls, strict=True):
            x = each[number](model.get_submodule(name), x)
        torch.testing.assert_close(model.head(x), model(tokens))


def test_a_cache_is_left_out_of_a_call() -> None:
    seen: dict[str, Any] = {}

    class Watched(nn.Module):
        def forward(self, x: Tensor, past: object, mask: str, **kwargs: Any) -> Tensor:
            seen.update(kwargs, past=past, mask=mask)
            return x

    class Cache:
        def get_seq_length(self) -> int:
            return 0

    x = torch.randn(1, 2, 3)
    call = Call.of((x, Cache(), "mask"), {"past_key_values": object(), "use_cache": True, "positions": 7})
    assert call(Watched(), x) is x
    assert seen == {"past": None, "mask": "mask", "past_key_values": None, "use_cache": False, "positions": 7}


def test_gradients_of_outputs_are_those_of_autograd() -> None:
    model, tokens = Stack(), texts()[0]
    with output_gradients(model, ["blocks.1"]) as found:
        model(tokens).square().sum().backward()
    x = model.words(tokens)
    for block in model.blocks[:2]:
        x, _ = block(x, scale=torch.tensor(0.5))
    x = x.detach().requires_grad_()
    last, _ = model.blocks[2](x, scale=torch.tensor(0.5))
    (g,) = torch.autograd.grad(model.head(last).square().sum(), x)
    g = g.flatten(0, 1)
    torch.testing.assert_close(found["blocks.1"], g.t() @ g)


def moments(x0: Tensor, x: Tensor) -> Moments:
    return Moments(x.t() @ x / len(x), cross_II=x0.t() @ x / len(x))


def test_an_anchored_matrix_is_the_least_squares_one() -> None:
    """The oracle: the solution of min |W x0 - M x|, and W itself where both read the same."""
    torch.manual_seed(0)
    x0 = torch.randn(200, 8, dtype=torch.double)
    x = x0 @ torch.randn(8, 8, dtype=torch.double) + 0.1 * torch.randn(200, 8, dtype=torch.double)
    weight = torch.randn(5, 8, dtype=torch.double)
    want = torch.linalg.lstsq(x, x0 @ weight.t()).solution.t()
    torch.testing.assert_close(anchored(weight, moments(x0, x), damping=1e-12), want, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(anchored(weight, moments(x, x)), weight)
    torch.testing.assert_close(anchored(weight, Moments(x.t() @ x)), weight)


@pytest.mark.parametrize("rank", [1, 3, 5])
@pytest.mark.parametrize("shape", [(5, 8), (12, 8)])
def test_anchored_factors_are_no_worse_than_any_other_of_their_rank(rank: int, shape: tuple[int, int]) -> None:
    """The oracle: reduced rank regression, the best outputs by least squares projected on their leading directions."""
    torch.manual_seed(0)
    x0 = torch.randn(300, shape[1], dtype=torch.double)
    x = x0 + 0.5 * torch.randn(300, shape[1], dtype=torch.double)
    weight = torch.randn(*shape, dtype=torch.double)
    y = x0 @ weight.t()
    fitted = x @ torch.linalg.lstsq(x, y).solution
    u, s, v = torch.linalg.svd(fitted, full_matrices=False)
    want = (u[:, :rank] * s[:rank] @ v[:rank] - y).square().sum()
    factors = svd(weight, rank, moments(x0, x), damping=1e-12)
    torch.testing.assert_close((x @ (factors.p_OR @ factors.q_RI).t() - y).square().sum(), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(5, 8), (12, 8)])
def test_factors_by_two_outputs_at_once_are_the_svd_in_that_metric(shape: tuple[int, int]) -> None:
    """The oracle: the truncated SVD of K^T W L, with G = K K^T and C = L L^T."""
    torch.manual_seed(0)
    weight = torch.randn(*shape, dtype=torch.double)
    g, c = (a @ a.t() for a in (torch.randn(n, 2 * n, dtype=torch.double) for n in shape))
    factors = svd(weight, 3, Moments(c, g.diagonal(), outputs_OO=g), damping=1e-12)
    k, root = torch.linalg.cholesky(g), torch.linalg.cholesky(c)
    u, s, v = torch.linalg.svd(k.t() @ weight @ root)
    torch.testing.assert_close(k.t() @ (factors.p_OR @ factors.q_RI) @ root, (u[:, :3] * s[:3]) @ v[:3])
    torch.testing.assert_close(factors.energy_R, s[:3].square())


def shrunk(model: nn.Module, name: str) -> None:
    """A layer with half of its singular values."""
    layer = model.get_submodule(name)
    factors = svd(layer.weight, min(layer.weight.shape) // 2)
    with torch.no_grad():
        layer.weight.copy_(factors.p_OR @ factors.q_RI)


def test_refining_a_block_lowers_its_error_on_text_that_it_was_not_trained_on() -> None:
    torch.manual_seed(0)
    model = Stack()
    inputs, calls = record_calls(model, ["blocks.0"], texts())
    targets = [call(model.blocks[0], x).detach() for call, x in zip(calls[0], inputs, strict=True)]
    shrunk(model, "blocks.0.up")
    before = copy.deepcopy(model.blocks[0].state_dict())
    errors = refine(model.blocks[0], calls[0], inputs, targets, None, Refinement(steps=60, learning_rate=1e-2))
    assert errors[1] < 0.8 * errors[0]
    # nothing is changed by no steps, and a block that became worse is put back
    for settings in (Refinement(steps=0), Refinement(steps=3, learning_rate=1e3)):
        model.blocks[0].load_state_dict(before)
        first, second = refine(model.blocks[0], calls[0], inputs, targets, None, settings)
        assert first == second
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.blocks[0].state_dict().items())


def test_errors_on_which_the_loss_does_not_depend_cost_nearly_nothing() -> None:
    torch.manual_seed(0)
    model = Stack()
    inputs, calls = record_calls(model, ["blocks.0"], texts())
    targets = [call(model.blocks[0], x).detach() for call, x in zip(calls[0], inputs, strict=True)]
    weights = torch.zeros(16, 16)
    weights[:8, :8] = torch.eye(8)
    for part, costs in ((slice(8, 16), False), (slice(0, 8), True)):
        wrong = [y.clone() for y in targets]
        for y in wrong:
            y[..., part] += 1
        error, _ = refine(model.blocks[0], calls[0], inputs, wrong, weights, Refinement(steps=0, floor=1e-6))
        assert (error > 1e-2) == costs


@pytest.mark.parametrize("anchor", [False, True])
def test_blocks_are_compressed_in_turn_and_each_reads_what_the_last_one_gives(anchor: bool) -> None:
    model = Stack()
    plan, names = find_plan(model), find_blocks(model, texts()[0])
    blocks = Blocks(model, names, lambda: record_calls(model, names, texts()), anchor=anchor)
    dense = copy.deepcopy(model)
    seen: dict[str, Moments] = {}
    for number, name in enumerate(names):

        def shrink(site: Any, moments: Moments) -> None:
            seen[site.name] = moments
            shrunk(model, site.name)

        blocks.compress(number, blocks.sites(number, plan.sites), shrink, None, Refinement(steps=0))
        read: dict[str, list[Tensor]] = {"small": [], "dense": []}
        for which, each in (("small", model), ("dense", dense)):
            layer = each.get_submodule(f"{name}.down")
            handle = layer.register_forward_pre_hook(lambda _, args, to=read[which]: to.append(args[0].flatten(0, 1)))
            for tokens in texts():
                each(tokens)
            handle.remove()
        x, x0 = torch.cat(read["small"]), torch.cat(read["dense"])
        torch.testing.assert_close(seen[f"{name}.down"].inputs_II, x.t() @ x / len(x))
        cross = seen[f"{name}.down"].cross_II
        assert (cross is not None) == anchor
        if cross is not None:
            torch.testing.assert_close(cross, x0.t() @ x / len(x))


def test_a_model_is_compressed_and_refined_to_the_exact_size() -> None:
    torch.manual_seed(0)
    model, losses = Stack(), {}
    for steps in (0, 80):
        settings: Any = {"refinement": Refinement(steps=steps, learning_rate=1e-2), "target": "cpu"}
        small = rw.compress(model, rw.Budget(removed=0.4), texts(), **settings)
        limit = rw.count(model) * 6 // 10
        assert limit - 100 < rw.count(small) <= limit
        others = torch.cat(texts(20)[9:])
        losses[steps] = (small(others).log_softmax(-1) - model(others).log_softmax(-1)).square().mean()
    assert losses[80] < losses[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("build", [Stack, partial(family, "gpt2")], ids=["stack", "gpt2"])
def test_a_model_of_any_precision_is_refined_and_keeps_it(build: Callable[[], Any], dtype: torch.dtype) -> None:
    """GPT-2 has a layer norm behind a sum within a block."""
    torch.manual_seed(0)
    model, errors = build().to(dtype), {}
    for steps in (0, 80):
        settings: Any = {"refinement": Refinement(steps=steps, learning_rate=1e-2), "target": "cpu"}
        small = rw.compress(model, rw.Budget(removed=0.4), texts(), **settings)
        assert {tensor.dtype for tensor in small.state_dict().values()} == {dtype}
        found, wanted = (each(torch.cat(texts(20)[9:])) for each in (small, model))
        found, wanted = (getattr(each, "logits", each).float() for each in (found, wanted))
        errors[steps] = (found - wanted).square().mean()
    assert errors[80] < errors[0]


def test_a_model_that_requires_no_gradients_is_refined_all_the_same() -> None:
    settings: Any = {"refinement": Refinement(steps=5, learning_rate=1e-2), "target": "cpu"}
    torch.manual_seed(0)
    model = Stack()
    want = rw.compress(model, rw.Budget(removed=0.4), texts(), **settings)
    found = rw.compress(model.requires_grad_(False), rw.Budget(removed=0.4), texts(), **settings)
    torch.testing.assert_close(found.state_dict(), want.state_dict())
    assert not any(parameter.requires_grad for parameter in found.parameters())


class Kept:
    """Refined blocks in memory; the work is stopped after some of them."""

    def __init__(self, stops_after: int) -> None:
        self.states: dict[int, Any] = {}
        self.stops_after = stops_after

    def load(self, number: int) -> Any:
        return self.states.get(number)

    def save(self, number: int, state: Any) -> None:
        self.states[number] = {name: tensor.clone() for name, tensor in state.items()}
        if number == self.stops_after:
            raise KeyboardInterrupt


def test_work_that_was_stopped_goes_on_to_the_same_model() -> None:
    model = Stack()
    settings: Any = {"refinement": Refinement(steps=5), "target": "cpu"}
    want = rw.compress(model, rw.Budget(removed=0.4), texts(), **settings)
    kept = Kept(stops_after=1)
    with pytest.raises(KeyboardInterrupt):
        rw.compress(model, rw.Budget(removed=0.4), texts(), refined=kept, **settings)
    assert list(kept.states) == [0, 1]
    done: list[int] = []
    found = rw.compress(
        *(model, rw.Budget(removed=0.4), texts()),
        refined=kept,
        progress=lambda what, number, total: done.append(number) if what == "refining" else None,
        **settings,
    )
    assert all(torch.equal(tensor, want.state_dict()[name]) for name, tensor in found.state_dict().items())
    # only the last block was trained
    assert done == [11, 12, 13, 14, 15]


@pytest.mark.parametrize("asked", [{"refinement": Refinement(steps=2)}, {"anchor": True}])
def test_a_model_without_blocks_is_not_refined_or_anchored_in_silence(asked: dict[str, Any]) -> None:
    with pytest.raises(rw.RankwiseError, match="`refinement` and `anchor` need a model of blocks"):
        rw.compress(nn.Linear(8, 8), rw.Budget(removed=0.5), [torch.randn(4, 8)], **asked)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"steps": -1}, "`steps` must be a whole number of at least 0, but is -1"),
        ({"learning_rate": 0.0}, "`learning_rate` must be positive, but is 0.0"),
        ({"floor": 0.0}, "`floor` must be positive, but is 0.0"),
    ],
)
def test_bad_settings_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Refinement(**wrong)
