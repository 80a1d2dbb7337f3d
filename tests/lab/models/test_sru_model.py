"""SRU layers, stacks and the language model: sizes, start, state, causality, dropout, and how they are pruned."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import rankwise as rw
from rankwise.lab.models.adaptive import Clusters
from rankwise.lab.models.sru import SRU, SRUConfig, SRULanguageModel, SRULayer

ENWIK8 = SRUConfig(num_words=205, embedding_width=205, width=3056, num_layers=6, rank=512)
TINY = SRUConfig(num_words=13, embedding_width=6, width=16, num_layers=3, rank=10, dropout=0.0)
VARIANTS = [
    TINY,
    replace(TINY, layer_norm=True, rescale=True),
    replace(TINY, embedding_width=16, rank=None, rescale=True),
    replace(TINY, embedding_width=16, first_rank=9, layer_norm=True),
]


def tokens(batch: int = 4, steps: int = 12, seed: int = 0) -> Tensor:
    return torch.randint(TINY.num_words, (batch, steps), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "config, params",
    [
        (ENWIK8, 34_541_414),
        (replace(ENWIK8, layer_norm=True), 34_572_384),
        (replace(ENWIK8, rank=None, width=1536), 37_042_934),
        (replace(ENWIK8, rank=None, width=2048), 65_105_142),
    ],
    ids=["enwik8", "enwik8 with layer norm", "np-l0 1536", "np-l0 2048"],
)
def test_the_models_of_the_paper_have_their_exact_size(config: SRUConfig, params: int) -> None:
    with torch.device("meta"):
        assert rw.count(SRULanguageModel(config)) == params


@pytest.mark.parametrize("layer_norm, params", [(False, 50_429_952), (True, 50_479_104)])
def test_the_stack_for_wikitext_103_has_its_exact_size(layer_norm: bool, params: int) -> None:
    """100,222,876 less the embedding (49,525,184) and the softmax biases (267,740)."""
    with torch.device("meta"):
        assert rw.count(SRU(2048, 2048, 12, rank=512, first_rank=512, layer_norm=layer_norm)) == params


def test_prunable_parameters_are_those_of_the_paper() -> None:
    with torch.device("meta"):
        plan = rw.find_plan(SRULanguageModel(ENWIK8), include=r"sru\..*")
    assert plan.params == 33_799_360


@pytest.mark.parametrize("input_width", [400, 300])
@pytest.mark.parametrize("rank", [None, 200])
@pytest.mark.parametrize("options", [{}, {"dropout": 0.36}, {"rescale": True}, {"layer_norm": True}], ids=str)
def test_projections_start_with_the_variance_of_the_sru_package(
    input_width: int, rank: int | None, options: dict[str, float]
) -> None:
    """Whether W is one matrix or a low-rank pair."""
    layer = SRULayer(input_width, 400, rank=rank, highway_bias=-1.0, **options)
    weight = layer.projection(torch.eye(input_width)).t()
    expected = [1 - options.get("dropout", 0.0), 0.5, 0.5, 1.0]
    if "rescale" in options:
        expected[3] = 1 + 2 * math.exp(-1.0)
    if "layer_norm" in options:
        expected = [0.01 * v for v in expected]
    blocks = weight.view(layer.num_projections, 400, input_width)
    found = blocks.square().mean((1, 2)) * input_width
    torch.testing.assert_close(found, torch.tensor(expected[: layer.num_projections]), rtol=0.05, atol=0)
    torch.testing.assert_close(layer.weight_c.square().mean(), torch.tensor(0.5), rtol=0.2, atol=0)
    assert layer.bias[:400].eq(0).all()
    assert layer.bias[400:].eq(-1).all()


@pytest.mark.parametrize("config", VARIANTS, ids=range(len(VARIANTS)))
@pytest.mark.parametrize("cuts", [(5,), (1, 2, 11)], ids=str)
def test_windows_with_carried_state_equal_one_long_window(config: SRUConfig, cuts: Sequence[int]) -> None:
    """Outputs, the last state and, as the state is not detached, every gradient."""
    model = SRULanguageModel(config).double()
    words = tokens()
    whole, whole_state = model(words)
    whole.square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]

    model.zero_grad()
    state, parts = None, []
    for start, end in itertools.pairwise((0, *cuts, words.shape[1])):
        logits, state = model(words[:, start:end], state)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    torch.testing.assert_close(state, whole_state)
    torch.cat(parts, 1).square().sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)


def test_gradients_flow_through_the_state_unless_it_is_detached() -> None:
    model = SRULanguageModel(TINY)
    _, state = model(tokens(seed=1))
    assert state.shape == (TINY.num_layers, 4, TINY.width)
    model(tokens(seed=2), state.detach())[0].sum().backward()
    without = model.sru.layers[0].weight_c.grad.clone()
    model.zero_grad()
    model(tokens(seed=2), state)[0].sum().backward()
    assert not torch.allclose(model.sru.layers[0].weight_c.grad, without)


@pytest.mark.parametrize("config", VARIANTS, ids=range(len(VARIANTS)))
def test_a_word_changes_no_output_before_it_and_none_of_another_sequence(config: SRUConfig) -> None:
    model = SRULanguageModel(config)
    words = tokens()
    changed = words.clone()
    changed[1, 7] = (words[1, 7] + 1) % config.num_words
    with torch.no_grad():
        same = (model(words)[0] == model(changed)[0]).all(-1)
    assert same[1, :7].all()
    assert not same[1, 7:].any()
    assert same[[0, 2, 3]].all()


def test_dropout_draws_one_mask_a_sequence_in_all_layers_but_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[Tensor] = []
    plain = F.dropout

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        y = plain(x, p, training, inplace)
        masks.append(y)
        return y

    monkeypatch.setattr(F, "dropout", dropout)
    model = SRU(8, 64, 3, dropout=0.25)
    model(torch.randn(5, 6, 8))
    assert [tuple(mask.shape) for mask in masks] == [(6, 64)] * 2
    assert set(masks[0].unique().tolist()) == {0.0, plain(torch.ones(99), 0.25).max().item()}
    assert not torch.equal(masks[0], masks[1])
    masks.clear()
    model.eval()(torch.randn(5, 6, 8))
    assert not masks


def test_a_dropped_unit_passes_its_highway_on() -> None:
    layer = SRULayer(400, 400, rescale=True, highway_bias=-1.0, dropout=0.5)
    x = torch.randn(6, 2, 400)
    h, _ = layer(x)
    dropped = (h == layer.scale * x).all(0)
    assert 0.4 < dropped.float().mean() < 0.6


def test_dropout_is_on_embedding_and_output_too() -> None:
    model = SRULanguageModel(replace(TINY, width=200, dropout=0.5))
    hidden, _ = model.hidden(tokens())
    assert 0.4 < hidden.eq(0).float().mean() < 0.6
    assert not model.eval().hidden(tokens())[0].eq(0).any()
    assert torch.equal(model(tokens())[0], model(tokens())[0])


def test_with_clusters_embedding_and_output_are_adaptive_and_tied() -> None:
    clusters = Clusters(cutoffs=(3, 6), widths=(6, 4, 2))
    model = SRULanguageModel(replace(TINY, embedding_width=TINY.width, dropout=0.0, clusters=clusters))
    logits, state = model(tokens())
    torch.testing.assert_close(logits.exp().sum(-1), torch.ones(4, 12))
    hidden, hidden_state = model.hidden(tokens())
    assert torch.equal(model.output(hidden), logits)
    assert torch.equal(hidden_state, state)
    sites = [site for site in rw.find_plan(model).sites if site.has_embedding]
    assert [[use.name for use in site.uses] for site in sites] == [
        [f"embedding.clusters.{i}", f"output.clusters.{i}"] for i in range(3)
    ]
    with pytest.raises(ValueError, match="`embedding_width` must be `width`"):
        replace(TINY, embedding_width=TINY.width + 1, clusters=clusters)


def test_mixed_precision_keeps_the_state_in_float32() -> None:
    model = SRULanguageModel(replace(TINY, layer_norm=True))
    expected, _ = model(tokens())
    with torch.autocast("cpu", torch.bfloat16):
        logits, state = model(tokens())
    assert (logits.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(logits.float(), expected, rtol=0.1, atol=0.05)
    half, state = model.bfloat16()(tokens())
    assert (half.dtype, state.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("rank, kind", [(10, "linear-pair"), (None, "linear")])
def test_the_plan_finds_every_matrix(rank: int | None, kind: str) -> None:
    plan = rw.find_plan(SRULanguageModel(replace(TINY, rank=rank)))
    assert {site.name: site.uses[0].kind for site in plan.sites} == {
        "embedding": "embedding",
        "sru.layers.0.projection": "linear",
        "sru.layers.1.projection": kind,
        "sru.layers.2.projection": kind,
        "output": "linear",
    }
    assert [site.pair_rank for site in plan.sites] == [None, None, rank, rank, None]
    assert not plan.left_out


@pytest.mark.filterwarnings("ignore:.* of the gates had not decided")
@pytest.mark.parametrize("config", VARIANTS, ids=range(len(VARIANTS)))
def test_a_pruned_model_meets_its_budget_and_keeps_its_outputs(config: SRUConfig, tmp_path: Path) -> None:
    model = SRULanguageModel(replace(config, dropout=0.1))
    dense = rw.count(model)
    pruner = rw.Pruner(model, rw.Budget(removed=0.5), method="flop-l0", anneal_steps=6, gate_lr=5.0)
    optimizer = torch.optim.Adam(pruner.weight_parameters(), lr=1e-3)
    state = None
    for step in range(10):
        words = tokens(seed=step)
        logits, state = model(words[:, :-1], state)
        F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten()).backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()
        state = state.detach()

    small = pruner.compact()
    unused = zip(pruner.account.curves, pruner.ranks().values(), strict=True)
    steps = [curve(k + 1) - curve(k) for curve, k in unused if k < curve.num_components]
    assert 0 <= dense // 2 - rw.count(small) < min(steps)

    rw.save(small, tmp_path / "small")
    loaded = rw.load(tmp_path / "small", SRULanguageModel(config))
    for twin in (small, loaded):
        with torch.no_grad():
            for got, want in zip(twin.eval()(tokens(), state), model.eval()(tokens(), state), strict=True):
                assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="`num_layers` must be at least 1, but is 0"):
        replace(TINY, num_layers=0)
    with pytest.raises(ValueError, match="`rank` must be at least 1, or None for a plain matrix, but is 0"):
        replace(TINY, rank=0)
    with pytest.raises(ValueError, match=r"`dropout` must lie in \[0, 1\), but is 1.0"):
        replace(TINY, dropout=1.0)
    with pytest.raises(ValueError, match="`input_width` must be at least 1, but is 0"):
        SRULayer(0, 4)
    with pytest.raises(ValueError, match="`state_LBD` must hold 3 layers, but holds 2"):
        SRULanguageModel(TINY)(tokens(), torch.zeros(2, 4, TINY.width))
