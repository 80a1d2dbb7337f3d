"""The SRU kernel for CPUs against `reference.sru`, forward and in every gradient, and how it is built."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rankwise.files import cache_folder
from rankwise.lab.kernels.sru import cpu, reference, sru
from tests.lab.kernels import test_sru_reference

with warnings.catch_warnings():
    warnings.simplefilter("ignore", RuntimeWarning)
    pytestmark = pytest.mark.skipif(not cpu.READY, reason="needs a C compiler")

NAMES = ("u", "x", "weight_c", "bias", "c0", "mask")
Inputs = dict[str, Tensor | None]


@pytest.fixture(autouse=True)
def _memory_that_is_not_written_holds_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def some_inputs(
    T: int,
    B: int,
    K: int,
    D: int,
    *,
    dtype: torch.dtype = torch.float32,
    x_dtype: torch.dtype | None = None,
    dropout: bool = True,
) -> Inputs:
    return {
        "u": torch.randn(T, B, K, D).to(dtype),
        "x": torch.randn(T, B, D).to(x_dtype or dtype) if K == 3 else None,
        # with larger ones a state can double a rounding error at every step, here and in the reference
        "weight_c": 0.5 * torch.randn(2, D),
        "bias": torch.randn(2, D),
        "c0": torch.randn(B, D),
        "mask": 1.5 * torch.randint(0, 2, (B, D)).float() if dropout else None,
    }


def results(
    implementation: Callable[..., Any],
    inputs: Inputs,
    *,
    scale: float = 1.3,
    dtype: torch.dtype | None = None,
    use: str = "hc",
) -> dict[str, Tensor]:
    """h, c and the gradient of every input, for the same gradients of h and c each time."""
    leaves = {n: None if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for n, t in inputs.items()}
    h, c = implementation(*leaves.values(), scale)
    generator = torch.Generator().manual_seed(1)
    # of what h is rounded to, so that all implementations get the same
    dh = torch.randn(h.shape, generator=generator).to(inputs["u"].dtype).to(h.dtype)
    dc = torch.randn(c.shape, generator=generator).to(c.dtype)
    pairs = {"h": (h, dh), "c": (c, dc)}
    torch.autograd.backward([pairs[n][0] for n in use], [pairs[n][1] for n in use])
    gradients = {f"d{n}": torch.zeros_like(t) if t.grad is None else t.grad for n, t in leaves.items() if t is not None}
    return {"h": h.detach(), "c": c.detach()} | gradients


def error(got: Tensor, exact: Tensor) -> float:
    """The largest error, relative to the largest value."""
    return float((got - exact).abs().max() / exact.abs().max().clamp(min=1e-3))


def assert_as_exact_as_the_reference(inputs: Inputs, **options: Any) -> None:
    exact = results(reference.sru, inputs, dtype=torch.float64, **options)
    theirs = results(reference.sru, inputs, **options)
    ours = results(cpu.sru, inputs, **options)
    assert ours.keys() == exact.keys()
    for name, got in ours.items():
        assert (got.dtype, got.shape) == (theirs[name].dtype, theirs[name].shape), name
        rounding = max(torch.finfo(got.dtype).eps, 4e-6)
        assert error(got, exact[name]) <= 10 * error(theirs[name], exact[name]) + rounding, name


@given(
    T=st.integers(1, 40),
    B=st.integers(1, 3),
    K=st.sampled_from([3, 4]),
    D=st.integers(1, 150),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    x_dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    dropout=st.booleans(),
    scale=st.floats(0.5, 2),
    seed=st.integers(0, 2**31),
)
def test_results_and_every_gradient_are_those_of_the_reference(
    T: int, B: int, K: int, D: int, dtype: torch.dtype, x_dtype: torch.dtype, dropout: bool, scale: float, seed: int
) -> None:
    torch.manual_seed(seed)
    inputs = some_inputs(T, B, K, D, dtype=dtype, x_dtype=x_dtype, dropout=dropout)
    assert_as_exact_as_the_reference(inputs, scale=scale)


@pytest.mark.parametrize("T, B, D", [(1, 1, 1), (63, 2, 65), (3, 1, 511), (3, 2, 1030), (700, 1, 130), (256, 4, 500)])
@pytest.mark.parametrize("K", [3, 4])
def test_odd_shapes_and_ends_of_blocks(T: int, B: int, K: int, D: int) -> None:
    assert_as_exact_as_the_reference(some_inputs(T, B, K, D))


@pytest.mark.parametrize("name", test_sru_reference.CASES)
@pytest.mark.parametrize("implementation", [cpu.sru, reference.sru])
def test_stacks_are_those_of_the_package(
    implementation: Callable[..., Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankwise.lab.models.sru.sru", implementation)
    fresh = {key: tensor.detach().clone() for key, tensor in test_sru_reference.RECORDED.items()}
    monkeypatch.setattr(test_sru_reference, "RECORDED", fresh)
    test_sru_reference.test_outputs_and_every_gradient_are_those_of_the_package(name, monkeypatch)


def test_it_runs_where_tensors_are_on_the_cpu() -> None:
    inputs = some_inputs(9, 2, 3, 40)
    assert torch.equal(sru(*inputs.values())[0], cpu.sru(*inputs.values())[0])
    inputs["u"].requires_grad_()
    assert "sru_cpu" in type(sru(*inputs.values())[0].grad_fn).__name__


def test_float64_goes_to_the_reference() -> None:
    inputs = some_inputs(9, 2, 3, 40, dtype=torch.float64)
    theirs = results(reference.sru, inputs)
    for name, got in results(cpu.sru, inputs).items():
        assert torch.equal(got, theirs[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("K", [3, 4])
def test_half_precision_is_the_float32_result_rounded_to_the_nearest(K: int, dtype: torch.dtype) -> None:
    inputs = some_inputs(20, 2, K, 100, dtype=dtype)
    float32 = {name: None if t is None else t.float() for name, t in inputs.items()}
    dh = torch.randn(20, 2, 100).to(dtype)
    ours, wide = [], []
    for found, tensors in ((ours, inputs), (wide, float32)):
        leaves = [None if t is None else t.clone().requires_grad_() for t in tensors.values()]
        h, c = cpu.sru(*leaves)
        h.backward(dh.to(h.dtype))
        found += [h, c, *(t.grad for t in leaves if t is not None)]
    for got, want in zip(ours, wide, strict=True):
        assert torch.equal(got, want.to(got.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("K", [3, 4])
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype, K: int) -> None:
    inputs = some_inputs(60, 2, K, 1030, dtype=dtype)
    alone = results(cpu.sru, inputs)
    for num_threads in (2, 5):
        torch.set_num_threads(num_threads)
        for name, got in results(cpu.sru, inputs).items():
            assert torch.equal(got, alone[name]), f"{name} with {num_threads} threads"


@pytest.mark.parametrize("use", ["h", "c"])
def test_a_result_that_is_not_used_brings_no_gradient(use: str) -> None:
    assert_as_exact_as_the_reference(some_inputs(9, 2, 3, 40), use=use)


@pytest.mark.parametrize("name", NAMES)
def test_each_input_can_be_the_only_one_with_a_gradient(name: str) -> None:
    inputs = some_inputs(9, 2, 3, 40)
    expected = results(cpu.sru, inputs, use="h")[f"d{name}"]
    leaf = inputs[name].requires_grad_()
    h, _ = cpu.sru(*inputs.values(), 1.3)
    h.backward(torch.randn(h.shape, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(leaf.grad, expected)


def test_memory_may_be_in_any_order() -> None:
    dense = some_inputs(9, 2, 3, 40)
    strided = {
        "u": dense["u"].permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        "x": dense["x"].transpose(0, 1).contiguous().transpose(0, 1),
        "weight_c": dense["weight_c"].t().contiguous().t(),
        "bias": torch.cat([dense["bias"], dense["bias"]], 1)[:, :40],
        "c0": dense["c0"].t().contiguous().t(),
        "mask": dense["mask"].repeat_interleave(2, 1)[:, ::2],
    }
    assert not any(t.is_contiguous() for t in strided.values())
    for ours, theirs in zip(cpu.sru(*strided.values()), cpu.sru(*dense.values()), strict=True):
        assert torch.equal(ours, theirs)

    gradients = []
    for inputs in (strided, dense):
        inputs["u"].requires_grad_()
        # the gradient of a sum is one number, seen as many
        gradients.append(torch.autograd.grad(cpu.sru(*inputs.values())[0].sum(), inputs["u"])[0])
    assert torch.equal(*gradients)


def test_no_sequence_gives_no_output() -> None:
    inputs = some_inputs(9, 0, 3, 40)
    ours, theirs = results(cpu.sru, inputs), results(reference.sru, inputs)
    assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in theirs.items()}
    assert not ours["dweight_c"].any()


def sigmoid(p: Tensor) -> Tensor:
    """The kernel's forget gate alone: c = f c0 + (1 - f) v with c0 = 1 and v = 0."""
    zeros, ones = torch.zeros_like(p), torch.ones_like(p)
    u_TBKD = torch.stack([zeros, p, zeros])[None, None]
    _, c_BD = cpu.sru(u_TBKD, zeros[None, None], zeros.expand(2, -1), zeros.expand(2, -1), ones[None])
    return c_BD[0]


