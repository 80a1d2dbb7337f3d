"""What the examples share: Python's help topics as bytes, and a Llama small enough for a laptop; no download."""

from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

TEXT = torch.tensor(list("\n\n".join(topics[name] for name in sorted(topics)).encode()))
CUT = int(0.9 * len(TEXT))
"""The last tenth is kept from training."""


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256, hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=10, eos_token_id=10,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batches(
    number: int, seed: int = 0, *, held_out: bool = False, size: int = 16, length: int = 64
) -> Iterator[dict[str, Tensor]]:
    """Random windows of the text; a causal model shifts the labels itself."""
    data = TEXT[CUT:] if held_out else TEXT[:CUT]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(number):
        starts = torch.randint(len(data) - length, (size, 1), generator=generator)
        tokens = data[starts + torch.arange(length)]
        yield {"input_ids": tokens, "labels": tokens}


def train(model: nn.Module, num_steps: int, lr: float = 3e-3, seed: int = 0) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model.train()
    for batch in batches(num_steps, seed):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.inference_mode()
def held_out_loss(model: nn.Module) -> float:
    """Nats per byte on text that was kept from training."""
    model.eval()
    losses = [model(**batch).loss.item() for batch in batches(8, seed=1, held_out=True)]
    return sum(losses) / len(losses)
