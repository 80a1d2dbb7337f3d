"""Saving a compact model as a folder that stock `from_pretrained` loads after `import rankwise.hf`.

`save_pretrained` writes a new folder with tokenizer and model card; `save_changed` is what `model.save_pretrained` does
for a model that rankwise changed. Files of sentence-transformers are copied where the source folder has them.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from rankwise.core.budget import SizeReport, count
from rankwise.deploy.quantize import check_unrounded
from rankwise.deploy.save import check_target, refuse_nonfinite, whole_folder
from rankwise.deploy.structure import Head, LowRankEmbedding, LowRankLinear, layers_of
from rankwise.errors import CheckpointError, InvalidTypeError, InvalidValueError, RankwiseError
from rankwise.files import sealed, write_json
from rankwise.hf.format import REMEDY, entry_of, is_gated
from rankwise.version import VERSION

CONFIG, ENTRY, CARD = "config.json", "quantization_config", "README.md"
HUB = ("repo_id", "commit_message", "create_pr", "private")
"""Arguments of an upload."""
MODULES = "modules.json"
SENTENCE_FILES = (MODULES, "sentence_bert_config.json", "config_sentence_transformers.json")
"""Files by which sentence-transformers knows how token vectors become one vector for a sentence."""
SAFE = (".json", ".txt", ".safetensors")
"""Endings of files that may be copied, because they cannot hold code."""
USUAL = ("config.json", "model.safetensors")
"""Files in the folder of a sentence-transformers module, where it cannot be listed."""


BeforeAfter = tuple[float, float]
"""A figure of the dense model, and the same figure of this one."""


def save_pretrained(
    model: PreTrainedModel,
    folder: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    size: SizeReport | None = None,
    quality: Mapping[str, BeforeAfter] | None = None,
    speed: Mapping[str, BeforeAfter] | None = None,
    base_model: str | None = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    check_finite: bool = True,
    files_from: str | None = None,
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
        base_model: for the card: the name of the dense model.
        max_shard_size: the largest file of weights.
        overwrite: replace a model that was saved under this name before.
        check_finite: refuse parameters that are NaN or infinite.
        files_from: a folder or name whose files for sentence-transformers are copied, if it has them.
    """
    _check(model, size)
    for word, figures in (("quality", quality), ("speed", speed)):
        _check_figures(word, figures)
    target = Path(folder).resolve()
    check_pretrained_target(target, overwrite)
    with whole_folder(target) as unfinished:
        unchecked: dict[str, Any] = {} if check_finite else {"check_finite": False}
        model.save_pretrained(unfinished, max_shard_size=max_shard_size, **unchecked)
        if tokenizer is not None:
            tokenizer.save_pretrained(unfinished)
        text = card(model, target.name, size=size, quality=quality, speed=speed, base_model=base_model)
        (unfinished / CARD).write_text(text, encoding="utf-8")
        return [] if files_from is None else _copy_sentence_files(files_from, unfinished)


def _check(model: PreTrainedModel, size: SizeReport | None) -> None:
    if not isinstance(model, PreTrainedModel):
        raise InvalidTypeError(
            f"`model` must be a model of transformers, but is a {type(model).__name__} instead. "
            "Use `rankwise.save` for others."
        )
    if is_gated(model):
        raise CheckpointError(
            "A saved model must be compact, but this one is gated. Save what `pruner.compact()` returns."
        )
    if size is not None and not size.nonzeros and size.exported != count(model):
        raise RankwiseError(
            f"`size` must be the report of this model of {count(model):,} parameters, but describes one of "
            f"{size.exported:,}. Pass `pruner.size()` of the pruner that made it, for its own budget."
        )


def _check_figures(word: str, figures: Mapping[str, BeforeAfter] | None) -> None:
    for name, pair in (figures or {}).items():
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(math.isfinite(number) for number in pair):
            raise InvalidValueError(
                f"`{word}` must give two numbers by name, dense and compact, but {name!r} has {pair!r} instead."
            )


def check_pretrained_target(target: Path, overwrite: bool) -> None:
    """Refuse to write over anything but an earlier model of transformers."""

    def not_ours(folder: Path) -> str | None:
        known = _module_folders(folder)
        inside = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name not in known)
        if inside:
            return f"also holds the folder {inside[0]}"
        config = folder / CONFIG
        return (
            None if config.is_file() and "model_type" in json.loads(config.read_text()) else f"has no {CONFIG} of one"
        )

    check_target(target, overwrite, not_ours)


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
    entry = entry_of(model)
    with _holding(model.config, entry):
        stock(model, save_directory, is_main_process, state_dict, **kwargs)
    config = Path(save_directory) / CONFIG
    if entry is not None and model.should_save_on_this_rank(is_main_process):
        # Without `import rankwise.hf`, transformers only warns of an unknown `quant_method` and goes on with random
        # weights. But it stops at a file name for the weights that cannot be one, and shows it: here it is a sentence.
        content = json.loads(config.read_text(encoding="utf-8"))
        # weights of gates are not loaded by this entry
        checked = sealed(entry, () if is_gated(model) else _weights_in(config.parent))
        write_json(config, {**content, ENTRY: checked, "transformers_weights": REMEDY})
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
        _copy(_found(source, name), target / name)
    left: list[str] = []
    for folder in sorted(_module_folders(target)):
        for name in _names(Path(source) / folder):
            if not name.endswith(SAFE):
                left.append(f"{folder}/{name}")
            else:
                _copy(_found(source, f"{folder}/{name}"), target / folder / name)
    return left


