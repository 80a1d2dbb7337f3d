"""Modules that hold several matrices, split into linear layers that can be pruned one by one.

Those of torch become a subclass of the module they replace, and compute the same: `nn.MultiheadAttention` with its
packed weights, `nn.LSTM` and `nn.GRU`, and `nn.Conv1d` with a kernel of length 1. Mixtures of experts of transformers
become `rankwise.experts.SplitExperts`. A compact model keeps them, with linear layers inside that are of low rank where
that is smaller.

Shapes: B = batch, T = steps, S = steps of the keys, I = inputs, E = width, H = hidden units, G = gates x hidden units.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from rankwise import experts
from rankwise.lazy import is_traced, lazy_weight
from rankwise.modules import LowRankLinear, is_observed, linear
from rankwise.swap import become, own_class

STEP_COST = {"cpu": 1e6, "cuda": 1e9}
"""Multiplications that take as long as the calls of one recurrent step in Python, by device."""


LISTS = ("_flat_weights", "_flat_weight_refs")
"""Where a stock recurrent module notes its weights."""


def _settings(module: nn.Module) -> dict[str, Any]:
    """What a module holds besides parameters, buffers, children and hooks."""
    return {name: value for name, value in vars(module).items() if name not in vars(nn.Module())}


class SplitAttention(nn.MultiheadAttention):
    """Attention with one linear layer each for queries, keys and values."""

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear

    def __init__(self, module: nn.MultiheadAttention, part: Callable[[nn.Parameter, slice], nn.Parameter]) -> None:
        nn.Module.__init__(self)
        vars(self).update(_settings(module))
        # where torch asks, so that it calls this module
        self._qkv_same_embed_dim = False
        self.bias_k = self.bias_v = None
        packed, biases = module.in_proj_weight, module.in_proj_bias
        for i, name in enumerate(("q_proj", "k_proj", "v_proj")):
            rows = slice(i * self.embed_dim, (i + 1) * self.embed_dim)
            weight = getattr(module, f"{name}_weight") if packed is None else part(packed, rows)
            setattr(self, name, linear(weight, None if biases is None else part(biases, rows)))
        self.out_proj = module.out_proj

    @property
    def in_proj_weight(self) -> Tensor | None:  # type: ignore[override]
        """The weights of queries, keys and values in one matrix, where they are equally wide."""
        if not self.embed_dim == self.kdim == self.vdim:
            return None
        layers = (self.q_proj, self.k_proj, self.v_proj)
        shape = (3 * self.embed_dim, self.embed_dim)
        like = next(self.q_proj.parameters())
        return lazy_weight(lambda: torch.cat([layer.weight for layer in layers]), shape, like)

    @property
    def in_proj_bias(self) -> Tensor | None:  # type: ignore[override]
        """Their biases in one vector."""
        biases = (self.q_proj.bias, self.k_proj.bias, self.v_proj.bias)
        return None if biases[0] is None else torch.cat(biases)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As of the stock module."""
        if is_causal and attn_mask is None:
            raise RuntimeError("`is_causal` must come with `attn_mask`, but there is none. Pass the mask.")
        is_batched = query.dim() == 3
        if not is_batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        heads = (self.num_heads, self.head_dim)
        inputs = ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        q, k, v = (layer(x).unflatten(-1, heads).transpose(1, 2) for layer, x in inputs)
        mask = _added(attn_mask, key_padding_mask, q)
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            scores = (q * self.head_dim**-0.5) @ k.transpose(-1, -2)
            weights: Tensor | None = torch.softmax(scores if mask is None else scores + mask, -1)
            assert weights is not None
            weights = F.dropout(weights, dropout)
            y = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            y, weights = F.scaled_dot_product_attention(q, k, v, mask, dropout), None
        y = self.out_proj(y.transpose(1, 2).flatten(2))
        if not is_batched:
            return y.squeeze(0), None if weights is None else weights.squeeze(0)
        return y if self.batch_first else y.transpose(0, 1), weights


def _added(attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor) -> Tensor | None:
    """What is added to the scores (B, heads, T, S) for both masks; a bool mask marks what must not be seen."""
    total: Tensor | None = None
    batch, heads = q.shape[:2]
    if attn_mask is not None and attn_mask.dim() == 3:
        attn_mask = attn_mask.view(batch, heads, *attn_mask.shape[1:])
    if key_padding_mask is not None:
        key_padding_mask = key_padding_mask.view(batch, 1, 1, -1)
    for mask in (attn_mask, key_padding_mask):
        if mask is not None:
            if mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, -torch.inf)
            total = mask.to(q.dtype) if total is None else total + mask
    return total


