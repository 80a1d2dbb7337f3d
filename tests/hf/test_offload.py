"""Models that do not fit: compressed from disk block by block, or on several devices, they become the same models."""

from __future__ import annotations

import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rankwise as rw
from rankwise.core import calibrate
from rankwise.core.blocks import find_blocks
from rankwise.core.placement import (
    Offload,
    _shares,
    answering,
    block_names,
    num_bytes,
    offload_of,
    spread,
    tensors_of,
)
from rankwise.deploy.compress import compress_folder
from rankwise.deploy.compressed import times_in_turns
from rankwise.deploy.devices import Placer
from rankwise.deploy.inputs import Calibration
from rankwise.errors import RankwiseError
from rankwise.hf.loading import PretrainedModel, load_model
from rankwise.oneshot import Refinement, data, default_plan
from tests.hf.hf_families import WORDS, build
from tests.hf.test_compress import WORDS as TEXT_WORDS
from tests.hf.test_compress import Notes, tokenizer

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:These layers are left as they are")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("offload")
    for family in ("llama-tied", "llama", "gemma", "bert", "t5", "qwen3-moe", "gpt2"):
        build(family).save_pretrained(folder / family)
        tokenizer().save_pretrained(folder / family)
    (folder / "text.txt").write_text(" ".join(TEXT_WORDS[i * i % 50] for i in range(2_000)))
    return folder


def batches(length: int = 12, device: str = "cpu") -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(2, WORDS, (2, 12), generator=generator) for _ in range(5)]
    return [{"input_ids": some[:, :length].to(device)} for some in tokens]


def compressed(model: nn.Module, device: str = "cpu", **settings: Any) -> dict[str, Tensor]:
    settings = {"loss_batches": batches(7, device), "refinement": Refinement(steps=3), **settings}
    small = rw.compress(model, rw.Budget(removed=0.3), batches(12, device), in_place=True, **settings)
    return {name: tensor.cpu() for name, tensor in small.state_dict().items()}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert {name: t.shape for name, t in found.items()} == {name: t.shape for name, t in wanted.items()}
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5, msg=name)


def in_memory(module: nn.Module) -> int:
    """The bytes of a module that are not windows on a file of weights."""
    lines = (line.split() for line in Path("/proc/self/maps").read_text().splitlines() if ".safetensors" in line)
    files = [tuple(int(end, 16) for end in line[0].split("-")) for line in lines]
    tensors = (tensor for _, tensor in tensors_of(module))
    return sum(t.nbytes for t in tensors if not any(first <= t.data_ptr() < last for first, last in files))


@pytest.mark.parametrize("family", ["llama-tied", "llama", "gemma", "bert", "qwen3-moe", "gpt2"])
@pytest.mark.parametrize("more", [{}, {"ranks": "even"}, {"loss": None}], ids=["global", "even", "no loss"])
def test_a_model_on_disk_is_compressed_as_one_in_memory(place: Path, tmp_path: Path, family: str, more: Any) -> None:
    wanted = compressed(load_model(str(place / family)), **more)
    model = load_model(str(place / family))
    offload = Offload(model, CPU, tmp_path)
    found = compressed(model, **more)
    offload.close()
    assert_same(found, wanted)
    assert not any(tmp_path.iterdir())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("family", ["llama-tied", "gemma", "bert"])
def test_a_model_on_disk_is_compressed_on_a_gpu(place: Path, tmp_path: Path, family: str) -> None:
    # not refined, which is in bfloat16 there; the same share of every matrix, as scores may be equal up to rounding
    how: Any = {"device": "cuda", "ranks": "even", "refinement": None}
    wanted = compressed(load_model(str(place / family)).cuda(), **how)
    model = load_model(str(place / family))
    offload = Offload(model, torch.device("cuda"), tmp_path)
    found = compressed(model, **how)
    offload.close()
    assert {t.device.type for name in offload.names for _, t in tensors_of(model.get_submodule(name))} == {"cpu"}
    assert_same(found, wanted)
    made = compress_folder(
        PretrainedModel(str(place / family)),
        *(rw.Budget(removed=0.3), tmp_path / "small"),
        **settings(place, offload="disk", device="cuda"),
    )
    assert made.device == "cuda" and rw.count(load_model(str(tmp_path / "small"))) == made.exported


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_no_more_than_one_block_is_in_memory(place: Path, tmp_path: Path) -> None:
    model = load_model(str(place / "llama"))
    offload = Offload(model, CPU, tmp_path)
    most: list[int] = []
    for name in offload.names:
        model.get_submodule(name).register_forward_pre_hook(lambda *_: most.append(in_memory(model)))
    wanted = model(**batches()[0]).logits
    blocks = [sum(t.nbytes for _, t in tensors_of(model.get_submodule(name))) for name in offload.names]
    assert max(most) <= offload.largest < in_memory(build("llama")) == offload.largest - max(blocks) + sum(blocks)
    compressed(model, refinement=None)
    assert max(most) <= offload.largest
    with answering(model, batches()):
        before = offload.fetched
        answers = [model(**batch).logits for batch in batches()]
        assert offload.fetched == before
    offload.close()
    assert wanted.shape == answers[0].shape
    for batch, answer in zip(batches(), answers, strict=True):
        torch.testing.assert_close(model(**batch).logits, answer)


