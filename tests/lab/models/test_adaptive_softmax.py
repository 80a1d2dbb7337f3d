"""Adaptive embedding and softmax: exact probabilities, a sparing loss, published sizes, one gate a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import rankwise as rw
from rankwise.lab.models.adaptive import AdaptiveConfig, AdaptiveEmbedding, AdaptiveSoftmax, WordSplit, split_words
from rankwise.modules import LowRankHead
from tests.waiting import no_waiting

WT103 = AdaptiveConfig(
    num_words=267_735,
    width=2048,
    cutoffs=(10_000, 20_000, 40_000, 60_000, 100_000),
    widths=(1024, 1024, 256, 256, 64, 64),
)
"""The released code: widths 1024 // 4 ** (cluster // 2), projected to the 2048 of its SRU."""

SMALL = AdaptiveConfig(num_words=60, width=12, cutoffs=(10, 15, 40), widths=(12, 8, 4, 2))


class Model(nn.Module):
    """Word in, next word out."""

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__()
        self.embedding = AdaptiveEmbedding(config)
        self.body = nn.Linear(config.width, config.width)
        self.softmax = AdaptiveSoftmax(config, self.embedding)

    def hidden(self, words: Tensor | WordSplit) -> Tensor:
        return torch.tanh(self.body(self.embedding(words)))

    def forward(self, words: Tensor) -> Tensor:
        return self.softmax(self.hidden(words))

    def loss(self, words: Tensor | WordSplit, targets: Tensor | WordSplit) -> Tensor:
        return self.softmax.loss(self.hidden(words), targets)


def build(config: AdaptiveConfig, dtype: torch.dtype = torch.float64) -> Model:
    """A model whose biases and weights are all at work."""
    model = Model(config).to(dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(
        zip(names, torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True), strict=True)
    )


def matrix(cluster: nn.Module) -> Tensor:
    """E_c O_c, or its counterpart in the softmax: words x D."""
    if isinstance(cluster, LowRankHead):
        return cluster.embedding.weight @ cluster.projection.weight.t()
    first, second = cluster
    return first.weight @ second.weight.t() if isinstance(first, nn.Embedding) else second.weight @ first.weight


@st.composite
def configs(draw: st.DrawFn, **fixed: Any) -> AdaptiveConfig:
    num_words = draw(st.integers(1, 30))
    cutoffs = sorted(draw(st.sets(st.integers(1, num_words - 1), max_size=5))) if num_words > 1 else []
    widths = draw(st.lists(st.integers(1, 7), min_size=len(cutoffs) + 1, max_size=len(cutoffs) + 1))
    values = {"width": draw(st.integers(1, 6)), "tie": draw(st.booleans()), "bias": draw(st.booleans())}
    return AdaptiveConfig(num_words=num_words, cutoffs=tuple(cutoffs), widths=tuple(widths), **(values | fixed))


shapes = st.sampled_from([(), (0,), (1,), (7,), (3, 0), (2, 1, 5)])


# probabilities


@given(config=configs(), shape=shapes)
def test_probabilities_sum_to_one(config: AdaptiveConfig, shape: tuple[int, ...]) -> None:
    model = build(config)
    log_prob = model.softmax.log_prob(torch.randn(*shape, config.width, dtype=torch.float64))
    assert log_prob.shape == (*shape, config.num_words)
    torch.testing.assert_close(log_prob.exp().sum(-1), torch.ones(shape, dtype=torch.float64))


@given(config=configs())
def test_probabilities_are_those_of_the_definition(config: AdaptiveConfig) -> None:
    """p(w) = p_0(w), or p_0(cluster) p_c(w): word by word."""
    model = build(config)
    h_D = torch.randn(config.width, dtype=torch.float64)
    biases = [c.bias if config.tie else c[1].bias for c in model.softmax.clusters]
    probs = [
        F.softmax(matrix(cluster) @ h_D + (0 if bias is None else bias), 0)
        for cluster, bias in zip(model.softmax.clusters, biases, strict=True)
    ]
    num_frequent = (*config.cutoffs, config.num_words)[0]
    want = []
    for word in range(config.num_words):
        c = sum(word >= cutoff for cutoff in config.cutoffs)
        factor = probs[0][num_frequent + c - 1] if c else 1
        want.append(factor * probs[c][word - (0, *config.cutoffs)[c]])
    torch.testing.assert_close(model.softmax.log_prob(h_D).exp(), torch.stack(want))


