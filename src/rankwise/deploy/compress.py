"""One-shot compression of a model in a folder: what all kinds of folders share, and those of `rankwise.save`."""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankwise.adapters.generic import find_plan
from rankwise.core.budget import Budget, SizeReport
from rankwise.core.plan import LeftOut, Plan, check_not_empty
from rankwise.core.targets import find_target
from rankwise.data.text import not_utf8
from rankwise.data.vocabulary import Vocabulary
from rankwise.deploy.save import check_target, save_with
from rankwise.errors import DataError
from rankwise.methods.svd import Svd
from rankwise.oneshot import compress
from rankwise.pruner import account_of

BYTES_PER_TOKEN = 16
"""More than a token of text has, nearly always."""
BYTES_PER_CHARACTER = 4
"""The most that UTF-8 has."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A text, and how much of it is read."""

    file: Path
    num_windows: int = 64
    """Windows, at equal distances in the text."""
    window: int = 256
    """Tokens of a window."""
    loss_window: int = 32
    """Tokens at the start of a window by which gradients are measured: they take far more memory."""

    def __post_init__(self) -> None:
        for name in ("num_windows", "window", "loss_window"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                option = " (--windows)" if name == "num_windows" else ""
                raise ValueError(f"`{name}`{option} must be a whole number of at least 1, but is {value!r} instead.")


def compress_saved(
    model: nn.Module,
    budget: Budget,
    out: str | os.PathLike[str],
    *,
    vocabulary: Vocabulary | None = None,
    calibration: Calibration | None = None,
    layout: Literal["pair", "pivot"] | None = None,
    target: str | None = None,
    embeddings: bool = False,
    exclude: Sequence[str] = (),
    overwrite: bool = False,
    beside: Mapping[str, Mapping[str, Any]] | None = None,
) -> SizeReport:
    """Compress `model`, which `rankwise.load` gave, in place and into the folder `out`, which `rankwise.load` opens.

    Args:
        model: of any kind; with `calibration`, one of our language models.
        vocabulary: what `calibration` is read by.
        beside: JSON files that are written along with the model, by name.
        budget, out, calibration, layout, target, embeddings, exclude, overwrite: as for models of transformers.
    """
    folder = Path(out).resolve()
    check_target(folder, overwrite)
    plan = plan_of(model, embeddings=embeddings, exclude=exclude)
    where = find_target(target, model)
    account = account_of(model, plan, Svd(layout=layout or where.layout), where, trained=True)
    data = {} if calibration is None else _data(model, calibration, vocabulary)
    compress(model, budget, plan=plan, layout=layout, target=target, in_place=True, **data)
    save_with(model, folder, beside or {}, overwrite=overwrite)
    return SizeReport.of(model, account, budget)


def _data(model: nn.Module, calibration: Calibration, vocabulary: Vocabulary | None) -> dict[str, Any]:
    """What `compress` takes of a text."""
    if vocabulary is None:
        raise DataError(
            "A calibration text needs the model's vocabulary, but the folder holds none. "
            "Give the folder of the run that made the model, or leave `calibration` out."
        )
    num_words = getattr(getattr(model, "config", None), "num_words", None)
    if num_words != len(vocabulary):
        raise DataError(f"The vocabulary must be the model's own, of {num_words} words, but has {len(vocabulary)}.")
    most = BYTES_PER_TOKEN if vocabulary.kind == "word" else BYTES_PER_CHARACTER
    windows = [window[None] for window in text_windows(vocabulary.encode, calibration, bytes_per_token=most)]
    generator = torch.Generator().manual_seed(0)
    return {
        "calibration": windows,
        "loss_batches": [window[:, : calibration.loss_window] for window in windows],
        "loss": lambda output: loss_of_choices(output[0], generator),
    }


def text_windows(
    encode: Callable[[str], list[int]], calibration: Calibration, *, bytes_per_token: int = BYTES_PER_TOKEN
) -> list[Tensor]:
    """Windows of tokens at equal distances in a text; of a long one only those places are read."""
    length = calibration.window
    span = length * bytes_per_token
    try:
        size = calibration.file.stat().st_size
        with calibration.file.open("rb") as file:
            number = max(1, min(calibration.num_windows, size // span))
            windows = []
            for i in range(number):
                first = i * size // number
                file.seek(first)
                text = _decoded(calibration.file, file.read(span), first)
                windows.append(torch.tensor(encode(text)[:length], dtype=torch.long))
    except OSError as error:
        raise DataError(f"`calibration` must be a text, but {calibration.file} is not: {error.strerror}.") from None
    whole = [window for window in windows if len(window) == length]
    if not whole:
        raise DataError(
            f"`calibration` must hold at least one window of {length} tokens, but {calibration.file} has "
            f"{max(len(window) for window in windows)}. Give a longer text, or shorter windows."
        )
    return whole


def _decoded(path: Path, block: bytes, first: int) -> str:
    """A block that begins at byte `first` of a text, without the characters that are cut at its ends."""
    cut = 0
    while first > 0 and cut < min(BYTES_PER_CHARACTER - 1, len(block)) and block[cut] & 0xC0 == 0x80:
        cut += 1
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(block[cut:])
    except UnicodeDecodeError as error:
        raise not_utf8(path, first + cut, error) from None


def plan_of(model: nn.Module, *, embeddings: bool, exclude: Sequence[str]) -> Plan:
    """Every linear layer, and tables of words if they are wanted."""
    plan = find_plan(model, exclude=list(exclude))
    if not embeddings:
        words = [site for site in plan.sites if site.has_embedding]
        left_out = [LeftOut(site.name, site.params, "a table of words") for site in words]
        plan = Plan(tuple(site for site in plan.sites if site not in words), (*plan.left_out, *left_out))
    check_not_empty(plan)
    return plan


def sampled_loss(seed: int = 0) -> Callable[[Any], Tensor]:
    """The loss of answers that the model itself gives at random: its gradients tell what changes those answers.

    Their second moments are the Fisher information, with no need of right answers.
    """
    generator = torch.Generator().manual_seed(seed)

    def loss(output: Any) -> Tensor:
        logits = output.logits if hasattr(output, "logits") else output[0]
        if not hasattr(output, "logits") or logits.shape[-1] == 1:
            # numbers, not choices: the squared error
            noise = torch.randn(logits.shape, generator=generator).to(logits)
            error: Tensor = (logits * noise).sum()
            return error
        return loss_of_choices(logits, generator)

    return loss


def loss_of_choices(logits: Tensor, generator: torch.Generator) -> Tensor:
    """The loss of choices that are drawn from the logits, over their last dimension."""
    logits = logits.reshape(-1, logits.shape[-1])
    with torch.no_grad():
        chances = logits.float().softmax(-1).cpu()
        answers = torch.multinomial(chances, 1, generator=generator).flatten().to(logits.device)
    return F.cross_entropy(logits, answers, reduction="sum")
