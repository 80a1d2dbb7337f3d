"""Healing of a folder: a compressed model is trained to answer as the dense one, by the lab's one loop.

All of its weights are trained: factors, norms, biases and tables. While it runs, OUT.healing keeps the state; the same
call goes on from there, and on a CPU ends with the same weights, bit for bit. OUT appears when it is complete.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankwise.core.budget import count
from rankwise.deploy.compress import ABOUT
from rankwise.deploy.inputs import ERROR
from rankwise.deploy.save import COMPRESSION
from rankwise.errors import CheckpointError, InvalidValueError, RankwiseError, first_line
from rankwise.hub import check_name
from rankwise.lab.experiments.healing.pair import (
    MOST_RATES,
    RATES,
    REMEDY,
    HealingConfig,
    Pair,
    best_rate,
    check_goes_on,
    rates_beyond,
    state_of,
    weights_of,
)
from rankwise.lab.experiments.healing.pretrained import PretrainedPair
from rankwise.lab.experiments.healing.streams import StreamPair
from rankwise.lab.experiments.run_folder import EXPERIMENT, find_run
from rankwise.lab.experiments.saved_models import kind_of, open_model
from rankwise.lab.training import Watcher, fit
from rankwise.lab.training.ranks import refuse_several
from rankwise.lab.training.records import read_json, write_file
from rankwise.lab.training.run import DivergedError

STATE, TRAINING, RESULT = "healing.json", "training", "result"
DOUBTFUL = 1.5
"""A dense model whose perplexity is so many times the compressed one's is probably another model."""
FIGURES = ("dense", "before", "after")
"""What was measured, which may be infinite."""
Place = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class Healed:
    """What was gained by healing a model; less of the measure is better."""

    folder: str
    parameters: int
    measure: str
    held_out: str
    """The text on which it was measured, in words: never trained on, and never test text."""
    dense: float
    before: float
    after: float
    lr: float
    rates: dict[str, float | None]
    """What each learning rate reached in its trial, in the loss of the text held out; None: it diverged."""
    steps: int
    tokens: int
    """Tokens that were read, without those of the trials."""
    seconds: float
    """Of training, with the trials."""
    next_command: str

    def to_json(self) -> dict[str, Any]:
        """As JSON, which has no infinite numbers."""
        return {**asdict(self), **{name: str(getattr(self, name)) for name in FIGURES}}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Healed:
        """What `to_json` gave."""
        return cls(**{**content, **{name: float(content[name]) for name in FIGURES}})

    @property
    def figures(self) -> str:
        """The three figures in words."""
        dense = "" if self.measure == ERROR else f"{self.dense:.4g} dense, "
        return f"{self.measure} {dense}{self.before:.4g} before, {self.after:.4g} after ({self.held_out})"

    @property
    def training(self) -> str:
        """What was done in words."""
        chosen = f", the best of {', '.join(self.rates)}" if self.rates else ""
        return f"{self.tokens:,} tokens in {self.steps} steps at a rate of {self.lr:g}{chosen}; {self.seconds:.0f} s"

    def __str__(self) -> str:
        return f"{self.folder}: {self.figures}; {self.training}. Next: {self.next_command}"