@given(config=configs(), shape=shapes, data=st.data())
def test_the_loss_is_the_log_probability_of_the_target_and_so_are_its_gradients(
    config: AdaptiveConfig, shape: tuple[int, ...], data: st.DataObject
) -> None:
    model = build(config)
    # few different words: clusters without a target, and batches within one cluster
    some = data.draw(st.lists(st.integers(0, config.num_words - 1), min_size=1, max_size=3))
    targets = torch.tensor(some)[torch.randint(len(some), shape)]
    words = torch.randint(config.num_words, shape)
    h = model.hidden(words)
    want = -model.softmax.log_prob(h).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(model.softmax.loss(h, targets, "none"), want)
    torch.testing.assert_close(model.softmax.loss(h, targets, "mean"), want.mean(), equal_nan=True)
    loss = model.softmax.loss(h, targets, "sum")
    torch.testing.assert_close(loss, want.sum())
    torch.testing.assert_close(gradients(model, loss), gradients(model, want.sum()))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tie", [True, False])
def test_one_cluster_is_the_plain_softmax(tie: bool, bias: bool) -> None:
    config = AdaptiveConfig(num_words=23, width=6, widths=(4,), tie=tie, bias=bias)
    model = build(config)
    assert config.rows == (23,)
    words, targets = torch.randint(23, (2, 9)), torch.randint(23, (2, 9))
    (front,), (head,) = model.embedding.clusters, model.softmax.clusters
    h = torch.tanh(model.body(F.embedding(words, matrix(front))))
    logits = F.linear(h, matrix(head), head.bias if tie else head[1].bias)
    want = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss = model.loss(words, targets)
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(gradients(model, loss), gradients(model, want))
    torch.testing.assert_close(model(words), F.log_softmax(logits, -1))


def test_the_loss_passes_gradcheck() -> None:
    model = build(SMALL)
    h = torch.randn(5, SMALL.width, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 12, 59, 40, 12])
    assert torch.autograd.gradcheck(lambda h: model.softmax.loss(h, targets), h)


@pytest.mark.parametrize("word", [0, 9, 10, 14, 15, 39, 40, 59])
@pytest.mark.parametrize("tie", [True, False])
def test_words_on_the_border_of_a_cluster(word: int, tie: bool) -> None:
    config = AdaptiveConfig(num_words=60, width=12, cutoffs=(10, 15, 40), widths=(12, 8, 4, 2), tie=tie)
    model = build(config)
    table = torch.cat([matrix(c)[:n] for c, n in zip(model.embedding.clusters, (10, 5, 25, 20), strict=True)])
    h = torch.randn(3, 12, dtype=torch.float64)
    torch.testing.assert_close(model.embedding(torch.tensor([word, word])), table[[word, word]])
    torch.testing.assert_close(
        model.softmax.loss(h, torch.full((3,), word), "none"), -model.softmax.log_prob(h)[:, word]
    )


# embedding


@given(config=configs(scale=1.5), shape=shapes)
def test_the_embedding_is_a_row_of_the_dense_table(config: AdaptiveConfig, shape: tuple[int, ...]) -> None:
    model = build(config)
    pairs = zip(model.embedding.clusters, config.sizes, strict=True)
    # the rows of the further clusters, at the end of the first table, belong to no word
    table = 1.5 * torch.cat([matrix(pair)[:size] for pair, size in pairs])
    assert len(table) == config.num_words
    words = torch.randint(config.num_words, shape)
    mine, want = model.embedding(words), F.embedding(words, table)
    assert mine.shape == (*shape, config.width)
    torch.testing.assert_close(mine, want)
    direction = torch.randn_like(mine)
    torch.testing.assert_close(gradients(model, (mine * direction).sum()), gradients(model, (want * direction).sum()))


