"""A plan for whole blocks of a decoder: feed-forward neurons, and attention heads by key-value group.

A block is known by the names of its layers, which Llama, Mistral, Qwen, Gemma and many others share. Since all layers
keep the same number of neurons and of heads, the result is a smaller model of the same family: its configuration says
so (`update_config`), and whatever loads that family loads it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import nn

from rankwise.adapters.plans import check_ungated, kind_of
from rankwise.core.plan import LeftOut, Plan, Site, Use
from rankwise.core.widths import Feeder, WidthSite
from rankwise.errors import PlanError

NEURONS, HEADS = "neurons", "key-value heads"
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FAMILIES = "such as Llama, Mistral, Qwen2, Qwen3 or Gemma 3"
LEFT_OUT = "it is in no block whose width is pruned"


def find_widths(model: nn.Module, *, heads: bool = True, within: Plan | None = None) -> Plan:
    """Plan the neurons of every feed-forward block, and with `heads` the key-value groups of every attention block.

    A model is refused unless every layer has one block of each kind, and all blocks of a kind have the same shape.

    Args:
        within: blocks are pruned only if this plan holds every layer of every block of their kind.
    """
    check_ungated(model)
    config = _config(model)
    found = [_feed_forward(name, block, config) for name, block in _blocks(model, FEED_FORWARD)]
    _check_blocks(model, found, FEED_FORWARD, config)
    if heads:
        counts = _accepted_heads(config)
        attention = [_attention(name, block, config, counts) for name, block in _blocks(model, ATTENTION)]
        _check_blocks(model, attention, ATTENTION, config)
        found += attention
    allowed = {name for site in found for name in _layers(site)}
    if within is not None:
        allowed = {name for site in within.sites for name in _layers(site)}
    kept_out = {site.width for site in found if not allowed.issuperset(_layers(site))}
    sites = [site for site in found if site.width not in kept_out]
    if not sites:
        raise PlanError(
            "`plan` must hold every layer of the feed-forward or of the attention blocks, because all layers keep the "
            "same width, but holds neither. Leave it out."
        )
    inside = {name for site in sites for name in _layers(site)}
    _check_unshared(model, inside)
    others = [(name, layer) for name, layer in model.named_modules() if name not in inside and kind_of(layer)]
    left_out = [LeftOut(name, sum(p.numel() for p in layer.parameters()), LEFT_OUT) for name, layer in others]
    return Plan(tuple(sites), tuple(left_out))


def _layers(site: Site) -> list[str]:
    """The names of all layers that a site prunes."""
    feeders = site.feeders if isinstance(site, WidthSite) else ()
    return [*(use.name for use in site.uses), *(feeder.name for feeder in feeders)]


def update_config(model: nn.Module) -> None:
    """Write the widths that the blocks of `model` have into its configuration, and into what its modules note."""
    config = _config(model)
    for _, block in _blocks(model, FEED_FORWARD):
        config.intermediate_size = block.down_proj.in_features
        _note(block, intermediate_size=config.intermediate_size)
    before = config.num_attention_heads, config.num_key_value_heads
    for _, block in _blocks(model, ATTENTION):
        sizes = (layer.out_features // block.head_dim for layer in (block.q_proj, block.k_proj))
        config.num_attention_heads, config.num_key_value_heads = sizes
        _note(
            block,
            num_heads=config.num_attention_heads,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
        )
        if before != (config.num_attention_heads, config.num_key_value_heads):
            # it is no longer the hidden size divided by the number of heads
            config.head_dim = block.head_dim


def _note(block: nn.Module, **numbers: int) -> None:
    for name, number in numbers.items():
        if name in vars(block):
            setattr(block, name, number)


def _config(model: nn.Module) -> Any:
    """The part of a model's configuration that is about its decoder."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise PlanError(
            f"The model must be a decoder of transformers, {FAMILIES}, for all layers to have one width, but is a "
            f"{type(model).__name__}. Use another method."
        )
    return config.get_text_config(decoder=True)


