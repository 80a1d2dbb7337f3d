"""The Triton kernels of the SRU against plain PyTorch: forward and every gradient, at odd shapes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import rankwise as rw
from rankwise.lab.kernels import sru as dispatch
from rankwise.lab.kernels.sru import reference
from rankwise.lab.models import sru as models
from rankwise.lab.models.sru import SRUConfig, SRULanguageModel
from tests.lab.kernels.triton_cases import (
    BF16,
    DEVICE,
    GPU,
    assert_same,
    by_interpreter,
    kernels,
    outputs_and_gradients,
    poison,  # noqa: F401
    run_by_interpreter,
    some,
)

pytestmark = pytest.mark.usefixtures("poison")

SHAPES = [(1, 1, 1), (2, 3, 5), (3, 1, 130), (17, 2, 65)]
if GPU:
    SHAPES += [(63, 2, 65), (256, 4, 500), (100, 3, 3056)]


@by_interpreter
def test_the_kernels_by_the_interpreter() -> None:
    run_by_interpreter(__file__)


def test_importing_rankwise_does_not_import_triton() -> None:
    code = "import sys, rankwise, rankwise.lab.models.sru, rankwise.lab.training; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def recurrence_inputs(
    steps: int, batch: int, width: int, num_projections: int, dtype: torch.dtype, dropout: bool
) -> list[Tensor | None]:
    x = some(steps, batch, width, dtype=dtype) if num_projections == 3 else None
    mask = (torch.rand(batch, width, device=DEVICE) > 0.3).float().div(0.7).requires_grad_() if dropout else None
    # with weights of full size some units are chaotic: rounding grows from step to step, in the reference too
    gates = [some(2, width).detach().mul(0.5).requires_grad_(), some(2, width)]
    return [some(steps, batch, num_projections, width, dtype=dtype), x, *gates, some(batch, width), mask]


@kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_projections", [3, 4])
@pytest.mark.parametrize("dropout", [False, True], ids=["", "mask"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_and_every_gradient_are_those_of_the_reference(
    shape: tuple[int, int, int], num_projections: int, dropout: bool, dtype: torch.dtype
) -> None:
    from rankwise.lab.kernels.sru import triton

    inputs = recurrence_inputs(*shape, num_projections, dtype, dropout)
    scale = 1.3
    got = outputs_and_gradients(lambda *a: triton.sru(*a, scale), inputs)
    want = outputs_and_gradients(lambda *a: reference.sru(*a, scale), inputs)
    assert_same(got, want, 1e-5 if dtype == torch.float32 else BF16)


@kernels
def test_inputs_need_not_be_contiguous_and_need_no_gradient() -> None:
    from rankwise.lab.kernels.sru import triton

    inputs = recurrence_inputs(5, 2, 9, 3, torch.float32, dropout=True)
    strange = [None if t is None else t.detach().mT.contiguous().mT for t in inputs]
    for got, want in zip(triton.sru(*strange), reference.sru(*inputs), strict=True):
        torch.testing.assert_close(got, want)


@kernels
def test_in_inference_no_states_are_kept() -> None:
    from rankwise.lab.kernels.sru import triton

    inputs = [None if t is None else t.detach() for t in recurrence_inputs(3, 2, 9, 4, torch.float32, dropout=False)]
    assert torch.ops.rankwise.sru(*inputs, 1.0, False)[2].numel() == 0
    torch.testing.assert_close(triton.sru(*inputs), reference.sru(*inputs))


@kernels
@pytest.mark.parametrize("num_projections", [3, 4])
@pytest.mark.parametrize("learns", [False, True])
def test_the_operator_keeps_the_rules_of_torch(num_projections: int, learns: bool) -> None:
    from rankwise.lab.kernels.sru import triton

    assert triton.sru
    inputs = recurrence_inputs(4, 2, 20, num_projections, torch.float32, dropout=num_projections == 3)
    inputs = inputs if learns else [None if t is None else t.detach() for t in inputs]
    torch.library.opcheck(torch.ops.rankwise.sru, (*inputs, 1.3, learns))


@kernels
@pytest.mark.filterwarnings("ignore")  # those of the compiler
def test_a_compiled_model_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from rankwise.lab.kernels.sru import triton

    monkeypatch.setattr(dispatch, "_implementation", lambda device_type: triton.sru)
    model = small_model().to(DEVICE).eval()
    tokens = torch.randint(13, (2, 9), device=DEVICE)
    compiled = torch.compile(model, fullgraph=True, backend="inductor" if GPU else "aot_eager")
    torch.testing.assert_close(compiled(tokens), model(tokens), rtol=1e-4, atol=1e-5)
    compiled(tokens)[0].square().mean().backward()
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(tokens)[0].square().mean().backward()
    for a, b in zip(got, model.parameters(), strict=True):
        torch.testing.assert_close(a, b.grad, rtol=1e-3, atol=1e-5)


@kernels
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (5, 7, 3, 4), (19, 40, 13, 21), (33, 130, 16, 9), (40, 9, 600, 5)], ids=str
)
@pytest.mark.parametrize("gated, selected", [(False, False), (True, False), (True, True), (False, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_folded_norm_is_that_of_the_reference(
    shape: tuple[int, int, int, int], gated: bool, selected: bool, dtype: torch.dtype
) -> None:
    from rankwise.lab.kernels.sru import layer

    num_rows, width, rank, num_outputs = shape
    x = (some(num_rows, width, dtype=dtype) + 0.5).detach().requires_grad_()
    rstd = torch.rsqrt(x.float().var(-1, correction=0) + 1e-2).detach().requires_grad_()
    torch.testing.assert_close(layer.row_stats(x.detach(), 1e-2)[1], rstd.detach())
    inputs = [x, rstd, some(rank, width), some(num_outputs, rank), some(width), some(width)]
    z = torch.rand(rank, device=DEVICE).requires_grad_() if gated else None
    active = torch.randperm(rank, device=DEVICE)[: max(rank // 2, 1)] if selected else None
    inputs += [z, active]
    got = outputs_and_gradients(layer.normed_pair, inputs)
    want = outputs_and_gradients(layer.normed_pair_reference, inputs)
    if width > 1:
        assert_same(got, want, 1e-5 if dtype == torch.float32 else 2 * BF16)


def small_model(dropout: float = 0.0) -> SRULanguageModel:
    config = SRUConfig(
        num_words=13, embedding_width=6, width=20, num_layers=3, rank=10, dropout=dropout, layer_norm=True, rescale=True
    )
    model = SRULanguageModel(config)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, 1.0, 0.3)
            nn.init.normal_(module.bias, 0.0, 0.3)
    return model


def run_model(model: SRULanguageModel, fused: bool, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Logits, states and every gradient, those of gates included."""
    monkeypatch.setattr(models, "can_fuse", lambda x: fused)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(13, (2, 7), generator=generator).to(DEVICE)
    state = torch.randn(3, 2, 20, generator=generator).to(DEVICE).requires_grad_()
    torch.manual_seed(3)
    logits, after = model(tokens, state)
    (logits.square().mean() + after.square().mean()).backward()
    found = {"logits": logits, "state": after, "dstate": state.grad}
    for name, parameter in model.named_parameters():
        found[name], parameter.grad = parameter.grad, None
    for name, module in model.named_modules():
        z = getattr(module, "z", None)
        if isinstance(z, Tensor) and z.requires_grad:
            found[f"{name} z"], z.grad = z.grad * (z != 0), None
    return found


