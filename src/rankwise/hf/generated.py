"""Text that a decoder generates itself. It is like what the model has learned, of every kind in its proportion."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from rankwise.core.budget import count
from rankwise.deploy.documents import SpecialTokens
from rankwise.measure import evaluating

AT_ONCE, AT_ONCE_SMALL, SMALL = 64, 256, 500_000_000
"""Windows that are generated at a time, and by models of fewer parameters on a GPU, which leave most of it idle."""


@torch.no_grad()
def generated(
    model: Any,
    number: int,
    length: int,
    special: SpecialTokens,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Tensor:
    """Windows of `length` tokens, word by word as likely as the model finds them, each from the beginning of a text.

    `progress` is called with how many windows are done, and of how many.
    """
    config = model.config.get_text_config()
    ends = getattr(config, "eos_token_id", None)
    # what ends a text also comes before one; a model may have several such tokens
    end = ends[0] if isinstance(ends, list) and ends else ends
    is_known = isinstance(end, int) and 0 <= end < config.vocab_size
    first = special.before or (end if is_known else 0,)
    more = length - len(special.before)
    at_once = AT_ONCE_SMALL if model.device.type == "cuda" and count(model) < SMALL else AT_ONCE
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), evaluating(model), _plain_generation(model):
        torch.manual_seed(seed % 2**63)
        found = [
            model.generate(
                torch.tensor([first] * min(at_once, number - done), device=model.device),
                attention_mask=torch.ones(min(at_once, number - done), len(first), device=model.device).long(),
                max_new_tokens=more,
                min_new_tokens=more,
                do_sample=True,
                top_k=0,
                use_cache=True,
            ).cpu()
            for done in _told(range(0, number, at_once), progress)
        ]
    # where nothing is to come first, the token that text was generated from goes
    windows = torch.cat(found)
    return windows if special.before else windows[:, 1:]


def _told(starts: range, progress: Callable[[int, int], None]) -> Iterator[int]:
    """The first window of every call, told before the call; and the end."""
    for done in starts:
        progress(done, starts.stop)
        yield done
    progress(starts.stop, starts.stop)


@contextmanager
def _plain_generation(model: Any) -> Iterator[None]:
    """Leave out what a folder says of answers, such as a penalty for repetitions."""
    own = model.generation_config
    model.generation_config = GenerationConfig(eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        model.generation_config = own