def test_no_word_looks_up_the_row_of_a_cluster() -> None:
    model = build(SMALL)
    grad = gradients(model, model.embedding(torch.arange(60)).sum())["embedding.clusters.0.0.weight"]
    assert grad.shape == (13, 12)
    assert grad[:10].abs().sum(1).min() > 0
    assert not grad[10:].any()


@pytest.mark.parametrize("words", [torch.arange(3, dtype=torch.int32), torch.arange(3, dtype=torch.uint8)])
def test_any_integers_are_words(words: Tensor) -> None:
    model = build(SMALL)
    torch.testing.assert_close(model.loss(words, words), model.loss(words.long(), words.long()))


def test_a_cluster_without_words_gets_a_zero_gradient_rather_than_none() -> None:
    model = build(SMALL)
    model.loss(torch.zeros(4, dtype=torch.long), torch.zeros(4, dtype=torch.long)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
    assert not model.softmax.clusters[3].bias.grad.any()


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("low", [2, 64])
def test_a_new_model_has_vectors_of_length_one_and_logits_of_variance_one(tie: bool, low: int) -> None:
    config = AdaptiveConfig(num_words=4000, width=256, widths=(low, low), cutoffs=(500,), tie=tie)
    model = Model(config)
    vectors = model.embedding(torch.arange(4000)).detach()
    assert vectors.square().sum(-1).mean() == pytest.approx(1, rel=0.2)
    for cluster in model.softmax.clusters:
        assert cluster(torch.randn(200, 256)).detach().var() == pytest.approx(1, rel=0.4)


# cost


class LargestOutput(TorchDispatchMode):
    """Records the number of elements of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_the_loss_never_holds_logits_of_every_row_for_every_word() -> None:
    config = AdaptiveConfig(num_words=2000, width=4, cutoffs=(50, 200), widths=(4, 2, 1))
    model = Model(config)
    num_rows = 300
    h = torch.randn(num_rows, 4, requires_grad=True)
    targets = torch.cat([torch.randint(50, (260,)), torch.randint(50, 200, (30,)), torch.randint(200, 2000, (10,))])
    with LargestOutput() as loss:
        model.softmax.loss(h, targets).backward()
    # cluster 0 for all rows, each further cluster for its own
    assert loss.numel == max(num_rows * 52, 30 * 150, 10 * 1800, 2000)
    with LargestOutput() as full:
        model.softmax.log_prob(h)
    assert full.numel == num_rows * 2000


@pytest.mark.parametrize("autocast", [True, False])
def test_bf16_logits_are_normalised_in_fp32(autocast: bool) -> None:
    config = AdaptiveConfig(num_words=3000, width=32, cutoffs=(100, 500), widths=(32, 8, 4))
    model = build(config, torch.float32)
    exact = model.double().softmax.log_prob(h := torch.randn(50, 32, dtype=torch.float64))
    targets = torch.randint(3000, (50,))
    model.to(torch.float32 if autocast else torch.bfloat16)
    h = h.to(torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        log_prob = model.softmax.log_prob(h)
        loss = model.softmax.loss(h, targets, "none")
        embedded = model.embedding(targets)
    assert (log_prob.dtype, loss.dtype, embedded.dtype) == (torch.float32, torch.float32, torch.bfloat16)
    # a softmax in bf16 would be off by percents
    torch.testing.assert_close(log_prob.exp().sum(-1), torch.ones(50), rtol=1e-5, atol=0)
    torch.testing.assert_close(loss, -log_prob.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(log_prob.double(), exact, rtol=0.03, atol=0.5)
    loss.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_words_split_beforehand_give_the_same() -> None:
    model = build(SMALL)
    words, targets = torch.randint(60, (4, 5)), torch.randint(60, (4, 5))
    split = split_words(words, SMALL).to("cpu"), split_words(targets, SMALL).to("cpu")
    clusters = torch.bucketize(words, torch.tensor(SMALL.cutoffs), right=True)
    assert split[0].counts == clusters.flatten().bincount(minlength=4).tolist()
    assert torch.equal(model.loss(*split), model.loss(words, targets))


@given(
    words=st.lists(st.integers(0, 59), min_size=1, max_size=12),
    more=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    seed=st.integers(0, 9),
)
def test_places_without_a_word_change_neither_the_loss_nor_a_gradient(
    words: list[int], more: list[int], seed: int
) -> None:
    torch.manual_seed(seed)
    model = build(SMALL)
    split = split_words(torch.tensor(words), SMALL), split_words(torch.randint(60, (len(words),)), SMALL)
    room = [max(counts) + n for *counts, n in zip(split[0].counts, split[1].counts, more, strict=True)]
    padded = [part.padded(room) for part in split]
    assert [part.shape for part in padded[0].within] == [part.shape for part in padded[1].within]
    want, got = model.loss(*split), model.loss(padded[0], padded[1])
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(gradients(model, got), gradients(model, want))


def test_padding_must_hold_all_words() -> None:
    with pytest.raises(ValueError, match=r"\[1, 1, 0, 1\], but leaves \[1, 0, 4, 4\]"):
        split_words(torch.tensor([3, 12, 55]), SMALL).padded([1, 0, 4, 4])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_words_split_on_the_cpu_never_make_a_gpu_wait() -> None:
    model = Model(SMALL)
    words, targets = torch.randint(60, (4, 5)), torch.randint(60, (4, 5))
    want = model.loss(words, targets)
    model.cuda()
    split = split_words(words, SMALL).to("cuda"), split_words(targets, SMALL).to("cuda")
    with no_waiting():
        loss = model.loss(*split)
        loss.backward()
    torch.testing.assert_close(loss.cpu(), want)
    torch.testing.assert_close(model.loss(words.cuda(), targets.cuda()), loss)
    with pytest.raises(IndexError, match="but one is 60 instead"):
        model.embedding(torch.tensor([60], device="cuda"))


# sizes


def test_the_published_size() -> None:
    """49,525,184 parameters in matrices, 267,740 biases: 100,222,876 with 12 SRU layers of width 2048 and rank 512."""
    with torch.device("meta"):
        embedding = AdaptiveEmbedding(WT103)
        softmax = AdaptiveSoftmax(WT103, embedding)
    # five rows of cluster 0 stand for the five further clusters
    tables = 10_005 * 1024 + 10_000 * 1024 + 20_000 * 256 + 20_000 * 256 + 40_000 * 64 + 167_735 * 64
    projections = (1024 + 1024 + 256 + 256 + 64 + 64) * 2048
    assert (tables, projections) == (44_020_160, 5_505_024)
    assert rw.count(embedding) == tables + projections == 49_525_184
    biases = 267_735 + 5
    assert rw.count(nn.ModuleList([embedding, softmax])) == 49_525_184 + biases
    # 3 projections of rank 512 a layer, since inputs are as wide as the layer; weight_c and bias: 4 x 2048
    sru = 12 * (512 * (2048 + 3 * 2048) + 4 * 2048)
    assert 49_525_184 + biases + sru == 100_222_876


@pytest.mark.parametrize("tie, bias", [(True, True), (True, False), (False, True), (False, False)])
def test_the_size_by_config(tie: bool, bias: bool) -> None:
    config = AdaptiveConfig(num_words=60, width=12, cutoffs=(10, 15), widths=(12, 8, 4), tie=tie, bias=bias)
    model = Model(config)
    pairs, cluster_rows = 10 * 12 + 5 * 8 + 45 * 4 + 24 * 12, 2 * 12
    own = pairs + cluster_rows if tie else 2 * pairs + cluster_rows
    assert rw.count(model) == own + 62 * bias + 12 * 12 + 12


# what is refused


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"num_words": 0}, "`num_words` must be at least 1, but is 0"),
        ({"width": -3}, "`width` must be at least 1, but is -3"),
        ({"cutoffs": (15, 10, 40)}, r"`cutoffs` must increase strictly .* but are \(15, 10, 40\) instead. Name"),
        ({"cutoffs": (10, 10, 40)}, r"but are \(10, 10, 40\)"),
        ({"cutoffs": (0, 10, 40)}, r"but are \(0, 10, 40\)"),
        ({"cutoffs": (10, 40, 60)}, r"num_words=60, but are \(10, 40, 60\) instead. .* leave out 0 and `num_words`"),
        ({"widths": (12, 8, 4)}, r"one width per cluster, 4 for 3 cutoffs, but are \(12, 8, 4\)"),
        ({"widths": (12, 8, 4, 0)}, r"`widths` must be at least 1, but are \(12, 8, 4, 0\)"),
        ({"scale": 0.0}, "`scale` must be positive and finite, but is 0.0"),
    ],
)
def test_a_bad_config_is_refused(changes: dict[str, Any], match: str) -> None:
    good = {"num_words": 60, "width": 12, "cutoffs": (10, 15, 40), "widths": (12, 8, 4, 2)}
    with pytest.raises(ValueError, match=match):
        AdaptiveConfig(**{**good, **changes})


def test_a_config_from_json_equals_its_source() -> None:
    config = AdaptiveConfig(num_words=60, width=12, cutoffs=[10, 15, 40], widths=[12, 8, 4, 2])
    assert config == SMALL
    assert hash(config) == hash(SMALL)


@pytest.mark.parametrize("wrong", [-1, 60, 10**9])
@pytest.mark.parametrize("config", [SMALL, AdaptiveConfig(num_words=60, width=12, widths=(3,))])
def test_words_outside_the_vocabulary_are_refused(config: AdaptiveConfig, wrong: int) -> None:
    model = Model(config)
    words = torch.tensor([3, wrong, 20])
    match = rf"must lie in \[0, 60\), but one is {wrong:,} instead. Encode"
    with pytest.raises(IndexError, match=match):
        model.embedding(words)
    with pytest.raises(IndexError, match=match):
        model.softmax.loss(torch.randn(3, 12), words)


def test_bad_arguments_are_refused() -> None:
    model = Model(SMALL)
    with pytest.raises(TypeError, match="Words must be integers, but are torch.float32 instead. Convert"):
        model.embedding(torch.zeros(3))
    with pytest.raises(ValueError, match=r"one vector of width 12 per target, \(3, 12\), but is \(4, 12\)"):
        model.softmax.loss(torch.randn(4, 12), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"\(3, 12\), but is \(3, 11\)"):
        model.softmax.loss(torch.randn(3, 11), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="`reduction` must be .* but is 'max'"):
        model.softmax.loss(torch.randn(3, 12), torch.zeros(3, dtype=torch.long), "max")


def test_a_tied_softmax_needs_its_embedding() -> None:
    with pytest.raises(ValueError, match="needs an embedding of the same config, but was given none. Pass it"):
        AdaptiveSoftmax(SMALL)
    other = AdaptiveConfig(num_words=60, width=12, widths=(3,))
    with pytest.raises(ValueError, match=r"but was given one of AdaptiveConfig\(widths=\(3,\)"):
        AdaptiveSoftmax(SMALL, AdaptiveEmbedding(other))


# pruning


@pytest.mark.parametrize("bias", [True, False])
def test_a_plan_finds_one_matrix_a_cluster(bias: bool) -> None:
    config = AdaptiveConfig(num_words=60, width=12, cutoffs=(10, 15, 40), widths=(12, 8, 4, 2), bias=bias)
    model = Model(config)
    sites = {site.name: site for site in rw.find_plan(model).sites}
    assert set(sites) == {"body", *(f"embedding.clusters.{c}" for c in range(4))}
    for c, shape, rank in zip(range(4), [(13, 12), (5, 12), (25, 12), (20, 12)], config.widths, strict=True):
        site = sites[f"embedding.clusters.{c}"]
        assert (site.shape, site.pair_rank) == (shape, rank)
        assert [use.name for use in site.uses] == [f"embedding.clusters.{c}", f"softmax.clusters.{c}"]
    assert rw.find_plan(model).left_out == ()


def test_a_plan_finds_two_matrices_a_cluster_without_ties() -> None:
    config = AdaptiveConfig(num_words=60, width=12, cutoffs=(10, 15), widths=(12, 8, 4), tie=False)
    plan = rw.find_plan(Model(config))
    kinds = {use.name: use.kind for site in plan.sites for use in site.uses}
    pairs = {f"embedding.clusters.{c}": "embedding-pair" for c in range(3)}
    assert kinds == {"body": "linear", **pairs, **{f"softmax.clusters.{c}": "linear-pair" for c in range(3)}}
    assert [len(site.uses) for site in plan.sites] == [1] * 7


def test_the_published_size_is_what_a_plan_prunes() -> None:
    with torch.device("meta"):
        embedding = AdaptiveEmbedding(WT103)
        model = nn.ModuleDict({"embedding": embedding, "softmax": AdaptiveSoftmax(WT103, embedding)})
    plan = rw.find_plan(model)
    assert (len(plan.sites), plan.params) == (6, 49_525_184)


@pytest.mark.parametrize("method", ["flop-l0", "flop-agp", "np-l0", "agp", "fac"])
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.filterwarnings("ignore:.* of the gates had not decided")
def test_a_pruned_model_keeps_the_budget_the_tie_and_its_probabilities(method: str, tie: bool, tmp_path: Path) -> None:
    config = AdaptiveConfig(num_words=60, width=12, cutoffs=(10, 15, 40), widths=(12, 8, 4, 2), tie=tie)
    model = Model(config).double()
    settings = {} if method == "fac" else {"anneal_steps": 6}
    pruner = rw.Pruner(model, rw.Budget(removed=0.2 if method == "np-l0" else 0.6, of="prunable"), method, **settings)
    optimizer = torch.optim.Adam(pruner.weight_parameters(), lr=1e-2)
    for step in range(10):
        # every other batch leaves the rare clusters out
        words = torch.randint(60 if step % 2 else 10, (3, 8))
        model.loss(words, (words * 7 + 3) % 60).backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()
    small = pruner.compact().eval()
    model.eval()
    words = torch.arange(60)
    torch.testing.assert_close(small(words), model(words), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(small.loss(words, words), model.loss(words, words), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(small(words).exp().sum(-1), torch.ones(60, dtype=torch.float64))
    if method != "agp":
        # short of the budget by less than the next component of any matrix, where one is left
        ranks = zip(pruner.account.curves, pruner.ranks().values(), strict=True)
        steps = [curve(k + 1) - curve(k) for curve, k in ranks if k < curve.num_components]
        assert rw.count(small) <= pruner.limit
        assert not steps or pruner.limit - rw.count(small) < min(steps)
    if tie:
        shared = {id(p) for p in small.embedding.parameters()}
        for head in small.softmax.clusters:
            assert {id(p) for p in head.parameters()} - {id(head.bias)} <= shared
    rw.save(small, tmp_path / "small")
    loaded = rw.load(tmp_path / "small", Model(config).double()).eval()
    assert rw.count(loaded) == rw.count(small)
    assert torch.equal(loaded(words), small(words))


def test_every_component_may_go() -> None:
    """Rank 0 in every cluster: what is left are the biases."""
    config = AdaptiveConfig(num_words=60, width=12, cutoffs=(10, 15, 40), widths=(4, 4, 4, 2))
    model = Model(config)
    fixed = 63 + 12
    pruner = rw.Pruner(model, rw.Budget(params=fixed), "flop-agp", rw.find_plan(model), anneal_steps=1)
    words = torch.randint(60, (8,))
    model.loss(words, words).backward()
    pruner.step()
    small = pruner.compact()
    assert rw.count(small) == fixed
    assert not small.embedding(words).any()
    small.loss(words, words).backward()
    torch.testing.assert_close(small(words).exp().sum(-1), torch.ones(8))
