"""Fused layers give what the layers gave, whoever calls them and however."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import rankwise as rw
from rankwise.deploy import fuse_layers
from rankwise.deploy.fuse import FusedLayer, SharedInput
from rankwise.modules import LowRankLinear
from tests.hf.hf_families import FAMILIES, QUIET, batch, build, logits

pytestmark = QUIET

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


def decoder() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, vocab_size=60, attention_bias=True)
    return transformers.LlamaForCausalLM(config).eval()


def outputs_of_groups(model: nn.Module) -> list[list[int]]:
    return sorted(module.outputs for module in model.modules() if isinstance(module, SharedInput))


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("layout", ["pair", "pivot"])
def test_a_decoder_computes_the_same_with_q_k_v_and_gate_up_fused(layout: str) -> None:
    small = rw.compress(decoder(), rw.Budget(removed=0.6), layout=layout, ranks="even")
    fused = fuse_layers(copy.deepcopy(small))
    groups = outputs_of_groups(fused)
    assert groups.count([64, 32, 32]) == groups.count([96, 96]) == 2
    tokens = torch.randint(60, (2, 9))
    with torch.inference_mode():
        torch.testing.assert_close(fused(tokens).logits, small(tokens).logits, rtol=1e-4, atol=1e-5)
        chosen = [m.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0) for m in (fused, small)]
    assert torch.equal(*chosen)
    torch.testing.assert_close(torch.compile(fused, fullgraph=True)(tokens).logits, small(tokens).logits)


def test_dense_layers_that_read_the_same_input_are_one_product() -> None:
    dense = decoder()
    fused = fuse_layers(copy.deepcopy(dense))
    assert outputs_of_groups(fused) == [[64, 32, 32]] * 2 + [[96, 96]] * 2
    tokens = torch.randint(60, (2, 9))
    torch.testing.assert_close(fused(tokens).logits, dense(tokens).logits)
    layer, was = fused.model.layers[0].self_attn.k_proj, dense.model.layers[0].self_attn.k_proj
    assert isinstance(layer, FusedLayer) and (layer.in_features, layer.out_features) == (64, 32)
    torch.testing.assert_close(layer.weight + 0, was.weight + 0, rtol=1e-4, atol=1e-5)
    assert layer.bias is not None and torch.equal(layer.bias, was.bias)


class InPlace(nn.Module):
    """Two layers that read one tensor, which the output of the first is added to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        x += self.first(x)
        y: Tensor = self.second(x) * self.third(x)
        return y


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_layers_between_which_their_input_changes_are_not_fused(mode: Callable[[], Any]) -> None:
    dense, x = InPlace(), torch.randn(3, 8)
    with mode():
        fused = fuse_layers(copy.deepcopy(dense), x)
        torch.testing.assert_close(fused(x), dense(x))
    assert outputs_of_groups(fused) == [[8, 8]]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_the_same(family: str) -> None:
    small = rw.compress(build(family).eval(), rw.Budget(removed=0.3, of="prunable"))
    fused = fuse_layers(copy.deepcopy(small), batch(small))
    assert outputs_of_groups(fused)
    torch.testing.assert_close(logits(fused), logits(small), rtol=1e-4, atol=1e-5)


class Reads(nn.Module):
    """Two layers read x; between their calls x may be changed in place, or one may not be called at all."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 5)
        self.how = "plain"

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if self.how == "changed":
            x.add_(1)
        return y if self.how == "skipped" else torch.cat([y, self.b(x)], -1)


@pytest.mark.parametrize("how", ["plain", "changed", "skipped"])
def test_what_was_computed_for_one_input_is_never_given_for_another(how: str) -> None:
    plain = Reads()
    fused = fuse_layers(copy.deepcopy(plain), torch.randn(2, 4))
    assert outputs_of_groups(fused) == [[3, 5]]
    plain.how = fused.how = how
    for _ in range(3):
        x = torch.randn(2, 4)
        torch.testing.assert_close(fused(x.clone()), plain(x.clone()))
        torch.testing.assert_close(fused(x), fused(x - 0) if how != "changed" else fused(x - 1))


def test_shared_and_observed_layers_stay_as_they_are() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.twice = (nn.Linear(4, 4) for _ in range(4))
            self.b.weight = self.a.weight
            self.seen: list[Tensor] = []
            self.c.register_forward_hook(lambda module, args, y: self.seen.append(y))

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x) + self.c(x) + self.twice(x) + self.twice(x)

    model, x = Tied(), torch.randn(2, 4)
    want = model(x)
    assert not outputs_of_groups(fuse_layers(model, x))
    torch.testing.assert_close(model(x), want)


class ByName(nn.Module):
    """Layers that are called with their input by its name: each time, or once."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(input=x) + self.b(x) + self.c(input=self.c(x)) + self.d(x)


def test_layers_that_are_called_by_name_stay_as_they_are() -> None:
    model, x = ByName(), torch.randn(2, 4)
    want = model(x)
    assert outputs_of_groups(fuse_layers(model, x)) == [[4, 4]]
    torch.testing.assert_close(model(x), want)


def test_a_fused_model_is_not_saved(tmp_path) -> None:
    fused = fuse_layers(rw.compress(decoder(), rw.Budget(removed=0.5)))
    assert fuse_layers(fused) is fused
    with pytest.raises(rw.RankwiseError, match="must not be fused to be saved"):
        rw.save(fused, tmp_path / "small")
    with pytest.raises(rw.RankwiseError, match="must not be fused to be saved"):
        fused.save_pretrained(tmp_path / "small")


def test_a_model_of_ones_own_needs_an_example() -> None:
    model = nn.Sequential(LowRankLinear(nn.Linear(4, 2, bias=False), nn.Linear(2, 4)))
    with pytest.raises(rw.RankwiseError, match="needs a batch of input"):
        fuse_layers(model)
    x = torch.randn(3, 4)
    want = model(x)
    torch.testing.assert_close(fuse_layers(model, x)(x), want)
