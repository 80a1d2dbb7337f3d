"""Prune with the stock Trainer of transformers: one callback, and a folder that `from_pretrained` loads.

python examples/trainer.py [--steps 300]
"""

import argparse
import tempfile
from pathlib import Path

import torch
from toy import batches, held_out_loss, tiny_llama
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import rankwise as rw
from rankwise.hf import PruningCallback, save_pretrained


def rows(number: int) -> list[dict[str, torch.Tensor]]:
    """Examples, as a dataset gives them: one text each."""
    return [{name: tensor[0] for name, tensor in batch.items()} for batch in batches(number, size=1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps

    model = tiny_llama()
    pruner = rw.Pruner(model, rw.Budget(removed=0.5), anneal_steps=steps // 2)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=f"{folder}/runs", max_steps=steps, per_device_train_batch_size=16, learning_rate=3e-3,
            logging_steps=max(1, steps // 4), report_to="none", use_cpu=True, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=rows(512), callbacks=[PruningCallback(pruner)])
        trainer.train()
        small = pruner.compact()
        print(pruner.size())
        save_pretrained(small, Path(folder) / "small", size=pruner.size())
        loaded = AutoModelForCausalLM.from_pretrained(Path(folder) / "small")
    print(f"loaded: {rw.count(loaded):,} parameters, {held_out_loss(loaded):.3f} nats per byte on held-out text")


if __name__ == "__main__":
    main()
