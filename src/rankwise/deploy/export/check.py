"""A format writes an exported model, loads it again, and keeps it only if its outputs are those of the model."""

from __future__ import annotations

import importlib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rankwise.deploy.export.program import Captured, Inputs, capture, flatten, one_line_errors, quiet
from rankwise.deploy.save import whole_folder
from rankwise.errors import CheckpointError, InvalidTypeError, first_line, install_extra
from rankwise.files import sync, write_json
from rankwise.measure import evaluating
from rankwise.version import VERSION

SUMMARY = "export.json"
TOLERANCE, INT8_TOLERANCE = 1e-4, 0.1
"""Largest relative difference of outputs that is accepted, of float32 and of 8-bit weights."""
Runner = Callable[..., dict[str, Tensor]]
"""A loaded model: called with the model's inputs by name, it gives its outputs by name."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A summary of what was written."""

    folder: Path
    format: str
    int8: bool
    bytes: int
    """The size of all files except the summary."""
    difference: float
    """Largest difference to the model's outputs, over the largest of them: the worst output of the worst input."""
    checked: list[dict[str, list[int]]]
    """The shapes of the inputs that were compared."""
    shapes: dict[str, list[int | str]]
    """The shapes of inputs: a letter where any size may be given, otherwise the size of the example."""
    outputs: list[str]
    settings: dict[str, str]
    """What a session of your own needs to give the same outputs."""


class Format(ABC):
    """A format of another engine."""

    name: ClassVar[str]
    file: ClassVar[str]
    packages: ClassVar[tuple[str, ...]] = ()
    """What must be installed."""
    int8_packages: ClassVar[tuple[str, ...] | None] = ()
    """What else must be for weights of 8 bits; None where there are none."""

    def has_loops(self) -> bool:
        """Whether a recurrence can be written as a loop; otherwise it is unrolled."""
        return False

    @abstractmethod
    def convert(self, captured: Captured, int8: bool) -> Callable[[Path], None]:
        """Convert a captured model; what is returned writes it into a folder."""

    @abstractmethod
    def load(self, path: str | os.PathLike[str]) -> Runner:
        """An exported folder in the engine."""

    def settings(self, path: str | os.PathLike[str]) -> dict[str, str]:
        """With what the engine must load an exported folder."""
        return {}

    def found(self, folder: str | os.PathLike[str]) -> Path:
        """The file of an exported model; refuses a folder that holds none."""
        path = Path(folder) / self.file
        if not path.is_file():
            raise CheckpointError(
                f"A model exported to {self.name} must hold {self.file}, but {folder} does not. "
                f"Give a folder that `rankwise export --to {self.name}` wrote."
            )
        return path

    def export(
        self,
        model: nn.Module,
        example_inputs: Inputs,
        path: str | os.PathLike[str],
        *,
        int8: bool = False,
        tolerance: float | None = None,
        tell: Callable[[str], None] = lambda step: None,
    ) -> Exported:
        """Write a new folder; it gets its name once what is in it has been loaded and compared with the model.

        `tell` is called with every step before it is taken, because some take minutes.
        """
        if int8 and self.int8_packages is None:
            raise CheckpointError(
                f"`int8` goes with onnx and openvino, but the format is {self.name}. Choose one of these."
            )
        for package in (*self.packages, *((self.int8_packages or ()) if int8 else ())):
            imported(package)
        target = Path(path).resolve()
        if target.exists():
            raise CheckpointError(f"The exported folder must be new, but {target} exists. Choose another name.")
        tell("capturing")
        captured = capture(model, example_inputs, loops=self.has_loops())
        tell(f"writing for {self.name}")
        with quiet():
            write = self.convert(captured, int8)
        with whole_folder(target) as unfinished:
            rule = f"The model must be one that can be written as {self.name}, but its tools say"
            with one_line_errors(rule, keep=(OSError,)), quiet():
                write(unfinished)
            tell("comparing")
            files = sorted(unfinished.iterdir())
            allowed = tolerance if tolerance is not None else INT8_TOLERANCE if int8 else TOLERANCE
            made = Exported(
                folder=target,
                format=self.name,
                int8=int8,
                bytes=sum(file.stat().st_size for file in files),
                outputs=captured.outputs,
                settings=self.settings(unfinished),
                **_compared(captured, self.load(unfinished), self.name),
            )
            if not made.difference <= allowed:
                raise CheckpointError(
                    f"The exported model must give the outputs of the model within {allowed:g}, but they differ by "
                    f"{made.difference:.2g} of the largest in {self.name}{' with int8' if int8 else ''}. Nothing was "
                    f"written. {'Export without int8, or allow more.' if int8 else 'Choose another format.'}"
                )
            write_json(unfinished / SUMMARY, {**asdict(made), "folder": target.name, "rankwise": VERSION})
            for file in files:
                sync(file)
        return made


