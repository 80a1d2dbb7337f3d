"""What a layer is: how it uses a weight matrix, if it does so as PyTorch's own layers do; why not, if it does not; and
whether its weights are fresh."""

from __future__ import annotations

import re

from torch import Tensor, nn
from torch.nn.utils import parametrize

from rankwise import split
from rankwise.core.plan import Site, Use, UseKind, pair
from rankwise.modules import LowRankEmbedding, LowRankHead, LowRankLinear, PivotLinear, runs_in_order, scale_of

PAIRS = (LowRankLinear, LowRankEmbedding)
WHOLES: tuple[UseKind, ...] = ("linear-pair", "embedding-pair", "low-rank-head")
"""Kinds of use whose children are part of them."""

_TASK = re.compile(r".*For(Sequence|Token|Image|Audio)Classification|.*For(QuestionAnswering|MultipleChoice)")
_MARK = "_is_hf_initialized"


def kind_of(module: nn.Module) -> UseKind | None:
    """The kind of use that a module is, or None."""
    if isinstance(module, LowRankHead):
        return "low-rank-head"
    if isinstance(module, nn.Sequential) and runs_in_order(module) and len(module) == 2:
        return _pair_kind(*module)
    if _refusal(module) is not None:
        return None
    if isinstance(module, nn.Linear):
        return "linear"
    return "embedding" if isinstance(module, nn.Embedding) else "conv1d"


def _pair_kind(first: nn.Module, second: nn.Module) -> UseKind | None:
    if (kind_of(second) != "linear" and not isinstance(second, PivotLinear)) or first is second:
        return None
    if kind_of(first) == "embedding":
        return "embedding-pair" if second.bias is None else None
    return "linear-pair" if kind_of(first) == "linear" and first.bias is None else None


def why_not(module: nn.Module) -> str | None:
    """Why a module that holds matrices of its own cannot be gated; None where it holds none."""
    if isinstance(module, nn.Linear | nn.Embedding) or any(p.dim() >= 2 for p in module.parameters(recurse=False)):
        return _refusal(module)
    return None


def _refusal(module: nn.Module) -> str | None:
    """Why a module is not used as a plain linear layer or embedding; None where it is."""
    name = type(module).__name__
    if isinstance(module, PivotLinear):
        return "the pair that it is half of is no LowRankLinear"
    if type(module) in split.SPLIT:
        return split.refusal(module) or "it shares a packed weight with another module"
    conv1d = name == "Conv1D" and hasattr(module, "nf") and getattr(module.weight, "ndim", 0) == 2
    if not isinstance(module, nn.Linear | nn.Embedding) and not conv1d:
        return f"{name} is not a linear layer or an embedding"
    if parametrize.is_parametrized(module):
        return "its weight is parametrized"
    stock = nn.Linear if isinstance(module, nn.Linear) else nn.Embedding
    plain = conv1d or type(module).forward is stock.forward
    if "forward" in module.__dict__ or not (plain or isinstance(module, nn.Embedding)):
        return f"{name} has a forward of its own"
    # a scaled table may hold its scale
    more = any(plain or buffer is None or buffer.numel() > 1 for buffer in module._buffers.values())
    if not set(module._parameters) <= {"weight", "bias"} or more or module._modules:
        return f"{name} holds more than a weight and a bias"
    if not isinstance(module._parameters.get("weight"), nn.Parameter):
        return "its weight is made from something else"
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse or module.scale_grad_by_freq):
        return "an embedding with `max_norm` or `sparse` or `scale_grad_by_freq` treats its rows in a way of its own"
    if isinstance(module, nn.Embedding) and scale_of(module) is None:
        return f"{name} has a forward of its own, which does more than scale rows"
    return None


def matrix_key(module: nn.Module, kind: UseKind) -> tuple[int, ...]:
    """The identity of the parameters that make up the matrix of a use."""
    if kind == "low-rank-head":
        assert isinstance(module, LowRankHead)
        return id(module.embedding.weight), id(_stored(module.projection))
    if kind.endswith("pair"):
        first, second = pair(module)
        return id(first.weight), id(_stored(second))
    return (id(module.weight),)


def _stored(layer: nn.Linear | PivotLinear) -> Tensor:
    return layer.coefficients if isinstance(layer, PivotLinear) else layer.weight


def site_of(module: nn.Module, uses: tuple[Use, ...]) -> Site:
    """The site of a group of uses; `module` is that of the first, which holds the parameters."""
    kind = uses[0].kind
    if kind in ("linear-pair", "embedding-pair"):
        first, second = pair(module)
        rows, pivot = second.out_features, isinstance(second, PivotLinear)
        if kind == "linear-pair":
            return Site(uses, (rows, first.weight.shape[1]), first.weight.shape[0], pivot)
        return Site(uses, (first.weight.shape[0], rows), first.weight.shape[1], pivot)
    rows, columns = module.weight.shape  # type: ignore[misc]
    return Site(uses, (columns, rows) if kind == "conv1d" else (rows, columns))


def fresh(model: nn.Module) -> dict[int, str]:
    """Modules of a pretrained model whose weights are most likely random, by identity, and why we think so.

    Nothing says which components of random weights are worth keeping. transformers marks every tensor that a checkpoint
    brought; where no mark is left (a copy, a model built from its configuration), a task head is known by the class of
    its model.
    """
    found: dict[int, str] = {}
    for part in model.modules():
        # a `PreTrainedModel` of transformers, which need not be installed
        if not hasattr(part, "base_model_prefix") or not hasattr(part, "config"):
            continue
        loaded = {id(p) for p in part.parameters() if getattr(p, _MARK, False)}
        if loaded:
            found |= dict.fromkeys(_without(part, loaded), "its weights did not come with the checkpoint")
        elif _TASK.fullmatch(type(part).__name__):
            base = getattr(part, str(part.base_model_prefix), None)
            inside = {id(p) for p in base.parameters()} if isinstance(base, nn.Module) else set()
            reason = f"a task head of {type(part).__name__} is most likely fresh; include it by name to prune it"
            found |= dict.fromkeys(_without(part, inside) if inside else [], reason)
    return found


def _without(part: nn.Module, known: set[int]) -> list[int]:
    """Modules that have parameters, none of them a known one."""
    owned = ((module, [id(p) for p in module.parameters()]) for module in part.modules())
    return [id(module) for module, parameters in owned if parameters and known.isdisjoint(parameters)]
