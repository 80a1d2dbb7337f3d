"""Linear layers that read the same input as one product: matrices stand one below the other, outputs are split.

q, k and v of attention are such layers, and so are the first factors of their low-rank pairs. An engine does one large
product faster than three small ones. Layers that share a matrix stay as they are: it would have to be stored twice.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

LINEAR = torch.ops.aten.linear.default
SPLIT = torch.ops.aten.split_with_sizes.default

Program = torch.export.ExportedProgram
# a node's arguments may be anything, and the signature says of which nodes they are names
Node = Any


def fuse(program: Program) -> None:
    """Fuse, in place, all linear layers of a program that read the same tensor, unchanged between them."""
    parameters = program.graph_signature.inputs_to_parameters
    readers: dict[tuple[Node, int], list[Node]] = {}
    num_changes = 0
    for node in program.graph.nodes:
        num_changes += _changes_in_place(node)
        if node.target is LINEAR and all(
            str(each) in parameters and len(each.users) == 1 for each in node.args[1:] if each is not None
        ):
            # what is changed in place may be the tensor, by another name
            readers.setdefault((node.args[0], num_changes), []).append(node)
    groups = [group for group in readers.values() if len(group) > 1]
    for group in groups:
        _fuse(program, group)
    if groups:
        program.graph_module.recompile()
        program.validate()  # type: ignore[no-untyped-call]


def _changes_in_place(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _fuse(program: Program, group: Sequence[Node]) -> None:
    graph, first = program.graph, group[0]
    sizes = [node.meta["val"].shape[-1] for node in group]
    weights, biases = ([node.args[i] if i < len(node.args) else None for node in group] for i in (1, 2))
    stacked = [_stacked(program, each, sizes) for each in (weights, biases) if any(part is not None for part in each)]
    with graph.inserting_before(first):
        whole = graph.call_function(LINEAR, (first.args[0], *stacked))
        split = graph.call_function(SPLIT, (whole, sizes, -1))
        parts = [graph.call_function(operator.getitem, (split, i)) for i in range(len(group))]
    whole.meta["val"] = torch.cat([node.meta["val"] for node in group], -1)
    split.meta["val"] = whole.meta["val"].split(sizes, -1)
    for node, part, value in zip(group, parts, split.meta["val"], strict=True):
        part.meta["val"] = value
        node.replace_all_uses_with(part)
        graph.erase_node(node)
    for parameter in (*weights, *biases):
        if parameter is not None:
            _remove(program, parameter)


def _stacked(program: Program, parts: Sequence[Node], sizes: Sequence[int]) -> Node:
    """A new parameter before the first of `parts`: all of them, one below the other, zeros where there is none."""
    signature = program.graph_signature
    first = next(part for part in parts if part is not None)
    with program.graph.inserting_before(first):
        made = program.graph.placeholder(f"{first.name}_and_others")
    stored = [None if part is None else program.state_dict[signature.inputs_to_parameters[part.name]] for part in parts]
    values = [None if part is None else part.meta["val"] for part in parts]
    program.state_dict[made.name] = nn.Parameter(_below_each_other(stored, sizes), requires_grad=False)
    made.meta["val"] = _below_each_other(values, sizes)
    place = [spec.arg.name for spec in signature.input_specs].index(first.name)
    signature.input_specs.insert(place, InputSpec(InputKind.PARAMETER, TensorArgument(made.name), made.name))
    return made


def _below_each_other(tensors: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor:
    like = next(tensor for tensor in tensors if tensor is not None)
    with torch.no_grad():
        parts = [like.new_zeros(n) if tensor is None else tensor for tensor, n in zip(tensors, sizes, strict=True)]
        return torch.cat(parts)


def _remove(program: Program, parameter: Node) -> None:
    specs = program.graph_signature.input_specs
    (spec,) = [spec for spec in specs if spec.arg.name == parameter.name]
    specs.remove(spec)
    del program.state_dict[spec.target]
    program.graph.erase_node(parameter)
