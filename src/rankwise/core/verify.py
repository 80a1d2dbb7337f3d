"""A check that pruned layers do in a model what stock layers of the same weights would do.

Layers answer for themselves, but code of a model may ask for their exact type, or call parts of them. So the model is
run on a batch twice: as it is, and with stock layers of the same weights in the place of gated and low-rank ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from rankwise.core.layers import GatedEmbedding, GatedLayer
from rankwise.core.plan import listed
from rankwise.errors import RankwiseError
from rankwise.experts import same_routes
from rankwise.modules import LowRankEmbedding, LowRankHead, LowRankLinear, SelectedLinear, embedding, has_own_forward
from rankwise.swap import swapped

TOLERANCE = {4: 1e-3, 8: 1e-8}
"""How far outputs may differ by rounding, as a share of the largest of them, by the bytes of a number."""
HALF = 0.1
"""The same in half precision."""
FORMS = (GatedLayer, LowRankLinear, LowRankEmbedding, LowRankHead, SelectedLinear)


class Batch:
    """What a model is called with: given by the user, or noted at the model's first call, by a hook that this is."""

    def __init__(self, given: Any = None) -> None:
        self.inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        """Positional and keyword arguments; None while nothing is known."""
        self._handle: RemovableHandle | None = None
        if given is not None:
            self.take(given)

    def take(self, given: Any) -> None:
        """A tensor, a tuple of positional arguments or a mapping of keyword arguments."""
        if isinstance(given, Mapping):
            self.inputs = (), dict(given)
        else:
            self.inputs = tuple(given) if isinstance(given, tuple | list) else (given,), {}

    def first_of(self, batches: Iterable[Any]) -> Iterator[Any]:
        """`batches`, of which the first is taken if nothing is known yet."""
        for batch in batches:
            if self.inputs is None:
                self.take(batch)
            yield batch

    def note(self, model: nn.Module) -> None:
        """Note what `model` is called with next, if nothing is known yet."""
        if self.inputs is None:
            self._handle = model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling() and self._handle is not None:
            # without what a recurrent state was computed from
            self.inputs = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
            self.stop()

    def stop(self) -> None:
        """Take the hook away again."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __getstate__(self) -> dict[str, Any]:
        # copied or saved with a model, the hook does nothing
        return {"inputs": self.inputs, "_handle": None}


def verify_layers(model: nn.Module, batch: Batch) -> None:
    """Refuse a model whose code does with its gated or low-rank layers what it would not do with stock layers."""
    is_captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if batch.inputs is None or is_captured:
        return
    layers: dict[str, nn.Module] = {}
    inside = None
    for name, module in model.named_modules():
        # the parts of such a layer come right after it, and are tried with it
        if isinstance(module, FORMS) and (inside is None or not name.startswith(inside)):
            layers[name] = module
            inside = f"{name}." if name else ""
    if not layers:
        return
    # Accelerate puts mixed precision into a forward of the module's own
    devices = {parameter.device.type for parameter in model.parameters()} - {"meta"}
    is_mixed = any(map(torch.is_autocast_enabled, devices)) or any("forward" in vars(each) for each in model.modules())
    with _undisturbed(model), same_routes(model) as start:
        start()
        found = _outputs(model, *batch.inputs)
        start()
        with swapped([(layer, _stock_layer(layer)) for layer in layers.values()]):
            expected = _outputs(model, *batch.inputs)
        # a model that cannot be called like this says nothing
        if isinstance(expected, Exception) or _are_close(found, expected, is_mixed):
            return
        wrong = []
        for name, layer in layers.items():
            start()
            with swapped([(layer, _stock_layer(layer))]):
                if not _are_close(found, _outputs(model, *batch.inputs), is_mixed):
                    wrong.append(name)
    raise RankwiseError(
        f"The model must compute with these layers what it computes with stock layers of the same weights, but does "
        f"not: {listed(wrong or list(layers))}. Its code may ask for their type, or take them apart. Build it "
        "again and leave them out: `plan=rankwise.find_plan(model, exclude=[...])`."
    ) from (found if isinstance(found, Exception) else None)


def _stock_layer(layer: nn.Module) -> nn.Module:
    """A stock layer of the same weight, which is multiplied out when it is used."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    bias = getattr(layer, "bias", None)
    table = layer[0] if isinstance(layer, LowRankEmbedding) else getattr(layer, "scaling", None)
    if isinstance(layer, GatedEmbedding | LowRankEmbedding):
        like = table if isinstance(table, nn.Embedding) and has_own_forward(table) else None
        rows = nn.Parameter(torch.empty(0, 1, dtype=weight.dtype, device=weight.device), requires_grad=False)
        made: nn.Module = embedding(rows, None, like)
        made.padding_idx, made.num_embeddings = layer.padding_idx, layer.num_embeddings  # type: ignore[assignment]
        made.embedding_dim = layer.embedding_dim  # type: ignore[assignment]
    else:
        with torch.device("meta"):
            made = nn.Linear(1, 1, bias=False)
        made.bias = bias  # type: ignore[assignment]
        made.in_features, made.out_features = layer.in_features, layer.out_features  # type: ignore[assignment]
    del made._parameters["weight"]
    vars(made)["weight"] = weight
    return made


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards modes and all that modules keep are as before."""
    modes = [(module, module.training) for module in model.modules()]
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        model.eval()
        # for padding, torch's fast path gives zeros, and its other path does not
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, training in modes:
            module.training = training


def _outputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor] | Exception:
    """What the model gives for its inputs; what it keeps and the state of random numbers are put back."""
    kept = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    buffers = {id(b): (b, b.detach().clone()) for _, _, own in kept for b in own.values() if b is not None}
    devices = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    try:
        with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            return [tensor.clone() for tensor in _tensors(model(*args, **kwargs))]
    # the code of a stranger may raise anything
    except Exception as error:
        return error
    finally:
        for buffer, value in buffers.values():
            if not buffer.is_meta and not torch.equal(buffer, value):
                buffer.copy_(value)
        for module, state, own in kept:
            module.__dict__ = state
            module.__dict__["_buffers"] = own


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(part)


def _are_close(found: Sequence[Tensor] | Exception, expected: Sequence[Tensor] | Exception, is_mixed: bool) -> bool:
    if isinstance(found, Exception) or isinstance(expected, Exception):
        return isinstance(found, Exception) and isinstance(expected, Exception)
    if len(found) != len(expected):
        return False
    for one, other in zip(found, expected, strict=True):
        if one.shape != other.shape:
            return False
        share = HALF if is_mixed else TOLERANCE.get(one.element_size(), HALF)
        one, other = one.double(), other.double()
        known = one.isfinite() & other.isfinite()
        if known.any() and (one - other)[known].abs().max() > share * other[known].abs().max():
            return False
    return True
