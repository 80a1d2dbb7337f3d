"""Attention, recurrent modules and pointwise convolutions: split into layers they compute the same, and are pruned."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import rankwise as rw
from rankwise import split
from rankwise.split import SPLIT, all_split

pytestmark = pytest.mark.filterwarnings("ignore:.* of the gates had not decided", "ignore:The PyTorch API of nested")

WORDS = 13


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [] if value is None else [tensor for part in value for tensor in tensors(part)]


ATTENTION: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "self": ({"batch_first": True}, lambda: dict.fromkeys(("query", "key", "value"), torch.randn(3, 5, 8))),
    "time first, no bias": (
        {"bias": False},
        lambda: {"query": torch.randn(5, 3, 8), "key": torch.randn(6, 3, 8), "value": torch.randn(6, 3, 8)},
    ),
    "widths of their own": (
        {"kdim": 6, "vdim": 4},
        lambda: {"query": torch.randn(5, 3, 8), "key": torch.randn(6, 3, 6), "value": torch.randn(6, 3, 4)},
    ),
    "without a batch": ({}, lambda: dict.fromkeys(("query", "key", "value"), torch.randn(5, 8))),
    "masks": (
        {"batch_first": True},
        lambda: {
            **dict.fromkeys(("query", "key", "value"), torch.randn(3, 5, 8)),
            "attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1),
            "key_padding_mask": torch.tensor([[False] * 5, [False] * 4 + [True], [False] * 3 + [True] * 2]),
            "is_causal": True,
        },
    ),
    "a mask for each head": (
        {"batch_first": True},
        lambda: {**dict.fromkeys(("query", "key", "value"), torch.randn(3, 5, 8)), "attn_mask": torch.randn(6, 5, 5)},
    ),
}


@pytest.mark.parametrize("case", ATTENTION)
@pytest.mark.parametrize("need_weights, average", [(True, True), (True, False), (False, True)])
def test_split_attention_is_attention(case: str, need_weights: bool, average: bool) -> None:
    torch.manual_seed(0)
    settings, inputs = ATTENTION[case]
    module = nn.MultiheadAttention(8, 2, **settings)
    given = {**inputs(), "need_weights": need_weights, "average_attn_weights": average}
    expected = tensors(module(**given))
    before = module.state_dict()
    with all_split(module):
        assert type(module) in SPLIT.values()
        torch.testing.assert_close(tensors(module(**given)), expected)
    assert type(module) is nn.MultiheadAttention
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    torch.testing.assert_close(tensors(module(**given)), expected)


def test_split_attention_offers_its_packed_weights() -> None:
    module = nn.MultiheadAttention(8, 2)
    weight, bias = module.in_proj_weight, module.in_proj_bias
    with all_split(module):
        torch.testing.assert_close(module.in_proj_weight + 0, weight)
        torch.testing.assert_close(module.in_proj_bias, bias)


RECURRENT: dict[str, tuple[Callable[[], nn.RNNBase], tuple[int, ...]]] = {
    "lstm": (lambda: nn.LSTM(6, 8), (5, 3, 6)),
    "lstm, all there is": (lambda: nn.LSTM(6, 8, 2, bidirectional=True, batch_first=True), (3, 5, 6)),
    "gru": (lambda: nn.GRU(6, 8, bias=False), (5, 3, 6)),
    "gru, all there is": (lambda: nn.GRU(6, 8, 3, bidirectional=True), (5, 3, 6)),
    "gru without a batch": (lambda: nn.GRU(6, 8, 2), (5, 6)),
}


@pytest.mark.parametrize("case", RECURRENT)
@pytest.mark.parametrize("by_steps", [False, True])
@pytest.mark.parametrize("has_state", [False, True])
def test_a_split_recurrent_module_is_the_stock_one(case: str, by_steps: bool, has_state: bool) -> None:
    torch.manual_seed(0)
    build, shape = RECURRENT[case]
    module, x = build().double(), torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    state = module(x)[1] if has_state else None
    state = (
        tuple(each.detach() for each in state)
        if isinstance(state, tuple)
        else state
        if state is None
        else state.detach()
    )
    expected = tensors(module(x, state))
    gradients = torch.autograd.grad(sum(t.square().sum() for t in expected), (x, module.weight_hh_l0))
    with all_split(module):
        called: list[nn.Module] = []
        if by_steps:
            module.hh_l0.register_forward_hook(lambda layer, args, output: called.append(layer))
        found = tensors(module(x, state))
        assert bool(called) == by_steps
        torch.testing.assert_close(found, expected)
        again = torch.autograd.grad(sum(t.square().sum() for t in found), (x, module.hh_l0.weight))
        torch.testing.assert_close(again, gradients)
        torch.testing.assert_close(tensors(copy.deepcopy(copy.deepcopy(module))(x, state)), expected)
        assert torch.equal(module.weight_hh_l0, module.hh_l0.weight)


def test_packed_sequences_go_through_a_split_module() -> None:
    module, x = nn.LSTM(6, 8, 2), torch.randn(5, 3, 6)
    packed = pack_padded_sequence(x, torch.tensor([5, 4, 2]))
    expected = pad_packed_sequence(module(packed)[0])[0]
    with all_split(module):
        found = module(packed)[0]
        assert isinstance(found, PackedSequence)
        torch.testing.assert_close(pad_packed_sequence(found)[0], expected)


@pytest.mark.parametrize("shape", [(3, 6, 5), (6, 5)])
def test_a_split_convolution_is_the_stock_one(shape: tuple[int, ...]) -> None:
    module, x = nn.Conv1d(6, 8, 1), torch.randn(*shape)
    expected, weight = module(x), module.weight
    with all_split(module):
        torch.testing.assert_close(module(x), expected)
        torch.testing.assert_close(module.weight + 0, weight)


def test_a_packed_weight_that_others_hold_too_is_left_out() -> None:
    first, second = nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 2)
    second.in_proj_weight = first.in_proj_weight
    plan = rw.find_plan(nn.ModuleList([first, second, nn.Linear(8, 8)]))
    assert {item.reason for item in plan.left_out} == {"it shares a packed weight with another module"}
    # torch reads the weight of `out_proj`, and the gated layer gives it
    assert [site.name for site in plan.sites] == ["0.out_proj", "1.out_proj", "2"]


# models


class Recurrent(nn.Module):
    """Words in, logits out, by a recurrent module."""

    def __init__(self, kind: Any, *, tied: bool = False, **settings: Any) -> None:
        super().__init__()
        self.words, self.rnn = nn.Embedding(WORDS, 16), kind(16, 16, batch_first=True, **settings)
        self.head = nn.Linear(16 * (2 if self.rnn.bidirectional else 1), WORDS, bias=not tied)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.words(tokens))[0])


class Encoder(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, **settings)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.encoder(self.words(tokens), mask, is_causal=True))


class Decoder(nn.Module):
    """Looks at the words that it embeds through another attention."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(WORDS, 16), nn.TransformerDecoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.mix, self.head = nn.Conv1d(16, 16, 1), nn.Linear(16, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        return self.head(self.layer(x, self.mix(x.transpose(1, 2)).transpose(1, 2)))


