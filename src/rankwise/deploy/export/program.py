"""A model captured by `torch.export`: what all three formats start from.

Inputs and outputs are flat and named. What a model takes as a tuple (`memory` of Transformer-XL) becomes `memory_0`,
`memory_1`, ...; what it gives as one, likewise. Layers that engines cannot run are replaced before the capture, by
others that compute the same function.

Shapes: B = any batch dimensions, I = inputs, O = outputs, K = kept, D = width.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rankwise.deploy.structure import refuse_gated
from rankwise.errors import CheckpointError, InvalidTypeError, first_line
from rankwise.measure import evaluating
from rankwise.modules import LowRankHead, PivotLinear, SelectedLinear
from rankwise.swap import become, copied

_SIZES = ("in_features", "out_features", "num_embeddings", "embedding_dim", "padding_idx")
"""What layers of PyTorch tell of themselves, and those in their place do too."""

Inputs = Mapping[str, Any]
"""What a model is called with: tensors, or tuples of them, by the names of its arguments."""


@dataclass(frozen=True, eq=False)
class Captured:
    """A program, and the names and shapes of what goes in and comes out."""

    program: torch.export.ExportedProgram
    reference: nn.Module
    """The model itself, with flat inputs and outputs."""
    inputs: dict[str, Tensor]
    """The example."""
    expected: dict[str, Tensor]
    """What the model gives for the example as the user wrote it."""
    shapes: dict[str, list[int | str]]
    """The sizes of each input: a number where it is fixed, otherwise a letter that stands for any size."""
    ranges: dict[str, tuple[int, int | None]]
    """The smallest and the largest size that each letter may stand for."""

    @property
    def outputs(self) -> list[str]:
        """The names of the outputs."""
        return list(self.expected)


class FlatModel(nn.Module):
    """A model that takes named tensors and gives a tuple of tensors. An attention mask has the shape of its words."""

    def __init__(self, model: nn.Module, example: Inputs) -> None:
        super().__init__()
        self.model = model
        self.lengths = {name: len(value) for name, value in example.items() if not isinstance(value, Tensor)}
        shapes = {name: value.shape for name, value in example.items() if isinstance(value, Tensor)}
        texts = {name: name.replace("attention_mask", "input_ids") for name in shapes if "attention_mask" in name}
        self.texts = {name: words for name, words in texts.items() if shapes[name] == shapes.get(words)}

    def forward(self, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        for mask, words in self.texts.items():
            for one, other in zip(inputs[mask].shape, inputs[words].shape, strict=True):
                # a graph that could repeat a mask for other words would leave its sizes open
                torch._check(one == other)  # type: ignore[no-untyped-call]
        given: dict[str, Any] = dict(inputs)
        for name, length in self.lengths.items():
            given[name] = tuple(given.pop(f"{name}_{i}") for i in range(length))
        return tuple(named_outputs(self.model, self.model(**given)).values())


def flatten(inputs: Inputs) -> dict[str, Tensor]:
    """The inputs by name, with every part of a tuple under a name of its own."""
    for name, value in inputs.items():
        parts = value if isinstance(value, tuple | list) and value else (value,)
        if not all(isinstance(part, Tensor) for part in parts):
            raise InvalidTypeError(
                f"`example_inputs` must hold tensors, or tuples of them, by name, but {name!r} is "
                f"{type(value).__name__} instead. Example: {{'input_ids': tokens}}."
            )
    return _flat(inputs, "Inputs")


def named_outputs(model: nn.Module, outputs: Any) -> dict[str, Tensor]:
    """The outputs of a model by name, with every part of a tuple under a name of its own."""
    if isinstance(outputs, Tensor):
        return {"output": outputs}
    if not isinstance(outputs, Mapping):
        names = getattr(model, "output_names", [f"output_{i}" for i in range(len(outputs))])
        outputs = dict(zip(names, outputs, strict=True))
    return _flat(outputs, "Outputs")


def _flat(values: Mapping[str, Any], kind: str) -> dict[str, Tensor]:
    """The tensors among some values, by flat names; two of one name are refused."""
    found: dict[str, Tensor] = {}
    for name, value in values.items():
        parts = (
            {f"{name}_{i}": part for i, part in enumerate(value)} if isinstance(value, tuple | list) else {name: value}
        )
        for flat_name, part in parts.items():
            if flat_name in found:
                raise CheckpointError(
                    f"{kind} must differ in their flat names, but two are called {flat_name}: a part of a tuple, and "
                    "another. Rename one of them."
                )
            if isinstance(part, Tensor):
                found[flat_name] = part
    return found


def capture(model: nn.Module, example_inputs: Inputs, *, loops: bool = False) -> Captured:
    """Capture a model for every size of its inputs that the model itself leaves open.

    A size of 1 in the example counts as fixed, so give a batch and a length of 2 or more. With `loops`, a recurrence
    may be a loop over any number of steps; otherwise it is unrolled.
    """
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(f"`model` must be a torch.nn.Module, but is a {type(model).__name__} instead.")
    if not isinstance(example_inputs, Mapping) or not example_inputs:
        raise InvalidTypeError(
            f"`example_inputs` must be a dictionary of inputs by name, but is {type(example_inputs).__name__} instead. "
            "Example: {'input_ids': tokens}."
        )
    inputs = flatten(example_inputs)
    flat = FlatModel(exportable(model, loops=loops), example_inputs)
    reference = FlatModel(model, example_inputs)
    # a graph captured with a size of 1 may hold for no other, where engines repeat what has that size
    kinds = torch.export.Dim
    shapes = {name: [kinds.STATIC if n == 1 else kinds.AUTO for n in tensor.shape] for name, tensor in inputs.items()}
    with quiet(), torch.no_grad(), evaluating(model):
        expected = named_outputs(model, model(**example_inputs))
        rule = "The model must be one that `torch.export` can capture, but it says"
        with one_line_errors(rule), _sizes_of_one(), ZeroForMaskedQueries():
            program = torch.export.export(flat, (inputs,), dynamic_shapes=(shapes,), strict=False)
    return Captured(program, reference, inputs, expected, *_open_sizes(program, inputs))


def _open_sizes(
    program: torch.export.ExportedProgram, inputs: dict[str, Tensor]
) -> tuple[dict[str, list[int | str]], dict[str, tuple[int, int | None]]]:
    """The sizes of each input, with a letter for each that is open, and the range of each letter."""
    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    letters: dict[str, str] = {}
    shapes: dict[str, list[int | str]] = {}
    for name, placeholder in zip(inputs, program.graph_signature.user_inputs, strict=True):
        # a size that the model fixes is a number by now, or a symbol that says one
        sizes = [str(size) for size in values[str(placeholder)].shape]
        shapes[name] = [int(s) if s.isdigit() else letters.setdefault(s, f"n{len(letters)}") for s in sizes]
    ranges: dict[str, tuple[int, int | None]] = dict.fromkeys(letters.values(), (1, None))
    for symbol, bounds in program.range_constraints.items():
        if str(symbol) in letters:
            upper = str(bounds.upper)
            ranges[letters[str(symbol)]] = max(int(bounds.lower), 1), int(upper) if upper.isdigit() else None
    return shapes, ranges


@contextlib.contextmanager
def _sizes_of_one() -> Iterator[None]:
    """Let a program that is captured with a batch of 2 accept a batch of 1 where it can."""
    from torch.fx.experimental import _config

    known = hasattr(_config, "backed_size_oblivious")
    with _config.patch(backed_size_oblivious=True) if known else contextlib.nullcontext():  # type: ignore[attr-defined]
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide the warnings, logs and prints of exporters."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def one_line_errors(rule: str, *, keep: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn any error of an engine, except those to `keep`, into `rule` and the engine's own first line."""
    try:
        yield
    except keep:
        raise
    except Exception as error:
        raise CheckpointError(f"{rule}: {first_line(error)}") from error


