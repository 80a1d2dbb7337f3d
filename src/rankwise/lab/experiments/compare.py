"""Two language models that answer the same prompt, and what each finds of the other's answer.

A model is one of a run, with its vocabulary, or a decoder of transformers, with its tokenizer. Losses are nats per
token where both have the same vocabulary, and bits per byte otherwise: tokens of different lengths cannot be compared.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankwise.core.budget import count
from rankwise.deploy.devices import find_device
from rankwise.deploy.inputs import encoder, is_decoder, positions_of, special_tokens
from rankwise.errors import CheckpointError, DataError, RankwiseError, first_line
from rankwise.lab.data.vocabulary import Vocabulary
from rankwise.lab.experiments.run_folder import BASE, EXPERIMENT, MODEL, find_run, load_run
from rankwise.lab.experiments.sample import check_drawing, draw, spelled
from rankwise.lab.experiments.saved_models import PRETRAINED, kind_of
from rankwise.lab.models.stream import open_stream

ROWS = 512
"""Tokens whose logits are turned into float32 at a time: a vocabulary is wide."""
SEEN = 8
"""Tokens before a new one that are spelled together with it: spaces and characters may depend on them."""
WARM_UP = 4
"""Tokens that a model draws before anybody waits: its first calls are slower."""
BROKEN = "\ufffd"
"""How a decoder writes the bytes of a character that is not complete."""


@dataclass(frozen=True)
class Piece:
    """The fewest tokens that spell whole characters, and how unlikely a model finds them."""

    text: str
    loss: float | None
    """In the unit of the comparison; None for the first token, which nothing predicts."""
    tokens: int = 1


@dataclass(frozen=True)
class Score:
    """A text as a model reads it."""

    mean: float | None
    """In the unit of the comparison; None where nothing is predicted."""
    pieces: tuple[Piece, ...]


class Answering(ABC):
    """A language model, and how it reads and spells text."""

    def __init__(self, name: str, model: nn.Module) -> None:
        self.name, self.model = name, model.eval()

    vocabulary: object
    """Equal for models that read a text as the same tokens."""
    ends: frozenset[int] = frozenset()
    """Tokens that end an answer."""
    before: tuple[int, ...] = ()
    """Tokens before every text, such as BOS."""
    longest: int | None = None
    """Tokens that the model is sure to read; None where there is no end."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without those before it."""

    @abstractmethod
    def spell(self, seen: Sequence[int], numbers: Iterable[int]) -> Iterator[str]:
        """The text of each token after those in `seen`, empty while a character is not complete; a rest at the end."""

    @abstractmethod
    def stream(self) -> Callable[[Tensor], Tensor]:
        """What reads further tokens of one text, (1, T), and gives the logits of the next ones, (1, T, V)."""

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def about(self) -> dict[str, Any]:
        """What is known before any answer."""
        dtype = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        size = {"parameters": count(self.model)}
        # tied weights once
        size["bytes"] = sum(weight.numel() * weight.element_size() for weight in self.model.parameters())
        return {"name": self.name, **size, "dtype": dtype, "device": str(self.device)}

    @torch.inference_mode()
    def losses(self, numbers: Sequence[int], first: int) -> list[float | None]:
        """The loss of each token from place `first` on, in nats; None for the first of all."""
        tokens_T = torch.tensor(list(numbers), device=self.device)
        logits_TV = self.stream()(tokens_T[None, :-1])[0] if len(numbers) > 1 else torch.empty(0, 1)
        found: list[float | None] = [None] * (first == 0)
        for start in range(max(first, 1) - 1, len(numbers) - 1, ROWS):
            rows_TV = logits_TV[start : start + ROWS].float()
            found += F.cross_entropy(rows_TV, tokens_T[start + 1 : start + 1 + len(rows_TV)], reduction="none").tolist()
        if bad := [loss for loss in found if loss is not None and not math.isfinite(loss)]:
            dtype, remedy = next(self.model.parameters()).dtype, "Choose another --dtype, or check the weights."
            raise RankwiseError(f"Losses must be finite, but {self.name} in {dtype} gives {bad[0]}. {remedy}")
        return found

    def score(self, numbers: Sequence[int], first: int, *, per_byte: bool) -> Score:
        """How unlikely the model finds the tokens from place `first` on, after those before them."""
        losses = self.losses(numbers, first)
        texts = list(self.spell(numbers[:first], numbers[first:]))
        # what is left of a character at the end belongs to the last token
        texts[len(losses) - 1 :] = ["".join(texts[len(losses) - 1 :])] if losses else []
        pieces: list[Piece] = []
        waiting: list[float | None] = []
        for place, (text, loss) in enumerate(zip(texts, losses, strict=True), 1):
            waiting.append(loss)
            if text or place == len(losses):
                pieces.append(_piece(text, waiting, per_byte))
                waiting = []
        predicted = [piece for piece in pieces if piece.loss is not None]
        weights = [_size(piece.text) if per_byte else 1 for piece in predicted]
        total = sum((piece.loss or 0) * weight for piece, weight in zip(predicted, weights, strict=True))
        number = sum(weights) if per_byte else sum(piece.tokens for piece in predicted)
        return Score(total / number if number else None, tuple(pieces))