def heal_folder(
    folder: Place,
    teacher: Place,
    texts: Place | Sequence[Place],
    out: Place,
    *,
    valid: Place | Sequence[Place] = (),
    overwrite: bool = False,
    about: Mapping[str, Any] | None = None,
    watcher: Watcher | None = None,
    say: Callable[[str], None] = lambda text: None,
    **settings: Any,
) -> Healed:
    """Train the compressed model in `folder` to answer as `teacher` does, and write it to `out`.

    The result has the same layers and the same size. Stopped, the same call goes on from the last checkpoint.

    Args:
        folder: what `rankwise compress` wrote, or the model of a run; a dense model may be healed too.
        teacher: the dense model that it was made from: a folder, or a name on the hub.
        texts: files like those that the model is for; their ends are held out. May be empty with `generated=True`.
        out: may be `folder` itself, with `overwrite`.
        valid: texts to hold out instead of the ends of `texts`: they choose the learning rate, so no test text.
        overwrite: replace a model that was saved in `out` before.
        about: what else must be the same where a call goes on, as JSON.
        watcher: called on each event.
        say: called with lines that a user should read.
        settings: those of `HealingConfig`, such as `steps`, `lr` and `batch_size`.
    """
    refuse_several("Healing")
    config = HealingConfig(**settings)
    if not texts and not config.generated:
        raise InvalidValueError("`texts` must name at least one text, but is empty. Example: --text book.txt.")
    pair, target = open_pair(os.fspath(folder), os.fspath(teacher), config), Path(out)
    watcher, place = watcher or Watcher(), _work_folder(target)
    saved = _saved(place, target)
    if saved is None:
        pair.check_target(target, overwrite)
    elif os.path.realpath(pair.folder) == os.path.realpath(target):
        # the healed model has taken the place of the student
        pair.student = saved["of"]["student"]
    missing = [folder for folder in (place, *place.parents) if not folder.exists()]
    _begin(place, pair, about)
    watcher.phase("generating text" if config.generated else "reading the text")
    try:
        fingerprint = pair.read(_paths(texts), _paths(valid), place, watcher.count)
    except RankwiseError:
        if missing:
            shutil.rmtree(missing[-1], ignore_errors=True)
        raise
    work = Work(place, pair, {"text": fingerprint, ABOUT: about}, watcher)
    for note in pair.notes:
        say(note)
    return work.run(target, overwrite, say) if saved is None else work.end(Healed.from_json(saved[RESULT]), say)


def _begin(place: Path, pair: Pair, about: Mapping[str, Any] | None) -> None:
    """Refuse to go on with what differs, before text is written or read; and note that a healing has begun."""
    asked = json.loads(json.dumps({**pair.made_from(), ABOUT: about, "settings": asdict(pair.config)}))
    if (before := _learned(place)) is not None:
        check_goes_on({name: before["of"].get(name) for name in asked}, asked, place)
        return
    _check_place(place)
    write_file(place / STATE, {"of": asked, "rates": {}, "seconds": 0.0})


def _check_place(place: Path) -> None:
    if place.is_dir() and any(place.iterdir()) and not (place / STATE).exists():
        raise CheckpointError(
            f"{place} must be where a healing keeps its state, but holds other files. Move it, or choose another name "
            "for the result."
        )


def _learned(place: Path) -> dict[str, Any] | None:
    """The state of a healing; None where nothing was learned yet, so that nothing is lost by other settings."""
    before = read_json(place / STATE, "of", "rates", "seconds")
    if before is None or RESULT in before or any(loss is not None for loss in before["rates"].values()):
        return before
    return before if any(place.glob("*/checkpoints/step-*")) else None


def _saved(place: Path, out: Path) -> dict[str, Any] | None:
    """The state of a healing that was stopped after its model was saved to `out`; None if it was not."""
    before = read_json(place / STATE, "of")
    if before is None or RESULT not in before:
        return None
    # what is there may be the model from before, or another one that was written since
    with suppress(RankwiseError):
        if out.exists() and weights_of(open_model(str(out))) == before["weights"]:
            return before
    return None


def _paths(given: Place | Sequence[Place]) -> list[Path]:
    return [Path(given)] if isinstance(given, str | os.PathLike) else [Path(each) for each in given]


def is_unfinished(out: Place, about: Mapping[str, Any] | None = None) -> bool:
    """Whether a healing of what is in `out` was stopped, so that the same call goes on; with another `about` it may
    not."""
    folder = _work_folder(Path(out))
    before = read_json(folder / STATE, "of")
    if before is None:
        # compressed in order to be healed
        made = _record_of(out) or {}
        return made.get(ABOUT) is not None and made[ABOUT] == json.loads(json.dumps(about))
    # what was written there since is another model, but for the healed one
    if before["of"].get("student") != state_of(_model_of(os.fspath(out))) and _saved(folder, Path(out)) is None:
        return False
    check_goes_on({ABOUT: before["of"].get(ABOUT)}, {ABOUT: about}, folder)
    return True


