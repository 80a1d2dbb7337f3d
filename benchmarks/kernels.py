"""What kernels gain over their reference: `python benchmarks/kernels.py [--record] [sru_cpu]`.

sru_cpu   the SRU recurrence, forward alone and with its backward pass, on one and on two threads: the reference and
          the CPU kernel in milliseconds; the bytes that the kernel must at least move, per second, next to a copy of
          as many bytes (which may fit into the cache) and of 512 MiB (which do not)

Rows are printed, and with --record also kept in results.csv.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
from harness import interleaved, record
from torch import Tensor

from rankwise.lab.kernels.sru import cpu, reference

REPEATS = 15
report = partial(record, "kernels", keep="--record" in sys.argv)


def inputs(T: int, B: int, D: int, dtype: torch.dtype) -> list[Tensor]:
    wide = [torch.randn(T, B, 3, D, dtype=dtype), torch.randn(T, B, D, dtype=dtype)]
    return [*wide, 0.5 * torch.randn(2, D), torch.randn(2, D), torch.randn(B, D)]


def forward(sru: Callable[..., tuple[Tensor, Tensor]], tensors: list[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    def run() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return sru(*tensors)

    return run


def forward_and_backward(
    sru: Callable[..., tuple[Tensor, Tensor]], tensors: list[Tensor]
) -> Callable[[], tuple[Tensor, ...]]:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    # some gradient, the same for all that are compared
    dh = tensors[1].detach()

    def run() -> tuple[Tensor, ...]:
        return torch.autograd.grad(sru(*leaves)[0], leaves, dh)

    return run


def copy(num_bytes: float) -> Callable[[], object]:
    """Reads and writes `num_bytes` in all."""
    source = torch.zeros(int(num_bytes) // 2, dtype=torch.uint8)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def check(tensors: list[Tensor]) -> None:
    tolerance = 1e-2 if tensors[0].dtype == torch.bfloat16 else 1e-4
    for how in (forward, forward_and_backward):
        for got, want in zip(how(cpu.sru, tensors)(), how(reference.sru, tensors)(), strict=True):
            assert (got - want).abs().max() <= tolerance * want.abs().max()


def bench_sru_cpu() -> None:
    assert cpu.READY
    torch.manual_seed(0)
    for T, B, D in ((256, 1, 3056), (64, 16, 512)):
        for dtype in (torch.float32, torch.bfloat16):
            tensors = inputs(T, B, D, dtype)
            check(tensors)
            # reads u (3) and x, writes h; then reads u, x and dh, writes du and dx
            for name, how, passes in (("forward", forward, 5), ("forward + backward", forward_and_backward, 5 + 5 + 4)):
                for num_threads in (1, 2):
                    torch.set_num_threads(num_threads)
                    moved = passes * T * B * D * dtype.itemsize
                    times = interleaved(
                        {
                            "reference": how(reference.sru, tensors),
                            "kernel": how(cpu.sru, tensors),
                            "copy": copy(moved),
                            "large copy": copy(2**29),
                        },
                        REPEATS,
                    )
                    case = f"{T}x{B}x{D} {str(dtype)[6:]} {name}, {num_threads} thread{'s' * (num_threads > 1)}"
                    for one in ("reference", "kernel"):
                        report(f"{case}: {one}", [1e3 * t for t in times[one]], "ms")
                    pairs = zip(times["reference"], times["kernel"], strict=True)
                    report(f"{case}: gain", [theirs / ours for theirs, ours in pairs], "x")
                    for one, num_bytes in (("kernel", moved), ("copy", moved), ("large copy", 2**29)):
                        report(f"{case}: {one}", [num_bytes / t / 1e9 for t in times[one]], "GB/s")


if __name__ == "__main__":
    parts = {"sru_cpu": bench_sru_cpu}
    for part in [word for word in sys.argv[1:] if not word.startswith("-")] or parts:
        parts[part]()
