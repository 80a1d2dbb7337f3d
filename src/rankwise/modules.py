"""The plain modules a compact model may hold beside PyTorch's own.

They know nothing of gates: each is an ordinary layer for which `torch.nn` has no name.

Shapes: B = any batch dimensions, I = inputs, O = outputs, K = kept, N = words, D = width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankwise.errors import InvalidValueError
from rankwise.lazy import lazy_weight
from rankwise.swap import own_class

Layer = TypeVar("Layer", nn.Embedding, "nn.Linear | PivotLinear")


def select(x_BI: Tensor, index_K: Tensor) -> Tensor:
    """x[..., index]: torch is many times faster at it with two dimensions."""
    if x_BI.dim() == 1:
        return x_BI.index_select(0, index_K)
    return x_BI.flatten(0, -2).index_select(1, index_K).view(*x_BI.shape[:-1], len(index_K))


def is_exporting() -> bool:
    """Whether a graph is made for any input; torch 2.6 says only whether one is made at all."""
    # TODO(torch>=2.7): `torch.compiler.is_exporting` is always there
    return bool(getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)())


class PivotLinear(nn.Module):
    """Linear layer whose outputs are its inputs and combinations of them: W = [1; C], with its rows in any order.

    After a layer that gives K of the O outputs of a matrix of rank K, it gives all: K (O - K) weights instead of K O.
    """

    places: Tensor
    """Where each of the O outputs stands in [inputs; combinations]: an order of 0 to O - 1."""

    def __init__(self, coefficients: nn.Parameter, places_O: Tensor, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        assert sum(coefficients.shape) == len(places_O)
        self.coefficients = coefficients
        self.bias = bias
        self.register_buffer("places", places_O)

    @property
    def in_features(self) -> int:
        return self.coefficients.shape[1]

    @property
    def out_features(self) -> int:
        return self.places.shape[0]

    @property
    def weight(self) -> Tensor:
        """The matrix multiplied out, O x K."""
        one = torch.eye(self.in_features, dtype=self.coefficients.dtype, device=self.coefficients.device)
        return torch.cat([one, self.coefficients]).index_select(0, self.places)

    def forward(self, x_BK: Tensor) -> Tensor:
        # to put a matrix in order is less than to put the outputs in order where they are more; an exported graph takes
        # any number of them
        if not is_exporting() and x_BK.shape[:-1].numel() > self.in_features:
            return F.linear(x_BK, self.weight, self.bias)
        others = F.linear(x_BK, self.coefficients)
        y_BO = select(torch.cat([x_BK.to(others.dtype), others], -1), self.places)
        return y_BO if self.bias is None else y_BO + self.bias.to(y_BO.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class LowRankHead(nn.Module):
    """Output layer tied to a low-rank embedding: logits = (h projection) embedding^T + bias.

    `embedding` (N x K) and `projection` (K -> D) have the very weights of the input side, so that they
    are stored and counted once. They are modules of its own, because torch exchanges shared weights for others and back
    (`torch.func.functional_call`), but not those of shared modules.
    """

    def __init__(
        self, embedding: nn.Embedding, projection: nn.Linear | PivotLinear, bias: nn.Parameter | None = None
    ) -> None:
        super().__init__()
        self.embedding = around(embedding)
        self.projection = around(projection)
        self.bias = bias

    @property
    def in_features(self) -> int:
        return self.projection.out_features

    @property
    def out_features(self) -> int:
        return self.embedding.num_embeddings

    @property
    def weight(self) -> Tensor:
        """The matrix multiplied out, N x D."""
        words = self.embedding.weight
        shape = (self.out_features, self.in_features)
        return lazy_weight(lambda: words @ self.projection.weight.t(), shape, words)

    def forward(self, h_BD: Tensor) -> Tensor:
        h_BK = F.linear(h_BD, self.projection.weight.t())
        return F.linear(h_BK, self.embedding.weight, self.bias)

    def extra_repr(self) -> str:
        return f"bias={self.bias is not None}"


class SelectedLinear(nn.Module):
    """Linear layer that reads only some of its inputs: y = W x[kept] + bias."""

    kept: Tensor
    """Which of the I inputs are read, as a mask: one byte an input, whatever their number."""

    def __init__(self, weight_OK: nn.Parameter, kept_I: Tensor, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        assert weight_OK.shape[1] == int(kept_I.sum())
        # by its name in saved models; as an attribute, `weight` is the whole matrix
        self._parameters["weight"] = weight_OK
        self.bias = bias
        self.register_buffer("kept", kept_I)

    @property
    def in_features(self) -> int:
        return self.kept.numel()

    @property
    def out_features(self) -> int:
        return self.columns.shape[0]

    @property
    def columns(self) -> nn.Parameter:
        """What is stored: the columns of the inputs that are read, O x K."""
        stored = self._parameters["weight"]
        assert stored is not None
        return stored

    @property
    def weight(self) -> Tensor:
        """The matrix with zeros for inputs that are not read, O x I."""
        # a shard: `fully_shard` asks for what is stored by the name under which it is stored
        if hasattr(self.columns, "full_tensor"):
            return self.columns
        shape = (self.out_features, self.in_features)

        def whole() -> Tensor:
            return self.columns.new_zeros(shape).index_copy(1, self._index(), self.columns)

        return lazy_weight(whole, shape, self.columns)

    def _index(self) -> Tensor:
        # the number is known, so this neither waits for a GPU nor makes a shape that depends on data
        return torch.nonzero_static(self.kept, size=self.columns.shape[1]).flatten()

    def forward(self, x_BI: Tensor) -> Tensor:
        return F.linear(select(x_BI, self._index()), self.columns, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, kept={self.columns.shape[1]}, out_features={self.out_features}"


def linear(weight_OI: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    """An `nn.Linear` around given parameters, without drawing random ones first."""
    out_features, in_features = weight_OI.shape
    with torch.device("meta"):
        module = nn.Linear(max(in_features, 1), max(out_features, 1), bias=bias is not None)
    module.in_features, module.out_features = in_features, out_features
    module.weight = weight_OI
    module.bias = bias  # type: ignore[assignment]  # the stub forgets that bias may be None
    return module


def embedding(weight_ND: nn.Parameter, padding_idx: int | None, like: nn.Embedding | None = None) -> nn.Embedding:
    """An `nn.Embedding` around a given parameter; where `like` has a forward of its own, of its class and settings."""
    num_words, width = weight_ND.shape
    module = nn.Embedding(num_words, width, padding_idx, _weight=weight_ND.detach())
    module.weight = weight_ND
    if like is not None and has_own_forward(like):
        module.__class__ = type(like)
        vars(module).update({name: value for name, value in vars(like).items() if name not in vars(module)})
        module._buffers.update({name: buffer for name, buffer in like._buffers.items() if name != "weight"})
        module._non_persistent_buffers_set |= like._non_persistent_buffers_set - {"weight"}
    return module


def has_own_forward(table: nn.Embedding) -> bool:
    """Whether a table of words does more, or other things, than look up rows."""
    return type(table).forward is not nn.Embedding.forward


def scale_of(table: nn.Embedding) -> float | None:
    """The number by which a table of words multiplies the rows that it looks up; None where it does anything else.

    It is tried out on a small table of the same class: such a table may hold one factor of a low-rank pair, since the
    product with the other factor is scaled just as well (BART, Gemma). A scale that lies on the meta device has no
    value yet, so another number stands for it: whether the table scales can be told all the same.
    """
    if not has_own_forward(table):
        return 1.0
    buffers = {name: buffer for name, buffer in table._buffers.items() if buffer is not None}
    device = next(iter(buffers.values()), table.weight).device
    device = torch.device("cpu") if device.type == "meta" else device
    # rows of very different sizes, words in no order and more than once: no other function gives the same
    rows = torch.tensor([[10.0**k, -(2.0**k), 0.7 + k] for k in range(-2, 3)], device=device)
    words = torch.tensor([[3, 0, 4, 1], [1, 2, 0, 3]], device=device)
    padding_idx = None if table.padding_idx is None else 1
    probe = embedding(nn.Parameter(rows, requires_grad=False), padding_idx, table)
    known = {name: torch.full_like(each, 2, device=device) for name, each in buffers.items() if each.is_meta}
    probe._buffers.update(known)
    # a forward may draw random numbers, as dropout does
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            found = [probe.train(training).forward(words) for training in (True, False)]
        # the code of a stranger may raise anything
        except Exception:
            return None
        try:
            probe.forward(words.float())
        except Exception:
            scale = float(found[0].flatten()[0] / rows[3, 0]) if isinstance(found[0], Tensor) else 0.0
            alike = scale and all(y.shape == (2, 4, 3) and torch.allclose(y, scale * rows[words]) for y in found)
            return scale if alike and math.isfinite(scale) else None
        # a table that multiplies by its rows, too (Ovis2)
        return None


def scaling_of(table: nn.Embedding) -> nn.Embedding | None:
    """The scaling of a table alone: a table of the one number 1, which is no parameter; None for a plain table."""
    if not has_own_forward(table):
        return None
    made = embedding(nn.Parameter(table.weight.new_ones(1, 1), requires_grad=False), None, table)
    one = made._parameters.pop("weight")
    made.register_buffer("weight", one.detach() if one is not None else None, persistent=False)
    return made


def around(layer: Layer) -> Layer:
    """A layer of its own around the parameters of another."""
    made: nn.Module
    match layer:
        case PivotLinear():
            made = PivotLinear(layer.coefficients, layer.places.clone(), layer.bias)
        case nn.Embedding():
            made = embedding(layer.weight, layer.padding_idx)  # type: ignore[arg-type]
        case _:
            made = linear(layer.weight, layer.bias)  # type: ignore[arg-type]
    return made  # type: ignore[return-value]


class LowRankLinear(nn.Sequential):
    """Two linear layers, the first without a bias, in the place of one: y = P (Q x) + bias.

    A plan takes it for one matrix of low rank, and an `nn.Sequential` of two layers for two matrices.
    """

    def __init__(self, first: nn.Linear, second: nn.Linear | PivotLinear) -> None:
        if first.out_features != second.in_features or first.bias is not None:
            raise InvalidValueError(
                "The first layer of a LowRankLinear must have no bias and as many outputs as the second has inputs, "
                f"but is {first} before {second}. Pass bias=False, and layers that fit."
            )
        super().__init__(first, second)

    @property
    def factors(self) -> tuple[nn.Linear, nn.Linear | PivotLinear]:
        first, second = self
        return first, second  # type: ignore[return-value]

    @property
    def in_features(self) -> int:
        return self.factors[0].in_features

    @property
    def out_features(self) -> int:
        return self.factors[1].out_features

    @property
    def bias(self) -> nn.Parameter | None:
        return self.factors[1].bias

    @property
    def weight(self) -> Tensor:
        """The matrix multiplied out, O x I."""
        shape, (first, second) = (self.out_features, self.in_features), self.factors
        return lazy_weight(lambda: second.weight @ first.weight, shape, first.weight)


class LowRankEmbedding(nn.Sequential):
    """A table of narrow words and a linear layer without a bias that widens them, in the place of one table."""

    def __init__(self, words: nn.Embedding, projection: nn.Linear | PivotLinear) -> None:
        if words.embedding_dim != projection.in_features or projection.bias is not None:
            raise InvalidValueError(
                "The second layer of a LowRankEmbedding must have no bias and as many inputs as a word is wide, but "
                f"is {projection} after {words}. Pass bias=False, and layers that fit."
            )
        super().__init__(words, projection)

    @property
    def factors(self) -> tuple[nn.Embedding, nn.Linear | PivotLinear]:
        words, projection = self
        return words, projection  # type: ignore[return-value]

    @property
    def num_embeddings(self) -> int:
        return self.factors[0].num_embeddings

    @property
    def embedding_dim(self) -> int:
        return self.factors[1].out_features

    @property
    def padding_idx(self) -> int | None:
        return self.factors[0].padding_idx

    @property
    def weight(self) -> Tensor:
        """The matrix multiplied out, N x D."""
        shape, (words, projection) = (self.num_embeddings, self.embedding_dim), self.factors
        return lazy_weight(lambda: words.weight @ projection.weight.t(), shape, words.weight)


def joined(first: nn.Linear | nn.Embedding, second: nn.Linear | PivotLinear) -> LowRankLinear | LowRankEmbedding:
    """Two layers in the place of one."""
    return LowRankEmbedding(first, second) if isinstance(first, nn.Embedding) else LowRankLinear(first, second)


def runs_in_order(module: nn.Module) -> bool:
    """Whether a module does nothing but call its children one after the other."""
    return own_class(module) in (nn.Sequential, LowRankLinear, LowRankEmbedding)


class Pair(NamedTuple):
    """A matrix W = P diag(z) Q without a bias, of which the components named by `active` take part."""

    q_RI: Tensor
    p_OR: Tensor
    z_R: Tensor | None = None
    """None: one everywhere."""
    active: Tensor | None = None
    """None: all."""


def pair_of(module: nn.Module) -> Pair | None:
    """The pair that `module` multiplies by, for a kernel that does it in its place; None where it must be called.

    Any module may offer one with a method `pair`, and either half of a sequence its own matrix with a method `whole`.
    """
    if is_observed(module) or (isinstance(module, nn.Sequential) and len(module) != 2):
        return None
    if isinstance(module, nn.Sequential):
        q_RI, p_OR = map(_whole, module)
        return None if q_RI is None or p_OR is None else Pair(q_RI, p_OR)
    offered: Pair | None = getattr(module, "pair", lambda: None)()
    return offered


def _whole(module: nn.Module) -> Tensor | None:
    """The one matrix that `module` multiplies by, without a bias."""
    if is_observed(module):
        return None
    offer: Callable[[], Tensor | None] | None = getattr(module, "whole", None)
    if offer is not None:
        return offer()
    return module.weight if isinstance(module, nn.Linear) and module.bias is None else None


def is_observed(module: nn.Module) -> bool:
    """Whether someone waits for `module` to be called."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
