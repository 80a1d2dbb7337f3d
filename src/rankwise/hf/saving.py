"""Saving a compact model as a folder that stock `from_pretrained` loads after `import rankwise.hf`.

`save_pretrained` writes a new folder with tokenizer and model card; `save_changed` is what `model.save_pretrained` does
for a model that rankwise changed. Files of sentence-transformers are copied where the source folder has them.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from rankwise.core.budget import SizeReport, count
from rankwise.deploy.quantize import check_unrounded
from rankwise.deploy.save import check_target, refuse_nonfinite, whole_folder
from rankwise.deploy.structure import refuse_gated
from rankwise.errors import CheckpointError, InvalidTypeError, InvalidValueError, RankwiseError, shortened
from rankwise.files import fingerprint, read_json, sealed, write_json
from rankwise.hf.bounds import CONFIG, WHOLE
from rankwise.hf.card import OWN_RESULTS, RESULTS, UNNAMED, BeforeAfter, Card, sections_of, write_card
from rankwise.hf.format import entry_of, is_gated

ENTRY = "quantization_config"
REMEDY = (
    'its layers are those of the package rankwise; install it (pip install ".[hf]" in a clone of rankwise) and '
    "`import rankwise.hf` before `from_pretrained`"
)
"""What transformers shows to people who load a folder without `import rankwise.hf`: see `save_changed`."""
HUB = ("repo_id", "commit_message", "create_pr", "private")
"""Arguments of an upload."""
MODULES = "modules.json"
SENTENCE_FILES = (MODULES, "sentence_bert_config.json", "config_sentence_transformers.json")
"""Files by which sentence-transformers knows how token vectors become one vector for a sentence."""
SAFE = (".json", ".txt", ".safetensors")
"""Endings of files that may be copied, because they cannot hold code."""
USUAL = ("config.json", "model.safetensors")
"""Files in the folder of a sentence-transformers module, where it cannot be listed."""


def save_pretrained(
    model: PreTrainedModel,
    folder: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    size: SizeReport | None = None,
    quality: Mapping[str, BeforeAfter] | None = None,
    speed: Mapping[str, BeforeAfter] | None = None,
    base_model: str | None = None,
    measured_on: str = UNNAMED,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    check_finite: bool = True,
    files_from: str | None = None,
    healing: str | None = None,
    beside: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[str]:
    """Write `model` into a new folder. After `import rankwise.hf` any `from_pretrained` loads it.

    The folder appears only when it is complete. Returns the names of files in `files_from` that were not copied,
    because they may hold code.

    Args:
        model: what `pruner.compact()` or `rankwise.compress` returns.
        folder: must not exist, unless `overwrite` is set.
        tokenizer: saved beside the model (or a processor: anything with `save_pretrained`).
        size: `pruner.size()`, for the card: the requested size, and that of the dense model.
        quality: for the card, by name of the metric: the dense model's figure and this one's.
        speed: for the card, by what was timed and where: milliseconds of the dense model and of this one.
        base_model: for the card: the name of the dense model on the hub, or its folder.
        measured_on: for the card: the data on which `quality` was measured.
        max_shard_size: the largest file of weights, as for transformers; files are written one after another.
        overwrite: replace a model that was saved under this name before.
        check_finite: refuse parameters that are NaN or infinite.
        files_from: a folder or name whose files for sentence-transformers are copied, if it has them.
        healing: for the card: how the model of `files_from`, which has the same layers, was trained further. Where
            `size` or `speed` is not given, the card has what that folder's card says of them.
        beside: JSON files that are written along, by name.
    """
    _check(model, size, {"quality": quality or {}, "speed": speed or {}})
    target = Path(folder).resolve()
    check_pretrained_target(target, overwrite)
    with whole_folder(target) as unfinished:
        unchecked: dict[str, Any] = {} if check_finite else {"check_finite": False}
        model.save_pretrained(unfinished, max_shard_size=max_shard_size, **unchecked)
        if tokenizer is not None:
            tokenizer.save_pretrained(unfinished)
        earlier = sections_of(files_from) if healing is not None and files_from is not None else {}
        given = Card(model, target.name, size, quality or {}, speed or {}, base_model, measured_on, earlier, healing)
        write_card(unfinished, given)
        for name, content in (beside or {}).items():
            write_json(unfinished / name, content)
        return [] if files_from is None else _copy_sentence_files(files_from, unfinished)


def _check(model: PreTrainedModel, size: SizeReport | None, figures: Mapping[str, Mapping[str, BeforeAfter]]) -> None:
    if not isinstance(model, PreTrainedModel):
        raise InvalidTypeError(
            f"`model` must be a model of transformers, but is a {type(model).__name__} instead. "
            "Use `rankwise.save` for others."
        )
    refuse_gated(model, "A saved model")
    check_generation(model)
    if size is not None and not size.nonzeros and size.exported != count(model):
        raise RankwiseError(
            f"`size` must be the report of this model of {count(model):,} parameters, but describes one of "
            f"{size.exported:,}. Pass `pruner.size()` of the pruner that made it, for its own budget."
        )
    for word, pairs in figures.items():
        for name, pair in pairs.items():
            if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(map(math.isfinite, pair)):
                raise InvalidValueError(
                    f"`{word}` must give two numbers by name, dense and compact, but {name!r} has {pair!r} instead."
                )


def check_generation(model: PreTrainedModel) -> None:
    """Refuse settings of `generate` that transformers loads with a warning, but does not save."""
    if not model.can_generate():
        return
    try:
        model.generation_config.validate(strict=True)
    # a stranger's file may hold values of any type
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"generation_config.json must be one that transformers also saves, but is not: {shortened(error)} "
            "Correct it, or remove it."
        ) from None


def check_pretrained_target(target: Path, overwrite: bool) -> None:
    """Refuse to write over anything but an earlier model of transformers."""

    def not_ours(folder: Path) -> str | None:
        known, config = {RESULTS, *_module_folders(folder)}, folder / CONFIG
        if others := sorted({entry.name for entry in (folder / RESULTS).glob("*")} - OWN_RESULTS):
            return f"also holds {RESULTS}/{others[0]}"
        for entry in sorted(folder.iterdir()):
            if entry.is_dir() and entry.name not in known:
                return f"also holds the folder {entry.name}"
        is_model = config.is_file() and _names_model(config)
        return None if is_model else f"has no {CONFIG} of one"

    check_target(target, overwrite, not_ours)


def _names_model(config: Path) -> bool:
    try:
        return "model_type" in read_json(config)
    except (OSError, ValueError, TypeError):
        return False


def save_changed(
    model: PreTrainedModel,
    stock: Callable[..., None],
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: dict[str, Tensor] | None = None,
    push_to_hub: bool = False,
    check_finite: bool = True,
    **kwargs: Any,
) -> None:
    """Save by the stock method, and write into `config.json` what the layers are (`rankwise.hf.format`).

    Parameters of a compact model that are NaN or infinite are refused, unless `check_finite` is False.
    """
    check_unrounded(model)
    if check_finite and not is_gated(model):
        weights = dict(model.named_parameters(remove_duplicate=False))
        refuse_nonfinite({name: tensor for name, tensor in (state_dict or weights).items() if name in weights})
    hub = {name: kwargs.pop(name) for name in HUB if name in kwargs}
    if is_gated(model):
        # the Trainer resumes by `load_state_dict`, which knows no names but the model's own
        kwargs.setdefault("save_original_format", False)
    entry = entry_of(model)
    with _holding(model.config, entry):
        stock(model, save_directory, is_main_process, state_dict, **kwargs)
    config = Path(save_directory) / CONFIG
    if entry is not None and model.should_save_on_this_rank(is_main_process):
        # Without `import rankwise.hf`, transformers only warns of an unknown `quant_method` and goes on with random
        # weights. But it stops at a file name for the weights that cannot be one, and shows it: here it is a sentence.
        content = read_json(config)
        # weights of gates are not loaded by this entry
        checked = sealed(entry, () if is_gated(model) else _weights_in(config.parent))
        content = {**content, ENTRY: checked, "transformers_weights": REMEDY}
        write_json(config, content if is_gated(model) else {**content, WHOLE: fingerprint(content)})
    if push_to_hub:
        # it saves by `save_pretrained`, and so by this function, before it uploads
        model.push_to_hub(hub.pop("repo_id", Path(save_directory).name), **hub)


def _weights_in(folder: Path) -> list[Path]:
    """The files of weights that belong to a folder's `config.json`, those of other variants included."""
    found = sorted(folder.glob("model*.safetensors"))
    # stock code removes the shards of an earlier save, but leaves a file that was not in shards
    return [path for path in found if not any(folder.glob(f"{path.stem}-*-of-*.safetensors"))]


