"""Prune with Lightning: the pruner steps after the optimizer, in `optimizer_step`.

python examples/lightning_module.py [--steps 300]

`optimizer_step` runs once per step of the optimizer, also with accumulated gradients. All state of the pruner is in the
model's buffers, so Lightning's checkpoints hold it.
"""

import argparse
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader
from toy import batches, held_out_loss, tiny_llama

import rankwise as rw


class PrunedModel(lightning.LightningModule):
    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.model = tiny_llama()
        # before the optimizer, which takes the weights that the pruner makes
        self.pruner = rw.Pruner(self.model, rw.Budget(removed=0.5), anneal_steps=num_steps // 2)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("expected_size", float(self.pruner.size().expected))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.pruner.weight_parameters(), lr=3e-3)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.pruner.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps

    module = PrunedModel(steps)
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(list(batches(steps)), batch_size=None))
    small = module.pruner.compact()
    print(module.pruner.size())
    print(f"compact: {rw.count(small):,} parameters, {held_out_loss(small):.3f} nats per byte on held-out text")


if __name__ == "__main__":
    main()
