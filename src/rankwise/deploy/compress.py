"""One-shot compression of a folder: load a model, compress it in place, measure what was lost, save it.

A `Source` is what depends on the kind of folder: `SavedModel` here, `rankwise.hf.loading.PretrainedModel` for
transformers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rankwise.core.blocks import find_blocks
from rankwise.core.budget import Budget, SizeReport
from rankwise.core.host_memory import return_large_blocks
from rankwise.core.placement import answering, device_of, num_bytes, offload_of
from rankwise.core.plan import Plan
from rankwise.core.targets import Target, find_target
from rankwise.deploy.compressed import (
    Compressed,
    RefinedFolder,
    example_text,
    kept_by_shape,
    left_out_lines,
    milliseconds,
    times_in_turns,
    versions,
)
from rankwise.deploy.devices import Offloading, Placer
from rankwise.deploy.inputs import BYTES_PER_CHARACTER, BYTES_PER_TOKEN, Calibration, KeptBack, Windows, read_windows
from rankwise.deploy.save import COMPRESSION, check_target, save
from rankwise.errors import DataError, RankwiseError
from rankwise.latency import size_for
from rankwise.methods.svd import Svd
from rankwise.methods.width import Width
from rankwise.oneshot import RANKS, Progress, Ranks, Refinement, compress, default_plan, oneshot_method
from rankwise.sizes import plan_for_method, size_account
from rankwise.surroundings import surroundings

TIMED_TOKENS = 128
"""Tokens of a call that is timed, where no calibration says how long texts are."""
COMPRESSED = "rankwise-compressed"
ABOUT = "about"
"""What the record of a folder keeps of what `compress_folder` was told."""
Beside = Mapping[str, Mapping[str, Any]]
"""JSON files by name."""
"""The format of what a compressed folder keeps of its own making."""
MOST_TOKENS = {"cuda": 4096, "cpu": 1024}
"""Tokens of a batch, by device."""
LEAST_BATCHES = 8
"""Batches that windows are divided into, at least, if there are as many windows."""
MOST_LOGITS = {"cuda": 2**27, "cpu": 2**26}
"""Logits of a batch with gradients, by device; a batch without them may have four times as many."""
REFINED_STEPS = 250
"""Steps for each block by which a model is refined by default, on a GPU."""
SMALL = 10_000_000
"""Models of up to so many parameters are refined on a CPU too."""


class Listener:
    """Receives what happens while a model is compressed; override what is of interest."""

    def say(self, text: str) -> None:
        """Something that a user should know."""

    def progress(self, what: str, done: int, total: int) -> None:
        """How far a part of the work is, see `rankwise.compress`."""


@dataclass(frozen=True)
class Data:
    """Batches of a calibration text for a model, on its device; `texts` names those kept back (`KeptBack`)."""

    batches: Sequence[Any]
    loss_batches: Sequence[Any]
    kept_back: Sequence[Any]
    is_decoder: bool
    window: int
    notes: Sequence[str] = ()
    loss: Callable[[Any], Tensor] | Literal["sampled"] = "sampled"
    texts: Sequence[str] | None = None

    @classmethod
    def of(cls, windows: Windows, batch: Callable[[Tensor], Any], model: nn.Module, *, is_decoder: bool) -> Data:
        """The data of some windows; `batch` makes what the model reads of several of them, on its device."""
        kind = "cuda" if device_of(model).type == "cuda" else "cpu"
        config: Any = getattr(model, "config", None)
        words = getattr(config, "num_words", None) or getattr(config, "vocab_size", None) or 1

        def batches(part: Sequence[Tensor], most_logits: int) -> list[Any]:
            # several in one call keep a GPU busy; several batches allow some to be kept back
            most = min(MOST_TOKENS[kind], most_logits // words) // max(len(part[0]), 1) if part else 1
            number = max(1, min(most, len(part) // LEAST_BATCHES))
            return [batch(torch.stack(list(part[i : i + number]))) for i in range(0, len(part), number)]

        most = MOST_LOGITS[kind]
        back = [(name, each) for name, part in windows.compared.items() for each in batches(part, most)]
        parts = (batches(windows.used, 4 * most), batches(windows.shortened, most), [each for _, each in back])
        return cls(*parts, is_decoder, len(windows.used[0]), windows.notes, texts=[name for name, _ in back])


class Source(ABC):
    """A model to compress: how it is loaded, how it reads a text, and how the small one is saved."""

    name = ""
    """What a user calls it; empty where nobody has said it."""

    @property
    def generates(self) -> bool:
        """Whether the model can generate a text for its own calibration."""
        return False

    def window(self, most: int) -> int:
        """Tokens of a window of text, of which the model may read fewer."""
        return most

    @abstractmethod
    def load(self) -> nn.Module:
        """The dense model, which is changed in place; it may be asked for a second time."""

    @abstractmethod
    def read(self, calibration: Calibration, progress: Progress | None = None) -> Callable[[nn.Module], Data]:
        """Read the text before the model is loaded; gives a function from the model to its data, which may take time
        and tells `progress`."""

    @abstractmethod
    def check_target(self, folder: Path, overwrite: bool) -> None:
        """Refuse a folder that must not be written."""

    @abstractmethod
    def save(self, small: nn.Module, made: Compressed, folder: Path, overwrite: bool, beside: Beside) -> list[str]:
        """Write the folder, with the JSON files `beside` the model; gives lines that a user should read."""


def compress_folder(
    source: Source,
    budget: Budget,
    out: str | Path,
    *,
    calibration: Calibration | None = None,
    method: Literal["svd", "width", "width+svd"] = "svd",
    width_share: float | None = None,
    layout: Literal["pair", "pivot"] | None = None,
    target: str | None = None,
    embeddings: bool | None = None,
    exclude: Sequence[str] = (),
    ranks: Ranks | Literal["auto"] = "auto",
    refine: int | None = None,
    overwrite: bool = False,
    device: str = "auto",
    offload: Offloading = "auto",
    dtype: torch.dtype | None = None,
    listener: Listener | None = None,
    about: Mapping[str, Any] | None = None,
) -> Compressed:
    """Compress the model of `source` into the folder `out`, which appears when it is complete.

    Where more than a tenth is lost on the windows kept back, the model is loaded again and compressed with other ranks,
    and the best stays: ranks by the loss rest on gradients, which say little about large changes. Work that was stopped
    while blocks were refined goes on from the last one when it is called again.

    Args:
        budget: the size; `latency_ms` is for one text of 128 tokens, timed on the device.
        calibration: text on which outputs are measured; without it the SVD of the weights.
        method, width_share, layout, target, embeddings: as for `rankwise.compress`.
        exclude: names of layers that stay as they are.
        ranks: as for `rankwise.compress`; "auto": the best of them.
        refine: steps by which each block is trained towards the dense one; by default 250 on a GPU, or if it is small.
        overwrite: replace a model that was saved under this name before.
        device: such as "cuda:0"; "cuda:0,cuda:1": consecutive blocks on each; "auto": a GPU, if the model fits on it.
        offload: "disk": blocks are read from disk one at a time; "auto": where the model does not fit; "none": never.
        dtype: of the compressed model; by default that of the folder.
        listener: receives progress, and lines that a user should read.
        about: what else the folder's record keeps, as JSON.
    """
    folder, listener = Path(out).resolve(), listener or Listener()
    source.check_target(folder, overwrite)
    asked = None if refine is None else Refinement(steps=refine)
    return_large_blocks()
    prepare = None if calibration is None else source.read(calibration, listener.progress)
    low_rank, scratch = method == "svd" and calibration is not None, folder.with_name(f".{folder.name}.offload")
    with closing(Placer(source.load, device, offload, dtype, scratch, low_rank, listener.say)) as load:
        if refine and calibration is None:
            raise DataError("`refine` (--refine) needs a calibration, but there is none. Name a text, or leave it out.")
        model = load()
        plan, where = default_plan(model, embeddings=embeddings, exclude=exclude), find_target(target, model)
        only = layout is not None or bool(embeddings) or bool(refine)
        how = oneshot_method(method, budget, layout or where.layout, low_rank_only=only)
        attempts = _Attempts(source, load, model, budget, plan, where, how, prepare, listener)
        attempts.settings["width_share"] = width_share
        del model
        best = attempts.with_ranks(list(RANKS) if ranks == "auto" else [ranks])
        refinement = asked or Refinement(steps=attempts.default_steps)
        texts = () if calibration is None else calibration.files
        settings = {"model": source.name, "budget": budget, "plan": plan.sites, "target": where.name, "dtype": dtype}
        settings |= {"calibration": calibration, "refinement": refinement, "device": attempts.device}
        settings |= {"ranks": best.ranks}
        settings |= {name: attempts.settings[name] for name in ("method", "layout", "width_share")}
        settings["versions"] = versions(Path(source.name), *texts)
        kept = RefinedFolder(folder, {name: repr(value) for name, value in settings.items()})
        if refinement.steps:
            best = attempts.refined(best, refinement, kept)
        best = attempts.save(best, folder, overwrite, about)
        kept.remove()
        return best


TITLES = {"global": "Ranks by the loss", "even": "Even ranks", "blend": "Ranks between the two"}


class _Attempts:
    """Attempts at a model, of which one at a time is in memory; only the best is saved."""

    def __init__(
        self,
        source: Source,
        load: Placer,
        model: nn.Module,
        budget: Budget,
        plan: Plan,
        target: Target,
        method: Svd | Width,
        prepare: Callable[[nn.Module], Data] | None,
        listener: Listener,
    ) -> None:
        self.source, self.load, self.listener = source, load, listener
        self.dense: nn.Module | None = model
        """The dense model, until the first attempt."""
        self.small: nn.Module | None = None
        """The model of the last attempt."""
        if isinstance(method, Width):
            plan = plan_for_method(model, plan, method)
        on_disk = offload_of(model) is not None
        if budget.latency_ms is not None:
            if on_disk:
                raise RankwiseError(
                    "A latency is measured, but the model does not fit on the device and is read from disk. Give its "
                    "size instead, such as --removed 0.3."
                )
            budget, plan = size_for(model, budget, plan, example_text(model, TIMED_TOKENS), None)
        self.budget, self.account = budget, size_account(model, plan, method, target, trained=True)
        budget.resolve(self.account)
        # a model may generate its own text, which takes time
        data = None if prepare is None else prepare(model)
        for line in (*(data.notes if data else ()), *left_out_lines(plan, self.account, budget)):
            listener.say(line)
        self.settings: dict[str, Any] = {
            "plan": plan,
            "method": method.name,
            "layout": method.layout if isinstance(method, Svd) else None,
            "target": target,
            "progress": listener.progress,
        }
        self.device, self.default_steps = device_of(model), 0
        self.length, self.kept_back = TIMED_TOKENS, None
        if data is not None:
            self.settings |= {"calibration": data.batches, "loss_batches": data.loss_batches, "loss": data.loss}
            self.length = data.window
            if data.kept_back:
                with answering(model, data.kept_back):
                    self.kept_back = KeptBack(model, data.kept_back, is_decoder=data.is_decoder, texts=data.texts)
            takes_minutes = method.name == "svd" and (self.device.type == "cuda" or self.account.dense <= SMALL)
            if takes_minutes and (on_disk or find_blocks(model, data.batches[0])):
                self.default_steps = REFINED_STEPS
        self.kept: dict[str, dict[str, Any]] = {}
        """What each attempt kept of every matrix."""
        self.dense_times = {} if on_disk else milliseconds(model, self.length)
        self.dense_bytes = num_bytes(model)
        if on_disk:
            listener.say("Nothing is timed: the dense model is not on the device as a whole.")

    def with_ranks(self, names: Sequence[str]) -> Compressed:
        """The best of these ways to share out ranks; others than the first are tried where much is lost."""
        best: Compressed | None = None
        for name in names:
            if best is not None and (best.quality is None or not best.quality.is_bad):
                break
            made = self.attempt(name)
            if len(names) > 1 and made.quality is not None:
                self.listener.say(f"{TITLES[name]}: {made.quality}.")
            best = made if best is None or made.is_better(best) else best
        assert best is not None
        return best

    def refined(self, best: Compressed, refinement: Refinement, kept: RefinedFolder) -> Compressed:
        """The same with refined blocks, unless that is no better on text kept back."""
        made = self.attempt(best.ranks, refinement, kept)
        if made.quality is None or made.is_better(best):
            return made
        assert best.quality is not None
        self.listener.say(
            f"Refined: {made.quality}, no better than {best.quality.small:.4g} before, so the blocks stay as they were."
        )
        return best

    def attempt(
        self, ranks: str, refinement: Refinement | None = None, refined: RefinedFolder | None = None
    ) -> Compressed:
        """Compress the model once more, and measure it."""
        self.small = None
        model, self.dense = self.load() if self.dense is None else self.dense, None
        settings = {**self.settings, "ranks": ranks, "refinement": refinement, "refined": refined}
        self.small = compress(model, self.budget, in_place=True, **settings)
        self.kept[ranks] = kept_by_shape(self.settings["plan"].sites, model)
        quality = None
        if self.kept_back is not None:
            with answering(model, self.kept_back.batches):
                quality = self.kept_back.quality(model)
        self.last = Compressed(
            **vars(SizeReport.of(model, self.account, self.budget)),
            ranks=ranks,
            refined=refinement.steps if refinement else 0,
            quality=quality,
            device=str(self.device),
        )
        return self.last

    def save(
        self, best: Compressed, folder: Path, overwrite: bool, about: Mapping[str, Any] | None = None
    ) -> Compressed:
        """Time and save the best attempt, which is made again if another one came after it."""
        if best is not self.last:
            best = self.attempt(best.ranks)
        assert self.small is not None
        if dense := self.dense_times:
            one_device = self.load.on_one_device
            in_turns = times_in_turns(self.load, self.small, self.length, self.dense_bytes) if one_device else {}
            apart = {} if in_turns else milliseconds(self.small, self.length)
            speed = in_turns or {number: (dense[number], time) for number, time in apart.items()}
            best = replace(best, speed=speed, in_turns=bool(in_turns))
        # its blocks are read from files
        self.load.close()
        record = self._record(best) | ({} if about is None else {ABOUT: about})
        for note in self.source.save(self.small, best, folder, overwrite, {COMPRESSION: record}):
            self.listener.say(note)
        return best

    def _record(self, made: Compressed) -> dict[str, Any]:
        """What a report reads of a compressed folder."""
        about = {"format": COMPRESSED, "version": 1, "name": self.source.name, "method": self.settings["method"]}
        about |= {"layout": self.settings["layout"], "allocation": made.ranks}
        sizes = {**asdict(made), "removed": made.removed, "removed_of_prunable": made.removed_of_prunable}
        return {**about, **sizes, **self.kept[made.ranks], **surroundings(torch.device(made.device))}


@dataclass
class SavedModel(Source):
    """A model that `rankwise.load` gave; `rankwise.load` opens the folder that is written."""

    model: nn.Module | None
    """The model, the first time that it is loaded."""
    vocabulary: Any
    """What turns a text into tokens, for a language model (`rankwise.lab.data.vocabulary`), or None."""
    beside: Beside
    """What is written along with the model."""
    load_again: Callable[[], nn.Module]
    name: str = ""

    def load(self) -> nn.Module:
        model, self.model = self.model, None
        return self.load_again() if model is None else model

    def check_target(self, folder: Path, overwrite: bool) -> None:
        check_target(folder, overwrite)

    def save(self, small: nn.Module, made: Compressed, folder: Path, overwrite: bool, beside: Beside) -> list[str]:
        save(small.cpu(), folder, overwrite=overwrite, beside={**self.beside, **beside})
        return []

    def read(self, calibration: Calibration, progress: Progress | None = None) -> Callable[[nn.Module], Data]:
        vocabulary = self.vocabulary
        if vocabulary is None:
            raise DataError(
                "A calibration text needs the model's vocabulary, but the folder holds none. "
                "Give the folder of the run that made the model, or leave `calibration` out."
            )
        most = BYTES_PER_TOKEN if vocabulary.kind == "word" else BYTES_PER_CHARACTER
        windows = read_windows(vocabulary.encode, calibration, bytes_per_token=most)

        def prepare(model: nn.Module) -> Data:
            num_words = getattr(getattr(model, "config", None), "num_words", None)
            if num_words != len(vocabulary):
                raise DataError(
                    f"The vocabulary must be the model's own, of {num_words} words, but has {len(vocabulary)}."
                )
            device = device_of(model)
            return Data.of(windows, lambda some: some.to(device), model, is_decoder=True)

        return prepare
