"""What a run holds beside the model, as tensors: optimizer, carried state, random numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from rankwise.lab.training.language import State


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """`optimizer.<parameter>.<key>`; the settings are the configuration's."""
    tensors = {}
    for index, values in optimizer.state_dict()["state"].items():
        for key, value in values.items():
            assert isinstance(value, Tensor), f"optimizer state {key} is no tensor"
            tensors[f"optimizer.{index}.{key}"] = value
    return tensors


def load_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Take `optimizer_tensors` back."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            index, key = rest.split(".")
            state.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def state_tensors(states: Sequence[State | None], name: str = "state") -> dict[str, Tensor]:
    """`<name>.<part of the batch>`, or `<name>.<part>.<i>` where a state is several tensors."""
    tensors = {}
    for part, state in enumerate(states):
        if isinstance(state, Tensor):
            tensors[f"{name}.{part}"] = state
        elif state is not None:
            tensors.update({f"{name}.{part}.{i}": tensor for i, tensor in enumerate(state)})
    return tensors


def load_states(
    tensors: Mapping[str, Tensor], num_parts: int, device: torch.device, name: str = "state"
) -> list[State | None]:
    """Take `state_tensors` back."""
    states: list[State | None] = []
    for part in range(num_parts):
        if f"{name}.{part}" in tensors:
            states.append(tensors[f"{name}.{part}"].to(device))
            continue
        length = sum(key.startswith(f"{name}.{part}.") for key in tensors)
        states.append(tuple(tensors[f"{name}.{part}.{i}"].to(device) for i in range(length)) or None)
    return states


def random_tensors(device: torch.device) -> dict[str, Tensor]:
    """The states of torch's generators."""
    tensors = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        tensors["random.cuda"] = torch.cuda.get_rng_state(device)
    return tensors


def load_random(tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Take `random_tensors` back."""
    torch.set_rng_state(tensors["random.cpu"])
    if device.type == "cuda" and "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"], device)