class OwnWidths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.keys = nn.Embedding(WORDS, 16), nn.Embedding(WORDS, 12)
        self.attention, self.head = nn.MultiheadAttention(16, 2, kdim=12, vdim=12), nn.Linear(16, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.attention(self.words(tokens), self.keys(tokens), self.keys(tokens))[0])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Recurrent(nn.LSTM, num_layers=2),
    "lstm both ways": lambda: Recurrent(nn.LSTM, bidirectional=True),
    "tied gru": lambda: Recurrent(nn.GRU, tied=True, bias=False),
    "encoder": Encoder,
    "encoder with norms first": lambda: Encoder(norm_first=True),
    "decoder and pointwise convolution": Decoder,
    "keys of another width": OwnWidths,
}
METHODS: dict[str, dict[str, Any]] = {
    "flop-l0": {"anneal_steps": 4, "gate_lr": 5.0},
    "flop-agp": {"anneal_steps": 4},
    "np-l0": {"anneal_steps": 4, "gate_lr": 5.0},
    "agp": {"anneal_steps": 4},
    "fac": {},
}
TOKENS = torch.arange(40).view(4, 10) % WORDS


def pruned(name: str, method: str, steps: int) -> rw.Pruner:
    torch.manual_seed(0)
    model = MODELS[name]()
    budget = rw.Budget(removed=0.4, of="prunable")
    pruner = rw.Pruner(model, budget, method, rw.find_plan(model), example=TOKENS, **METHODS[method])
    train(pruner, steps)
    return pruner


def train(pruner: rw.Pruner, steps: int) -> None:
    optimizer = torch.optim.SGD(pruner.weight_parameters(), lr=0.1)
    pruner.model.train()
    for _ in range(steps):
        logits = pruner.model(TOKENS)
        nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS.flatten()).backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", METHODS)
