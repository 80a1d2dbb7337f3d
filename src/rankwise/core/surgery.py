"""Gating in place, and back: a planned module becomes a gated one without changing its identity (`rankwise.swap`); a
compact model is a copy with plain layers in place of gated ones.  Paper: section 4.4 "Inference".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from rankwise.core.budget import count
from rankwise.core.copies import copied
from rankwise.core.layers import GatedEmbedding, GatedLayer, GatedLinear
from rankwise.core.matrices import GatedMatrix
from rankwise.core.plan import Site, bias_of, get_module, listed, pair
from rankwise.core.widths import WidthMatrix, WidthSite
from rankwise.errors import RankwiseError
from rankwise.modules import scaling_of
from rankwise.swap import become

if TYPE_CHECKING:
    from rankwise.core.controller import Controller


def install(model: nn.Module, site: Site, matrix: GatedMatrix) -> None:
    """Let every use of `site` go through `matrix`."""
    for use in site.uses:
        module = get_module(model, use)
        if use.is_embedding:
            words = module if use.kind == "embedding" else pair(module)[0]
            assert isinstance(words, nn.Embedding)
            become(module, GatedEmbedding(matrix, words.padding_idx, scaling_of(words)))
        else:
            become(module, GatedLinear(matrix, bias_of(module, use)))
    if isinstance(site, WidthSite):
        assert isinstance(matrix, WidthMatrix)
        matrix.feeders = site.feeding(model)


def gated_layers(model: nn.Module) -> list[GatedLayer]:
    """The gated layers of `model`, each once."""
    return [module for module in model.modules() if isinstance(module, GatedLayer)]


class GatedStructure:
    """What a gated model is made of: its size is counted for this structure and for no other."""

    def __init__(self, model: nn.Module) -> None:
        self.size = count(model)
        self.modules = _modules(model)

    def check_gates(self, model: nn.Module, matrices: Sequence[GatedMatrix], what: str) -> None:
        """Refuse a model that has lost gated layers, or gained some that are not over `matrices`."""
        if {layer.matrix for layer in gated_layers(model)} != set(matrices):
            raise RankwiseError(self.message(model, matrices, what))

    def check(self, model: nn.Module, matrices: Sequence[GatedMatrix], what: str) -> None:
        """Refuse a model of another size too."""
        self.check_gates(model, matrices, what)
        if count(model) != self.size:
            raise RankwiseError(self.message(model, matrices, what))

    def message(self, model: nn.Module, matrices: Sequence[GatedMatrix], what: str) -> str:
        """What became of the model since, with the names of modules."""
        now, before = _modules(model), self.modules
        replaced = {name for name in before if name in now and now[name] != before[name]}
        for name, module in model.named_modules():
            if isinstance(module, GatedLayer) and name in before and module.matrix not in matrices:
                replaced.add(name)
        changes = {"added": now.keys() - before.keys(), "removed": before.keys() - now.keys(), "replaced": replaced}
        told = [f"{count(model):,} parameters instead of {self.size:,}"] if count(model) != self.size else []
        for word, names in changes.items():
            # a part of a module that was changed as a whole goes without saying
            found = [name for name in (before | now) if name in names and not (names | replaced) & _around(name)]
            told += [f"{word}: {listed(found)}"] if found else []
        return (
            f"`{what}` needs the model as the pruner gated it, but it has changed since ({'; '.join(told)}). Make such "
            "changes before `rankwise.Pruner`, or to what `compact()` returns."
        )


def _modules(model: nn.Module) -> dict[str, tuple[str, int]]:
    """The kind and the number of own parameters of each module, by its name."""
    return {
        name: (type(module).__name__, sum(p.numel() for p in module.parameters(recurse=False)))
        for name, module in model.named_modules()
    }


def _around(name: str) -> set[str]:
    """The names of the modules that a module stands in, but that of the model."""
    parts = name.split(".")
    return {".".join(parts[:i]) for i in range(1, len(parts))}


def compact(model: nn.Module, controller: Controller, limit: int) -> nn.Module:
    """A new model of at most `limit` parameters; `model` stays as it is."""
    layers = gated_layers(model)
    plain: dict[nn.Module, nn.Module] = {}
    memo: dict[int, object] = {}
    for i, (matrix, kept) in enumerate(zip(controller.matrices, controller.kept_components(limit), strict=True)):
        export = matrix.export(kept, controller.export_values(i))
        uses = [layer for layer in layers if layer.matrix is matrix]
        # an output layer is tied to its embedding, so that one is made first
        for layer in sorted(uses, key=lambda layer: not isinstance(layer, GatedEmbedding)):
            plain[layer] = layer.plain(export, memo).train(layer.training)
        if isinstance(matrix, WidthMatrix):
            plain.update(matrix.narrow_feeders(kept))
    return copied(model, memo, plain)
