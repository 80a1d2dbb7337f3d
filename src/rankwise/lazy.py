"""Weights that are multiplied out when an operation needs them: what `layer.weight` is where a layer stores factors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from rankwise.errors import RankwiseError

_KNOWN = {
    *(getattr(Tensor, name).__get__ for name in ("dtype", "device", "shape", "ndim", "layout", "requires_grad")),
    *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size),
}
"""What a `LazyWeight` answers by itself."""
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "matmul")
_WRITES = {"__set__", "__setitem__", *(f"__i{name}__" for name in _OPERATORS)}
"""The names of methods that change a tensor, beside those that end with one underscore."""


class LazyWeight(Tensor):
    """A weight that its layer stores in another form, such as two factors: multiplied out when an operation needs it.

    Code that only asks for the dtype, the device or the shape (T5 does so at each call) costs nothing. An operation on
    it is recorded for autograd as one on the product, so gradients reach what the layer stores. torch sees that it is
    no plain tensor, and does not take the fast path of `nn.TransformerEncoderLayer`, which would not call the layer.
    """

    _compute: Callable[[], Tensor]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KNOWN:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        name = getattr(func, "__name__", "")
        is_write = name in _WRITES or (name.endswith("_") and not name.endswith("__"))
        if args and isinstance(args[0], LazyWeight):
            if is_write:
                raise RankwiseError(
                    "`layer.weight` cannot be changed where its layer stores something else, such as two factors, "
                    f"but `{name}` was called on it. Change it before the Pruner; to freeze it, call "
                    "`layer.requires_grad_(False)`; otherwise change what `layer.parameters()` gives."
                )
            if func == _DATA:
                compute = args[0]._compute
                with torch.no_grad():
                    return lazy_weight(lambda: compute().detach(), tuple(args[0].shape), args[0])
        args, kwargs = tree_map_only(LazyWeight, lambda weight: weight._compute(), (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # below autograd it is too late to multiply out
        raise RuntimeError(f"{func} must get the plain tensor of a lazy weight. Pass `layer.weight + 0`.")


def lazy_weight(compute: Callable[[], Tensor], shape: tuple[int, ...], like: Tensor) -> Tensor:
    """The tensor that `compute` gives, of the given shape and the dtype and device of `like`, computed when needed."""
    # a compiler drops a product that nobody uses
    if is_traced():
        return compute()
    made: Tensor = Tensor._make_wrapper_subclass(
        LazyWeight,
        shape,
        dtype=like.dtype,
        device=like.device,
        requires_grad=like.requires_grad and torch.is_grad_enabled(),
    )
    made._compute = compute  # type: ignore[attr-defined]
    return made


def is_traced() -> bool:
    """Whether a graph is being made of what is computed."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