class ZeroForMaskedQueries(TorchFunctionMode):
    """Captures torch's attention with an explicit zero for queries whose keys are all masked (left padding).

    Torch gives zeros for such a query. Engines give the mean of all values, or NaN, which the next layer spreads.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is not F.scaled_dot_product_attention:
            return found
        mask = args[3] if len(args) > 3 else (kwargs or {}).get("attn_mask")
        if mask is None:
            return found
        visible = mask if mask.dtype is torch.bool else mask > -math.inf
        return torch.where(visible.any(-1, keepdim=True), found, 0.0)


def exportable(model: nn.Module, *, loops: bool = False) -> nn.Module:
    """A copy of `model` in evaluation mode that shares its weights, with layers replaced that engines cannot run."""
    refuse_gated(model, "An exported model")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type != "cpu" or (tensor.is_floating_point() and tensor.dtype != torch.float32):
            raise CheckpointError(
                f"An exported model must be float32 on the CPU, but {name} is {tensor.dtype} on {tensor.device}. "
                "Call `model.float().cpu()` first."
            )
    memo: dict[int, object] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    made = copied(model, memo).eval()
    for module in list(made.modules()):
        replacement = _replacement(module, loops=loops)
        if replacement is not None:
            sizes = {name: getattr(module, name) for name in _SIZES if hasattr(module, name)}
            become(module, replacement.eval())
            vars(module).update(sizes)
        if hasattr(getattr(module, "config", None), "use_cache"):
            # a cache that one call leaves for the next is not a tensor, so no graph can return it
            module.config.use_cache = False  # type: ignore[union-attr]
    return made.eval()


def _replacement(module: nn.Module, *, loops: bool) -> nn.Module | None:
    """The module that replaces one which engines cannot run, or run slowly; None to keep it."""
    if isinstance(module, SelectedLinear):
        return _without_inputs(module.columns, module.bias) or IndexedLinear(module)
    if isinstance(module, LowRankHead):
        other = PivotHead(module) if isinstance(module.projection, PivotLinear) else None
        return _without_inputs(module.embedding.weight, module.bias) or other
    if isinstance(module, PivotLinear):
        return OrderedPivots(module)
    if isinstance(module, nn.Sequential) and len(module) == 2 and isinstance(module[1], nn.Linear | PivotLinear):
        words = isinstance(module[0], nn.Embedding)
        return _without_inputs(module[1].weight, module[1].bias, for_words=words)
    if callable(own := getattr(module, "for_export", None)):
        made: nn.Module = own(loops=loops)
        return made
    return None


def _without_inputs(weight_OK: Tensor, bias: Tensor | None, *, for_words: bool = False) -> nn.Module | None:
    """The replacement of a layer of rank 0, because engines refuse products over an empty dimension."""
    if weight_OK.shape[1]:
        return None
    value = weight_OK.new_zeros(weight_OK.shape[0]) if bias is None else bias.detach()
    return Constant(value, for_words=for_words)


class Constant(nn.Module):
    """A layer that gives the same vector for every input."""

    value_O: Tensor

    def __init__(self, value_O: Tensor, *, for_words: bool) -> None:
        super().__init__()
        self.for_words = for_words
        self.register_buffer("value_O", value_O)

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape if self.for_words else x.shape[:-1]
        return self.value_O.expand(*shape, len(self.value_O))


class IndexedLinear(nn.Module):
    """`SelectedLinear` with the indices of its inputs instead of a mask."""

    index_K: Tensor

    def __init__(self, layer: SelectedLinear) -> None:
        super().__init__()
        self.weight, self.bias = layer.columns, layer.bias
        self.register_buffer("index_K", layer.kept.nonzero().flatten())

    def forward(self, x_BI: Tensor) -> Tensor:
        return F.linear(x_BI.index_select(-1, self.index_K), self.weight, self.bias)


class OrderedPivots(nn.Module):
    """`PivotLinear` computed the same way for any number of rows, so that the graph does not depend on it."""

    places_O: Tensor

    def __init__(self, layer: PivotLinear) -> None:
        super().__init__()
        self.coefficients, self.bias = layer.coefficients, layer.bias
        self.register_buffer("places_O", layer.places.long())

    def forward(self, x_BK: Tensor) -> Tensor:
        # engines refuse products without outputs
        y_BO = torch.cat([x_BK, F.linear(x_BK, self.coefficients)], -1) if len(self.coefficients) else x_BK
        y_BO = y_BO.index_select(-1, self.places_O)
        return y_BO if self.bias is None else y_BO + self.bias


class PivotHead(nn.Module):
    """`LowRankHead` on a `PivotLinear` without multiplying out its matrix: h W = h_chosen + h_others C."""

    order_D: Tensor
    """The indices of the chosen inputs, then those of the others."""

    def __init__(self, head: LowRankHead) -> None:
        super().__init__()
        assert isinstance(head.projection, PivotLinear)
        self.coefficients, self.bias = head.projection.coefficients, head.bias
        self.embedding = head.embedding
        self.register_buffer("order_D", head.projection.places.argsort())

    def forward(self, h_BD: Tensor) -> Tensor:
        rest, rank = self.coefficients.shape
        h_BK, others = torch.split(h_BD.index_select(-1, self.order_D), [rank, rest], -1)
        h_BK = h_BK + others @ self.coefficients if rest else h_BK
        return F.linear(h_BK, self.embedding.weight, self.bias)