def _blocks(model: nn.Module, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Modules with plain linear layers of these names."""
    for name, module in model.named_modules():
        layers = [getattr(module, layer, None) for layer in names]
        if all(isinstance(layer, nn.Linear) and kind_of(layer) == "linear" for layer in layers):
            yield name, module


def _check_blocks(model: nn.Module, sites: list[WidthSite], names: tuple[str, ...], config: Any) -> None:
    family, layers = type(model).__name__, config.num_hidden_layers
    if len(sites) != layers:
        raise PlanError(
            f"Every layer must have one block of {', '.join(names)}, as models {FAMILIES} have, but {family} has "
            f"{len(sites)} for {layers} layers. Packed projections and experts have no one width: use another method."
        )
    if len({(site.shape, site.num_components, site.per_component) for site in sites}) > 1:
        raise PlanError(f"All blocks must have the same shape, but those of {family} differ. Use another method.")


def _feeder(block: str, name: str, layer: nn.Linear, num_components: int) -> Feeder:
    outputs, rest = divmod(layer.out_features, num_components)
    if rest:
        raise PlanError(
            f"{block}.{name}: must have the same number of outputs for each of {num_components} components, but has "
            f"{layer.out_features}. Use another method."
        )
    return Feeder(f"{block}.{name}", outputs, layer.in_features + (layer.bias is not None))


def _site(name: str, block: Any, names: tuple[str, ...], width: str, num: int, counts: tuple[int, ...]) -> WidthSite:
    *feeders, last = names
    layer: nn.Linear = getattr(block, last)
    return WidthSite(
        (Use(f"{name}.{last}", "linear"),),
        (layer.out_features, layer.in_features),
        width=width,
        num_components=num,
        feeders=tuple(_feeder(name, each, getattr(block, each), num) for each in feeders),
        counts=counts,
    )


def _feed_forward(name: str, block: Any, config: Any) -> WidthSite:
    width = block.down_proj.in_features
    if config.intermediate_size != width or {block.gate_proj.out_features, block.up_proj.out_features} != {width}:
        raise PlanError(
            f"{name}: must have the {config.intermediate_size} neurons that `intermediate_size` says, but has {width}. "
            "Use another method."
        )
    return _site(name, block, FEED_FORWARD, NEURONS, width, ())


def _attention(name: str, block: Any, config: Any, counts: tuple[int, ...]) -> WidthSite:
    size, heads, groups = getattr(block, "head_dim", 0), config.num_attention_heads, config.num_key_value_heads
    if not groups or heads % groups:
        raise PlanError(
            f"The number of heads must be a multiple of that of key-value heads, but is {heads} for {groups}. Use "
            "another method."
        )
    found = [getattr(block, layer).out_features for layer in ATTENTION[:3]] + [block.o_proj.in_features]
    expected = [heads * size, groups * size, groups * size, heads * size]
    if found != expected:
        raise PlanError(
            f"{name}: must have projections of {expected} features for {heads} heads and {groups} key-value heads of "
            f"{size}, but has {found}. Use another method."
        )
    inside = {id(p) for layer in ATTENTION for p in getattr(block, layer).parameters()}
    for part, parameter in block.named_parameters():
        if id(parameter) not in inside and parameter.shape != (size,):
            raise PlanError(
                f"{name}.{part}: must be the same for all heads, of {size} numbers, but has "
                f"{parameter.numel()}: without some of the heads it would compute something else. Use another method."
            )
    return _site(name, block, ATTENTION, HEADS, groups, counts)


def _check_unshared(model: nn.Module, names: set[str]) -> None:
    """Refuse a block whose weights another module uses too."""
    planned = {id(p): name for name in sorted(names) for p in model.get_submodule(name).parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = planned.get(id(parameter), "")
        if owner and name.rpartition(".")[0] != owner:
            raise PlanError(f"{owner}: its weights must be its own, but {name} shares them. Use another method.")


def _accepted_heads(config: Any) -> tuple[int, ...]:
    """The numbers of key-value heads with which the model's own configuration can be read back.

    Some families refuse numbers of heads that do not divide the hidden size, whatever the size of a head is.
    """
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    if not groups or heads % groups:
        return ()
    accepted = []
    for n in range(1, groups + 1):
        values = {**copy.deepcopy(config.to_dict()), "num_attention_heads": n * heads // groups}
        try:
            type(config)(**{**values, "num_key_value_heads": n, "head_dim": _head_dim(config)})
        # the errors of a configuration's checks are of many types
        except Exception:
            continue
        accepted.append(n)
    return () if len(accepted) == groups else tuple(accepted)


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