@contextmanager
def _holding(config: PreTrainedConfig, entry: dict[str, Any] | None) -> Iterator[None]:
    """Let the configuration hold `entry` while it is written, not longer: other models may share it."""
    before = vars(config).pop(ENTRY, None)
    if entry is not None:
        setattr(config, ENTRY, entry)
    try:
        yield
    finally:
        vars(config).pop(ENTRY, None)
        if before is not None:
            setattr(config, ENTRY, before)


def _copy_sentence_files(source: str, target: Path) -> list[str]:
    """Copy the files for sentence-transformers of `source`, a folder or a name on the hub.

    Returns the names of files that `modules.json` asks for and that were not copied.
    """
    for name in SENTENCE_FILES:
        _copy(source, name, target)
    left: list[str] = []
    for folder in sorted(_module_folders(target)):
        here = Path(source) / folder
        names = [entry.name for entry in sorted(here.iterdir()) if entry.is_file()] if here.is_dir() else USUAL
        for name in names:
            if not name.endswith(SAFE):
                left.append(f"{folder}/{name}")
            else:
                _copy(source, f"{folder}/{name}", target)
    return left


def _module_folders(folder: Path) -> set[str]:
    """The folders that `modules.json` of a folder names, unless they lie elsewhere than directly in it."""
    try:
        paths = [entry.get("path") for entry in read_json(folder / MODULES)]
    except (OSError, ValueError, TypeError, AttributeError):
        return set()
    names = {path for path in paths if isinstance(path, str) and path not in ("", "..") and "\\" not in path}
    return {name for name in names if PurePosixPath(name).name == name}


def _copy(source: str, name: str, target: Path) -> None:
    """Copy a file of `source`, if it has one of that name."""
    try:
        found = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    # the model itself was there: another problem with the hub need not stop us
    except Exception:
        return
    if found is not None:
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(found, target / name)
