"""Gated layers: what a gated matrix is used for. Any matrix x any gate, composed.

Layers that share a matrix are tied: they share its parameters, its gate and its one entry in the books. A planned layer
becomes a gated one in place, without changing its identity (`rankwise.swap`), and a compact model is a copy with plain
layers in place of gated ones.  Paper: section 4.4 "Inference".
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from rankwise.core.exports import Export
from rankwise.core.loading import check_layer
from rankwise.core.matrices import GatedMatrix
from rankwise.core.plan import Site, bias_of, get_module, words_of
from rankwise.core.sharding import gathered, host_copies, is_first_rank, is_sharded, mesh_of, reshard, to_meta
from rankwise.core.widths import WidthMatrix, WidthSite
from rankwise.errors import RankwiseError
from rankwise.lazy import is_traced, lazy_weight
from rankwise.modules import Pair, scaling_of
from rankwise.swap import become, copied

if TYPE_CHECKING:
    from rankwise.core.controller import Controller


_WEIGHTS: WeakValueDictionary[tuple[object, ...], Tensor] = WeakValueDictionary()
"""Weights that someone holds: one object for tied layers, because Accelerate asks whether both have the same weight."""


class GatedLayer(nn.Module, ABC):
    """A layer over a gated matrix. It is also what it replaces, an `nn.Linear` or an `nn.Embedding`, to code that asks.

    Why not so in compact models: README.md.
    """

    matrix: GatedMatrix

    @property
    def weight(self) -> Tensor:
        """The matrix as the gate stands, for code that reads `layer.weight`."""
        like = next(self.matrix.parameters())
        if is_traced():
            return self.matrix.gathered_weight()
        key = (id(self.matrix), like.dtype, like.device, like.requires_grad and torch.is_grad_enabled())
        known = _WEIGHTS.get(key)
        if known is None:
            _WEIGHTS[key] = known = lazy_weight(self.matrix.gathered_weight, self.matrix.shape, like)
        return known

    @weight.setter
    def weight(self, value: Tensor) -> None:
        raise RankwiseError(
            "A gated layer stores a gated matrix in place of `weight`, which cannot be set. Set or tie weights before "
            "the Pruner, or in what `compact()` returns."
        )

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As of any module; refuses a weight, and what tensor parallelism would make of one."""
        if name == "weight":
            self.weight = param  # type: ignore[assignment]
        before = self._parameters.get(name)
        is_split = name.startswith("matrix.") or (before is not None and not is_sharded(before))
        if param is not None and is_sharded(param) and is_split:
            raise RankwiseError(
                "A gated layer cannot be split by tensor parallelism, because a component has a part in every row, but "
                f"its {name} is. Shard the model by `fully_shard`, or leave the layer out of the plan."
            )
        super().register_parameter(name, param)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        check_layer(state_dict, prefix, args[4])

    @abstractmethod
    def plain(self, export: Export, memo: dict[int, object]) -> nn.Module:
        """The layer of the compact model that takes this one's place; `memo` is that of the copy being made."""


class GatedLinear(GatedLayer, nn.Linear):
    """y = x W^T + bias."""

    def __init__(self, matrix: GatedMatrix, bias: nn.Parameter | None) -> None:
        # not as a stock layer, which would draw a weight
        nn.Module.__init__(self)
        self.matrix = matrix
        self.bias = bias  # type: ignore[assignment]  # the stub forgets that bias may be None
        self.out_features, self.in_features = matrix.shape

    def forward(self, x: Tensor) -> Tensor:
        self.matrix.check_gathered()
        return self.matrix.linear(x, self.bias)

    def pair(self) -> Pair | None:
        """See `rankwise.modules.pair_of`."""
        self.matrix.check_gathered()
        return self.matrix.pair() if self.bias is None else None

    def whole(self) -> Tensor | None:
        """See `rankwise.modules.pair_of`."""
        self.matrix.check_gathered()
        return self.matrix.whole() if self.bias is None else None

    def plain(self, export: Export, memo: dict[int, object]) -> nn.Module:
        return export.as_linear(copy.deepcopy(self.bias, memo))


