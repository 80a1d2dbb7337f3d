"""Compress at once, then train the small model to answer as the dense one does.

python examples/heal.py [--steps 300]

What is trained is the compact model itself: no gates, and each step costs what the small model costs. The dense model
stays as it is, so on a toy that has not converged the small one may overtake it.
"""

import argparse
import copy

import torch
from toy import batches, held_out_loss, tiny_llama, train

import rankwise as rw
from rankwise.distill import Distillation, distillation_loss


def heal(small: torch.nn.Module, dense: torch.nn.Module, num_steps: int) -> None:
    loss = distillation_loss(dense, Distillation(labels=0.5, logits=1.0, hidden=1.0))
    optimizer = torch.optim.AdamW(small.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    small.train()
    for batch in batches(num_steps, seed=3):
        loss(small, batch).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="steps of training before, and of healing after")
    steps = parser.parse_args().steps

    dense = tiny_llama()
    train(dense, steps)
    # `compress` works in place
    small = rw.compress(copy.deepcopy(dense), rw.Budget(removed=0.8), calibration=list(batches(8, seed=2)))
    before = held_out_loss(small)
    heal(small, dense, steps)
    print(f"dense:      {rw.count(dense):,} parameters, {held_out_loss(dense):.3f} nats per byte on held-out text")
    print(f"compressed: {rw.count(small):,} parameters, {before:.3f}")
    print(f"healed:     {rw.count(small):,} parameters, {held_out_loss(small):.3f}")


if __name__ == "__main__":
    main()
