"""The structure of a compact model: what each of its layers is, in words that JSON can hold.

It is read from the model alone, which bears no trace of pruning. A layer has a role in the model (its inputs, outputs
and bias), which pruning never changes, and a form (one matrix, two factors, selected inputs), which it may.
`rankwise.json` and the entry `quantization_config` in the `config.json` of transformers hold it in the same words.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from rankwise.core.layers import GatedLayer
from rankwise.deploy.fuse import check_not_fused
from rankwise.errors import CheckpointError, shortened
from rankwise.files import FILES, check_seal, reason, verifies
from rankwise.modules import LowRankHead, PivotLinear, SelectedLinear, embedding, joined, linear, runs_in_order

VERSION = 2
"""The version of both formats; earlier ones had no checksums."""
ENTRY = "The `quantization_config` in config.json"

Find = Callable[[str], nn.Module]
"""The module of that name in the model that is being made."""


@dataclass(frozen=True, kw_only=True)
class Layer(ABC):
    """One layer of a compact model. Its fields are what is written of it."""

    kind: ClassVar[str]
    masked: ClassVar[str | None] = None
    """The field that is the length of a mask of inputs, or of an order of outputs, stored with the weights."""

    @property
    @abstractmethod
    def role(self) -> str:
        """What the layer does for the model around it, whatever its form."""

    @abstractmethod
    def build(self, like: Tensor, find: Find) -> nn.Module:
        """A layer of this form whose parameters wait to be filled: they have the device and the mode of `like`."""

    def __str__(self) -> str:
        return f"{self.kind} ({', '.join(f'{name} {value}' for name, value in dataclasses.asdict(self).items())})"


@dataclass(frozen=True, kw_only=True)
class Linear(Layer):
    kind = "linear"
    inputs: int
    outputs: int
    bias: bool

    @property
    def role(self) -> str:
        return f"linear {self.inputs} -> {self.outputs}{' with bias' if self.bias else ''}"

    def build(self, like: Tensor, find: Find) -> nn.Module:
        return _factor(like, self.outputs, self.inputs, bias=self.bias)


@dataclass(frozen=True, kw_only=True)
class LowRankLinear(Linear):
    """`rankwise.modules.LowRankLinear` of two stock layers."""

    kind = "low_rank_linear"
    pivot: ClassVar[bool] = False
    rank: int

    def build(self, like: Tensor, find: Find) -> nn.Module:
        first = linear(_waiting(like, self.rank, self.inputs), None)
        return joined(first, _factor(like, self.outputs, self.rank, bias=self.bias, pivot=self.pivot))


@dataclass(frozen=True, kw_only=True)
class PivotPair(LowRankLinear):
    """`rankwise.modules.LowRankLinear` whose second layer is a `PivotLinear`."""

    kind, pivot, masked = "pivot_linear", True, "outputs"


@dataclass(frozen=True, kw_only=True)
class Selected(Linear):
    """`rankwise.modules.SelectedLinear`."""

    kind, masked = "selected_linear", "inputs"
    kept: int

    def build(self, like: Tensor, find: Find) -> nn.Module:
        mask = torch.arange(self.inputs, dtype=torch.int32, device=None if like.is_meta else like.device) < self.kept
        bias = _waiting(like, self.outputs) if self.bias else None
        return SelectedLinear(_waiting(like, self.outputs, self.kept), mask, bias)


@dataclass(frozen=True, kw_only=True)
class Head(Linear):
    """`rankwise.modules.LowRankHead`."""

    kind = "low_rank_head"
    pivot: ClassVar[bool] = False
    rank: int
    embedding: str | None
    """Name of the embedding it is tied to; None where the head alone holds it."""
    projection: str | None

    def build(self, like: Tensor, find: Find) -> nn.Module:
        words = find(self.embedding) if self.embedding else embedding(_waiting(like, self.outputs, self.rank), None)
        projection = (
            find(self.projection) if self.projection else _factor(like, self.inputs, self.rank, pivot=self.pivot)
        )
        if not isinstance(words, nn.Embedding) or not isinstance(projection, nn.Linear | PivotLinear):
            raise CheckpointError(f"{self.embedding} and {self.projection} are {words} and {projection}")
        return LowRankHead(words, projection, _waiting(like, self.outputs) if self.bias else None)


@dataclass(frozen=True, kw_only=True)
class PivotHead(Head):
    """The same with a `rankwise.modules.PivotLinear` of its own as projection."""

    kind, pivot, masked = "pivot_head", True, "inputs"


@dataclass(frozen=True, kw_only=True)
class Embedding(Layer):
    kind = "embedding"
    words: int
    width: int
    padding_idx: int | None

    @property
    def role(self) -> str:
        return f"embedding {self.words} -> {self.width}"

    def build(self, like: Tensor, find: Find) -> nn.Module:
        return embedding(_waiting(like, self.words, self.width), self.padding_idx)


@dataclass(frozen=True, kw_only=True)
class LowRankEmbedding(Embedding):
    """`rankwise.modules.LowRankEmbedding` of two stock layers."""

    kind = "low_rank_embedding"
    pivot: ClassVar[bool] = False
    rank: int

    def build(self, like: Tensor, find: Find) -> nn.Module:
        words = embedding(_waiting(like, self.words, self.rank), self.padding_idx)
        return joined(words, _factor(like, self.width, self.rank, pivot=self.pivot))


@dataclass(frozen=True, kw_only=True)
class PivotEmbedding(LowRankEmbedding):
    """`rankwise.modules.LowRankEmbedding` whose second layer is a `PivotLinear`."""

    kind, pivot, masked = "pivot_embedding", True, "width"


_LINEAR = (Linear, LowRankLinear, PivotPair, Selected, Head, PivotHead)
KINDS: dict[str, type[Layer]] = {layer.kind: layer for layer in (*_LINEAR, Embedding, LowRankEmbedding, PivotEmbedding)}


def _waiting(like: Tensor, *shape: int) -> nn.Parameter:
    """A parameter without memory of its own, to be replaced."""
    return nn.Parameter(torch.empty((), device=like.device).expand(shape), like.requires_grad)


def _factor(
    like: Tensor, outputs: int, inputs: int, *, bias: bool = False, pivot: bool = False
) -> nn.Linear | PivotLinear:
    offset = _waiting(like, outputs) if bias else None
    if not pivot:
        return linear(_waiting(like, outputs, inputs), offset)
    places = torch.arange(outputs, dtype=torch.int32, device=None if like.is_meta else like.device)
    return PivotLinear(_waiting(like, outputs - inputs, inputs), places, offset)


class Slot(NamedTuple):
    """A place in a model where a tensor lies."""

    name: str
    module: nn.Module
    key: str
    holds: Tensor


def walk(model: nn.Module, instead: Mapping[int, nn.Module] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Every module under every name it has, parents first; `instead` names some that stand for others, by identity."""
    queue = [("", model)]
    while queue:
        name, found = queue.pop()
        module = (instead or {}).get(id(found), found)
        yield name, module
        children = [(f"{name}.{key}".lstrip("."), child) for key, child in module._modules.items() if child is not None]
        queue.extend(reversed(children))