def _piece(text: str, losses: Sequence[float | None], per_byte: bool) -> Piece:
    nats = [loss for loss in losses if loss is not None]
    if len(nats) < len(losses):
        return Piece(text, None, len(losses))
    return Piece(text, sum(nats) / math.log(2) / _size(text) if per_byte else sum(nats), len(losses))


def _size(text: str) -> int:
    """Bytes of a text; a token without any, such as a special one, counts as one."""
    return max(len(text.encode(errors="replace")), 1)


class RunModel(Answering):
    """A model of a run."""

    vocabulary: Vocabulary

    def __init__(self, name: str, folder: Path) -> None:
        found = load_run(folder)
        super().__init__(name, found.model)
        self.vocabulary = found.vocabulary

    def encode(self, text: str) -> list[int]:
        return self.vocabulary.encode(text)

    def spell(self, seen: Sequence[int], numbers: Iterable[int]) -> Iterator[str]:
        return spelled(self.vocabulary, self.vocabulary.decode(seen), numbers)

    def stream(self) -> Callable[[Tensor], Tensor]:
        return open_stream(self.model).feed


class PretrainedDecoder(Answering):
    """A decoder of transformers."""

    def __init__(self, name: str, source: str) -> None:
        from rankwise.hf.evaluation import check_predicts
        from rankwise.hf.loading import load_model, load_tokenizer

        config = check_predicts(source, text=False)
        if not is_decoder(config):
            raise CheckpointError(
                f"`rankwise compare` needs decoders, which go on with a text, but {source} holds an encoder-decoder. "
                "Give a ...ForCausalLM."
            )
        self.tokenizer = load_tokenizer(source, needed=True, what="`rankwise compare`")
        super().__init__(name, load_model(source))
        self.before = special_tokens(self.tokenizer, config).before
        self.vocabulary = (self.tokenizer.get_vocab(), self.before)
        self.longest = positions_of(self.model)
        ends = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        self.ends = frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])
        self.num_words: int = config.get_text_config().vocab_size

    def encode(self, text: str) -> list[int]:
        numbers = encoder(self.tokenizer)(text)
        if numbers and (largest := max(numbers)) >= self.num_words:
            raise DataError(f"The tokenizer must be the model's own, of {self.num_words} words, but gives {largest}.")
        return numbers

    def spell(self, seen: Sequence[int], numbers: Iterable[int]) -> Iterator[str]:
        window = list(seen[-SEEN:])
        shown = self._decode(window)
        for number in numbers:
            window.append(number)
            text = self._decode(window)
            if text.endswith(BROKEN):
                yield ""
                continue
            yield text[len(shown) :]
            window = window[-SEEN:]
            shown = self._decode(window)
        yield self._decode(window)[len(shown) :]

    def _decode(self, numbers: list[int]) -> str:
        text: str = self.tokenizer.decode(numbers, clean_up_tokenization_spaces=False)
        return text

    def stream(self) -> Callable[[Tensor], Tensor]:
        return _PretrainedStream(self.model).feed