def _module_folders(folder: Path) -> set[str]:
    """The folders that `modules.json` of a folder names, unless they lie elsewhere than directly in it."""
    try:
        entries: Any = json.loads((folder / MODULES).read_bytes())
        paths = [entry.get("path") for entry in entries]
    except (OSError, ValueError, TypeError, AttributeError):
        return set()
    return {path for path in paths if isinstance(path, str) and path not in ("", "..") and _is_name(path)}


def _is_name(path: str) -> bool:
    return PurePosixPath(path).name == path and "\\" not in path


def _names(folder: Path) -> Iterable[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.is_file()) if folder.is_dir() else USUAL


def _found(source: str, name: str) -> Path | None:
    folder = Path(source)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    # the model itself was there: another problem with the hub need not stop us
    except Exception:
        return None
    return None if found is None else Path(found)


def _copy(source: Path | None, target: Path) -> None:
    if source is not None:
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(source, target)


def card(
    model: PreTrainedModel,
    name: str,
    *,
    size: SizeReport | None,
    quality: Mapping[str, BeforeAfter] | None,
    speed: Mapping[str, BeforeAfter] | None,
    base_model: str | None,
) -> str:
    """The text of README.md."""
    kind, is_stock = type(model).__name__, entry_of(model) is None
    how = (
        f". Its layers are as {kind} builds them, so that it needs nothing but what loads that."
        if is_stock
        else ", which writes weight matrices as products of two smaller ones."
    )
    lines = [
        *_front_matter(base_model, is_stock),
        f"# {name}",
        "",
        f"{kind} with {count(model):,} parameters"
        + (f", made of {base_model}" if base_model else "")
        + f" by rankwise {VERSION}{how}",
        "",
        "```python",
        *([] if is_stock else ['import rankwise.hf  # pip install ".[hf]" in a clone of rankwise']),
        f"from transformers import {kind}",
        "",
        f"model = {kind}.from_pretrained({json.dumps(name)})",
        "```",
        "",
        "## Size",
        "",
        *_size(model, size),
        "",
        *_layers(model),
        "",
        "## Quality",
        "",
        *_table(quality, "metric", "g"),
        "",
        "## Speed",
        "",
        *_table(speed, "milliseconds per call", ".2f"),
    ]
    return "\n".join(lines) + "\n"


def _front_matter(base_model: str | None, is_stock: bool) -> list[str]:
    # a JSON string is a YAML string too
    base = [f"base_model: {json.dumps(base_model)}"] if base_model else []
    tags = "tags: [rankwise, pruning]" if is_stock else "tags: [rankwise, pruning, low-rank]"
    return ["---", "library_name: transformers", tags, *base, "---", ""]


def _size(model: PreTrainedModel, size: SizeReport | None) -> list[str]:
    achieved = count(model)
    if size is None:
        return [f"{achieved:,} parameters, tied weights counted once. The size of the dense model was not given."]
    rows = [("dense", size.dense), ("requested, at most", size.budget), ("this model", achieved)]
    if size.nonzeros:
        rows[2:] = [("this model, non-zero", size.exported), ("this model, zeros included", achieved)]
    table = ["| | parameters | removed |", "|---|---|---|"]
    return [*table, *(f"| {name} | {n:,} | {1 - n / size.dense:.2%} |" for name, n in rows)]


def _layers(model: PreTrainedModel) -> list[str]:
    layers = layers_of(model).values()
    ranks = [layer.rank for layer in layers if isinstance(layer, LowRankLinear | LowRankEmbedding | Head)]
    if not ranks:
        return [f"None of the {len(layers)} linear layers and embeddings is low-rank."]
    return [
        f"{len(ranks)} of {len(layers)} linear layers and embeddings are low-rank, of rank {min(ranks)} to "
        f"{max(ranks)}; `config.json` lists them."
    ]


def _table(figures: Mapping[str, BeforeAfter] | None, what: str, form: str) -> list[str]:
    if not figures:
        return ["Not measured."]
    rows = [f"| {name} | {before:{form}} | {after:{form}} |" for name, (before, after) in figures.items()]
    return [f"| {what} | dense | this model |", "|---|---|---|", *rows]