class OnDevice(TorchDispatchMode):
    """Refuses to compute with the weights of blocks that are not on the device, or to copy them, while another is."""

    def __init__(self, offload: Offload) -> None:
        super().__init__()
        blocks = [offload.model.get_submodule(name) for name in offload.names]
        self.offload, self.homes = offload, {t.data_ptr() for block in blocks for _, t in tensors_of(block)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.offload.current and func.overloadpacket.__name__ not in ("detach", "alias"):
            assert not any(isinstance(t, Tensor) and t.data_ptr() in self.homes for t in tree_leaves(args)), func
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("more", [{}, {"ranks": "even"}, {"loss": None}], ids=["global", "even", "no loss"])
def test_nothing_is_computed_with_weights_on_disk(place: Path, tmp_path: Path, more: Any) -> None:
    model = load_model(str(place / "llama"))
    offload = Offload(model, CPU, tmp_path)
    with OnDevice(offload):
        compressed(model, **more)
        with answering(model, batches()):
            model(**batches()[0])
    offload.close()


@pytest.mark.parametrize("family", ["llama-tied", "gemma"])
def test_large_models_in_memory_get_whole_fisher_matrices_too(
    place: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = compressed(load_model(str(place / family)))
    # the matrices of one block, but not of all
    monkeypatch.setattr(calibrate, "FISHER_BYTES", 4 * 3_000)
    model = load_model(str(place / family))
    assert not calibrate.has_room(default_plan(model).sites)
    read: list[bool] = []
    weighed = data.CalibrationData.weighed

    def watched(self: Any, site: Any, moments: Any) -> Any:
        found = weighed(self, site, moments)
        read.append(found.outputs_OO is not None)
        return found

    monkeypatch.setattr(data.CalibrationData, "weighed", watched)
    assert_same(compressed(model), wanted)
    assert any(read)


def settings(place: Path, **more: Any) -> dict[str, Any]:
    calibration = Calibration(file=place / "text.txt", num_windows=8, window=12, loss_window=6)
    return {"calibration": calibration, "ranks": "global", "refine": 2, **more}


@pytest.mark.parametrize(
    "where", [{"offload": "disk"}, {"device": "cpu,cpu"}, {"offload": "disk", "dtype": torch.bfloat16}]
)
def test_a_folder_is_the_same_wherever_it_was_made(place: Path, tmp_path: Path, where: dict[str, Any]) -> None:
    dtype = {"dtype": torch.bfloat16} if "dtype" in where else {}
    made = {}
    for key, more in (("here", dtype), ("there", where | dtype)):
        source = PretrainedModel(str(place / "llama-tied"))
        given = settings(place, **{"device": "cpu", **more})
        made[key] = compress_folder(source, rw.Budget(removed=0.3), tmp_path / key, **given)
    assert made["here"].quality == made["there"].quality
    here, there = (dict(load_model(str(tmp_path / key)).state_dict()) for key in ("here", "there"))
    assert_same(there, here)
    # in turns where one device has both as a whole
    assert made["here"].in_turns and not made["there"].in_turns
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "there"]


def test_what_cannot_be_done_from_disk_is_refused(place: Path, tmp_path: Path) -> None:
    def refused(match: str, family: str = "llama", **more: Any) -> None:
        given = settings(place, offload="disk", **more)
        with pytest.raises(RankwiseError, match=match):
            compress_folder(PretrainedModel(str(place / family)), rw.Budget(removed=0.3), tmp_path / "small", **given)

    refused("with --method svd and a calibration text", method="width")
    refused("with --method svd and a calibration text", calibration=None)
    refused("on one device", device="cpu,cpu")
    refused("hand each other hidden states and nothing else", family="t5")
    refused("generate its own calibration text", calibration=Calibration(file=None))
    assert not any(tmp_path.iterdir())
    with pytest.raises(RankwiseError, match="an `nn.ModuleList` of blocks holds most of it, but Linear has none"):
        Offload(nn.Linear(2, 2), CPU, tmp_path)
    with pytest.raises(RankwiseError, match='`offload` must be "auto", "disk" or "none", but is \'ssd\''):
        compress_folder(PretrainedModel("unread"), rw.Budget(removed=0.3), tmp_path / "small", offload="ssd")  # type: ignore[arg-type]


def test_files_of_a_killed_command_are_removed_by_the_next_one(place: Path, tmp_path: Path) -> None:
    left = tmp_path / ".small.offload" / "tmp123"
    left.mkdir(parents=True)
    (left / "states-0.safetensors").write_text("large")
    compress_folder(PretrainedModel(str(place / "llama")), rw.Budget(removed=0.3), tmp_path / "small")
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_a_full_disk_is_refused_before_anything_is_written(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(str(place / "llama"))
    offload = Offload(model, CPU, tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, offload.num_bytes))
    with pytest.raises(RankwiseError, match="Read fewer --windows, or choose another --out"):
        compressed(model)
    assert not any(offload.folder.iterdir())


def test_a_model_is_read_from_disk_where_it_does_not_fit(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, notes = load_model(str(place / "llama")), Notes()
    size = sum(t.nbytes for _, t in tensors_of(model))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def card(free: float, model: nn.Module = model, **more: Any) -> torch.device | None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (int(free * size), int(free * size)))
        given: dict[str, Any] = {"device": "auto", "offload": "auto", "low_rank": True, **more}
        placer = Placer(load=lambda: model, dtype=None, folder=Path("unused"), say=notes.say, **given)
        return placer._card(model)

    assert card(3) is None and not notes.said
    assert card(1.9) == torch.device("cuda")
    assert "compressed from disk" in notes.said[0]
    assert card(1.9, offload="none") is None
    assert card(1.9, low_rank=False) is None
    assert card(1.9, load_model(str(place / "t5"))) is None


@given(st.lists(st.integers(1, 100), min_size=3, max_size=12), st.integers(2, 3), st.integers(0, 300))
def test_devices_get_consecutive_blocks_in_fair_shares(sizes: list[int], number: int, outside: int) -> None:
    places = _shares(sizes, number, outside)
    assert places == sorted(places)
    assert set(places) | {0} == set(range(number))
    loads = [sum(s for s, p in zip(sizes, places, strict=True) if p == i) for i in range(number)]
    loads[0] += outside
    fair = (outside + sum(sizes)) / number
    assert max(loads) <= max(fair, outside) + max(sizes)


@pytest.fixture
def two_gpus() -> list[torch.device]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return [torch.device("cuda:0"), torch.device("cuda:1")]


def test_blocks_on_two_gpus_give_what_one_device_gives(place: Path, two_gpus: list[torch.device]) -> None:
    model, alone = load_model(str(place / "llama")), load_model(str(place / "llama"))
    assert spread(model, two_gpus) == two_gpus
    given = [{"input_ids": batch["input_ids"].cuda(0)} for batch in batches()]
    assert find_blocks(model, given[0]) == block_names(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for each, data in ((model, given), (alone, batches())):
            rw.compress(each, rw.Budget(removed=0.3), data, in_place=True, target="cpu", ranks="even")
    found = model(**given[0]).logits.cpu()
    torch.testing.assert_close(found, alone(**batches()[0]).logits, rtol=1e-2, atol=1e-3)


class Mixed(nn.Module):
    """Blocks in single precision behind an embedding in half."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 4, dtype=torch.bfloat16)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_on_several_devices_weights_keep_their_precision_unless_another_is_asked_for(
    tmp_path: Path, dtype: torch.dtype | None
) -> None:
    placer = Placer(Mixed, "cpu,cpu", "none", dtype, tmp_path / "unused", low_rank=False, say=Notes().say)
    found = [parameter.dtype for parameter in placer().parameters()]
    assert found == ([dtype] * 5 if dtype else [parameter.dtype for parameter in Mixed().parameters()])


def test_times_of_a_model_that_is_read_from_disk_are_not_those_of_the_dense_one(place: Path, tmp_path: Path) -> None:
    """With the small model beside it, the dense one may no longer fit on the device where it was before."""
    dense, small = (load_model(str(place / "llama")) for _ in range(2))
    assert times_in_turns(lambda: dense, small, 12, num_bytes(dense))
    offload = Offload(dense, CPU, tmp_path)
    assert not times_in_turns(lambda: dense, small, 12, num_bytes(dense))
    offload.close()


def test_an_offloaded_model_is_no_longer_one_when_it_is_closed(place: Path, tmp_path: Path) -> None:
    model = load_model(str(place / "llama"))
    offload = Offload(model, CPU, tmp_path)
    assert offload_of(model) is offload
    with pytest.raises(RankwiseError, match="compressed in place"):
        rw.compress(model, rw.Budget(removed=0.3), batches())
    offload.close()
    assert offload_of(model) is None