def test_gates_are_exact_to_two_units_in_the_last_place() -> None:
    p = torch.cat([torch.linspace(-87, 88, 2**20), torch.linspace(-2, 2, 2**20), torch.logspace(-30, 0, 2**12)])
    exact = torch.sigmoid(p.double())
    assert ((sigmoid(p) - exact) / exact).abs().max() <= 2e-7


def test_gates_saturate() -> None:
    inf, nan = float("inf"), float("nan")
    # 33 numbers: in full vectors, and in what is left over
    p = torch.tensor(3 * [0.0, -0.0, 20.0, 89.0, 1e30, inf, -89.0, -110.0, -1e30, -inf, nan])
    torch.testing.assert_close(sigmoid(p), torch.sigmoid(p), rtol=2e-7, atol=1e-37, equal_nan=True)
    assert (sigmoid(p)[[4, 5, 8, 9]] == torch.tensor([1.0, 1.0, 0.0, 0.0])).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_nan_goes_where_the_reference_has_it(name: str, dtype: torch.dtype) -> None:
    inputs = some_inputs(9, 2, 3, 40, dtype=dtype)
    inputs[name].view(-1)[::7] = float("nan")
    ours, theirs = results(cpu.sru, inputs), results(reference.sru, inputs)
    assert theirs["h"].isnan().any()
    for result, got in ours.items():
        assert torch.equal(got.isnan(), theirs[result].isnan()), result