def slots(
    model: nn.Module, instead: Mapping[int, nn.Module] | None = None, *, computed: bool = False
) -> Iterator[Slot]:
    """Parameters and persistent buffers; with `computed`, the buffers that a model computes when it is built."""
    for prefix, module in walk(model, instead):
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and (key in module._non_persistent_buffers_set) == computed:
                yield Slot(f"{prefix}.{key}".lstrip("."), module, key, tensor)


def refuse_gated(model: nn.Module, what: str) -> None:
    """Refuse a model that is being pruned; `what` must be compact."""
    for name, module in walk(model):
        if isinstance(module, GatedLayer):
            raise CheckpointError(
                f"{what} must be compact, but {name or 'the model'} is gated. Use what `pruner.compact()` returns."
            )


def ties_of(model: nn.Module) -> dict[str, str]:
    """For every name of a tensor but the first, that first name."""
    first: dict[int, str] = {}
    return {s.name: first[id(s.holds)] for s in slots(model) if first.setdefault(id(s.holds), s.name) != s.name}


def layers_of(model: nn.Module) -> dict[str, Layer]:
    """Every layer of `model` that pruning could have made, under every name it has."""
    check_not_fused(model)
    modules = dict(walk(model))
    layers = {name: layer for name, module in modules.items() if (layer := layer_of(module)) is not None}
    wholes = [name for name, layer in layers.items() if isinstance(layer, LowRankLinear | LowRankEmbedding | Head)]
    inside = {f"{whole}.{child}".lstrip(".") for whole in wholes for child in modules[whole]._modules}
    heads = {name: layer for name, layer in layers.items() if isinstance(layer, Head)}

    def outside(part: nn.Embedding | nn.Linear | PivotLinear) -> str | None:
        if isinstance(part, PivotLinear):
            return None
        alike = (name for name, module in modules.items() if module._parameters.get("weight") is part.weight)
        return next((name for name in alike if name.rpartition(".")[0] not in heads), None)

    for name, layer in heads.items():
        head = modules[name]
        assert isinstance(head, LowRankHead)
        layers[name] = dataclasses.replace(
            layer, embedding=outside(head.embedding), projection=outside(head.projection)
        )
    return {name: layer for name, layer in layers.items() if name not in inside}