class GatedEmbedding(GatedLayer, nn.Embedding):
    """Rows of W, by index, scaled as the table did that stood here."""

    def __init__(self, matrix: GatedMatrix, padding_idx: int | None, scaling: nn.Embedding | None = None) -> None:
        nn.Module.__init__(self)
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, 2.0, False, False
        self.matrix = matrix
        self.scaling = scaling
        self.padding_idx = padding_idx
        self.num_embeddings, self.embedding_dim = matrix.shape

    def forward(self, index: Tensor) -> Tensor:
        self.matrix.check_gathered()
        rows = self.matrix.rows(index, self.padding_idx)
        if self.scaling is None:
            return rows
        scale: Tensor = self.scaling(torch.zeros(1, dtype=torch.long, device=rows.device))
        return rows * scale[0].to(rows.dtype)

    def plain(self, export: Export, memo: dict[int, object]) -> nn.Module:
        return export.as_embedding(self.padding_idx, copy.deepcopy(self.scaling, memo))


def install(model: nn.Module, site: Site, matrix: GatedMatrix) -> None:
    """Let every use of `site` go through `matrix`."""
    for use in site.uses:
        module = get_module(model, use)
        if use.is_embedding:
            words = words_of(module)
            become(module, GatedEmbedding(matrix, words.padding_idx, scaling_of(words)))
        else:
            become(module, GatedLinear(matrix, bias_of(module, use)))
    if isinstance(site, WidthSite):
        assert isinstance(matrix, WidthMatrix)
        matrix.feeders = site.feeding(model)


def gated_layers(model: nn.Module) -> list[GatedLayer]:
    """The gated layers of `model`, each once."""
    return [module for module in model.modules() if isinstance(module, GatedLayer)]


def compact(model: nn.Module, controller: Controller, limit: int) -> nn.Module:
    """A new model of at most `limit` parameters; `model` stays as it is.

    A sharded model is gathered matrix by matrix: the first rank gets the new model in the memory of the host, and the
    other ranks get it on the meta device.
    """
    uses: dict[GatedMatrix, list[GatedLayer]] = {matrix: [] for matrix in controller.matrices}
    for layer in gated_layers(model):
        uses[layer.matrix].append(layer)
    plain: dict[nn.Module, nn.Module] = {}
    memo: dict[int, object] = {}
    reshard(model)
    mesh = mesh_of(model.parameters())
    is_first = mesh is None or is_first_rank(mesh)
    if mesh is not None:
        exported = {p for matrix in controller.matrices for part in matrix.exported() for p in part.parameters()}
        memo = host_copies(model, exported, first=is_first)
    for i, (matrix, kept) in enumerate(zip(controller.matrices, controller.kept_components(limit), strict=True)):
        with gathered(matrix.exported()):
            made = _plain_layers(matrix, uses[matrix], kept, controller.export_values(i), memo)
        if not is_first:
            to_meta(made.values())
        elif mesh is not None:
            # what is computed was computed where the shards are
            made = {layer: module.cpu() for layer, module in made.items()}
        plain |= made
    return copied(model, memo, plain)


def _plain_layers(
    matrix: GatedMatrix, uses: Sequence[GatedLayer], kept: Tensor, z: Tensor | None, memo: dict[int, object]
) -> dict[nn.Module, nn.Module]:
    """What takes the place of each layer over `matrix` in a compact model."""
    device = next(matrix.parameters()).device
    kept, z = kept.to(device), None if z is None else z.to(device)
    export = matrix.export(kept, z)
    plain: dict[nn.Module, nn.Module] = {}
    # an output layer is tied to its embedding, so that one is made first
    for layer in sorted(uses, key=lambda layer: not isinstance(layer, GatedEmbedding)):
        plain[layer] = layer.plain(export, memo).train(layer.training)
    return plain | matrix.narrow_feeders(kept)
