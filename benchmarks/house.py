"""How large the code is, and how many files one has to read to follow it: `python benchmarks/house.py [--trace]`.

Counts lines, modules with one importer, the longest function and the lines of each part. `--trace` also runs a small
`rankwise run demo` and counts the files of the package in which anything but an import is executed: in the whole
command, and in training steps alone.
"""

from __future__ import annotations

import argparse
import ast
import collections
import sys
import tempfile
from pathlib import Path
from types import FrameType

SOURCE = Path(__file__).resolve().parents[1] / "src"
KERNELS = ("rankwise/kernels/", "rankwise/deploy/export/")
TINY = (
    "--base.steps 6 --training.steps 6 --method.anneal_steps 3 --training.eval_every 3 --base.eval_every 3 "
    "--training.log_every 1 --base.log_every 1 --compare fac"
)


def modules() -> dict[str, Path]:
    """Every module of the package by name."""
    files = sorted(SOURCE.rglob("*.py"))
    return {".".join(f.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): f for f in files}


def importers(found: dict[str, Path]) -> dict[str, set[str]]:
    """The modules that import each module."""
    users: dict[str, set[str]] = collections.defaultdict(set)
    for name, file in found.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    users[whole if whole in found else node.module].add(name)
    return users


def longest_functions(found: dict[str, Path], number: int = 5) -> list[tuple[int, str]]:
    """The longest functions: lines, and where."""
    lengths = []
    for name, file in found.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                lengths.append((node.end_lineno - node.lineno + 1, f"{name}.{node.name}"))
    return sorted(lengths, reverse=True)[:number]


def trace() -> tuple[set[str], set[str]]:
    """Files in which something is executed by a small run of the demo: in all of it, and inside of training steps."""
    from rankwise.cli.app import run

    whole: set[str] = set()
    steps: set[str] = set()
    depth = 0
    entries = {"train_step", "_train_step", "take_step"}

    def watch(frame: FrameType, event: str, _: object) -> None:
        nonlocal depth
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if "/rankwise/" not in file or name == "<module>":
            return
        if name in entries:
            depth += {"call": 1, "return": -1}.get(event, 0)
        if event == "call":
            whole.add(file)
            if depth:
                steps.add(file)

    with tempfile.TemporaryDirectory() as folder:
        sys.setprofile(watch)
        try:
            assert run(["run", "demo", *TINY.split(), "--out", f"{folder}/run"]) == 0
        finally:
            sys.setprofile(None)
    return whole, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", action="store_true")
    options = parser.parse_args()
    found = modules()
    lines = {name: len(file.read_text().splitlines()) for name, file in found.items()}
    users = importers(found)
    paths = {name: str(file.relative_to(SOURCE)) for name, file in found.items()}
    library = [n for n in found if not n.startswith(("rankwise.lab", "rankwise.cli", "rankwise.__main__"))]
    newcomer = [n for n in library if not paths[n].startswith(KERNELS)]
    print(f"lines of Python in src: {sum(lines.values()):,} in {len(found)} files")
    print(f"the library without kernels and exporters: {sum(lines[n] for n in newcomer):,} in {len(newcomer)} files")
    print(f"modules with one importer: {sum(len(users[n]) == 1 for n in found)}")
    print("longest functions:", ", ".join(f"{where} {length}" for length, where in longest_functions(found)))
    if options.trace:
        whole, steps = trace()
        print(f"files that `rankwise run demo` passes through: {len(whole)}; a training step: {len(steps)}")


if __name__ == "__main__":
    main()