def layer_of(module: nn.Module) -> Layer | None:
    """What a module is, if pruning could have made it."""
    if isinstance(module, LowRankHead):
        words, rank = module.embedding.weight.shape
        width, bias = module.projection.out_features, module.bias is not None
        head = PivotHead if isinstance(module.projection, PivotLinear) else Head
        return head(inputs=width, outputs=words, bias=bias, rank=rank, embedding=None, projection=None)
    if isinstance(module, SelectedLinear):
        outputs, kept = module.columns.shape
        return Selected(inputs=module.kept.numel(), outputs=outputs, bias=module.bias is not None, kept=kept)
    # a parametrized or wrapped layer holds other parameters
    if isinstance(module, nn.Linear) and set(module._parameters) == {"weight", "bias"}:
        outputs, inputs = module.weight.shape
        return Linear(inputs=inputs, outputs=outputs, bias=module.bias is not None)
    if isinstance(module, nn.Embedding) and set(module._parameters) == {"weight"}:
        words, width = module.weight.shape
        return Embedding(words=words, width=width, padding_idx=module.padding_idx)
    if runs_in_order(module) and isinstance(module, nn.Sequential) and len(module) == 2:
        return _pair_of(*module)
    return None


def _pair_of(one: nn.Module, other: nn.Module) -> Layer | None:
    first, second, pivot = layer_of(one), layer_of(other), isinstance(other, PivotLinear)
    if isinstance(other, PivotLinear):
        second = Linear(inputs=other.in_features, outputs=other.out_features, bias=other.bias is not None)
    if type(second) is not Linear:
        return None
    rank, outputs = second.inputs, second.outputs
    if type(first) is Linear and not first.bias and first.outputs == rank:
        pair = PivotPair if pivot else LowRankLinear
        return pair(inputs=first.inputs, outputs=outputs, bias=second.bias, rank=rank)
    if type(first) is Embedding and not second.bias and first.width == rank:
        table = PivotEmbedding if pivot else LowRankEmbedding
        return table(words=first.words, width=outputs, padding_idx=first.padding_idx, rank=rank)
    return None


def role_of(module: nn.Module) -> str | None:
    """What a module does for the model around it, if pruning could have changed its form."""
    layer = layer_of(module)
    if layer is None and type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        inputs, outputs = module.weight.shape  # type: ignore[misc]
        layer = Linear(inputs=inputs, outputs=outputs, bias=True)
    return None if layer is None else layer.role


