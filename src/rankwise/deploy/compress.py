"""One-shot compression of a model in a folder: what all kinds of folders share, and those of `rankwise.save`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankwise.adapters.plans import find_plan
from rankwise.core.budget import Budget, SizeAccount, SizeReport
from rankwise.core.plan import LeftOut, Plan, check_not_empty
from rankwise.core.targets import find_target
from rankwise.deploy.kept_back import KeptBack, Quality, milliseconds
from rankwise.deploy.measure import slower_than_dense
from rankwise.deploy.save import check_target, save_with
from rankwise.deploy.windows import BYTES_PER_CHARACTER, BYTES_PER_TOKEN, Calibration, Marks, split, text_windows
from rankwise.errors import DataError, RankwiseError
from rankwise.methods.svd import Svd
from rankwise.oneshot import compress
from rankwise.pruner import size_account

TIMED_TOKENS = 128
"""Of a call that is timed, where no calibration says how long texts are."""
WORDS = "a table of words"
TOLERATED = 1.1
"""Times the dense model's time: above it the small one is called slower. It is timed later, so they take no turns."""
ROOM = 2
"""A model is compressed on a GPU by default if that has this many times its size free."""


@dataclass(frozen=True, kw_only=True)
class Compressed(SizeReport):
    """What was made of a model."""

    ranks: str = "global"
    """How ranks were shared out: "global" or "even", as in `rankwise.compress`."""
    quality: Quality | None = None
    """None without calibration."""
    speed: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Milliseconds of a call, dense and small, by its number of tokens."""
    device: str = "cpu"

    def remarks(self) -> list[str]:
        """A line for every number of tokens with which the small model is slower than the dense one."""
        lines = []
        for tokens, (dense, small) in self.speed.items():
            where = f"{tokens} token{'s'[: tokens - 1]} on {self.device}"
            lines.append(slower_than_dense("The small model", small, dense, where=where, tolerated=TOLERATED))
        return [line for line in lines if line is not None]


class TextVocabulary(Protocol):
    """What reads a text for a language model that is not one of transformers."""

    @property
    def kind(self) -> str: ...

    def __len__(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...


class Listener:
    """Told what happens; override what is of interest."""

    def say(self, text: str) -> None:
        """Something that a user should know."""

    def progress(self, what: str, done: int, total: int) -> None:
        """How far a part of the work is, see `rankwise.compress`."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """What a calibration text says to a model, on its device."""

    batches: Sequence[Any]
    loss_batches: Sequence[Any]
    loss: Callable[[], Callable[[Any], Tensor]]
    """A loss whose random numbers begin anew."""
    kept_back: Sequence[Any]
    is_decoder: bool
    window: int
    notes: Sequence[str] = ()


def shrink(
    load: Callable[[], nn.Module],
    budget: Budget,
    save: Callable[[nn.Module, Compressed, bool], None],
    *,
    prepare: Callable[[nn.Module], Data] | None = None,
    again: bool = True,
    layout: Literal["pair", "pivot"] | None = None,
    target: str | None = None,
    embeddings: bool = False,
    exclude: Sequence[str] = (),
    listener: Listener | None = None,
) -> Compressed:
    """Compress what `load` gives, in place, measure it and `save` it.

    Where much is lost on the windows kept back, the model is loaded again and compressed with even ranks, and the
    better of the two is what stays: ranks by the loss rest on gradients, which are no guide to large changes.

    Args:
        save: of a model and what is known of it; whether it may replace what was saved.
        prepare: the data, for the model that was loaded. None: no calibration.
        again: whether `load` gives the dense model a second time.
    """
    listener = listener or Listener()
    model = load()
    plan = plan_of(model, embeddings=embeddings, exclude=exclude)
    where = find_target(target, model)
    account = size_account(model, plan, Svd(layout=layout or where.layout), where, trained=True)
    budget.resolve(account)
    data = None if prepare is None else prepare(model)
    for line in (*(() if data is None else data.notes), *_left_out(plan, account, budget)):
        listener.say(line)
    length = TIMED_TOKENS if data is None else data.window
    kept_back = KeptBack(model, data.kept_back, is_decoder=data.is_decoder) if data and data.kept_back else None
    before = milliseconds(model, length)

    def attempt(model: nn.Module, ranks: Literal["global", "even"]) -> Compressed:
        given: dict[str, Any] = {}
        if data is not None:
            given = {"calibration": data.batches, "loss_batches": data.loss_batches, "loss": data.loss()}
        progress = listener.progress
        compress(
            model,
            budget,
            plan=plan,
            layout=layout,
            target=where,
            in_place=True,
            ranks=ranks,
            progress=progress,
            **given,
        )
        after = milliseconds(model, length) if before else {}
        return Compressed(
            **vars(SizeReport.of(model, account, budget)),
            ranks=ranks,
            quality=None if kept_back is None else kept_back.quality(model),
            speed={number: (time, after[number]) for number, time in before.items() if number in after},
            device=str(next(model.parameters()).device),
        )

    first = attempt(model, "global")
    save(model, first, False)
    if first.quality is None or not first.quality.is_bad or not again:
        return first
    listener.say(f"Ranks by the loss: {first.quality}. Much is lost, so even ranks are tried too.")
    # one of the two models at a time is in memory
    del model
    model = load()
    second = attempt(model, "even")
    assert second.quality is not None
    is_better = second.quality.small < first.quality.small
    listener.say(f"Even ranks: {second.quality}. {'They are' if is_better else 'The first ones are'} kept.")
    if is_better:
        save(model, second, True)
    return second if is_better else first


def _left_out(plan: Plan, account: SizeAccount, budget: Budget) -> list[str]:
    """What stays as it is although it is large, and what the layers lose instead."""
    large = sorted(
        (item for item in plan.left_out if item.params >= 0.01 * account.dense), key=lambda item: -item.params
    )
    lines = []
    for item in large[:8]:
        hint = "; --embeddings compresses it" if item.reason == WORDS else ""
        share = f"{item.params:,} parameters, {item.params / account.dense:.1%} of the model"
        lines.append(f"Left out: {item.name} ({share}): {item.reason}{hint}.")
    if lines:
        lost = (account.dense - budget.resolve(account)) / account.prunable
        lines.append(f"So the layers that are compressed lose {lost:.1%} of their parameters.")
    return lines


def compress_saved(
    model: nn.Module,
    budget: Budget,
    out: str | os.PathLike[str],
    *,
    vocabulary: TextVocabulary | None = None,
    calibration: Calibration | None = None,
    layout: Literal["pair", "pivot"] | None = None,
    target: str | None = None,
    embeddings: bool = False,
    exclude: Sequence[str] = (),
    overwrite: bool = False,
    beside: Mapping[str, Mapping[str, Any]] | None = None,
    device: str = "auto",
    dtype: torch.dtype | None = None,
    again: Callable[[], nn.Module] | None = None,
    listener: Listener | None = None,
) -> Compressed:
    """Compress `model`, which `rankwise.load` gave, in place and into the folder `out`, which `rankwise.load` opens.

    Args:
        model: of any kind; with `calibration`, one of our language models.
        vocabulary: what `calibration` is read by.
        beside: JSON files that are written along with the model, by name.
        again: gives the model anew, for another try where much is lost.
        budget, out, calibration, layout, target, embeddings, exclude, overwrite, device, dtype, listener: as for models
            of transformers.
    """
    folder = Path(out).resolve()
    check_target(folder, overwrite)
    models = [model]

    def load() -> nn.Module:
        found = models.pop() if models else again() if again is not None else model
        return found.to(device=place(device, found), dtype=dtype)

    def save(small: nn.Module, made: Compressed, replace: bool) -> None:
        save_with(small.cpu(), folder, beside or {}, overwrite=overwrite or replace)

    return shrink(
        *(load, budget, save),
        prepare=None if calibration is None else lambda found: _data(found, calibration, vocabulary),
        again=again is not None,
        layout=layout,
        target=target,
        embeddings=embeddings,
        exclude=exclude,
        listener=listener,
    )


def place(device: str, model: nn.Module) -> torch.device:
    """The device that a user names; "auto": a GPU on which the model fits, else where it is."""
    if device == "auto":
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        fits = torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > ROOM * size
        return torch.device("cuda") if fits else next(model.parameters()).device
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        raise RankwiseError(
            f"`device` must be one that torch has here, such as cpu or cuda:0, but is {device!r}: "
            f"{str(error).splitlines()[0]}"
        ) from None
    return found


def windows_of(
    encode: Callable[[str], list[int]],
    calibration: Calibration,
    *,
    bytes_per_token: int = BYTES_PER_TOKEN,
    marks: Marks | None = None,
) -> Windows:
    """Windows of a text for calibration, and those that are kept back."""
    more = calibration.num_kept_back
    found = text_windows(encode, calibration, bytes_per_token=bytes_per_token, marks=marks, more=more)
    used, back = split(found, calibration)
    note = (
        f"{calibration.file} holds {len(found)} windows of {calibration.window} tokens, fewer than the "
        f"{calibration.num_windows + more} asked for: {len(used)} calibrate, {len(back)} are kept back."
    )
    return Windows(used, back, [note] if len(found) < calibration.num_windows + more else [])


class Windows(NamedTuple):
    used: list[Tensor]
    kept_back: list[Tensor]
    notes: list[str]
    """What a user should know of them."""


def _data(model: nn.Module, calibration: Calibration, vocabulary: TextVocabulary | None) -> Data:
    """What a text says to one of our language models."""
    if vocabulary is None:
        raise DataError(
            "A calibration text needs the model's vocabulary, but the folder holds none. "
            "Give the folder of the run that made the model, or leave `calibration` out."
        )
    num_words = getattr(getattr(model, "config", None), "num_words", None)
    if num_words != len(vocabulary):
        raise DataError(f"The vocabulary must be the model's own, of {num_words} words, but has {len(vocabulary)}.")
    most = BYTES_PER_TOKEN if vocabulary.kind == "word" else BYTES_PER_CHARACTER
    windows = windows_of(vocabulary.encode, calibration, bytes_per_token=most)
    device = next(model.parameters()).device
    batches, kept_back = ([window[None].to(device) for window in part] for part in windows[:2])

    def loss() -> Callable[[Any], Tensor]:
        generator = torch.Generator().manual_seed(0)
        return lambda output: loss_of_choices(output[0], generator)

    return Data(
        batches=batches,
        loss_batches=[batch[:, : calibration.loss_window] for batch in batches],
        loss=loss,
        kept_back=kept_back,
        is_decoder=True,
        window=calibration.window,
        notes=windows.notes,
    )


def plan_of(model: nn.Module, *, embeddings: bool, exclude: Sequence[str]) -> Plan:
    """Every linear layer, and tables of words if they are wanted."""
    plan = find_plan(model, exclude=list(exclude))
    if not embeddings:
        words = [site for site in plan.sites if site.has_embedding]
        left_out = [LeftOut(site.name, site.params, WORDS) for site in words]
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
    """The loss of choices that are drawn from the logits, over their last dimension.

    The generator, which may be that of another device, draws one number for each choice: where it lies among the
    running sums of the chances says what is chosen.
    """
    logits = logits.reshape(-1, logits.shape[-1])
    with torch.no_grad():
        sums = logits.float().softmax(-1).cumsum(-1)
        drawn = torch.rand(len(logits), 1, generator=generator, device=generator.device).to(logits.device)
        answers = torch.searchsorted(sums, drawn * sums[:, -1:], right=True).flatten().clamp(max=logits.shape[-1] - 1)
    return F.cross_entropy(logits, answers, reduction="sum")
