"""A stranger's folder chooses no amount of memory or time: what it asks for is bounded by the bytes that are there."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import rankwise as rw
from rankwise.deploy.load import dense_model, load, load_empty
from rankwise.files import CHECKSUM, FILES, sealed
from rankwise.lab.models.sru import SRUConfig, SRULanguageModel
from rankwise.lab.models.transformer_xl import TransformerXL, TransformerXLConfig
from tests.deploy.saved_toys import compact, features, mlp

LARGE = 10**9


@contextmanager
def little_memory() -> Iterator[None]:
    """Refuse more than a gigabyte to this process, beyond what it has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + 10**9, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change what a folder says of itself, with the checksums that fit."""
    path = folder / "rankwise.json"
    content = json.loads(path.read_text())
    change(content)
    plain = {key: value for key, value in content.items() if key not in (CHECKSUM, FILES)}
    path.write_text(json.dumps(sealed(plain, [folder / "model.safetensors"])))


@pytest.fixture
def sru(tmp_path: Path) -> Path:
    config = SRUConfig(num_words=9, embedding_width=8, width=8, num_layers=2)
    rw.save(rw.compress(SRULanguageModel(config), rw.Budget(removed=0.2)), tmp_path / "sru")
    return tmp_path / "sru"


@pytest.mark.parametrize("name", ["num_layers", "num_words", "width", "embedding_width"])
@pytest.mark.parametrize("size", [LARGE, 2**62])
@pytest.mark.parametrize("read", [load, load_empty, dense_model])
def test_a_description_of_a_larger_model_is_refused(name: str, size: int, read: Any, sru: Path) -> None:
    edit(sru, lambda content: content["dense"].update({name: size}))
    with little_memory(), pytest.raises(rw.CheckpointError, match="rankwise.json must be as|The skeleton must be"):
        read(sru)


@pytest.mark.parametrize("value", [None, [], "a", 1.5, -1, True, {"architecture": "sru"}])
@pytest.mark.parametrize("name", ["num_layers", "width", "clusters", "dropout", "highway_bias"])
def test_a_description_of_another_kind_is_refused_or_right(name: str, value: Any, sru: Path) -> None:
    edit(sru, lambda content: content["dense"].update({name: value}))
    try:
        assert isinstance(load(sru), SRULanguageModel)
    except rw.CheckpointError as error:
        assert "\n" not in str(error)  # noqa: PT017


def test_masks_are_as_long_as_what_was_saved(tmp_path: Path) -> None:
    for method, key in (("np-l0", "inputs"), ("svd pivot", "outputs")):
        folder = tmp_path / key
        rw.save(compact(mlp, features(), method), folder)

        def lengthen(content: dict[str, Any], key: str = key) -> None:
            for layer in content["layers"].values():
                layer[key] = LARGE

        edit(folder, lengthen)
        with little_memory(), pytest.raises(rw.CheckpointError, match="needs 1,000,000,000 numbers, but no tensor has"):
            load(folder, mlp())


def test_a_shape_that_the_file_of_weights_does_not_have_is_refused(tmp_path: Path) -> None:
    rw.save(nn.Linear(4, 4), tmp_path / "model")
    edit(tmp_path / "model", lambda content: content["tensors"]["weight"].update(shape=[LARGE, 4]))
    with pytest.raises(rw.CheckpointError, match=r"weight is \[4, 4\], but rankwise.json says \[1000000000, 4\]"):
        load(tmp_path / "model", nn.Linear(4, 4))


def test_a_dense_model_out_of_all_proportion_is_not_made(tmp_path: Path) -> None:
    config = TransformerXLConfig(num_words=9, width=8, num_heads=2, head_width=4, inner=8, num_layers=1)
    rw.save(rw.compress(TransformerXL(config), rw.Budget(removed=0.2)), tmp_path / "model")
    edit(tmp_path / "model", lambda content: content["dense"].update(inner=10**8))
    with little_memory(), pytest.raises(rw.CheckpointError, match=r"numbers were saved of a dense model of \d,"):
        dense_model(tmp_path / "model")


@pytest.mark.parametrize("name", ["rankwise.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "endless"])
def test_only_regular_files_are_read(name: str, kind: str, tmp_path: Path) -> None:
    rw.save(nn.Linear(4, 4), tmp_path / "model")
    path = tmp_path / "model" / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)
    with pytest.raises(rw.CheckpointError, match=f"{name}"):
        load(tmp_path / "model", nn.Linear(4, 4))