def test_a_nan_of_all_ones_is_not_rounded_up_to_zero() -> None:
    inputs = some_inputs(2, 1, 3, 40, dtype=torch.bfloat16, x_dtype=torch.float32)
    inputs["x"].view(torch.int32).fill_(0x7FFFFFFF)
    h, _ = cpu.sru(*inputs.values())
    assert h.isnan().all()


def test_second_derivatives_are_refused() -> None:
    inputs = some_inputs(3, 1, 3, 4)
    u = inputs["u"].requires_grad_()
    (du,) = torch.autograd.grad(cpu.sru(*inputs.values())[0].sum(), u, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivatives only. For second ones use .*reference.sru"):
        du.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("K", [3, 4])
@pytest.mark.parametrize("dropout", [False, True])
def test_torch_accepts_the_operators(K: int, dtype: torch.dtype, dropout: bool) -> None:
    torch.use_deterministic_algorithms(False)
    inputs = [t if t is None else t.requires_grad_() for t in some_inputs(4, 2, K, 5, dropout=dropout).values()]
    torch.library.opcheck(torch.ops.rankwise.sru_cpu.default, (*inputs, 1.3, False))
    inputs = [t if t is None else t.detach() for t in inputs]
    gradients = torch.randn(4, 2, 5), torch.randn(2, 5)
    torch.library.opcheck(torch.ops.rankwise.sru_cpu_backward.default, (*gradients, *inputs, 1.3, torch.empty(0, 2, 5)))


def test_it_compiles_into_one_graph() -> None:
    torch.use_deterministic_algorithms(False)
    compiled = torch.compile(sru, backend="aot_eager", fullgraph=True)
    for T in (5, 6, 7):
        inputs = some_inputs(T, 2, 3, 40)
        ours, theirs = results(compiled, inputs), results(sru, inputs)
        for name, got in ours.items():
            assert torch.equal(got, theirs[name]), name


def run_python(
    script: str, cache: Path, *arguments: str, wait: bool = True, **environment: str
) -> subprocess.Popen[str]:
    names = {"CC": "", "RANKWISE_CACHE": str(cache), "OMP_NUM_THREADS": "2"} | environment
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script, *arguments],
        env=os.environ | names,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if wait:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    return process


