"""A saved model comes back bit for bit, or not at all: a bit that changed in any file of the folder is noticed."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

import rankwise as rw
from tests.deploy.saved_toys import mlp
from tests.flips import flipped, unsealed

FILES, CHECKSUM = "files", "checksum"
NAMES = ["experiment.json", "model.safetensors", "rankwise.json", "vocabulary.json"]
FLIPS = 150
"""Bits of a file that are flipped, one after the other."""


def same(one: nn.Module, other: nn.Module) -> bool:
    state = other.state_dict()
    return all(torch.equal(tensor, state[name]) for name, tensor in one.state_dict().items())


def is_loaded(folder: Path, want: nn.Module) -> bool:
    """Whether a folder loads, which it may only as the model that was saved."""
    try:
        loaded = rw.load(folder, nn.Linear(3, 2))
    except rw.CheckpointError:
        return False
    assert same(loaded, want)
    return True


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_is_refused_or_changes_nothing(name: str, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    beside = {"experiment.json": {"seed": 1}, "vocabulary.json": {"kind": "character", "tokens": ["a", "b"]}}
    rw.save(model, tmp_path / "model", beside=beside)
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == NAMES
    path = tmp_path / "model" / name
    num_bits = 8 * path.stat().st_size
    loaded = 0
    # an odd step meets every place in a byte
    for bit in range(0, num_bits, num_bits // FLIPS | 1):
        with flipped(path, bit):
            loaded += is_loaded(tmp_path / "model", model)
    # white space between the words of `rankwise.json` means nothing
    assert loaded == 0 or name == "rankwise.json"
    assert is_loaded(tmp_path / "model", model)


@pytest.mark.parametrize("name", NAMES[:3])
def test_the_file_that_changed_is_named_with_a_remedy(name: str, tmp_path: Path) -> None:
    rw.save(mlp(), tmp_path / "model", beside={"experiment.json": {"seed": 1}})
    path = tmp_path / "model" / name
    # within the last value
    with (
        flipped(path, 8 * path.stat().st_size - 40),
        pytest.raises(rw.CheckpointError, match=rf"{name} must be as .* damaged.* Save the model again"),
    ):
        rw.load(tmp_path / "model", mlp())


def exponent_of_the_first_weight(folder: Path) -> int:
    """The place of the bit that makes a number of 1e38 from one near 1."""
    path = folder / "model.safetensors"
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    return 8 * (8 + length) + 30


def test_a_weight_that_became_huge_is_refused_unless_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(3, 2)
    model.weight.data.fill_(0.75)
    model.bias.data.fill_(0.75)
    rw.save(model, tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    with flipped(path, exponent_of_the_first_weight(tmp_path / "model")):
        with pytest.raises(rw.CheckpointError, match=r"its checksum is \w+.*, but was \w+.*verify=False"):
            rw.load(tmp_path / "model", nn.Linear(3, 2))
        as_it_is = rw.load(tmp_path / "model", nn.Linear(3, 2), verify=False)
        assert max(p.abs().max().item() for p in as_it_is.parameters()) > 1e38
        monkeypatch.setenv("RANKWISE_VERIFY", "0")
        assert same(rw.load(tmp_path / "model", nn.Linear(3, 2)), as_it_is)


def test_a_folder_of_before_checksums_loads(tmp_path: Path, small: nn.Module) -> None:
    rw.save(small, tmp_path / "model")
    path = tmp_path / "model" / "rankwise.json"
    path.write_text(json.dumps(unsealed(json.loads(path.read_text()))))
    assert same(rw.load(tmp_path / "model", mlp()), small)


@pytest.mark.parametrize("entry", [FILES, CHECKSUM])
def test_checksums_that_are_gone_are_missed(entry: str, tmp_path: Path, small: nn.Module) -> None:
    rw.save(small, tmp_path / "model")
    path = tmp_path / "model" / "rankwise.json"
    content = json.loads(path.read_text())
    del content[entry]
    path.write_text(json.dumps(content))
    with pytest.raises(rw.CheckpointError, match=r"rankwise.json must be as .* damaged: its checksum is"):
        rw.load(tmp_path / "model", mlp())


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    rw.save(mlp(), tmp_path / "model", beside={"experiment.json": {"seed": 1}})
    (tmp_path / "model" / "experiment.json").unlink()
    with pytest.raises(rw.CheckpointError, match=r"experiment.json must be as .*No such file"):
        rw.load(tmp_path / "model", mlp())


def test_the_layout_of_the_json_does_not_matter(tmp_path: Path, small: nn.Module) -> None:
    rw.save(small, tmp_path / "model")
    path = tmp_path / "model" / "rankwise.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(content.items())), indent=4))
    assert same(rw.load(tmp_path / "model", mlp()), small)


def test_a_folder_chooses_no_other_place_to_read(tmp_path: Path, small: nn.Module) -> None:
    rw.save(small, tmp_path / "model")
    path = tmp_path / "model" / "rankwise.json"
    content = json.loads(path.read_text())
    del content[CHECKSUM]
    content[FILES]["../elsewhere"] = "0" * 64
    # a checksum that fits, as a stranger would write it
    plain = json.dumps(content, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({**content, CHECKSUM: hashlib.sha256(plain.encode()).hexdigest()}))
    with pytest.raises(rw.CheckpointError, match=r"`files` names model.safetensors, \.\./elsewhere"):
        rw.load(tmp_path / "model", mlp())


# what is not finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_parameter_that_is_not_finite_is_refused_by_its_name(
    value: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = mlp().to(dtype)
    model[2].bias.data[3] = value
    with pytest.raises(rw.CheckpointError, match=r"1 of the \d+ numbers of 2.bias are NaN or infinite.*check_finite"):
        rw.save(model, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
    rw.save(model, tmp_path / "model", check_finite=False)
    loaded = rw.load(tmp_path / "model", mlp())
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0, equal_nan=True)


def test_complex_numbers_must_be_finite_too(tmp_path: Path) -> None:
    model = nn.Linear(2, 2, bias=False)
    model.weight = nn.Parameter(torch.full((2, 2), complex(0, float("nan"))))
    with pytest.raises(rw.CheckpointError, match="4 of the 8 numbers of weight are NaN or infinite"):
        rw.save(model, tmp_path / "model")


class Masked(nn.Module):
    """A causal mask, as models keep it: infinities in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))
        self.register_buffer("empty", torch.zeros(0))


def test_a_mask_of_infinities_is_saved(tmp_path: Path) -> None:
    model = Masked()
    rw.save(model, tmp_path / "model")
    assert same(rw.load(tmp_path / "model", Masked()), model)


def test_weights_of_any_finite_size_are_saved(tmp_path: Path) -> None:
    model = mlp()
    model[0].weight.data.fill_(torch.finfo(torch.float32).max)
    model[2] = nn.Linear(16, 16, bias=False)
    model[2].weight = nn.Parameter(torch.ones(16, 16, dtype=torch.int8), requires_grad=False)
    rw.save(model, tmp_path / "model")
    with safe_open(tmp_path / "model" / "model.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("0.weight"), model[0].weight)