def check_healing(
    model: Place, texts: Sequence[Place], out: Place, about: Mapping[str, Any] | None = None, **settings: Any
) -> None:
    """Refuse what `heal_folder` would refuse of a model that is yet to be made of `model`, and healed in place in
    `out`; nothing is generated, and no weights of transformers are loaded."""
    refuse_several("Healing")
    config, place, name = HealingConfig(**{**settings, "generated": False}), _work_folder(Path(out)), os.fspath(model)
    if (before := _learned(place)) is not None:
        check_goes_on({ABOUT: before["of"].get(ABOUT)}, {ABOUT: about}, place)
    _check_place(place)
    kind = StreamPair if kind_of(Path(name)) in ("saved", "run") else PretrainedPair
    pair: Pair = kind(_model_of(name), _model_of(name), config)
    if texts:
        pair.read(_paths(texts), (), place, lambda done, total: None)


def _record_of(folder: Place) -> dict[str, Any] | None:
    """What `rankwise compress` has noted of a model; None where there is nothing that can be read."""
    with suppress(RankwiseError):
        return read_json(Path(folder) / COMPRESSION)
    return None


def _work_folder(out: Path) -> Path:
    # "." has no name
    out = out.resolve()
    return out.with_name(f"{out.name}.healing")


def open_pair(folder: str, teacher: str, config: HealingConfig) -> Pair:
    """The models of two folders or names, of one kind and one vocabulary."""
    check_name(folder, "FOLDER")
    check_name(teacher, "`teacher`")
    folder, teacher = _model_of(folder), _model_of(teacher)
    if os.path.realpath(folder) == os.path.realpath(teacher):
        raise RankwiseError(f"`teacher` must be another model than FOLDER, but both are {folder}. {REMEDY}")
    own, dense_own = (kind_of(Path(name)) in ("saved", "run") for name in (folder, teacher))
    if own != dense_own:
        kinds = ("of transformers", "of rankwise's own architectures")
        raise RankwiseError(
            f"`teacher` must be a model {kinds[own]}, as {folder} is, but {teacher} is {kinds[not own]}. {REMEDY}"
        )
    return StreamPair(folder, teacher, config) if own else PretrainedPair(folder, teacher, config)


def _model_of(name: str) -> str:
    """The folder of the model itself, where `name` is that of a run."""
    return str(find_run(Path(name)).path) if (Path(name) / EXPERIMENT).is_file() else name


