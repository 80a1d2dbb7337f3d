"""Which ranks are fast in the engines of a CPU: `python benchmarks/targets.py [--repeats 30]`.

A linear layer of 1024 inputs and 1024 outputs, and one of 768 and 3072, in float32 on one thread, dense and as pairs
of several ranks: around one share of the dense parameters, odd and in multiples of 8, 16 and 64; and multiples of 8 at
several shares, which show from where on a pair is slower than the dense matrix. torch, ONNX Runtime and OpenVINO, for 1
and 128 tokens; speeds relative to dense, medians of calls in turns. `rankwise.core.targets` holds what follows.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from harness import interleaved
from torch import nn

from rankwise.deploy.bench import engine
from rankwise.modules import LowRankLinear

SHAPES = [(1024, 1024), (768, 3072)]
SHARES = (0.4, 0.6, 0.7, 0.8, 0.9, 0.95)
ODD = 0.5
"""The share of the dense parameters at which alignments are compared."""


class Stack(nn.Module):
    """Several layers one after the other, so that a call is not all overhead."""

    def __init__(self, inputs: int, outputs: int, rank: int | None, depth: int = 4) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for index in range(depth):
            i, o = (inputs, outputs) if index % 2 == 0 else (outputs, inputs)
            if rank is None:
                layers.append(nn.Linear(i, o))
            else:
                layers.append(LowRankLinear(nn.Linear(i, rank, bias=False), nn.Linear(rank, o)))
            layers.append(nn.ReLU())
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y


def ranks(inputs: int, outputs: int) -> dict[str, int]:
    """Ranks by what they are to show."""
    same = inputs * outputs / (inputs + outputs)
    middle = round(ODD * same / 64) * 64
    alike = {"odd": middle - 1, "multiple of 8": middle - 8, "multiple of 16": middle - 16, "multiple of 64": middle}
    return alike | {f"{share:.0%} of the parameters": round(share * same / 8) * 8 for share in SHARES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--engines", default="torch,onnx,openvino")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for inputs, outputs in SHAPES:
        wanted = ranks(inputs, outputs)
        for name in options.engines.split(","):
            for tokens in (1, 128):
                x = torch.randn(tokens, inputs)
                models = {"dense": Stack(inputs, outputs, None).eval()}
                models |= {key: Stack(inputs, outputs, rank).eval() for key, rank in wanted.items()}
                calls = {key: engine(name).prepare(model, (x,)) for key, model in models.items()}
                times = interleaved(calls, options.repeats)
                dense = times.pop("dense")
                print(f"\n{inputs} x {outputs}, {name}, {tokens} tokens: dense {1e3 * statistics.median(dense):.3f} ms")
                for key, spent in times.items():
                    speed = statistics.median(a / b for a, b in zip(dense, spent, strict=True))
                    print(f"  {key:24} rank {wanted[key]:4d}  {speed:.2f}x", flush=True)


if __name__ == "__main__":
    main()