def misfit(name: str, module: nn.Module, key: str, value: Tensor) -> str | None:
    """What is wrong with a saved mask of inputs or order of outputs, if anything."""
    if isinstance(module, SelectedLinear) and key == "kept":
        kept, columns = int(value.sum()), module.columns.shape[1]
        fits = kept == columns and value.dtype is torch.bool
        return None if fits else f"{name} must keep {columns} inputs, but keeps {kept}"
    if isinstance(module, PivotLinear) and key == "places":
        order = torch.arange(len(value), dtype=torch.int32, device=value.device)
        fits = value.dtype is torch.int32 and torch.equal(value.sort().values, order)
        return None if fits else f"the places of {name} must be an order of its outputs"
    return None


def to_json(layer: Layer) -> dict[str, Any]:
    """A layer as JSON holds it."""
    return {"kind": layer.kind, **dataclasses.asdict(layer)}


def from_json(entry: Any) -> Layer:
    """The layer that `to_json` wrote; refuses anything else."""
    values = dict(entry) if isinstance(entry, dict) else {}
    kind = KINDS.get(str(values.pop("kind", None)))
    if kind is None:
        raise CheckpointError(f"a layer must be one of {', '.join(KINDS)}, but is {shortened(entry, 200)}")
    types = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    if values.keys() != types.keys() or not all(_is(value, types[name]) for name, value in values.items()):
        raise CheckpointError(f"a {kind.kind} must have {', '.join(types)}, but is {shortened(entry, 200)}")
    return kind(**values)


def _is(value: object, type_name: str) -> bool:
    if value is None:
        return type_name.endswith("| None")
    if type_name.startswith("int"):
        return type(value) is int and value >= 0
    return type(value) is {"bool": bool, "str | None": str}[type_name]


@dataclass(frozen=True, kw_only=True)
class SavedLayers:
    """What `rankwise.json`, or the entry `quantization_config` of a `config.json`, says of a saved model."""

    layers: dict[str, Layer] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    """For every name of a tensor but the first, that first name."""
    files: dict[str, str] | None = None
    """Checksums of the other files; None where they are not to be compared."""
    gated: bool = False

    @classmethod
    def read(cls, entry: Mapping[str, Any], where: object = ENTRY, verify: bool = True) -> SavedLayers:
        """Read and check an entry; one of a newer version, or one that rankwise did not write, is refused."""
        version = entry.get("version")
        if type(version) is int and version > VERSION:
            raise CheckpointError(
                f"{where} must be version {VERSION} at most, but is version {version}, written by rankwise "
                f"{shortened(entry.get('rankwise'), 40)}. Upgrade rankwise."
            )
        if version != VERSION:
            raise damaged(where, f"its version is {version!r}")
        files = None
        if verify and verifies():
            with checking(where):
                check_seal(entry)
            files = entry[FILES]
        if entry.get("gated") is True:
            return cls(gated=True, files=files)
        for key in ("layers", "tied"):
            if key not in entry:
                raise damaged(where, f"it has no `{key}`")
        try:
            layers = {str(name): from_json(layer) for name, layer in entry["layers"].items()}
            tied = {str(name): str(first) for name, first in entry["tied"].items()}
        except (AttributeError, CheckpointError) as error:
            raise damaged(where, error) from None
        return cls(layers=layers, tied=tied, files=files)


def damaged(where: object, what: object, *, remedy: str = "Save the model again.") -> CheckpointError:
    """The error for a file that is not as it was saved."""
    return CheckpointError(f"{where} must be as rankwise wrote it, but is damaged: {shortened(what)}. {remedy}")


@contextmanager
def checking(where: object) -> Iterator[None]:
    """Name the file whose checksum does not fit, or that cannot be read."""
    try:
        yield
    except OSError as error:
        remedy = "Save the model again or download it again; verify=False or RANKWISE_VERIFY=0 loads it as it is."
        raise damaged(where, reason(error), remedy=remedy) from None
