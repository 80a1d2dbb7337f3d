"""`rankwise plan`: what would be pruned, tied, counted and left out, before anyone trains."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from rankwise.cli.command import Command, Options, Parser, number, one_of, whole_number
from rankwise.cli.tables import print_table, say
from rankwise.errors import OutOfReachError, RankwiseError

if TYPE_CHECKING:
    from torch import nn

    from rankwise.core.budget import Budget
    from rankwise.core.plan import Plan
    from rankwise.methods.base import Method

WORDS = ("name", "shape", "kind", "total", "left out", "why")
"""Columns that hold words; the others hold numbers, which stand to the right."""
SHOWN = 5
"""Layers that an error names."""


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
    notes: list[str]
    """What is assumed of the model."""


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        help="`package.module:builder` or `path/to/file.py:builder`; or a folder of transformers, of a run or of "
        "`rankwise.save`; or a name on the hub",
    )
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
    from rankwise.cli.models import find_model

    budget = _budget(options.of, options.removed, options.params, options.megabytes, options.latency_ms)
    chosen = _method(options.method)
    timed = budget is not None and budget.latency_ms is not None
    model, notes = find_model(options.model, weights=timed)
    include, exclude = options.include, options.exclude or []
    if budget is not None and timed:
        budget, exclude = _fast_enough(model, budget, include, exclude)
    outlook = look_ahead(options.model, model, chosen, budget, include, exclude, notes)
    if options.json:
        print(json.dumps(dataclasses.asdict(outlook), indent=2))
    else:
        show(outlook)


def _fast_enough(
    model: nn.Module, budget: Budget, include: list[str] | None, exclude: list[str]
) -> tuple[Budget, list[str]]:
    """The size that meets a time, and what is left out besides."""
    from rankwise.adapters.plans import find_plan
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
    name: str,
    model: nn.Module,
    method: Method,
    budget: Budget | None,
    include: list[str] | None,
    exclude: list[str],
    notes: list[str],
) -> Outlook:
    """Plan the model and choose uniform ranks within the budget; changes nothing."""
    from rankwise.adapters.plans import find_plan
    from rankwise.core.choice import uniform_counts
    from rankwise.methods.gatings import MagnitudeGates, UniformRanks
    from rankwise.methods.representations import InputFeatures, SingleWeights
    from rankwise.pruner import account_of, planned

    found = planned(model, find_plan(model, include, exclude), method)
    account = account_of(model, found, method, trained=True)
    try:
        limit = budget.resolve(account) if budget is not None else None
    except OutOfReachError as error:
        raise OutOfReachError(f"{error} {_fixed(model, found, account.dense)}") from None
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
        left_out=[
            {"name": each.name, "parameters": each.params, "share": each.params / account.dense, "reason": each.reason}
            for each in found.left_out
        ],
        dense=account.dense,
        prunable=account.prunable,
        fixed=account.fixed,
        budget=limit,
        exported=account.size(counts) if counts is not None else None,
        notes=notes,
    )


def _fixed(model: nn.Module, plan: Plan, dense: int) -> str:
    """What cannot be pruned: the layers that were left out, largest first and tied weights once, and the rest."""
    from rankwise.split import all_split

    fixed = dense - plan.params
    parts: dict[str, int] = {}
    seen: set[int] = set()
    with all_split(model):
        for item in sorted(plan.left_out, key=lambda item: -item.params):
            own = {id(p): p.numel() for p in model.get_submodule(item.name).parameters() if id(p) not in seen}
            seen |= own.keys()
            if own:
                name = item.name or "(model)"
                parts[name if len(parts) < SHOWN else "other layers"] = sum(own.values()) + parts.get("other layers", 0)
    if rest := fixed - sum(parts.values()):
        parts["biases, norms and the like"] = rest
    said = ", ".join(f"{name} {params:,} ({params / dense:.1%})" for name, params in parts.items())
    return f"Left out of the plan: {said}. Without a budget this command says why."


def show(outlook: Outlook) -> None:
    """Print the outlook: tables on a terminal, plain lines elsewhere."""
    say(f"{outlook.model}, method {outlook.method}")
    for note in outlook.notes:
        say(note)
    print()
    if outlook.matrices:
        print_table(_header(outlook), [_cells(name, row) for name, row in _alike(outlook.matrices)], WORDS)
        if outlook.budget is not None:
            say(_note(outlook))
        print()
    print_table(["total", "parameters", "of dense"], _totals(outlook), WORDS)
    if outlook.left_out:
        rows = [
            [item["name"] or "(model)", f"{item['parameters']:,}", f"{item['share']:.2%}", item["reason"]]
            for item in outlook.left_out
        ]
        print()
        print_table(["left out", "parameters", "of dense", "why"], rows, WORDS)
    removed = 1 - outlook.fixed / outlook.dense
    say(f"\nThe smallest size that can be reached is {outlook.fixed:,} parameters ({removed:.2%} removed).")


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


def _alike(rows: list[Row]) -> list[tuple[str, Row]]:
    """Layers that differ in the numbers in their names alone have one row: `layers.0-29.mlp.up_proj`."""
    groups: dict[Any, list[str]] = {}
    for row in rows:
        name = " = ".join(name or "(model)" for name in row.names)
        like = dataclasses.replace(row, names=[re.sub(r"\d+", "#", name)])
        groups.setdefault(json.dumps(dataclasses.asdict(like)), []).append(name)
    found = []
    for text, names in groups.items():
        row = Row(**json.loads(text))
        joined = _joined(names)
        found += [(name, row) for name in ([joined] if joined else names)]
    return found


def _joined(names: list[str]) -> str | None:
    """One name for those that differ in numbers, where these are all that lie in some ranges."""
    numbers = zip(*([int(part) for part in re.findall(r"\d+", name)] for name in names), strict=True)
    ranges = [sorted(set(each)) for each in numbers]
    if len(names) == 1 or any(each != list(range(each[0], each[-1] + 1)) for each in ranges):
        return names[0] if len(names) == 1 else None
    if prod(map(len, ranges)) != len(names):
        return None
    words = iter(str(each[0]) if len(each) == 1 else f"{each[0]}-{each[-1]}" for each in ranges)
    return re.sub(r"\d+", lambda _: next(words), names[0])


def _cells(names: str, row: Row) -> list[str]:
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
Nothing is trained or changed, and of a folder or a name on the hub only the configuration is read. Layers that
differ in numbers alone share a row: layers.0-29.mlp. A name matches itself and as the last part of a longer one.

example: rankwise plan my_models.py:build --removed 0.8 --exclude head
example: rankwise plan my-bert --removed 0.35""",
    arguments=add_arguments,
    run=plan,
)
