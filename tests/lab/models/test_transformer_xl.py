"""Transformer-XL: the published formula, its memory, its size, and its way through the pruner."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rankwise as rw
from rankwise.lab.models.transformer_xl import TransformerXL, TransformerXLConfig, TransformerXLLayer, by_key, sinusoid

V = 11


def config(**changes: Any) -> TransformerXLConfig:
    """Odd sizes, no two of them equal, and H * E != D."""
    sizes: dict[str, Any] = {"num_words": V, "width": 10, "num_heads": 3, "head_width": 5, "inner": 7, "num_layers": 2}
    return TransformerXLConfig(**{**sizes, "memory_length": 6, "dropout": 0.0, **changes})


def build(dtype: torch.dtype = torch.float64, **changes: Any) -> TransformerXL:
    """A small model whose attention is far from uniform."""
    model = TransformerXL(config(**changes)).to(dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def tokens(time: int, batch: int = 2) -> Tensor:
    return torch.randint(0, V, (batch, time))


# The published formula, one number at a time


def naive_attention(layer: TransformerXLLayer, h_BSD: Tensor, model: TransformerXL, size_T: int) -> Tensor:
    """sum_j softmax_j(((q_i + u) . k_j + (q_i + v) . W_r R_{M+i-j}) / sqrt(E)) value_j, head by head."""
    cfg, attention = model.config, layer.attention
    size_H, size_E = cfg.num_heads, cfg.head_width
    w_q, w_k, w_v = (w.view(size_H, size_E, cfg.width) for w in attention.qkv.weight.chunk(3))
    w_r = attention.position.weight.view(size_H, size_E, cfg.width)
    u, v = model.content_bias.view(size_H, size_E), model.position_bias.view(size_H, size_E)
    limit = cfg.memory_length if cfg.same_length else math.inf
    size_M = h_BSD.shape[1] - size_T
    outputs = []
    for h_SD in h_BSD:
        for i in range(size_T):
            heads = []
            for n in range(size_H):
                q = w_q[n] @ h_SD[size_M + i]
                seen = [j for j in range(size_M + i + 1) if size_M + i - j < limit]
                scores = []
                for j in seen:
                    distance = min(size_M + i - j, cfg.clamp_length or math.inf)
                    angles = [distance / 10_000 ** (2 * k / cfg.width) for k in range(cfg.width // 2)]
                    r = torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=h_SD.dtype)
                    score = (q + u[n]) @ (w_k[n] @ h_SD[j]) + (q + v[n]) @ (w_r[n] @ r)
                    scores.append(score / math.sqrt(size_E))
                p = torch.stack(scores).softmax(0)
                heads.append(sum(p[a] * (w_v[n] @ h_SD[j]) for a, j in enumerate(seen)))
            outputs.append(attention.out.weight @ torch.cat(heads))
    return torch.stack(outputs).view(h_BSD.shape[0], size_T, cfg.width)


def naive(model: TransformerXL, tokens_BT: Tensor, memory: list[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
    """Logits, and the inputs of each layer."""
    cfg, size_T = model.config, tokens_BT.shape[1]
    h = model.embedding.weight[tokens_BT] * cfg.width**0.5
    inputs = []
    for n, layer in enumerate(model.layers):
        context = h if memory is None else torch.cat([memory[n], h], dim=1)
        inputs.append(context.detach())
        first, second = layer.feed_forward.first, layer.feed_forward.second
        norm, last = layer.attention_norm, layer.feed_forward_norm
        if cfg.pre_norm:
            h = h + naive_attention(layer, norm(context), model, size_T)
            h = h + second(first(last(h)).clamp(min=0))
        else:
            h = norm(h + naive_attention(layer, context, model, size_T))
            h = last(h + second(first(h).clamp(min=0)))
    return h @ model.embedding.weight.T + model.head.bias, inputs


@pytest.mark.parametrize("pre_norm", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize("size_T, size_M", [(1, 0), (5, 0), (1, 4), (4, 3), (3, 7)])
def test_logits_memory_and_gradients_are_those_of_the_published_formula(
    size_T: int, size_M: int, pre_norm: bool
) -> None:
    model, x = build(pre_norm=pre_norm), tokens(size_T)
    memory = [torch.randn(2, size_M, 10, dtype=torch.float64) for _ in range(2)] if size_M else None
    weight = torch.randn(2, size_T, V, dtype=torch.float64)
    names, parameters = zip(*model.named_parameters(), strict=True)

    expected, inputs = naive(model, x, memory)
    expected_grads = torch.autograd.grad((expected * weight).sum(), parameters)
    logits, new_memory = model(x, memory)
    grads = torch.autograd.grad((logits * weight).sum(), parameters)

    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    for kept, whole in zip(new_memory, inputs, strict=True):
        torch.testing.assert_close(kept, whole[:, -6:], rtol=1e-10, atol=1e-10)
    for name, grad, other in zip(names, grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("changes", [{"same_length": True, "memory_length": 3}, {"clamp_length": 2}])
def test_the_lengths_of_evaluation_are_those_of_the_published_formula(changes: dict[str, Any]) -> None:
    model, x = build(), tokens(5)
    memory = [torch.randn(2, 3, 10, dtype=torch.float64) for _ in range(2)]
    before = model(x, memory)[0]
    model.config = dataclasses.replace(model.config, **changes)
    after = model(x, memory)[0]
    assert not torch.allclose(after, before)
    torch.testing.assert_close(after, naive(model, x, memory)[0], rtol=1e-10, atol=1e-10)


def test_scores_go_from_distances_to_keys_without_a_copy() -> None:
    size_T, size_M = 5, 3
    size_S = size_T + size_M
    distance = torch.arange(size_S, -1, -1).expand(2, 3, size_T, -1).contiguous()
    moved = by_key(distance)
    assert moved.untyped_storage().data_ptr() == distance.untyped_storage().data_ptr()
    for i in range(size_T):
        for j in range(size_S):
            hidden = moved[0, 0, i, j] > size_M + i + 1
            assert hidden if j > size_M + i else moved[0, 0, i, j] == size_M + i - j


def test_attention_moves_its_scores_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    def attention(*args: Tensor, attn_mask: Tensor, dropout_p: float) -> Tensor:
        seen.append(attn_mask)
        return true_attention(*args, attn_mask=attn_mask, dropout_p=dropout_p)

    true_attention = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    model = build()
    model(tokens(4), model(tokens(3))[1])
    for scores in seen[2:]:
        # rows of S numbers, in the memory of rows of S + 1
        assert scores.shape == (2, 3, 4, 7)
        assert scores.stride()[2:] == (7, 1)
        assert scores.untyped_storage().nbytes() == 8 * 2 * 3 * 4 * 8


def test_sinusoids_of_far_distances_are_exact_in_bfloat16() -> None:
    model = build(torch.bfloat16, num_layers=1)
    positions = model._positions(1000, torch.zeros(1, 24, 10, dtype=torch.bfloat16))
    expected = sinusoid(torch.arange(1024, -1, -1, dtype=torch.float64), 10).to(torch.bfloat16)
    torch.testing.assert_close(positions.sinusoid_LD, expected)


# Causality and memory


@pytest.mark.parametrize("pre_norm", [False, True])
def test_a_token_changes_nothing_before_it(pre_norm: bool) -> None:
    model, x = build(pre_norm=pre_norm), tokens(7)
    memory = model(tokens(4))[1]
    before = model(x, memory)[0]
    for t in range(7):
        changed = x.clone()
        changed[:, t] = (changed[:, t] + 1) % V
        after = model(changed, memory)[0]
        torch.testing.assert_close(after[:, :t], before[:, :t], rtol=0, atol=1e-12)
        assert not torch.isclose(after[:, t:], before[:, t:]).all(-1).any()


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("cuts", [(9,), (4, 5), (5, 4), (2, 3, 4), (1,) * 9])
def test_windows_with_memory_are_one_long_window_while_nothing_is_forgotten(
    cuts: tuple[int, ...], pre_norm: bool
) -> None:
    """The exact condition: `memory_length` >= the number of tokens before the last window."""
    x = tokens(9)
    long = build(pre_norm=pre_norm, memory_length=0)
    expected = long(x)[0]
    enough = 9 - cuts[-1]
    torch.testing.assert_close(in_windows(long, x, cuts, memory_length=enough), expected, rtol=0, atol=1e-12)
    if enough:
        short = in_windows(long, x, cuts, memory_length=enough - 1)
        torch.testing.assert_close(short[:, : -cuts[-1]], expected[:, : -cuts[-1]], rtol=0, atol=1e-12)
        assert not torch.isclose(short[:, -cuts[-1] :], expected[:, -cuts[-1] :]).all(-1).any()


@pytest.mark.parametrize("cuts", [(4, 5), (2, 3, 4), (8, 1), (1,) * 9])
def test_with_the_same_length_for_all_queries_it_never_matters_where_a_text_is_cut(cuts: tuple[int, ...]) -> None:
    x, model = tokens(9), build(same_length=True, memory_length=3)
    torch.testing.assert_close(in_windows(model, x, cuts), model(x)[0], rtol=0, atol=1e-12)


def in_windows(model: TransformerXL, x: Tensor, cuts: tuple[int, ...], **changes: Any) -> Tensor:
    """Logits of windows of the given lengths, memory handed on."""
    model.config = dataclasses.replace(model.config, **changes)
    memory, logits = None, []
    for window in x.split(cuts, dim=1):
        part, memory = model(window, memory)
        logits.append(part)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("memory_length", [0, 1, 5, 6, 8])
def test_memory_holds_the_last_inputs_of_each_layer_and_no_more(memory_length: int) -> None:
    model, x = build(memory_length=memory_length), tokens(12)
    memory = None
    for start, end in ((0, 3), (3, 6), (6, 12)):
        logits, memory = model(x[:, start:end], memory)
        assert len(memory) == 2
        embedded = model.embedding(x[:, max(0, end - memory_length) : end]) * 10**0.5
        torch.testing.assert_close(memory[0], embedded.detach())
        assert all(m.shape == (2, min(end, memory_length), 10) for m in memory)
        assert logits.shape == (2, end - start, V)


def test_a_memory_as_long_as_the_segment_holds_nothing_but_the_segment() -> None:
    model = build(memory_length=4)
    memory = model(tokens(4), model(tokens(4))[1])[1]
    assert all(m.untyped_storage().nbytes() == m.numel() * m.element_size() for m in memory)


def test_gradients_do_not_flow_into_memory() -> None:
    model, x = build(), tokens(4)
    memory = model(x)[1]
    assert not any(m.requires_grad for m in memory)
    given = [m.clone().requires_grad_() for m in memory]
    logits = model(x, given)[0]
    logits.sum().backward()
    assert all(m.grad is None for m in given)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_memory_that_does_not_fit_is_refused() -> None:
    model = build()
    memory = model(tokens(4))[1]
    with pytest.raises(
        ValueError, match="`memory` must hold 2 tensors of shape \\(3, any one length, 10\\), but holds"
    ):
        model(tokens(4, batch=3), memory)
    with pytest.raises(ValueError, match="`memory` must hold 2 tensors .* Give what the segment before returned"):
        model(tokens(4), memory[:1])
    with pytest.raises(ValueError, match="`memory` must hold 2 tensors"):
        model(tokens(4), (memory[0], memory[1][:, 1:]))
    with pytest.raises(
        ValueError, match="`tokens_BT` must be of shape \\(batch, time\\), time at least 1, but is \\(2, 0\\)"
    ):
        model(tokens(0))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_heads": 0}, "`num_heads` must be positive, but is 0"),
        ({"width": 9}, "`width` must be even .* but is 9"),
        ({"dropout": 1.0}, "`dropout` must be at least 0 and below 1, but is 1.0"),
        ({"memory_length": -1}, "`memory_length` must be at least 0, but is -1"),
        ({"memory_length": 0, "same_length": True}, "`memory_length` must be positive with `same_length`, but is 0"),
        ({"clamp_length": 0}, "`clamp_length` must be positive, but is 0"),
    ],
)
def test_a_bad_setting_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


# Training and precision


def test_dropout_acts_in_training_alone() -> None:
    for changes in ({"dropout": 0.5}, {"attention_dropout": 0.5}):
        model, x = build(**changes), tokens(6)
        assert not torch.equal(model(x)[0], model(x)[0])
        model.eval()
        assert torch.equal(model(x)[0], model(x)[0])


@pytest.mark.parametrize("pre_norm", [False, True])
def test_bfloat16_autocast_is_close_to_float32(pre_norm: bool) -> None:
    model = TransformerXL(config(width=32, head_width=16, inner=64, pre_norm=pre_norm))
    x = tokens(12)
    memory = model(tokens(6))[1]
    logits = model(x, memory)[0]
    loss = F.cross_entropy(logits.flatten(0, 1), x.flatten())
    grads = torch.autograd.grad(loss, list(model.parameters()))
    with torch.autocast("cpu", torch.bfloat16):
        cast_logits, cast_memory = model(x, memory)
    cast_loss = F.cross_entropy(cast_logits.float().flatten(0, 1), x.flatten())
    cast_grads = torch.autograd.grad(cast_loss, list(model.parameters()))
    assert cast_logits.dtype == torch.bfloat16
    assert all(m.dtype == torch.float32 for m in cast_memory)
    torch.testing.assert_close(cast_logits.float(), logits, rtol=0.02, atol=0.02 * logits.abs().max().item())
    flat, cast_flat = (torch.cat([g.flatten() for g in all_grads]) for all_grads in (grads, cast_grads))
    assert F.cosine_similarity(flat, cast_flat, dim=0) > 0.999


def test_a_model_cast_to_bfloat16_runs() -> None:
    model, x = TransformerXL(config()).to(torch.bfloat16), tokens(6)
    logits, memory = model(x, model(x)[1])
    logits.float().sum().backward()
    assert {m.dtype for m in memory} == {logits.dtype} == {torch.bfloat16}
    assert logits.isfinite().all()


def test_it_learns_what_only_memory_can_tell() -> None:
    """Each window repeats the one before: without memory every word is news."""
    model = TransformerXL(config(width=32, num_heads=2, head_width=16, inner=64, memory_length=4))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(150):
        x = torch.randint(0, V, (32, 4))
        memory = model(x)[1]
        logits = model(x, memory)[0]
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.5 * math.log(V)


# Size, and the way through the pruner


def test_the_base_model_has_the_parameters_of_the_paper() -> None:
    with torch.device("meta"):
        model = TransformerXL(TransformerXLConfig(num_words=204))
    qkv, out, position, first, second = 512 * 3 * 512, 512 * 512, 512 * 512, 512 * 2048, 2048 * 512
    matrices = 12 * (qkv + out + position + first + second)
    assert matrices == 40_894_464
    embedding = 204 * 512  # the output layer is the same matrix
    output_bias = 204  # of the published adaptive softmax, which with one cluster is a plain one
    feed_forward_biases = 12 * (2048 + 512)  # attention has none
    norms = 12 * 2 * (512 + 512)  # two a layer, scale and shift
    attention_biases = 2 * 8 * 64  # u and v, shared by all layers
    fixed = embedding + output_bias + feed_forward_biases + norms + attention_biases
    assert fixed == 160_972
    assert rw.count(model) == matrices + fixed == 41_055_436
    # the paper's factors: rank d1 d2 / (d1 + d2), rounded down
    shapes = [(1536, 512), (512, 512), (512, 512), (2048, 512), (512, 2048)]
    ranks = [rows * columns // (rows + columns) for rows, columns in shapes]
    assert ranks == [384, 256, 256, 409, 409]
    assert 12 * sum(r * (rows + columns) for r, (rows, columns) in zip(ranks, shapes, strict=True)) == 40_857_600


def test_the_plan_finds_five_matrices_a_layer_and_the_tied_words() -> None:
    with torch.device("meta"):
        model = TransformerXL(TransformerXLConfig(num_words=204))
    plan = rw.find_plan(model)
    assert not plan.left_out
    assert len(plan.sites) == 12 * 5 + 1
    names = [str(site) for site in plan.sites]
    assert names[0] == "embedding = head"
    layer = ["attention.qkv", "attention.position", "attention.out", "feed_forward.first", "feed_forward.second"]
    assert names[1:] == [f"layers.{n}.{name}" for n in range(12) for name in layer]
    assert plan.params == 40_894_464 + 204 * 512
    assert rw.find_plan(model, exclude=("embedding", "head")).params == 40_894_464


@pytest.fixture(scope="module")
def pruned() -> tuple[rw.Pruner, nn.Module, nn.Module]:
    """A pruner after a few steps, its gated model and the compact one, in float64."""
    torch.manual_seed(0)
    model = build(width=16, inner=24)
    pruner = rw.Pruner(model, rw.Budget(removed=0.6), method="flop-l0", anneal_steps=4)
    optimizer = torch.optim.Adam(pruner.weight_parameters(), lr=1e-3)
    memory = None
    for _ in range(6):
        x = tokens(5)
        logits, memory = model(x, memory)
        F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten()).backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()
    return pruner, model.eval(), pruner.compact().eval()


def test_a_pruned_model_meets_its_budget_and_gives_the_outputs_of_the_gated_one(
    pruned: tuple[rw.Pruner, nn.Module, nn.Module],
) -> None:
    pruner, gated, small = pruned
    report = pruner.size()
    assert rw.count(small) <= report.budget
    assert rw.count(small) == report.exported
    assert report.budget - rw.count(small) < 16 + 3 * 15  # one component of qkv, the dearest
    x = tokens(6)
    expected, gated_memory = gated(x, gated(x)[1])
    logits, memory = small(x, small(x)[1])
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    for m, other in zip(memory, gated_memory, strict=True):
        torch.testing.assert_close(m, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_compact_model_survives_saving_and_loading(
    pruned: tuple[rw.Pruner, nn.Module, nn.Module], device: str, tmp_path: Path
) -> None:
    small = pruned[2]
    rw.save(small, tmp_path / "small")
    with torch.device(device):
        skeleton = TransformerXL(config(width=16, inner=24))
    loaded = rw.load(tmp_path / "small", skeleton).eval()
    before, after = small.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert rw.count(loaded) == rw.count(small)
    x = tokens(6)
    (logits, memory), (expected, expected_memory) = loaded(x, loaded(x)[1]), small(x, small(x)[1])
    assert torch.equal(logits, expected)
    assert all(torch.equal(m, other) for m, other in zip(memory, expected_memory, strict=True))
