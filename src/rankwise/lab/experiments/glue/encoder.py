"""A pretrained encoder with a head for a task, and its tokenizer; what does not fit is refused in one line."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankwise.deploy.inputs import positions_of
from rankwise.errors import MissingPackageError, RankwiseError, install_extra
from rankwise.hub import source_of
from rankwise.lab.data.glue.tasks import Task

try:
    import transformers
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
except ImportError as error:
    raise MissingPackageError(
        f"GLUE needs the package transformers, which is not installed. {install_extra('hf')}"
    ) from error

SETTING = "`model.name`"


def load_tokenizer(name: str | os.PathLike[str]) -> Any:
    """Of a folder or a name on the hub."""
    why = ""
    source: dict[str, Any] = source_of(name, SETTING)
    with quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, **source)
            # where a folder has no vocabulary, transformers makes up one of special tokens alone
            files = list(tokenizer.vocab_files_names.values())
            if not Path(name).is_dir() or any((Path(name) / file).is_file() for file in files):
                return tokenizer
            why = f"it holds none of {', '.join(files)}."
        except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
            why = _first_line(error)
    raise RankwiseError(
        f"`model.name` must come with a tokenizer, but {name} does not: {why} Save the model's tokenizer beside it."
    )


def check_encoder(name: str | os.PathLike[str], task: Task, max_length: int) -> None:
    """Refuse a model that is not there, has a head for other labels, or takes no texts of `max_length` tokens."""
    with quiet():
        config = _config(name)
    # a head that was trained for other labels would give answers that mean something else
    trained = any("ForSequenceClassification" in each for each in config.architectures or ())
    if trained and config.num_labels != task.num_labels:
        raise RankwiseError(
            f"The head of {name} must have {task.num_labels} labels for {task.title}, but has {config.num_labels}. "
            "Give a model without a head, or one that was fine-tuned for this task."
        )
    with quiet():
        positions = positions_of(_skeleton(name, config))
    if positions is not None and positions < max_length:
        raise RankwiseError(
            f"`model.max_length` must be at most {positions}, the positions of {name}, but is {max_length} instead."
        )


def load_encoder(name: str | os.PathLike[str], task: Task, *, seed: int = 0) -> nn.Module:
    """With a head for `task`: the one that was saved, or a fresh one."""
    kind = "regression" if task.is_regression else "single_label_classification"
    source: dict[str, Any] = source_of(name, SETTING)
    torch.manual_seed(seed)
    with quiet():
        try:
            model: nn.Module = AutoModelForSequenceClassification.from_pretrained(
                name, num_labels=task.num_labels, problem_type=kind, dtype=torch.float32, **source
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise _no_classifier(name, error) from error
    return model


def _skeleton(name: str | os.PathLike[str], config: Any) -> Any:
    """The model without weights."""
    try:
        with torch.device("meta"):
            return AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise _no_classifier(name, error) from error


def _no_classifier(name: str | os.PathLike[str], error: Exception) -> RankwiseError:
    return RankwiseError(
        f"`model.name` must be a model that can classify texts, but {name} is not: {_first_line(error)}"
    )


def _config(name: str | os.PathLike[str]) -> Any:
    source: dict[str, Any] = source_of(name, SETTING)
    try:
        return AutoConfig.from_pretrained(name, **source)
    except (OSError, ValueError) as error:
        what = "a folder without a model" if Path(name).is_dir() else "neither a folder nor to be had from the hub"
        raise RankwiseError(
            f"`model.name` must be a folder with a model, or a name on the hub, but {name} is {what}: "
            f"{_first_line(error)}"
        ) from error


def _first_line(error: BaseException) -> str:
    line = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return f"{line[:200]}."


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' bars, and its report that a head is fresh: here it always is, or was checked."""
    logger, bars = logging.getLogger("transformers"), transformers.utils.logging.is_progress_bar_enabled()
    level = logger.level
    logger.setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logger.setLevel(level)
        if bars:
            transformers.utils.logging.enable_progress_bar()  # type: ignore[no-untyped-call]