class Work:
    """The folder that keeps the state of a healing."""

    def __init__(self, folder: Path, pair: Pair, more: Mapping[str, Any], watcher: Watcher) -> None:
        self.folder, self.pair, self.watcher = folder, pair, watcher
        made_from = {**pair.made_from(), **more, "settings": asdict(pair.config)}
        # as JSON gives it back: a tuple is a list there
        self.of: dict[str, Any] = json.loads(json.dumps(made_from))
        before = _learned(folder)
        if before is not None:
            check_goes_on(before["of"], self.of, folder)
        state = before or {"of": self.of, "rates": {}, "seconds": 0.0}
        self.rates: dict[str, float | None] = state["rates"]
        self.seconds: float = state["seconds"]

    def run(self, out: Path, overwrite: bool, say: Callable[[str], None]) -> Healed:
        """Measure, choose a rate, train, measure again, and save."""
        pair = self.pair
        self.watcher.phase("measuring the dense model and the compressed one")
        pair.prepare()
        student = pair.load()
        before, size = pair.measured(student), count(student)
        del student
        if pair.measure != ERROR and pair.dense > DOUBTFUL * before:
            say(
                f"The dense model is worse on text that is held out than the compressed one ({pair.measure} "
                f"{pair.dense:.4g} and {before:.4g}). Is it the one that this was made from?"
            )
        self._keep()
        lr = pair.config.lr or self._best_rate()
        self.watcher.phase(f"healing at a rate of {lr:g}")
        model, record = self._fit(TRAINING, pair.config.steps, lr)
        after = pair.measured(pair.rounded(model))
        if not after < before:
            say(f"Training made it no better on text that is held out ({after:.4g}), so its weights stay as they were.")
            model, after = pair.load(), before
        healed = Healed(
            folder=str(out), parameters=count(model), measure=pair.measure, held_out=pair.held_out, dense=pair.dense,
            before=before, after=after, lr=lr, rates=self.rates, steps=pair.config.steps, tokens=record["tokens"],
            seconds=self.seconds + record["seconds"], next_command=f"rankwise {pair.next_command} {out}",
        )  # fmt: skip
        assert healed.parameters == size, "healing changes no size"
        done = f"Distilled from {pair.teacher_name} on {record['corpus']['name']}: {healed.figures}; {healed.training}."
        # a stop after the model is saved is known by this
        self._keep({RESULT: healed.to_json(), "weights": weights_of(model)})
        figures = {"measure": pair.measure, "dense": pair.dense, "small": after} if math.isfinite(after) else None
        made = _record_of(pair.folder)
        if made is not None:
            # it is not to be healed any more
            made = {**{name: value for name, value in made.items() if name != ABOUT}, "healed": figures}
        beside = {} if made is None else {COMPRESSION: made}
        for line in pair.save(model, out, after, done, overwrite, beside):
            say(line)
        self._remove()
        return healed

    def end(self, healed: Healed, say: Callable[[str], None]) -> Healed:
        """Remove what was left where a healing was stopped after its model was saved."""
        say(f"The healing of {healed.folder} was finished before; what was left of it is removed.")
        self._remove()
        return healed

    def _remove(self) -> None:
        done_with = self.folder.with_name(f".{self.folder.name}.done")
        # of a removal that was stopped
        shutil.rmtree(done_with, ignore_errors=True)
        # whole or not at all
        os.replace(self.folder, done_with)
        shutil.rmtree(done_with, ignore_errors=True)

    def _best_rate(self) -> float:
        """The rate by which a short training comes furthest on text that is held out."""
        given = self.pair.config.rates
        waiting = list(given or RATES)
        while waiting:
            self._try_rate(waiting.pop(0))
            if not waiting and given is None and len(self.rates) < MOST_RATES:
                waiting = rates_beyond(self.rates)
        if (best := best_rate(self.rates)) is None:
            raise RankwiseError(
                f"A learning rate must keep the loss finite, but none of {', '.join(self.rates)} does. "
                "Give a lower one: --lr 1e-5."
            )
        return best

    def _try_rate(self, rate: float) -> None:
        name = f"{rate:g}"
        if name not in self.rates:
            self.watcher.phase(f"trying a rate of {name}")
            try:
                _, record = self._fit(f"rate-{name}", self.pair.config.trial_steps, rate)
                loss, seconds = record["quality"]["valid"]["loss"], record["seconds"]
            except DivergedError:
                loss, seconds = None, 0.0
            self.rates[name] = loss
            self.seconds += seconds
            self._keep()
        # its weights are not needed any more
        shutil.rmtree(self.folder / f"rate-{name}", ignore_errors=True)

    def _fit(self, name: str, steps: int, lr: float) -> tuple[nn.Module, dict[str, Any]]:
        pair = self.pair
        config = pair.phase(steps, lr)
        try:
            outcome = fit(
                pair.load(), pair.task, config, self.folder / name, teacher=pair.teacher, about=self.of,
                progress=self.watcher,
            )  # fmt: skip
        except DivergedError:
            # with another rate it may be tried again
            shutil.rmtree(self.folder / name, ignore_errors=True)
            raise
        except torch.OutOfMemoryError as error:
            raise RankwiseError(
                f"A step must fit into the memory of the GPU, but does not in {config.accumulate} parts: "
                f"{first_line(error)} Give more parts (--accumulate {2 * config.accumulate}), or --checkpointing."
            ) from None
        return outcome.model, outcome.record

    def _keep(self, result: Mapping[str, Any] | None = None) -> None:
        state = {"of": self.of, "rates": self.rates, "seconds": self.seconds}
        write_file(self.folder / STATE, {**state, **(result or {})})