def test_every_model_is_pruned_to_its_budget_saved_and_loaded(name: str, method: str, tmp_path: Path) -> None:
    pruner = pruned(name, method, 5)
    small = pruner.compact().eval()
    if method == "agp":
        assert sum(int(p.count_nonzero()) for p in small.parameters()) <= pruner.limit
    else:
        assert rw.count(small) == pruner.size().exported <= pruner.limit
        slack = max(curve(1) for curve in pruner.account.curves)
        assert pruner.limit - rw.count(small) < slack
    for grads in (torch.no_grad(), torch.enable_grad()):
        with grads:
            expected = pruner.model.eval()(TOKENS)
            torch.testing.assert_close(small(TOKENS), expected, rtol=1e-5, atol=1e-5)
    rw.save(small, tmp_path / "small")
    skeleton = MODELS[name]()
    loaded = rw.load(tmp_path / "small", skeleton)
    assert loaded is skeleton
    torch.testing.assert_close(loaded.eval()(TOKENS), small(TOKENS), rtol=0, atol=0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", ["flop-l0", "np-l0"])
def test_a_resumed_run_ends_with_the_same_weights(name: str, method: str) -> None:
    whole = pruned(name, method, 6)
    first = pruned(name, method, 3)
    state = copy.deepcopy(first.state_dict())
    second = pruned(name, method, 0)
    second.load_state_dict(state)
    train(second, 3)
    for key, tensor in whole.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[key]), key


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("calibration", [None, [TOKENS]])
def test_every_model_is_compressed_without_training(name: str, calibration: Any) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    before, kinds = model.eval()(TOKENS), [type(module) for module in model.modules()]
    whole = rw.compress(model, rw.Budget(params=rw.count(model)), calibration)
    torch.testing.assert_close(whole(TOKENS), before, rtol=1e-4, atol=1e-5)
    small = rw.compress(model, rw.Budget(removed=0.3), calibration)
    assert rw.count(small) <= 0.7 * rw.count(model)
    assert small(TOKENS).isfinite().all()
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.parametrize("name", ["lstm", "tied gru"])
def test_a_compact_recurrent_module_that_calls_its_layers_gives_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = pruned(name, "fac", 2).compact().eval()
    expected = small(TOKENS)
    monkeypatch.setitem(split.STEP_COST, "cpu", 0.0)
    torch.testing.assert_close(small(TOKENS), expected, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_leaves_the_skeleton_as_it_is(tmp_path: Path) -> None:
    rw.save(pruned("lstm", "fac", 2).compact(), tmp_path / "small")
    other = Recurrent(nn.LSTM, num_layers=1)
    with pytest.raises(rw.CheckpointError, match="ih_l1"):
        rw.load(tmp_path / "small", other)
    assert type(other.rnn) is nn.LSTM


@pytest.mark.parametrize("name", ["lstm", "encoder", "tied gru"])
def test_most_of_a_stock_model_can_be_removed(name: str) -> None:
    model = MODELS[name]()
    assert rw.find_plan(model).params >= 0.8 * rw.count(model)


def test_excluding_a_module_excludes_its_layers() -> None:
    model = MODELS["lstm"]()
    plan = rw.find_plan(model, exclude=["rnn"])
    assert {site.name for site in plan.sites} == {"words", "head"}
    rw.Pruner(model, rw.Budget(removed=0.05), "fac", plan)
    assert type(model.rnn) is nn.LSTM


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("exclude", [(), ("self_attn",), ("linear1", "linear2")])
def test_the_fast_path_of_a_stock_encoder_is_not_taken_with_other_weights(exclude: tuple[str, ...]) -> None:
    """In evaluation mode torch passes weights on to one kernel, and words that are not padding in nested tensors."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(3, 5, 16)
    padding = torch.tensor([[False] * 5, [False] * 4 + [True], [False] * 3 + [True] * 2])
    budget = rw.Budget(removed=0.4, of="prunable")
    pruner = rw.Pruner(model, budget, "fac", rw.find_plan(model, exclude=exclude))
    for each in (model, pruner.compact().eval()):
        # with gradients, torch calls every layer
        expected = each(x, src_key_padding_mask=padding)
        with torch.no_grad():
            found = each(x, src_key_padding_mask=padding)
        torch.testing.assert_close(found[~padding], expected[~padding], rtol=1e-4, atol=1e-5)