def _compared(captured: Captured, run: Runner, format: str) -> dict[str, Any]:
    """The difference to the model, the shapes that were compared, and which sizes are open."""
    cases = list(_inputs_to_compare(captured))
    with torch.no_grad(), evaluating(captured.reference):
        more = [dict(zip(captured.outputs, captured.reference(case), strict=True)) for case in cases[1:]]
    example = captured.inputs
    return {
        "difference": largest_difference(run, cases, [captured.expected, *more], format),
        "checked": [{name: list(tensor.shape) for name, tensor in case.items()} for case in cases],
        # a letter only where another size was compared
        "shapes": {
            name: [
                size if any(case[name].shape[i] != example[name].shape[i] for case in cases) else example[name].shape[i]
                for i, size in enumerate(shape)
            ]
            for name, shape in captured.shapes.items()
        },
    }


def _inputs_to_compare(captured: Captured) -> Iterator[dict[str, Tensor]]:
    """The example, and resized copies of it in which every open size differs once, where the program accepts them."""
    yield captured.inputs
    sizes = {
        letter: tensor.shape[i]
        for name, tensor in captured.inputs.items()
        for i, letter in enumerate(captured.shapes[name])
        if isinstance(letter, str)
    }
    same = set(sizes)
    for others in _other_sizes(sizes, captured.ranges):
        changed = {letter for letter in same if others[letter] != sizes[letter]}
        chosen = {letter: others[letter] if letter in changed else size for letter, size in sizes.items()}
        inputs = {name: _resized(tensor, captured.shapes[name], chosen) for name, tensor in captured.inputs.items()}
        if not changed:
            continue
        try:
            with torch.no_grad(), quiet():
                captured.program.module()(inputs)
        # the programs of some models do not run for a batch of 1
        except (AssertionError, IndexError, RuntimeError):
            continue
        same -= changed
        yield inputs


def _other_sizes(sizes: dict[str, int], ranges: dict[str, tuple[int, int | None]]) -> Iterator[dict[str, int]]:
    """Half of every size with a batch of 1, the same with a batch of 2, and one more of every size."""
    batch = next(iter(sizes.values()), 0)
    for one in (1, 2):
        smaller = {letter: one if size == batch else math.ceil(size / 2) for letter, size in sizes.items()}
        yield {letter: max(size, ranges[letter][0]) for letter, size in smaller.items()}
    yield {letter: min(size + 1, ranges[letter][1] or size + 1) for letter, size in sizes.items()}


def _resized(tensor: Tensor, shape: list[int | str], sizes: dict[str, int]) -> Tensor:
    """The tensor cut to these sizes, or continued with its own beginning."""
    for i, size in enumerate(shape):
        if isinstance(size, str):
            tensor = tensor.index_select(i, torch.arange(sizes[size]) % tensor.shape[i])
    return tensor.contiguous()


def largest_difference(
    run: Runner, compared: list[dict[str, Tensor]], expected: list[dict[str, Tensor]], format: str
) -> float:
    """The largest `difference` over all outputs for all inputs."""
    worst = 0.0
    for inputs, outputs in zip(compared, expected, strict=True):
        try:
            found = run(**inputs)
        except Exception as error:
            shapes = {name: list(tensor.shape) for name, tensor in inputs.items()}
            raise CheckpointError(
                f"The exported model must run in {format}, but on inputs of {shapes} it says: {first_line(error)}"
            ) from error
        if missing := [name for name in outputs if name not in found]:
            raise CheckpointError(
                f"The exported model must give {', '.join(outputs)}, but in {format} it lacks {', '.join(missing)}."
            )
        worst = max(worst, *(difference(found[name], tensor) for name, tensor in outputs.items()))
    return worst


def difference(found: Tensor, expected: Tensor) -> float:
    """Largest absolute difference over the largest absolute value; infinite where shapes differ or numbers are NaN."""
    if found.shape != expected.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    gap = (found.double() - expected.double()).abs().max()
    largest = expected.double().abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    value = float(gap / largest)
    return value if math.isfinite(value) else math.inf


def imported(name: str) -> Any:
    """Import a package of an engine, or say in one line which one is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CheckpointError(
            f"This export needs the package {name}, but it is not installed ({error}). {install_extra('export')}"
        ) from error


def as_flat_numpy(inputs: Inputs, wanted: list[str]) -> dict[str, Any]:
    """The inputs that the program reads, as flat numpy arrays."""
    flat = flatten(inputs)
    if missing := [name for name in wanted if name not in flat]:
        raise InvalidTypeError(
            f"The exported model needs {', '.join(missing)}, but got {', '.join(flat) or 'nothing'}."
        )
    return {name: flat[name].detach().contiguous().numpy() for name in wanted}
