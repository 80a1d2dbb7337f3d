"""`rankwise plan`: what would be pruned, tied, counted and left out, before anyone trains."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rankwise.cli.command import Argument, Options, UsageError, command
from rankwise.cli.tables import print_table, say
from rankwise.errors import RankwiseError, nearest

if TYPE_CHECKING:
    from torch import nn

    from rankwise.core.budget import Budget
    from rankwise.preview import Matrix, Preview

WORDS = ("name", "shape", "kind", "total", "left out", "why")
"""Columns that hold words; the others hold numbers, which stand to the right."""
METHODS = "dense, fac, np-l0, agp, flop-agp, flop-l0, svd, width or width-l0"
BUDGET = (
    Argument("--removed FRACTION", "Budget: the fraction of the parameters to remove.", float),
    Argument("--params N", "Budget: the parameters of the smaller model.", int),
    Argument("--megabytes N", "Budget: the saved tensors in units of 10^6 bytes.", float),
    Argument("--latency-ms N", "Budget: milliseconds for 1 x 128 tokens, timed here.", float),
)
"""How a size is asked for."""

T = TypeVar("T")


def sizes_of(options: Options) -> dict[str, Any]:
    """The sizes that were asked for: values of `Budget` by name."""
    asked = {argument.key: getattr(options, argument.key) for argument in BUDGET}
    return {name: value for name, value in asked.items() if value is not None}


def as_options(sizes: dict[str, Any]) -> str:
    return " and ".join(f"--{name.replace('_', '-')}" for name in sizes)


@command(
    Argument(
        "MODEL",
        "`package.module:builder` or `path/to/file.py:builder`; or a folder of transformers, of a run or of "
        "`rankwise.save`; or a name on the hub.",
        required=True,
    ),
    *BUDGET,
    Argument("--of WHAT", "--removed is of the model or of its prunable part.", Literal["model", "prunable"]),
    Argument("--method NAME", f"{METHODS}. Default: flop-l0.", default="flop-l0"),
    Argument("--include NAME", "Plan only modules of this name. Repeatable.", several=True),
    Argument("--exclude NAME", "Leave out modules of this name. Repeatable.", default=[], several=True),
    Argument("--json", "Print JSON."),
)
def plan(options: Options) -> None:
    """Show what would be pruned, tied and counted, what is left out and why, and the ranks at a budget.

    Nothing is trained or changed. Of a folder or a name on the hub, only the configuration is read. Layers whose names
    differ only in numbers share a row: layers.0-29.mlp. NAME is the full name of a module or its end: head matches
    model.head too.

    example: rankwise plan my_models.py:build --removed 0.8 --exclude head
    example: rankwise plan my-bert --removed 0.35
    """
    from rankwise import methods
    from rankwise.preview import preview

    budget, exclude = _budget(options), options.exclude
    known = methods.METHODS.get(options.method)
    has_ramp = known is not None and "anneal_steps" in [field.name for field in dataclasses.fields(known)]
    # nothing is trained here, so any number of steps will do
    method = methods.make_method(options.method, **({"anneal_steps": 1_000} if has_ramp else {}))
    timed = budget is not None and budget.latency_ms is not None
    model, notes = find_model(options.subject, weights=timed)
    if budget is not None and timed:
        budget, exclude = _fast_enough(model, budget, options.include, exclude)
    found = preview(model, method, budget, options.include, exclude)
    if options.json:
        print(json.dumps({"model": options.subject, **dataclasses.asdict(found), "notes": notes}, indent=2))
        return
    say("\n".join([f"{options.subject}, method {found.method}", *notes, ""]))
    _show(found)


def _budget(options: Options) -> Budget | None:
    from rankwise.core.budget import Budget

    sizes = sizes_of(options)
    if len(sizes) > 1:
        raise UsageError(f"A plan takes one budget at most, but got {as_options(sizes)}. Leave out all but one.")
    if options.of is not None and "removed" not in sizes:
        raise UsageError(
            f"`--of {options.of}` must go with `--removed`, but stands alone. Add `--removed 0.8`, or leave it out."
        )
    return Budget(**sizes, of=options.of or "model") if sizes else None


def _fast_enough(
    model: nn.Module, budget: Budget, include: list[str] | None, exclude: list[str]
) -> tuple[Budget, list[str]]:
    """The size that meets a time, and `exclude` with the layers that would be slower at low rank."""
    from rankwise.adapters.plans import find_plan
    from rankwise.deploy.inputs import example_inputs
    from rankwise.latency import SLOWER, meet_latency

    found = meet_latency(model, budget, example_inputs(model, 1, 128), plan=find_plan(model, include, exclude))
    slower = [item.name for item in found.plan.left_out if item.reason == SLOWER]
    return found.budget, [*exclude, *slower]


def _show(found: Preview) -> None:
    """Print the matrices of the plan, the totals, and what is left out."""
    if found.matrices:
        print_table(_header(found), [_cells(name, matrix) for name, matrix in _grouped(found.matrices)], WORDS)
        if found.budget is not None:
            end = f"{found.method} exports these" if found.final else "training or SVD will share them out differently"
            kept = "; matrices keep their shape" if found.component == "weight" else ""
            say(f"uniform {found.component}s; {end}{kept}")
        print()
    sizes = [(name, getattr(found, name)) for name in ("dense", "prunable", "fixed", "budget", "exported")]
    totals = [[name, f"{size:,}", f"{size / found.dense:.2%}"] for name, size in sizes if size is not None]
    print_table(["total", "parameters", "of dense"], totals, WORDS)
    if found.left_out:
        rows = [
            [item["name"] or "(model)", f"{item['parameters']:,}", f"{item['share']:.2%}", item["reason"]]
            for item in found.left_out
        ]
        print()
        print_table(["left out", "parameters", "of dense", "why"], rows, WORDS)
    removed = 1 - found.smallest / found.dense
    say(f"\nThe smallest size that can be reached is {found.smallest:,} parameters ({removed:.2%} removed).")


def _header(found: Preview) -> list[str]:
    header = ["name", "shape", "kind", "parameters"]
    if found.component == "rank":
        whole, part = "full rank", "rank/full rank"
    else:
        whole, part = f"{found.component}s", f"kept {found.component}s"
    return [*header, whole] if found.budget is None else [*header, part, "exported"]


def _cells(name: str, matrix: Matrix) -> list[str]:
    cells = [name, " x ".join(map(str, matrix.shape)), " = ".join(matrix.kinds), f"{matrix.parameters:,}"]
    if matrix.kept is None:
        return [*cells, f"{matrix.components:,}"]
    return [*cells, f"{matrix.kept:,}/{matrix.components:,}", f"{matrix.exported:,}"]


def _grouped(matrices: list[Matrix]) -> list[tuple[str, Matrix]]:
    """Matrices by name. Those that differ only in the numbers in their names share one: `layers.0-29.mlp.up_proj`."""
    groups: dict[str, list[tuple[str, Matrix]]] = {}
    for matrix in matrices:
        name = " = ".join(name or "(model)" for name in matrix.names)
        alike = dataclasses.replace(matrix, names=[re.sub(r"\d+", "#", name)])
        groups.setdefault(repr(alike), []).append((name, matrix))
    found = []
    for group in groups.values():
        joined = _joined([name for name, _ in group])
        found += group if joined is None else [(joined, group[0][1])]
    return found


def _joined(names: list[str]) -> str | None:
    """One name for names that differ in numbers, where these are all the numbers of some ranges; otherwise None."""
    numbers = zip(*([int(part) for part in re.findall(r"\d+", name)] for name in names), strict=True)
    ranges = [sorted(set(each)) for each in numbers]
    if any(each != list(range(each[0], each[-1] + 1)) for each in ranges) or prod(map(len, ranges)) != len(names):
        return None
    words = iter(str(each[0]) if len(each) == 1 else f"{each[0]}-{each[-1]}" for each in ranges)
    return re.sub(r"\d+", lambda _: next(words), names[0])


def find_model(target: str, *, weights: bool) -> tuple[nn.Module, list[str]]:
    """The model that `target` names, and what is assumed of it; `weights`: whether those of a folder are needed."""
    # a module of that name: its builder was forgotten
    is_module = target.isidentifier() and (Path(f"{target}.py").is_file() or importlib.util.find_spec(target))
    if not Path(target).is_dir() and (":" in target or target.endswith(".py") or is_module):
        return build(target), []
    from rankwise.lab.experiments.saved_models import open_empty, open_model

    return (open_model(target), []) if weights else open_empty(target)


def build(target: str) -> nn.Module:
    """The model that `target` names: a module attribute that is one, or a class or function that makes one."""
    from torch import nn

    place, _, name = target.rpartition(":")
    if not place or not name:
        raise RankwiseError(
            f"MODEL must be `package.module:builder` or `path/to/file.py:builder`, but is {target!r} instead."
        )
    # what a builder prints is not part of the output
    with contextlib.redirect_stdout(sys.stderr):
        module = _tried(lambda: _import(place), f"{place} must import without error")
        if not hasattr(module, name):
            hint = nearest(name, vars(module))
            raise RankwiseError(f"MODEL must name a builder that exists, but {place} has no {name!r}.{hint}")
        model = getattr(module, name)
        if not isinstance(model, nn.Module):
            if not callable(model):
                raise RankwiseError(f"{target} must be a model or make one, but is {model!r} instead.")
            model = _tried(model, f"{target} must make a model without arguments")
    if not isinstance(model, nn.Module):
        raise RankwiseError(f"{target} must give a torch.nn.Module, but gives {model!r} instead.")
    return model


def _import(place: str) -> ModuleType:
    """The module of that name, or in that file."""
    path = Path(place)
    # a file may import its neighbours
    sys.path.insert(0, str(path.resolve().parent) if path.suffix == ".py" else os.getcwd())
    if path.suffix != ".py":
        return importlib.import_module(place)
    if not path.is_file():
        raise RankwiseError(f"MODEL must name a file that exists, but there is no {path}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # its dataclasses look it up
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _tried(call: Callable[[], T], rule: str) -> T:
    """What a call gives; an error of the user's code is told in one line."""
    try:
        return call()
    except RankwiseError:
        raise
    except (Exception, SystemExit) as error:
        raised = f"{type(error).__name__}: {error}".rstrip(".: ")
        raise RankwiseError(f"{rule}, but raises {raised}.") from error
