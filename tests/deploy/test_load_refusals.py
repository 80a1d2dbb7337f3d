"""What cannot be loaded is refused in one sentence, and the skeleton stays as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import rankwise as rw
from rankwise.deploy.load import load
from rankwise.deploy.save import save
from rankwise.modules import SelectedLinear
from tests.deploy.saved_toys import Buffered, compact, features, mlp
from tests.models import Spec


def refused(folder: Path, skeleton: nn.Module, match: str) -> None:
    """Loading is refused with these words, unless a checksum speaks first, and the skeleton is as it was."""
    modules = [(name, module, type(module)) for name, module in skeleton.named_modules()]
    state = skeleton.state_dict(keep_vars=True)
    before = {name: (tensor, tensor.clone()) for name, tensor in state.items()}
    with pytest.raises(rw.CheckpointError, match=f"{match}|is damaged: its checksum is .*verify=False"):
        load(folder, skeleton)
    with pytest.raises(rw.CheckpointError, match=match) as caught:
        load(folder, skeleton, verify=False)
    assert "\n" not in str(caught.value)
    assert [(name, module, type(module)) for name, module in skeleton.named_modules()] == modules
    after = skeleton.state_dict(keep_vars=True)
    assert list(after) == list(before)
    assert all(after[name] is tensor and torch.equal(tensor, value) for name, (tensor, value) in before.items())


def wider() -> nn.Module:
    model = mlp()
    model[2] = nn.Linear(16, 17)
    return model


def longer() -> nn.Module:
    return nn.Sequential(*mlp(), nn.Linear(10, 10))


def normed() -> nn.Module:
    model = mlp()
    model[1] = nn.LayerNorm(16)
    return model


def convolved() -> nn.Module:
    model = mlp()
    model[2] = nn.Conv1d(16, 16, 1)
    return model


def biased() -> nn.Module:
    model = mlp()
    model[4] = nn.Linear(16, 10)
    return model


@pytest.mark.parametrize(
    "skeleton, match",
    [
        (wider(), r"2 was saved as low_rank_linear .*, but is linear 16 -> 17 with bias in the skeleton"),
        (longer(), r"5.weight is in the skeleton, but was not saved; 5.bias .*Build it with the code"),
        (mlp()[:3], r"4 was saved as \w+ .*, but is not in the skeleton"),
        (normed(), r"1.weight is in the skeleton, but was not saved"),
        (convolved(), r"2 was saved as low_rank_linear .*, but is Conv1d in the skeleton"),
        (biased(), r"4 was saved as .*, but is linear 16 -> 10 with bias in the skeleton"),
        (nn.Linear(10, 10), r"0 was saved as .*not in the skeleton; 2 was saved"),
    ],
)
def test_a_skeleton_of_another_architecture_is_refused(
    tmp_path: Path, small: nn.Module, skeleton: nn.Module, match: str
) -> None:
    save(small, tmp_path / "small")
    refused(tmp_path / "small", skeleton, match)


def test_a_skeleton_that_shares_what_was_saved_apart_is_refused(tmp_path: Path) -> None:
    apart = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    shared = nn.Sequential(nn.Linear(8, 8))
    shared.append(shared[0])
    save(apart, tmp_path / "apart")
    refused(tmp_path / "apart", shared, r"1.weight and 0.weight were saved apart, but are one in the skeleton")
    apart[1] = rw.compress(apart[1], rw.Budget(removed=0.8, of="prunable"))
    save(apart, tmp_path / "forms")
    refused(tmp_path / "forms", shared, r"1 was saved as low_rank_linear .*the same module as 0")


def test_a_long_list_of_misfits_is_cut(tmp_path: Path) -> None:
    save(nn.Sequential(*(nn.Linear(2, 2) for _ in range(9))), tmp_path / "model")
    refused(tmp_path / "model", nn.Sequential(*(nn.Linear(2, 3) for _ in range(9))), "; and 4 more. Build it")


def test_buffers_that_nothing_fills_are_refused(tmp_path: Path) -> None:
    save(Buffered(), tmp_path / "model")
    with torch.device("meta"):
        skeleton = Buffered()
    with pytest.raises(rw.CheckpointError, match="kept_out is on the meta device and is not saved"):
        load(tmp_path / "model", skeleton)


def edited(folder: Path, **changes: Any) -> None:
    path = folder / "rankwise.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "changes, match",
    [
        (
            {"version": 7, "rankwise": "9.1"},
            "must be version 2 at most, but is version 7, written by rankwise 9.1. Upgrade",
        ),
        ({"version": 7, "rankwise": "9" * 5_000}, r"written by rankwise 9{37}\.\.\.\. Upgrade rankwise\.$"),
        ({"format": "other"}, "must say that a rankwise model is here, but does not. Give a folder that"),
        ({"version": "1"}, "must say that a rankwise model is here"),
        ({"version": 0}, "is damaged: its version is 0"),
        ({"layers": {"0": {"kind": "lambda"}}}, "is damaged: a layer must be one of linear, low_rank_linear"),
        ({"layers": {"0": {"kind": "linear", "inputs": -1, "outputs": 2, "bias": True}}}, "a linear must have inputs"),
        ({"layers": {"0": {"kind": "linear", "inputs": 10}}}, "a linear must have inputs, outputs, bias"),
        ({"layers": 3}, "rankwise.json must be as rankwise wrote it, but is damaged"),
        ({"tensors": None}, "rankwise.json must be as rankwise wrote it, but is damaged"),
        ({"computed": {"x": "int8"}}, "is damaged: a dtype must be a floating one of torch, but is 'int8'"),
        ({"tied": {"0.1.bias": "elsewhere"}}, "0.1.bias is in the skeleton, but was not saved"),
    ],
)
def test_a_structure_that_is_not_ours_is_refused(
    tmp_path: Path, small: nn.Module, changes: dict[str, Any], match: str
) -> None:
    save(small, tmp_path / "small")
    edited(tmp_path / "small", **changes)
    refused(tmp_path / "small", mlp(), match)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b"null", b"[" * 100_000])
def test_a_structure_that_is_not_json_is_refused(tmp_path: Path, small: nn.Module, text: bytes) -> None:
    save(small, tmp_path / "small")
    (tmp_path / "small" / "rankwise.json").write_bytes(text)
    refused(tmp_path / "small", mlp(), "is damaged|must say that a rankwise model is here")


def test_a_missing_file_is_refused(tmp_path: Path, small: nn.Module) -> None:
    refused(tmp_path / "nowhere", mlp(), "but .*nowhere has no rankwise.json. Give a folder")
    save(small, tmp_path / "small")
    (tmp_path / "small" / "model.safetensors").unlink()
    refused(tmp_path / "small", mlp(), "must hold rankwise.json and model.safetensors, but .* has no model.safetensors")


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, small: nn.Module, kept: int) -> None:
    save(small, tmp_path / "small")
    path = tmp_path / "small" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    refused(tmp_path / "small", mlp(), "model.safetensors must be as .* but is damaged: .* Save the model again")


def test_weights_of_another_model_are_refused(tmp_path: Path, small: nn.Module) -> None:
    save(small, tmp_path / "small")
    path = tmp_path / "small" / "model.safetensors"
    tensors = load_file(path)
    first = next(iter(tensors))
    save_file({**tensors, first: tensors[first].half()}, path)
    refused(tmp_path / "small", mlp(), f"damaged: {first} is .*float16.*, but rankwise.json says .*float32")
    del tensors[first]
    save_file(tensors, path)
    refused(tmp_path / "small", mlp(), f"damaged: {first} is missing")


def test_a_mask_that_keeps_another_number_of_inputs_is_refused(tmp_path: Path) -> None:
    small = compact(mlp, features(), "np-l0")
    selected = next(name for name, module in small.named_modules() if isinstance(module, SelectedLinear))
    save(small, tmp_path / "small")
    path = tmp_path / "small" / "model.safetensors"
    tensors = load_file(path)
    tensors[f"{selected}.kept"].fill_(True)
    save_file(tensors, path)
    refused(tmp_path / "small", mlp(), f"damaged: {selected} must keep")


def test_a_head_tied_to_nothing_is_refused(tmp_path: Path) -> None:
    build = Spec(back="low-rank").build
    save(build(), tmp_path / "small")
    layers = json.loads((tmp_path / "small" / "rankwise.json").read_text())["layers"]
    layers["head"]["embedding"] = "front.7"
    edited(tmp_path / "small", layers=layers)
    refused(tmp_path / "small", build(), "head was saved as low_rank_head .*, but front.7 is not in the skeleton")


@pytest.mark.parametrize(
    "build, name, change",
    [
        (Spec(front="pair").build, "front", {"rank": 2**62}),
        (Spec().build, "front", {"padding_idx": 11}),
        (mlp, "0", {"kind": "selected_linear", "kept": 11}),
    ],
)
def test_a_layer_that_cannot_be_is_refused(
    tmp_path: Path, build: Callable[[], nn.Module], name: str, change: dict[str, Any]
) -> None:
    save(build(), tmp_path / "small")
    layers = json.loads((tmp_path / "small" / "rankwise.json").read_text())["layers"]
    layers[name].update(change)
    edited(tmp_path / "small", layers=layers)
    refused(tmp_path / "small", build(), f"{name}.* was saved as")


@pytest.mark.parametrize("value", [0, 999])
def test_places_that_are_no_order_are_refused(tmp_path: Path, value: int) -> None:
    small = rw.compress(mlp(), rw.Budget(removed=0.3), layout="pivot")
    save(small, tmp_path / "small")
    path = tmp_path / "small" / "model.safetensors"
    tensors = load_file(path)
    (name, *_) = [name for name in tensors if name.endswith("places")]
    tensors[name][:2] = value
    save_file(tensors, path)
    refused(tmp_path / "small", mlp(), "the places of .* must be an order of its outputs. Save the model again")
