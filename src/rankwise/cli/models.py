"""Models that a command names: `package.module:builder`, `path/to/file.py:builder`, a folder, or a name on the hub."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rankwise.errors import RankwiseError, nearest

if TYPE_CHECKING:
    from torch import nn


def find_model(target: str, *, weights: bool) -> tuple[nn.Module, list[str]]:
    """The model that `target` names, and what is assumed of it; `weights`: whether those of a folder are needed."""
    if not Path(target).is_dir() and (":" in target or target.endswith(".py") or _is_module(target)):
        return build(target), []
    from rankwise.lab.experiments.saved_models import open_empty, open_model

    return (open_model(target), []) if weights else open_empty(target)


def _is_module(name: str) -> bool:
    """Whether there is a Python module of that name: its builder was forgotten."""
    return name.isidentifier() and (Path(f"{name}.py").is_file() or importlib.util.find_spec(name) is not None)


def build(target: str) -> nn.Module:
    """The model that `target` names: a module attribute that is one, or a class or function that makes one."""
    from torch import nn

    place, separator, name = target.rpartition(":")
    if not separator or not place or not name:
        raise RankwiseError(
            f"MODEL must be `package.module:builder` or `path/to/file.py:builder`, but is {target!r} instead."
        )
    # what a builder prints is not part of the output
    with contextlib.redirect_stdout(sys.stderr):
        module = _import_file(Path(place)) if place.endswith(".py") else _import(place)
        model = _attribute(module, place, name)
        if not isinstance(model, nn.Module):
            model = _call(model, target)
    if not isinstance(model, nn.Module):
        raise RankwiseError(f"{target} must give a torch.nn.Module, but gives {model!r} instead.")
    return model


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise RankwiseError(f"MODEL must name a file that exists, but there is no {path}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # its dataclasses look it up, and it may import its neighbours
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise RankwiseError(f"{path} must import without error, but {_said(error)}.") from error
    return module


def _import(name: str) -> ModuleType:
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise RankwiseError(f"{name} must import without error, but {_said(error)}.") from error


def _attribute(module: ModuleType, place: str, name: str) -> Any:
    if not hasattr(module, name):
        hint = nearest(name, vars(module))
        raise RankwiseError(f"MODEL must name a builder that exists, but {place} has no {name!r}.{hint}")
    return getattr(module, name)


def _call(builder: Any, target: str) -> Any:
    if not callable(builder):
        raise RankwiseError(f"{target} must be a model or make one, but is {builder!r} instead.")
    try:
        return builder()
    except (Exception, SystemExit) as error:
        raise RankwiseError(f"{target} must make a model without arguments, but {_said(error)}.") from error


def _said(error: BaseException) -> str:
    return f"raises {type(error).__name__}: {error}".rstrip(".: ")
