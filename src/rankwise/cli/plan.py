"""`rankwise plan`: what would be pruned, tied, counted and left out, before anyone trains."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rankwise.cli.command import Command, Options, Parser, number, one_of, whole_number
from rankwise.cli.tables import print_table
from rankwise.errors import RankwiseError

if TYPE_CHECKING:
    from torch import nn

    from rankwise.core.budget import Budget
    from rankwise.methods.base import Method

WORDS = ("name", "shape", "kind", "total", "left out", "why")
"""Columns that hold words; the others hold numbers, which stand to the right."""


@dataclass(frozen=True)
class Row:
    """One planned matrix."""

    names: list[str]
    """Every module that uses it; tied ones are one matrix. The model itself has the empty name."""
    kinds: list[str]
    shape: list[int]
    parameters: int
    components: int
    """The full rank; input features or single weights where the method prunes those."""
    kept: int | None
    """The rank within the budget."""
    exported: int | None


@dataclass(frozen=True)
class Outlook:
    """What a pruner would do with a model."""

    model: str
    method: str
    component: str
    """What is kept or dropped as one: a rank, an input feature or a weight."""
    final: bool
    """Whether the method exports these very numbers, rather than share them out anew."""
    matrices: list[Row]
    left_out: list[dict[str, Any]]
    dense: int
    prunable: int
    fixed: int
    budget: int | None
    exported: int | None


def add_arguments(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="`package.module:builder` or `path/to/file.py:builder`")
    add = parser.add_argument
    add("--removed", type=number, metavar="FRACTION", help="budget: fraction of the parameters to remove")
    add("--of", type=one_of("model", "prunable"), metavar="WHAT", help="--removed is of the model or prunable")
    add("--params", type=whole_number, metavar="N", help="budget: parameters of the exported model")
    add("--megabytes", type=number, metavar="N", help="budget: 10^6 bytes of saved tensors")
    add("--latency-ms", type=number, metavar="N", help="budget: milliseconds for 1 x 128 tokens, timed on this machine")
    add(
        "--method", default="flop-l0", metavar="NAME", help="dense, fac, np-l0, agp, flop-agp, flop-l0 (default) or svd"
    )
    add("--include", action="append", metavar="NAME", help="plan only modules of this name; repeatable")
    add("--exclude", action="append", metavar="NAME", help="leave out modules of this name; repeatable")
    add("--json", action="store_true", help="print JSON")


def plan(options: Options) -> None:
    from rankwise.cli.models import build

    budget = _budget(options.of, options.removed, options.params, options.megabytes, options.latency_ms)
    chosen = _method(options.method)
    model = build(options.model)
    include, exclude = options.include, options.exclude or []
    if budget is not None and budget.latency_ms is not None:
        budget, exclude = _fast_enough(model, budget, include, exclude)
    outlook = look_ahead(options.model, model, chosen, budget, include, exclude)
    if options.json:
        print(json.dumps(dataclasses.asdict(outlook), indent=2))
    else:
        show(outlook)


def _fast_enough(
    model: nn.Module, budget: Budget, include: list[str] | None, exclude: list[str]
) -> tuple[Budget, list[str]]:
    """The size that meets a time, and what is left out besides."""
    from rankwise.adapters.generic import find_plan
    from rankwise.deploy.inputs import example_inputs
    from rankwise.deploy.latency import SLOWER, meet_latency

    found = meet_latency(model, budget, example_inputs(model, 1, 128), plan=find_plan(model, include, exclude))
    slower = [item.name for item in found.plan.left_out if item.reason == SLOWER]
    return found.budget, [*exclude, *slower]


def _budget(
    of: str | None, removed: float | None, params: int | None, megabytes: float | None, latency_ms: float | None
) -> Budget | None:
    from rankwise.core.budget import Budget

    sizes = {"removed": removed, "params": params, "megabytes": megabytes, "latency_ms": latency_ms}
    given = {name: value for name, value in sizes.items() if value is not None}
    if len(given) > 1:
        raise RankwiseError(
            f"A plan takes one budget at most, but got {' and '.join('--' + name.replace('_', '-') for name in given)}."
        )
    if of is not None and "removed" not in given:
        raise RankwiseError(
            f"`--of {of}` must go with `--removed`, but stands alone. Add `--removed 0.8`, or leave it out."
        )
    if not given:
        return None
    return Budget(**given, of=of or "model")  # type: ignore[arg-type]


def _method(name: str) -> Method:
    from rankwise.methods import METHODS, make_method

    known = {field.name for field in dataclasses.fields(METHODS[name])} if name in METHODS else set()
    # nothing is trained here, so any number of steps will do
    return make_method(name, **({"anneal_steps": 1_000} if "anneal_steps" in known else {}))


def look_ahead(
    name: str, model: nn.Module, method: Method, budget: Budget | None, include: list[str] | None, exclude: list[str]
) -> Outlook:
    """Plan the model and choose uniform ranks within the budget; changes nothing."""
    from rankwise.adapters.generic import find_plan
    from rankwise.core.choice import uniform_counts
    from rankwise.methods.gatings import MagnitudeGates, UniformRanks
    from rankwise.methods.representations import InputFeatures, SingleWeights
    from rankwise.pruner import account_of, planned

    found = planned(model, find_plan(model, include, exclude), method)
    account = account_of(model, found, method, trained=True)
    limit = budget.resolve(account) if budget is not None else None
    counts = uniform_counts(account.curves, limit - account.fixed) if limit is not None else None
    rows = []
    for i, (site, curve) in enumerate(zip(found.sites, account.curves, strict=True)):
        kept = counts[i] if counts is not None else None
        rows.append(
            Row(
                names=[use.name for use in site.uses],
                kinds=[use.kind for use in site.uses],
                shape=list(site.shape),
                parameters=site.params,
                components=curve.num_components,
                kept=kept,
                exported=curve(kept) if kept is not None else None,
            )
        )
    names = {SingleWeights: "weight", InputFeatures: "feature"}
    return Outlook(
        model=name,
        method=method.name,
        component=next((word for kind, word in names.items() if isinstance(method, kind)), "rank"),
        final=isinstance(method, UniformRanks | MagnitudeGates),
        matrices=rows,
        left_out=[{"name": item.name, "parameters": item.params, "reason": item.reason} for item in found.left_out],
        dense=account.dense,
        prunable=account.prunable,
        fixed=account.fixed,
        budget=limit,
        exported=account.size(counts) if counts is not None else None,
    )


def show(outlook: Outlook) -> None:
    """Print the outlook: tables on a terminal, plain lines elsewhere."""
    print(f"{outlook.model}, method {outlook.method}\n")
    if outlook.matrices:
        print_table(_header(outlook), [_cells(row) for row in outlook.matrices], WORDS)
        if outlook.budget is not None:
            print(_note(outlook))
        print()
    print_table(["total", "parameters", "of dense"], _totals(outlook), WORDS)
    if outlook.left_out:
        rows = [[item["name"] or "(model)", f"{item['parameters']:,}", item["reason"]] for item in outlook.left_out]
        print()
        print_table(["left out", "parameters", "why"], rows, WORDS)


def _header(outlook: Outlook) -> list[str]:
    header = ["name", "shape", "kind", "parameters"]
    if outlook.component == "rank":
        whole, part = "full rank", "rank/full rank"
    else:
        whole, part = f"{outlook.component}s", f"kept {outlook.component}s"
    return [*header, whole] if outlook.budget is None else [*header, part, "exported"]


def _note(outlook: Outlook) -> str:
    note = f"uniform {outlook.component}s; "
    note += f"{outlook.method} exports these" if outlook.final else "training or SVD will share them out differently"
    return note + "; matrices keep their shape" if outlook.component == "weight" else note


def _cells(row: Row) -> list[str]:
    names = " = ".join(name or "(model)" for name in row.names)
    kinds = " = ".join(row.kinds)
    cells = [names, " x ".join(map(str, row.shape)), kinds, f"{row.parameters:,}"]
    if row.kept is None:
        return [*cells, f"{row.components:,}"]
    return [*cells, f"{row.kept:,}/{row.components:,}", f"{row.exported:,}"]


def _totals(outlook: Outlook) -> list[list[str]]:
    names = ("dense", "prunable", "fixed", "budget", "exported")
    sizes = [(name, getattr(outlook, name)) for name in names]
    return [[name, f"{size:,}", f"{size / outlook.dense:.2%}"] for name, size in sizes if size is not None]


PLAN = Command(
    name="plan",
    usage="MODEL [--removed FRACTION | --params N | --megabytes N | --latency-ms N] [--method NAME] ...",
    about="Show what would be pruned, tied and counted, what is left out and why, and the ranks at a budget.",
    details="""\
Nothing is trained or changed. A name matches itself and as the last part of a longer one.

example: rankwise plan my_models.py:build --removed 0.8 --exclude head""",
    arguments=add_arguments,
    run=plan,
)
