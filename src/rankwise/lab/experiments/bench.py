"""The models of a folder against each other on this machine: those of a run, or a saved one against its dense shape.

A run's record keeps what was found, in `record.json` under "bench".
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.deploy.inputs import positions_of
from rankwise.deploy.load import dense_model, load
from rankwise.errors import CheckpointError, RankwiseError
from rankwise.lab.experiments.config import Experiment
from rankwise.lab.experiments.folder import BASE, MODEL, RECORD, read, read_experiment, refuse_sweep, write
from rankwise.lab.experiments.saved_models import kind_of
from rankwise.lab.training.records import surroundings

LENGTH = 256
"""Tokens, where no run says how many it was trained on."""


@dataclass(frozen=True, eq=False)
class BenchedModels:
    """What a folder holds."""

    models: dict[str, nn.Module]
    """The dense one first."""
    num_words: int
    length: int
    """Tokens of a sequence, where nobody says how many."""
    record: Path | None
    """The record that keeps what is measured."""
    longest: int | None = None
    """Tokens that the models are sure to take; None where there is no end."""

    def tokens(self, batch: int, length: int) -> Tensor:
        """Some text: how long a model takes does not depend on what it reads."""
        return torch.randint(0, self.num_words, (batch, length), generator=torch.Generator().manual_seed(0))

    @torch.inference_mode()
    def check_length(self, length: int) -> None:
        """Refuse sequences that the models cannot read."""
        if self.longest is None or length <= self.longest:
            return
        try:
            next(iter(self.models.values()))(self.tokens(1, length))
        except (IndexError, RuntimeError):
            raise RankwiseError(
                f"`length` must be one that the model has positions for, but is {length} instead. "
                f"{self.longest} tokens are few enough."
            ) from None


def find_models(folder: Path) -> BenchedModels:
    """The models of a run or of one of its methods, a model that `rankwise.save` wrote, or one of Hugging Face."""
    # "." has no name, and no parent
    folder = folder.resolve() if folder.name in ("", "..") else folder
    kind = kind_of(folder)
    if kind == "saved":
        dense = dense_model(folder)
        name = folder.name if folder.name != MODEL else folder.parent.name
        return BenchedModels(
            {"dense, fresh weights": dense, name: load(folder).float()}, _num_words(dense), LENGTH, None
        )
    if kind == "run":
        return _of_run(folder)
    if kind == "pretrained":
        return _of_hugging_face(folder)
    raise CheckpointError(
        f"`rankwise bench` needs the folder of a run or of a saved model, but {folder} is neither. Give one that "
        "`rankwise run`, `rankwise.save` or `save_pretrained` wrote."
    )


def keep(found: BenchedModels, rows: list[dict[str, Any]], lines: list[str], device: str) -> Path | None:
    """Write rows and remarks into the run's record; where that is."""
    if found.record is None:
        return None
    record = read(found.record)
    assert record is not None
    here = surroundings(torch.device(device))
    measured = datetime.now(timezone.utc).isoformat(timespec="seconds")
    write(found.record, {**record, "bench": {"rows": rows, "remarks": lines, "measured": measured, **here}})
    return found.record


def _of_run(folder: Path) -> BenchedModels:
    experiment = read_experiment(folder)
    if not isinstance(experiment, Experiment):
        raise RankwiseError(
            f"`rankwise bench` times runs of language models, but {folder} is one of GLUE. "
            f"Give the folder of one of its models, as in {folder / 'flop-l0' / MODEL}."
        )
    run = folder.parent if (folder / MODEL).is_dir() else folder
    places = [folder] if run is not folder else sorted(path.parent for path in folder.glob(f"*/{MODEL}"))
    if not places:
        refuse_sweep(folder)
        raise CheckpointError(
            f"A run must be finished before its models can be timed, but there is none in {folder}. "
            "Run the same command again to go on."
        )
    if (run / BASE / MODEL).is_dir() and run / BASE not in places:
        places.append(run / BASE)
    # the base is the dense model; what trained on from it takes as long
    places.sort(key=lambda place: (place.name != BASE, place.name != "dense", place.name))
    models = {"dense" if place.name == BASE else place.name: load(place / MODEL).float() for place in places}
    if places[0].name not in (BASE, "dense"):
        models = {"dense, fresh weights": dense_model(places[0] / MODEL), **models}
    record = next((place / RECORD for place in (folder, run) if "format" in (read(place / RECORD) or {})), None)
    return BenchedModels(models, _num_words(models), experiment.training.window, record)


def _num_words(models: nn.Module | dict[str, nn.Module]) -> int:
    model = next(iter(models.values())) if isinstance(models, dict) else models
    number: int = model.config.num_words  # type: ignore[union-attr, assignment]
    return number


def _of_hugging_face(folder: Path) -> BenchedModels:
    from rankwise.hf.format import skeleton_of
    from rankwise.hf.loading import load_model

    compact: Any = load_model(str(folder))
    compact.float()
    if compact.config.is_encoder_decoder:
        raise RankwiseError(
            f"`rankwise bench` times models that read one text, but {folder} holds a {type(compact).__name__}, "
            "which reads two. Time it by `rankwise export`."
        )
    dense = type(compact)(skeleton_of(compact).config)
    most = positions_of(compact)
    length = LENGTH if most is None else min(LENGTH, most)
    models = {"dense, fresh weights": dense, folder.name: compact}
    return BenchedModels(models, compact.config.vocab_size, length, None, most)
