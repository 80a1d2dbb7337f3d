"""Mixtures of experts, with linear layers for every expert, so that each of its matrices is pruned by itself.

transformers stores the experts of a block as parameters of three dimensions, one matrix for each expert. Classes that
it lets compute in several ways (`use_experts_implementation`) say how they do it; those are the ones known here. No
name of a model is.

Shapes: T = tokens, K = experts of a token, E = experts, D = width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.modules import is_exporting, linear

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""
SAYS = ("num_experts", "has_gate", "has_bias", "is_transposed")
"""What a module of experts says of itself."""


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds the matrices of experts as transformers does."""
    return all(name in vars(module) for name in SAYS) and "down_proj" in module._parameters


def own_parameters(module: nn.Module) -> dict[str, int]:
    """The parameters that a module of experts should hold, and their dimensions."""
    names = {"gate_up_proj" if module.has_gate else "up_proj": 3, "down_proj": 3}
    return {**names, **({f"{name}_bias": 2 for name in names} if module.has_bias else {})}


def refusal(module: nn.Module) -> str | None:
    """Why the experts of a module cannot be split, beyond what is wrong with its parameters; None if they can."""
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are spread over several processes"
    for name, dims in own_parameters(module).items():
        parameter = module._parameters.get(name)
        if parameter is not None and (parameter.dim() != dims or len(parameter) != module.num_experts):
            return f"{name} does not hold one matrix for each of {module.num_experts} experts"
    return None


class Expert(nn.Module):
    """The linear layers of one expert.

    They are not called `up_proj` and `down_proj`, because transformers takes tensors of such names for parts of the
    packed parameters when it loads a checkpoint.
    """

    def __init__(self, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self.up, self.down = up, down


class SplitExperts(nn.Module):
    """Experts with linear layers of their own: each is called with the tokens that are routed to it.

    A layer `up` holds the gate too, where there is one. The settings, and the activation, are those of the module that
    it replaces.
    """

    num_experts: int
    has_gate: bool

    def __init__(self, module: nn.Module, part: Callable[..., nn.Parameter]) -> None:
        super().__init__()
        own = vars(nn.Module())
        vars(self).update({name: value for name, value in vars(module).items() if name not in own})
        self._modules.update(module._modules)
        self.stock = type(module)
        names = "gate_up_proj" if self.has_gate else "up_proj", "down_proj"
        for i in range(self.num_experts):
            layers = []
            for name in names:
                bias = part(module._parameters[f"{name}_bias"], i) if module.has_bias else None
                layers.append(linear(part(module._parameters[name], i, turned=module.is_transposed), bias))
            self.add_module(str(i), Expert(*layers))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The sum of what the K experts of each token give, by their weights."""
        if _is_recorded(hidden_states):
            return self._all_experts(hidden_states, top_k_index, top_k_weights)
        x_TD, num_chosen = hidden_states, top_k_index.shape[-1]
        # tokens of the same expert lie together, as torch's grouped products want them
        chosen, order = top_k_index.flatten().sort(stable=True)
        # a number above those of all experts stands for none
        counts = torch.bincount(chosen, minlength=self.num_experts)[: self.num_experts].tolist()
        order = order[: sum(counts)]
        rows = torch.split(x_TD[order // num_chosen], counts)
        # with gradients every expert is called, so that all have one, though it may be zero
        called = [i for i, count in enumerate(counts) if count or torch.is_grad_enabled()]
        if not called:
            return torch.zeros_like(x_TD)
        y = torch.cat([self._expert(i, rows[i]) for i in called]) * top_k_weights.flatten()[order, None]
        y = y.new_zeros(top_k_index.numel(), y.shape[-1]).index_copy(0, order, y)
        return y.view(*top_k_index.shape, -1).sum(-2).to(x_TD.dtype)

    def _all_experts(self, x_TD: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Every expert for every token: a graph cannot depend on who is routed where."""
        total = torch.zeros_like(x_TD)
        for i in range(self.num_experts):
            weights_T = torch.where(top_k_index == i, top_k_weights, 0).sum(-1, keepdim=True)
            total = total + (self._expert(i, x_TD) * weights_T).to(x_TD.dtype)
        return total

    def _expert(self, i: int, x: Tensor) -> Tensor:
        expert: Any = self._modules[str(i)]
        h: Tensor = expert.up(x)
        h = self.stock._apply_gate(self, h) if self.has_gate else self.act_fn(h)  # type: ignore[attr-defined, operator]
        y: Tensor = expert.down(h)
        return self.post_expert_norm(y) if getattr(self, "has_post_expert_norm", False) else y  # type: ignore[operator]

    def extra_repr(self) -> str:
        return f"from {self.stock.__name__}"


def _is_recorded(x: Tensor) -> bool:
    """Whether calls are recorded for other inputs; a compiler instead leaves to Python what it cannot record."""
    is_captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
    return is_captured or is_exporting() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]


@contextmanager
def same_routes(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Call the function that this gives before each run of `model`: later runs route tokens as the first one did.

    A rounding error may send a token to another expert, so that two right results differ by much.
    """
    first: list[Call] = []
    known: Iterator[Call] | None = None

    def start() -> None:
        nonlocal known
        known = iter(first) if first else None

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if known is None:
            first.append((args[1:], {name: value for name, value in kwargs.items() if name != "hidden_states"}))
            return None
        routes, named = next(known, (args[1:], {}))
        return (*args[:1], *routes), {**kwargs, **named}

    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, SplitExperts) or is_experts(module):
                stack.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield start
