"""Text that the language model of a run writes."""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from rankwise.errors import RankwiseError
from rankwise.lab.data.vocabulary import Vocabulary
from rankwise.lab.models.stream import open_stream


def sample(
    model: nn.Module,
    vocabulary: Vocabulary,
    prompt: str,
    *,
    length: int = 500,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """`length` tokens that go on from `prompt`, as they are drawn; see `draw` for the settings."""
    check_drawing(length=length, temperature=temperature, top_k=top_k, seed=seed)
    numbers = vocabulary.encode(prompt)
    if not numbers:
        raise RankwiseError("`prompt` must hold at least one token, but is empty. Give the text a beginning.")
    feed, device = open_stream(model).feed, next(model.parameters()).device
    return draw(feed, numbers, device, length=length, temperature=temperature, top_k=top_k, seed=seed)


def check_drawing(*, length: int, temperature: float, top_k: int | None = None, seed: int) -> None:
    """Refuse settings of `draw` that it cannot follow."""
    if length < 1:
        raise RankwiseError(f"`length` must be at least 1, but is {length} instead.")
    if not 0 <= temperature < math.inf:
        raise RankwiseError(f"`temperature` must be at least 0 and finite, but is {temperature} instead.")
    if top_k is not None and top_k < 1:
        raise RankwiseError(f"`top_k` must be at least 1, but is {top_k} instead.")
    if not -(2**63) <= seed < 2**63:
        raise RankwiseError(f"`seed` must be a whole number of 64 bits, but is {seed} instead.")


@torch.inference_mode()
def draw(
    feed: Callable[[Tensor], Tensor],
    numbers: Sequence[int],
    device: torch.device,
    *,
    length: int,
    temperature: float,
    top_k: int | None = None,
    seed: int,
) -> Iterator[int]:
    """`length` tokens that follow `numbers`, as they are drawn.

    Args:
        feed: reads further tokens of a text, (1, T), and gives the logits of the next ones, (1, T, V).
        temperature: below 1 the likely becomes more likely; 0 always takes the likeliest.
        top_k: draw only from so many likeliest tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens_BT = torch.tensor([list(numbers)], device=device)
    for _ in range(length):
        logits_BTV = feed(tokens_BT)
        number = _draw(logits_BTV[0, -1].float().cpu(), temperature, top_k, generator)
        yield number
        tokens_BT = torch.tensor([[number]], device=device)


def _draw(logits_V: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    if top_k is not None and top_k < len(logits_V):
        least = logits_V.topk(top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < least, -math.inf)
    p_V = torch.softmax(logits_V.double() / temperature, 0)
    return int(torch.multinomial(p_V, 1, generator=generator))


def default_prompt(vocabulary: Vocabulary, prompt: str) -> str:
    """`prompt` where the vocabulary can write it, otherwise its most frequent token."""
    if vocabulary.kind == "word":
        prompt = prompt.strip()
        return prompt if prompt.encode() in vocabulary.numbers else vocabulary.decode([0])
    return prompt if all(letter.encode() in vocabulary.numbers for letter in prompt) else vocabulary.decode([0])


def spelled(vocabulary: Vocabulary, prompt: str, numbers: Iterable[int]) -> Iterator[str]:
    """The text of tokens that follow a prompt, as they come."""
    if vocabulary.kind != "word":
        # a character may be several bytes, and so several tokens
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        yield from (decoder.decode(vocabulary.tokens[number]) for number in numbers)
        yield decoder.decode(b"", final=True)
        return
    last = vocabulary.encode(prompt)[-1:]
    for one in numbers:
        yield vocabulary.decode([*last, one])[len(vocabulary.decode(last)) :]
        last = [one]