class _PretrainedStream:
    """A decoder of transformers fed piece by piece; one that keeps no keys and values reads all of the text again."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.read_BT: Tensor | None = None
        self.cache: Any = None

    def feed(self, tokens_BT: Tensor) -> Tensor:
        read_BT = tokens_BT if self.read_BT is None else torch.cat([self.read_BT, tokens_BT], 1)
        known = signature(self.model.forward).parameters
        more: dict[str, Any] = {"attention_mask": torch.ones_like(read_BT)} if "attention_mask" in known else {}
        more |= {"use_cache": True} if "use_cache" in known else {}
        more |= {"past_key_values": self.cache} if self.cache is not None else {}
        out = self.model(read_BT if self.cache is None else tokens_BT, **more)
        self.read_BT = read_BT
        self.cache = getattr(out, "past_key_values", None) if "past_key_values" in known else None
        logits_BTV: Tensor = out.logits[:, -tokens_BT.shape[1] :]
        return logits_BTV


def find_pair(folder: Path) -> tuple[Path, Path]:
    """The dense and the pruned model of a run: its control, or else its base, and the model of its own method."""
    if kind_of(folder) != "run":
        raise CheckpointError(
            f"`rankwise compare` needs two models, or the folder of a run that holds both, but {folder} is "
            f"{'one model' if kind_of(folder) else 'neither'}. Give DENSE and SMALL."
        )
    small = find_run(folder).folder
    for name in ("dense", BASE):
        for dense in (folder / name, small.parent / name):
            if (dense / MODEL).is_dir() and dense.resolve() != small.resolve():
                return dense, small
    raise CheckpointError(
        f"A run must hold its dense model to be compared with, but {folder} has no dense/{MODEL} or {BASE}/{MODEL}. "
        "Give DENSE and SMALL."
    )


def open_answering(source: str, name: str, *, device: str = "auto", dtype: torch.dtype | None = None) -> Answering:
    """The model of a folder, or of a name on the hub, on a device (auto: a GPU on which it fits)."""
    folder = Path(source)
    # the vocabulary of a run stands beside the folder of its model
    if folder.resolve().name == MODEL and (folder.resolve().parent / EXPERIMENT).is_file():
        folder = folder.resolve().parent
    found: Answering
    if (folder / EXPERIMENT).is_file():
        place = find_run(folder).path
        is_pretrained = (place / PRETRAINED).is_file()
        found = PretrainedDecoder(name, str(place)) if is_pretrained else RunModel(name, folder)
    elif kind_of(folder) == "saved":
        raise CheckpointError(
            f"`rankwise compare` needs a model with its vocabulary, but {folder} has none beside it. Give the folder "
            "of a run, or of transformers."
        )
    elif folder.exists() and kind_of(folder) is None:
        raise CheckpointError(f"MODEL must be a folder of a run or of transformers, but {folder} is neither.")
    else:
        from rankwise.hub import check_name

        check_name(source)
        found = PretrainedDecoder(name, source)
    found.model.to(device=find_device(device, found.model), dtype=dtype)
    return found


class Comparison:
    """Two models side by side: the dense one, and the small one."""

    def __init__(self, dense: Answering, small: Answering) -> None:
        self.models = (dense, small)
        self.same_vocabulary = dense.vocabulary == small.vocabulary
        for model in self.models:
            _warm_up(model)

    @property
    def unit(self) -> str:
        return "nats per token" if self.same_vocabulary else "bits per byte"

    def about(self) -> dict[str, Any]:
        return {"unit": self.unit, "models": [model.about() for model in self.models]}

    def answers(self, prompt: str, *, length: int, temperature: float, seed: int) -> Iterator[dict[str, Any]]:
        """Events, as they happen, of both models one after the other; all that can be refused is refused first.

        `prompt`: the prompt as the model reads it. `text`: a part of its answer. `answer`: the whole of it, its
        tokens per second after the first, and its loss under the other model.
        """
        check_drawing(length=length, temperature=temperature, seed=seed)
        read = [self._read(model, prompt, length) for model in self.models]
        settings = {"length": length, "temperature": temperature, "seed": seed}

        def events() -> Iterator[dict[str, Any]]:
            for place, (model, numbers) in enumerate(zip(self.models, read, strict=True)):
                found = model.score(numbers, len(model.before), per_byte=not self.same_vocabulary)
                yield {"kind": "prompt", "model": place, **asdict(found)}
            for place in range(len(self.models)):
                yield from self._answer(place, read, prompt, settings)

        return events()

    def _read(self, model: Answering, prompt: str, length: int) -> list[int]:
        try:
            numbers = [*model.before, *model.encode(prompt)]
        except DataError as error:
            raise DataError(f"{model.name}: {error}") from None
        if not numbers:
            raise RankwiseError("`prompt` must hold at least one token, but is empty. Give the text a beginning.")
        if model.longest is not None and len(numbers) + length > model.longest:
            raise RankwiseError(
                f"Prompt and answer must have at most {model.longest} tokens, which is all that {model.name} reads, "
                f"but have {len(numbers)} and {length}. Give a smaller length, or a shorter prompt."
            )
        return numbers

    def _answer(
        self, place: int, read: Sequence[list[int]], prompt: str, settings: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        model, other, numbers = self.models[place], self.models[1 - place], read[place]
        drawn: list[int] = []
        seconds: list[float] = []
        text = ""
        for piece in model.spell(numbers, _until(_timed(model, numbers, settings, seconds), model.ends, drawn)):
            text += piece
            yield {"kind": "text", "model": place, "text": piece}
        after = sum(seconds[1:])
        made = {"text": text, "tokens": len(drawn), "speed": (len(seconds) - 1) / after if after > 0 else None}
        score, why = self._under(other, read[1 - place], prompt, drawn, text)
        yield {"kind": "answer", "model": place, **made, "note": why, **asdict(score)}

    def _under(
        self, other: Answering, read: list[int], prompt: str, drawn: list[int], text: str
    ) -> tuple[Score, str | None]:
        """The loss of an answer under the other model, and why there is none."""
        if self.same_vocabulary:
            return other.score([*read, *drawn], len(read), per_byte=False), None
        nothing = Score(None, (Piece(text, None),))
        try:
            numbers = [*other.before, *other.encode(prompt + text)]
        except DataError as error:
            return nothing, f"{other.name} cannot read this answer: {error}"
        if other.longest is not None and len(numbers) > other.longest:
            return nothing, f"{other.name} cannot read this answer: it reads at most {other.longest} tokens."
        # the end of the prompt and the start of the answer may be one token
        first = next((i for i, pair in enumerate(zip(read, numbers, strict=False)) if pair[0] != pair[1]), len(read))
        found = other.score(numbers, first, per_byte=True)
        spelled = "".join(piece.text for piece in found.pieces)
        if len(spelled) < len(text) or not (prompt + text).endswith(spelled):
            return nothing, f"{other.name} cannot read this answer: its vocabulary does not spell the same text."
        return found, None


def _timed(model: Answering, numbers: Sequence[int], settings: dict[str, Any], seconds: list[float]) -> Iterator[int]:
    """Tokens that a model draws, and in `seconds` how long each took; what is done between them does not count."""
    tokens = draw(model.stream(), numbers, model.device, **settings)
    while True:
        began = time.perf_counter()
        number = next(tokens, None)
        if number is None:
            return
        seconds.append(time.perf_counter() - began)
        yield number


def _until(numbers: Iterable[int], ends: frozenset[int], drawn: list[int]) -> Iterator[int]:
    """Tokens before one that ends the text; `drawn` holds them too."""
    for number in numbers:
        if number in ends:
            return
        drawn.append(number)
        yield number


def _warm_up(model: Answering) -> None:
    try:
        list(draw(model.stream(), [*(model.before or (0,))], model.device, length=WARM_UP, temperature=0.0, seed=0))
    # a dtype that a layer has no kernel for
    except (RuntimeError, NotImplementedError) as error:
        about = model.about()
        raise RankwiseError(
            f"{model.name} must run in {about['dtype']} on {about['device']}, but does not: {first_line(error)} "
            "Choose another --dtype or --device."
        ) from None
