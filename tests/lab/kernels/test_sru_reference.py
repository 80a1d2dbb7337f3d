"""The SRU recurrence and layers against the `sru` package 2.6.0 (README.md), gradcheck and a plain loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from rankwise.lab.kernels.sru import sru
from rankwise.lab.models.sru import SRU

RECORD = Path(__file__).with_name("sru_2_6_0.safetensors")
with safe_open(RECORD, "pt") as record:
    CASES: dict[str, dict[str, Any]] = json.loads(record.metadata()["cases"])
    RECORDED: dict[str, Tensor] = {key: record.get_tensor(key) for key in record.keys()}  # noqa: SIM118

T, B, D = 5, 2, 3


def recorded(case: str, under: str = "") -> dict[str, Tensor]:
    prefix = f"{case}/{under}"
    return {key.removeprefix(prefix): t for key, t in RECORDED.items() if key.startswith(prefix)}


def ours(tensors: dict[str, Tensor], width: int) -> dict[str, Tensor]:
    """The package's tensors by our names. It stores (inputs, outputs), with the projections of a unit side by side."""
    found: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        _, layer, name = key.split(".", 2)
        projection = f"layers.{layer}.projection"
        if name == "weight":
            low_rank = f"rnn_lst.{layer}.weight_proj" in tensors
            by_block = tensor.t().reshape(width, -1, tensor.shape[0]).transpose(0, 1)
            found[projection + (".1.weight" if low_rank else ".weight")] = by_block.reshape(-1, tensor.shape[0])
        elif name == "weight_proj":
            found[projection + ".0.weight"] = tensor.t()
        else:
            found[f"layers.{layer}.{name.replace('layer_norm', 'norm')}"] = tensor
    return found


def stack(name: str, monkeypatch: pytest.MonkeyPatch) -> SRU:
    """Our twin of a recorded stack, with its weights and its dropout masks."""
    case = CASES[name]
    options = {o: case[o] for o in ("highway_bias", "layer_norm", "rescale", "rank", "dropout") if o in case}
    model = SRU(case["n"], case["d"], case.get("layers", 1), first_rank=case.get("rank"), **options)
    model.load_state_dict(ours(recorded(name, "weights/"), case["d"]))
    masks = [mask for _, mask in sorted(recorded(name, "mask.").items())]
    for layer, _ in zip(model.layers, masks, strict=False):
        layer.dropout = case["dropout"]  # the package's recording has a mask in a stack of one too
    monkeypatch.setattr(F, "dropout", lambda ones, p: masks.pop(0))
    return model


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_every_gradient_are_those_of_the_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = stack(name, monkeypatch), recorded(name)
    x = data["x"].requires_grad_()
    c0 = data["c0"].requires_grad_() if "c0" in data else None
    h, c = model(x, c0)
    torch.autograd.backward([h, c], [data["dh"], data["dc"]])

    got = {"h": h, "c": c, "dx": x.grad} | {f"d {n}": p.grad for n, p in model.named_parameters()}
    expected = {"h": data["h"], "c": data["c"], "dx": data["grad/x"]}
    if c0 is not None:
        got["dc0"], expected["dc0"] = c0.grad, data["grad/c0"]
    weights = {key: t for key, t in recorded(name, "grad/").items() if key.startswith("rnn_lst")}
    expected |= {f"d {n}": t for n, t in ours(weights, CASES[name]["d"]).items()}
    assert got.keys() == expected.keys()
    for key, want in expected.items():
        difference = (got[key] - want).abs().max() / want.abs().max()
        assert difference <= 1e-5, f"{key}: relative difference {difference:.1e}"


def test_the_record_holds_every_variant() -> None:
    for projections, same in ((3, True), (4, False)):
        cases = [case for case in CASES.values() if (case["n"] == case["d"]) == same]
        for option in ("highway_bias", "rescale", "layer_norm", "dropout", "rank", "c0"):
            given = {bool(case.get(option)) for case in cases}
            assert given == {True, False}, f"k={projections}: {option}"


def inputs(num_projections: int, *, dropout: bool = True, dtype: torch.dtype = torch.float64) -> list[Tensor | None]:
    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, requires_grad=True)

    x = some(T, B, D) if num_projections == 3 else None
    mask = torch.tensor([[0, 2, 2], [2, 0, 2]], dtype=dtype) if dropout else None
    return [some(T, B, num_projections, D), x, some(2, D), some(2, D), some(B, D), mask]


@pytest.mark.parametrize("num_projections", [3, 4])
@pytest.mark.parametrize("dropout", [False, True])
def test_gradients_are_the_numerical_ones(num_projections: int, dropout: bool) -> None:
    scale = 1.3
    assert torch.autograd.gradcheck(lambda *a: sru(*a, scale), inputs(num_projections, dropout=dropout))


@pytest.mark.parametrize("num_projections", [3, 4])
def test_each_number_follows_the_equations(num_projections: int) -> None:
    """One unit at a time, in Python numbers."""
    u, x, w, b, c0, mask = (None if t is None else t.detach() for t in inputs(num_projections))
    h, c_last = sru(u, x, w, b, c0, mask, 1.3)
    for i in range(B):
        for j in range(D):
            c = c0[i, j]
            for t in range(T):
                v, p, q, *highway = u[t, i, :, j]
                f = torch.sigmoid(p + w[0, j] * c + b[0, j])
                r = torch.sigmoid(q + w[1, j] * c + b[1, j])
                c = f * c + (1 - f) * v
                (carried,) = highway or [1.3 * x[t, i, j]]
                torch.testing.assert_close(h[t, i, j], carried + mask[i, j] * r * (c - carried))
            torch.testing.assert_close(c_last[i, j], c)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_state_is_float32_in_half_precision(dtype: torch.dtype) -> None:
    half = inputs(3, dtype=dtype)
    h, c = sru(*half)
    h_32, c_32 = sru(*(None if t is None else t.float() for t in half))
    assert (h.dtype, c.dtype) == (dtype, torch.float32)
    assert torch.equal(c, c_32)
    assert torch.equal(h, h_32.to(dtype))


def test_the_last_state_does_not_keep_the_others_alive() -> None:
    _, c = sru(*inputs(3))
    assert c.untyped_storage().nbytes() == c.numel() * c.element_size()


@pytest.mark.parametrize(
    "position, replacement, message",
    [
        (0, (T, B, 2, D), r"`u_TBKD` must be \(steps, batch, 3 or 4, width\) .* but is \(5, 2, 2, 3\)"),
        (0, (0, B, 3, D), r"with a step or more, but is \(0, 2, 3, 3\)"),
        (0, (T, B, 4, D), r"`x_TBD` must be given with 3 projections, .* but is given with 4"),
        (1, None, r"`x_TBD` must be given with 3 projections, .* but is None with 3"),
        (1, (T, B, D + 1), r"`x_TBD` must be \(5, 2, 3\), but is \(5, 2, 4\)"),
        (2, (2 * D,), r"`weight_c_GD` must be \(2, 3\), but is \(6,\)"),
        (3, (D,), r"`bias_GD` must be \(2, 3\), but is \(3,\)"),
        (4, (1, D), r"`c0_BD` must be \(2, 3\), but is \(1, 3\)"),
        (5, (T, B, D), r"`mask_BD` must be \(2, 3\), but is \(5, 2, 3\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(position: int, replacement: Any, message: str) -> None:
    arguments = inputs(3)
    arguments[position] = None if replacement is None else torch.zeros(replacement)
    with pytest.raises(ValueError, match=message):
        sru(*arguments)