class _SplitRecurrent(nn.RNNBase):
    """A recurrent module with a linear layer `ih_l0` for the inputs and one `hh_l0` for the state, and so on.

    By default torch's kernel is called with their weights multiplied out. The layers themselves are called step by step
    where that is fewer multiplications by more than the calls cost, and where somebody observes a layer.
    """

    def __init__(self, module: nn.RNNBase, part: Callable[[nn.Parameter, slice], nn.Parameter]) -> None:
        nn.Module.__init__(self)
        vars(self).update({name: value for name, value in _settings(module).items() if name not in LISTS})
        for place in self._places():
            bias = getattr(module, f"bias_{place}") if self.bias else None
            setattr(self, place, linear(getattr(module, f"weight_{place}"), bias))

    def _places(self) -> list[str]:
        """The names of the linear layers."""
        return [name.removeprefix("weight_") for name in self._flat_weights_names if name.startswith("weight_")]

    def __getattr__(self, name: str) -> Any:
        kind, _, place = name.partition("_")
        if kind in ("weight", "bias") and place in self._modules:
            return getattr(self._modules[place], kind)
        return super().__getattr__(name)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_flat_weight_refs"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]

    @property
    def _flat_weights(self) -> list[Tensor]:  # type: ignore[override]
        return [getattr(self, name) for name in self._flat_weights_names]

    def _init_flat_weights(self) -> None:
        """There is no list of weights to keep."""

    def flatten_parameters(self) -> None:
        """There are no weights that could lie in one piece."""

    def _weights_have_changed(self) -> bool:
        return False

    def forward(self, input: Any, hx: Any = None) -> Any:
        """As of the stock module."""
        if isinstance(input, PackedSequence) or not self._calls_layers(input):
            return self._fused(input, hx)
        is_batched = input.dim() == 3
        x_TBI = input.unsqueeze(1) if not is_batched else input.transpose(0, 1) if self.batch_first else input
        states: Sequence[Tensor] | None = None
        if hx is not None:
            states = hx if isinstance(hx, tuple) else (hx,)
            states = states if is_batched else [state.unsqueeze(1) for state in states]
        y_TBH, states = self._by_steps(x_TBI, states)
        if not is_batched:
            y_TBH, states = y_TBH.squeeze(1), [state.squeeze(1) for state in states]
        elif self.batch_first:
            y_TBH = y_TBH.transpose(0, 1)
        return y_TBH, tuple(states) if len(states) > 1 else states[0]

    def _fused(self, input: Any, hx: Any) -> Any:
        """By torch's kernel."""
        data = input.data if isinstance(input, PackedSequence) else input
        if not data.is_cuda or is_traced():
            return super().forward(input, hx)
        with warnings.catch_warnings():
            # cuDNN copies weights into one piece, and advises what does not help here
            warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk of memory")
            return super().forward(input, hx)

    def _calls_layers(self, input: Tensor) -> bool:
        if is_traced():
            return False
        layers = [self._modules[place] for place in self._places()]
        if any(layer is not None and is_observed(layer) for layer in layers):
            return True
        tokens = input.shape[:-1].numel()
        steps = input.shape[1 if self.batch_first and input.dim() == 3 else 0]
        saved = 0.0
        for layer in layers:
            if isinstance(layer, LowRankLinear):
                size = layer.out_features * layer.in_features
                few = sum(p.numel() for p in layer.parameters() if p.dim() == 2)
                # per token, and once to multiply the factors
                saved += tokens * (size - few) + size * layer.factors[0].out_features
        return saved > steps * len(layers) * STEP_COST.get(input.device.type, STEP_COST["cuda"])

    def _by_steps(self, x_TBI: Tensor, states: Sequence[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        """Outputs, and the last state of each layer and direction."""
        number = 2 if self.mode == "LSTM" else 1
        ends: list[tuple[Tensor, ...]] = []
        for layer in range(self.num_layers):
            directions: list[Tensor] = []
            for suffix in ("", "_reverse") if self.bidirectional else ("",):
                state = tuple(
                    x_TBI.new_zeros(x_TBI.shape[1], self.hidden_size) if states is None else states[i][len(ends)]
                    for i in range(number)
                )
                hidden = getattr(self, f"hh_l{layer}{suffix}")
                u_TBG = getattr(self, f"ih_l{layer}{suffix}")(x_TBI)
                outputs: list[Tensor] = []
                for u_BG in reversed(u_TBG) if suffix else u_TBG:
                    state = self._cell(u_BG, hidden(state[0]), state)
                    outputs.append(state[0])
                directions.append(torch.stack(outputs[::-1] if suffix else outputs))
                ends.append(state)
            x_TBI = torch.cat(directions, -1) if len(directions) > 1 else directions[0]
            if layer < self.num_layers - 1:
                x_TBI = F.dropout(x_TBI, self.dropout, self.training)
        return x_TBI, [torch.stack(parts) for parts in zip(*ends, strict=True)]

    def _cell(self, u_BG: Tensor, v_BG: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The next state from what the inputs and the state give."""
        raise NotImplementedError


class SplitLSTM(_SplitRecurrent, nn.LSTM):
    """`nn.LSTM` over linear layers."""

    def _cell(self, u_BG: Tensor, v_BG: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        i, f, g, o = (u_BG + v_BG).chunk(4, -1)
        c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class SplitGRU(_SplitRecurrent, nn.GRU):
    """`nn.GRU` over linear layers."""

    def _cell(self, u_BG: Tensor, v_BG: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (u_r, u_z, u_n), (v_r, v_z, v_n) = u_BG.chunk(3, -1), v_BG.chunk(3, -1)
        n = torch.tanh(u_n + torch.sigmoid(u_r + v_r) * v_n)
        return (n + torch.sigmoid(u_z + v_z) * (state[0] - n),)


class SplitConv1d(nn.Conv1d):
    """`nn.Conv1d` with a kernel of length 1: a linear layer along the channels."""

    def __init__(self, module: nn.Conv1d, part: Callable[[nn.Parameter, slice], nn.Parameter]) -> None:
        nn.Module.__init__(self)
        vars(self).update(_settings(module))
        self.linear = linear(part(module.weight, slice(None)), module.bias)  # type: ignore[arg-type]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight in the shape of a convolution's."""
        shape = (self.out_channels, self.in_channels, 1)
        return lazy_weight(lambda: self.linear.weight.unsqueeze(-1), shape, next(self.linear.parameters()))

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        return self.linear.bias

    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = self.linear(input.transpose(-1, -2))
        return y.transpose(-1, -2)


SPLIT: dict[type[nn.Module], Callable[..., nn.Module]] = {
    nn.MultiheadAttention: SplitAttention,
    nn.LSTM: SplitLSTM,
    nn.GRU: SplitGRU,
    nn.Conv1d: SplitConv1d,
}
"""What each module of torch becomes."""


def form_of(module: nn.Module) -> Callable[..., nn.Module] | None:
    """What a module becomes when it is split, if it is of a kind that can be."""
    return experts.SplitExperts if experts.is_experts(module) else SPLIT.get(own_class(module))


def refusal(module: nn.Module) -> str | None:
    """Why a module of one of these kinds cannot be split, or None if it can."""
    if "forward" in vars(module):
        return f"{type(module).__name__} has a forward of its own"
    match module:
        case nn.MultiheadAttention():
            own = {"in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight"}
            if module.bias_k is not None or module.add_zero_attn:
                return "it adds keys and values of its own (`add_bias_kv`, `add_zero_attn`)"
        case nn.RNNBase():
            own = set(module._flat_weights_names)
            if module.proj_size:
                return "its state is projected (`proj_size`)"
        case nn.Conv1d():
            own = {"weight", "bias"}
            if module.kernel_size != (1,) or module.groups != 1 or module.stride != (1,):
                return "it is a convolution of a longer kernel, of groups or of strides"
            if module.padding not in ((0,), "valid", "same"):
                return "it is a convolution that pads its input"
        case _:
            own = set(experts.own_parameters(module))
            if (why := experts.refusal(module)) is not None:
                return why
    if any(hasattr(parameter, "full_tensor") for parameter in module._parameters.values()):
        return "its weights are sharded: make the pruner before `fully_shard` to prune it"
    if {name for name, parameter in module._parameters.items() if parameter is not None} - own or module._buffers:
        return f"{type(module).__name__} holds more than its own weights"
    return "its weight is made from something else" if own - module._parameters.keys() else None


def splittable(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of `model` that can be split, by name."""
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    found = {}
    for name, module in model.named_modules():
        if form_of(module) is not None and refusal(module) is None:
            # a part of a packed weight could not stay tied to the whole elsewhere
            shared = any(len(owners[id(parameter)]) > 1 for parameter in module.parameters(recurse=False))
            if not shared or isinstance(module, nn.RNNBase):
                found[name] = module
    return found


def split(model: nn.Module, names: Collection[str], *, share: bool = False) -> Callable[[], None]:
    """Split in place the modules that hold a layer of one of `names`; the function that is returned undoes it.

    Args:
        share: parts of packed weights are views of them, which take no memory.
    """

    def part(parameter: nn.Parameter, rows: slice | int, *, turned: bool = False) -> nn.Parameter:
        taken = parameter.detach()[rows]
        taken = taken.squeeze(-1) if taken.dim() == 3 else taken.t() if turned else taken
        # the matrix of one expert stays where it is: all of a model would take twice the memory
        is_view = share or (isinstance(rows, int) and not turned)
        made = nn.Parameter(
            taken if is_view else taken.clone(memory_format=torch.contiguous_format), parameter.requires_grad
        )
        # notes that others have left, as transformers does
        vars(made).update(vars(parameter))
        return made

    undo = ExitStack()
    for name, module in splittable(model).items():
        if any(each.startswith(f"{name}." if name else "") for each in names):
            form = form_of(module)
            assert form is not None
            undo.callback(become(module, form(module, part)))
    return undo.close


@contextmanager
def all_split(model: nn.Module) -> Iterator[None]:
    """Every module split that can be, for as long as this lasts; no memory is taken."""
    undo = split(model, [f"{name}.x" if name else "x" for name in splittable(model)], share=True)
    try:
        yield
    finally:
        undo()


@contextmanager
def splitting(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """`split`, undone if what follows fails."""
    undo = split(model, names)
    try:
        yield
    except BaseException:
        undo()
        raise
