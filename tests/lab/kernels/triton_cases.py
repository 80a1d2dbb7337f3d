"""What tests of Triton kernels share: where they run, inputs, and how results are compared.

On a GPU where there is one; else through Triton's interpreter, in a process of its own: it must be asked for before
triton is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest
import torch
from torch import Tensor


def _interpreter() -> bool:
    """Those before 3.9 cannot count loops with today's numpy."""
    try:
        major, minor, *_ = version("triton").split(".")
    except PackageNotFoundError:
        return False
    return (int(major), int(minor)) >= (3, 9)


GPU, INTERPRETED = torch.cuda.is_available(), os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if GPU else "cpu"
kernels = pytest.mark.skipif(not (GPU or INTERPRETED), reason="no GPU; the interpreter has a test of its own")

BF16 = 1e-2
"""A number alone may be rounded another way, which is 2^-7 of it; the interpreter cuts off where a GPU rounds."""

by_interpreter = pytest.mark.skipif(
    GPU or INTERPRETED or not _interpreter(), reason="a GPU runs them, or there is no interpreter"
)


def run_by_interpreter(file: str) -> None:
    """Run the tests of a file once more, where kernels are interpreted."""
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", file]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:]


@pytest.fixture
def poison(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory is full of NaN, or of places that exist, so that what a kernel leaves unwritten shows."""
    if "compiled" in request.node.name:
        return

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(torch.nan if tensor.is_floating_point() else 0)

        return made

    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(Tensor, "new_empty", poisoned(Tensor.new_empty))


def some(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=torch.float32).to(DEVICE, dtype).requires_grad_()


def outputs_and_gradients(run: Callable[..., Any], inputs: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """What `run` gives, and the gradient of each input for random gradients of what it gives."""
    outputs = run(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(o.shape, generator=generator).to(o.device, o.dtype) for o in outputs]
    wanted = {f"d{i}": t for i, t in enumerate(inputs) if t is not None and t.requires_grad}
    gradients = torch.autograd.grad(outputs, list(wanted.values()), given)
    return {**{f"out{i}": o for i, o in enumerate(outputs)}, **dict(zip(wanted, gradients, strict=True))}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == want.keys()
    for name, expected in want.items():
        assert got[name].dtype == expected.dtype, name
        assert got[name].shape == expected.shape, name
        exact = expected.detach().double()
        error = (got[name].detach().double() - exact).norm() / exact.norm().clamp(min=1e-12)
        assert error <= tolerance, f"{name}: relative error {float(error):.1e}"