@kernels
@pytest.mark.parametrize("method", [None, "flop-l0", "flop-agp", "np-l0", "fac"])
def test_a_fused_stack_gives_the_outputs_and_gradients_of_the_plain_one(
    method: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model().to(DEVICE)
    model.sru.layers[0].dropout = 0.3
    if method is not None:
        settings = {} if method == "fac" else {"anneal_steps": 100}
        pruner = rw.Pruner(model, rw.Budget(removed=0.3), method, **settings)
        for gate in pruner.controller.gates:
            if method == "flop-l0":
                gate.alpha.copy_(torch.linspace(-5, 5, gate.num_components))
        pruner.controller.invalidate_masks()
    got = run_model(model, True, monkeypatch)
    assert_same(got, run_model(model, False, monkeypatch), 1e-5)


@kernels
def test_dropout_of_the_output_drops_its_share_and_no_gradient_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "can_fuse", lambda x: True)
    stack = small_model().sru.to(DEVICE)
    x = some(8, 4, 6)
    whole, _ = stack(x)
    torch.manual_seed(0)
    h, _ = stack(x, dropout=0.25)
    kept = h != 0
    assert abs(float(kept.float().mean()) - 0.75) < 0.06
    torch.testing.assert_close(h, torch.where(kept, whole / 0.75, 0.0))
    given = torch.randn_like(h)
    (got,) = torch.autograd.grad(h, x, given)
    (want,) = torch.autograd.grad(whole, x, given * kept / 0.75)
    torch.testing.assert_close(got, want)
    torch.manual_seed(0)
    assert torch.equal(stack(x, dropout=0.25)[0] != 0, kept)
    assert not torch.equal(stack(x, dropout=0.25)[0] != 0, kept)


@kernels
def test_dropout_within_a_stack_is_one_mask_a_sequence_and_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "can_fuse", lambda x: True)
    stack = small_model(dropout=0.25).sru.to(DEVICE).train()
    masks = [mask for mask in stack._draw_masks(some(8, 40, 6)) if mask is not None]
    assert [mask.shape for mask in masks] == [(40, 20)] * 2
    assert not torch.equal(*masks)
    for mask in masks:
        assert mask.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
        assert abs(float((mask > 0).float().mean()) - 0.75) < 0.08
    x = some(8, 4, 6)
    assert not torch.equal(stack(x)[0], stack(x)[0])
    assert torch.equal(stack.eval()(x)[0], stack(x)[0])


@kernels
def test_an_observed_projection_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "can_fuse", lambda x: True)
    stack = small_model().sru.to(DEVICE)
    seen: list[Tensor] = []
    x = some(3, 2, 6)
    want, _ = stack(x)
    stack.layers[1].projection.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    got, _ = stack(x)
    assert len(seen) == 1
    torch.testing.assert_close(got, want)