FALLBACK = """
import sys, warnings, torch
from rankwise.lab.kernels.sru import cpu, reference, sru
inputs = torch.randn(4, 2, 3, 5), torch.randn(4, 2, 5), torch.randn(2, 5), torch.randn(2, 5), torch.randn(2, 5)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for _ in range(2):
        assert torch.equal(sru(*inputs)[0], reference.sru(*inputs)[0])
(warning,) = told
assert warning.category is RuntimeWarning and sys.argv[1] in str(warning.message), warning
assert "Install a C compiler" in str(warning.message)
assert cpu.READY is False
"""


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"PATH": ""}, "there is no C compiler (cc or gcc or clang)"),
        ({"CC": "no-such-compiler -O1"}, "there is no C compiler (no-such-compiler)"),
        ({"CC": "false"}, "false failed"),
    ],
)
def test_without_a_compiler_the_reference_takes_over_and_says_so_once(
    environment: dict[str, str], message: str, tmp_path: Path
) -> None:
    run_python(FALLBACK, tmp_path, message, **environment)


BUILD = """
import torch
from rankwise.lab.kernels.sru import cpu, reference, sru
inputs = torch.randn(4, 2, 3, 5), torch.randn(4, 2, 5), torch.randn(2, 5), torch.randn(2, 5), torch.randn(2, 5)
assert "READY" not in vars(cpu)
torch.testing.assert_close(sru(*inputs), reference.sru(*inputs))
assert cpu.READY is True
"""


def test_two_processes_may_build_at_once_and_leave_one_file_which_is_mended(tmp_path: Path) -> None:
    processes = [run_python(BUILD, tmp_path, wait=False) for _ in range(2)]
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    (built,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in tmp_path.rglob("*") if path.is_dir()] == [built.parent]

    modified = built.stat().st_mtime_ns
    run_python(BUILD, tmp_path)
    assert built.stat().st_mtime_ns == modified, "built although it was there"
    built.write_bytes(b"not a library")
    run_python(BUILD, tmp_path)
    assert built.stat().st_size > 10_000


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run_python(BUILD, tmp_path / "file")


THREADS = """
import os, torch
from rankwise.lab.kernels.sru import sru
def count():
    return len(os.listdir("/proc/self/task"))
torch.set_num_threads(2)
inputs = [torch.randn(shape) for shape in ((40, 2, 3, 600), (40, 2, 600), (2, 600), (2, 600), (2, 600))]
before = count()
sru(*inputs)
assert count() == before + 1, (before, count())
torch.randn(2**20).exp()
assert count() == before + 1, (before, count())
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads as Linux shows them")
@pytest.mark.skipif(not torch.backends.openmp.is_available(), reason="torch has no OpenMP runtime here")
def test_threads_are_shared_with_torch(tmp_path: Path) -> None:
    run_python(THREADS, cache_folder())


def test_importing_builds_nothing(tmp_path: Path) -> None:
    script = "import rankwise.lab.models.sru, rankwise.lab.kernels.sru.cpu as cpu; assert 'READY' not in vars(cpu)"
    run_python(script, tmp_path, CC="false")
    assert not any(tmp_path.iterdir())
