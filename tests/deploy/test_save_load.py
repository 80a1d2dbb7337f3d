"""Saving and loading: what comes back is what was saved, and nothing is ever half-done."""

from __future__ import annotations

import concurrent.futures
import copy
import json
import os
import stat
import struct
import subprocess
import sys
import textwrap
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

import rankwise as rw
from rankwise.deploy import save as s
from rankwise.deploy.load import load
from rankwise.deploy.save import save
from rankwise.modules import LowRankHead
from tests.deploy.saved_toys import METHODS, MODELS, Buffered, Tower, compact, features, mlp, tokens
from tests.methods.rows import METHODS as ROWS
from tests.models import Spec, batch


def assert_same(loaded: nn.Module, small: nn.Module, x: Tensor) -> None:
    """Same outputs, tensors, ties and size."""
    assert rw.count(loaded) == rw.count(small)
    assert repr(loaded) == repr(small)
    before, after = small.state_dict(keep_vars=True), loaded.state_dict(keep_vars=True)
    assert list(before) == list(after)
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor), name
        assert isinstance(after[name], nn.Parameter) == isinstance(tensor, nn.Parameter)
    ties = [[list(state).index(n) for n, t in state.items() if t is u] for state in (before,) for u in state.values()]
    assert ties == [[list(after).index(n) for n, t in after.items() if t is u] for u in after.values()]
    assert torch.equal(loaded.eval()(x), small.eval()(x))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_model_is_the_saved_one_bit_for_bit(name: str, method: str, tmp_path: Path) -> None:
    build, inputs = MODELS[name]
    x = inputs()
    small = compact(build, x, method)
    save(small, tmp_path / "small")
    skeleton = build()
    loaded = load(tmp_path / "small", skeleton)
    assert loaded is skeleton
    assert_same(loaded, small, x)
    # the file may go: nothing of the model lies in it
    for path in (tmp_path / "small").iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    assert_same(loaded, small, x)


@pytest.mark.parametrize("method", ["np-l0", "flop-l0", "svd", "svd pivot"])
@pytest.mark.parametrize("name", ["mlp", "root", "tied", "low-rank", "shared", "asks"])
def test_a_skeleton_on_the_meta_device_is_filled(name: str, method: str, tmp_path: Path) -> None:
    build, inputs = MODELS[name]
    x = inputs()
    small = compact(build, x, method)
    save(small, tmp_path / "small")
    with torch.device("meta"):
        skeleton = build()
    assert_same(load(tmp_path / "small", skeleton), small, x)


@pytest.mark.parametrize("method", ["fac", "np-l0", "flop-l0", "svd", "svd pivot"])
def test_a_model_that_kept_nothing_round_trips(method: str, tmp_path: Path) -> None:
    model, x = mlp(), features()
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    small = compact(mlp, x, method, rw.Budget(params=rw.count(model) - matrices))
    assert any(p.numel() == 0 for p in small.parameters())
    save(small, tmp_path / "small")
    assert_same(load(tmp_path / "small", mlp()), small, x)


@pytest.mark.filterwarnings("ignore:These layers are left as they are")
@given(
    width=st.integers(2, 9),
    back=st.sampled_from(["untied", "tied", "bias-tied", "low-rank"]),
    parts=st.lists(st.sampled_from(["linear", "nested", "pair", "shared", "conv1d", "norm"]), max_size=4).map(tuple),
    removed=st.floats(0.05, 0.95),
)
def test_any_structure_round_trips(
    tmp_path_factory: pytest.TempPathFactory, width: int, back: Any, parts: Any, removed: float
) -> None:
    spec = Spec(width=width, back=back, parts=parts)
    small = rw.compress(spec.build(), rw.Budget(removed=removed, of="prunable"), embeddings=True)
    folder = tmp_path_factory.mktemp("any") / "small"
    save(small, folder)
    assert_same(load(folder, spec.build()), small, batch(spec))
    # a compact model is a skeleton too
    assert_same(load(folder, copy.deepcopy(small)), small, batch(spec))


def test_a_loaded_head_has_the_very_weights_of_its_embedding(tmp_path: Path) -> None:
    small = compact(Buffered, tokens(), "flop-l0", rw.Budget(removed=0.7, of="prunable"))
    save(small, tmp_path / "small")
    loaded = load(tmp_path / "small", Buffered())
    assert isinstance(loaded.head, LowRankHead)
    assert loaded.head.embedding.weight is loaded.front[0].weight
    assert loaded.head.projection.weight is loaded.front[1].weight
    assert loaded.front[0].padding_idx == 0


def test_a_module_with_two_names_stays_one_module(tmp_path: Path) -> None:
    small = rw.compress(Tower(), rw.Budget(removed=0.6))
    save(small, tmp_path / "small")
    loaded = load(tmp_path / "small", Tower())
    assert loaded.first is loaded.again
    assert loaded.twin[1].bias is loaded.first[1].bias


class Named(nn.Module):
    """A pair whose layers have names."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Sequential(OrderedDict(down=nn.Linear(10, 4, bias=False), up=nn.Linear(4, 10)))
        self.out = nn.Linear(10, 40)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.pair(x))


def test_a_pair_with_names_that_kept_its_rank_round_trips(tmp_path: Path) -> None:
    dense, x = Named(), features()
    small = compact(Named, x, "flop-l0", rw.Budget(params=rw.count(dense)))
    assert [(name, len(layer.weight)) for name, layer in small.pair.named_children()] == [("down", 4), ("up", 10)]
    for model, name in ((small, "small"), (dense, "dense")):
        save(model, tmp_path / name)
        assert_same(load(tmp_path / name, Named()), model, x)


def test_a_loaded_model_trains_and_keeps_the_modes_of_the_skeleton(tmp_path: Path, small: nn.Module) -> None:
    save(small, tmp_path / "small")
    skeleton = mlp().eval()
    skeleton[0].requires_grad_(False)
    loaded = load(tmp_path / "small", skeleton)
    assert not any(module.training for module in loaded.modules())
    loaded(features()).sum().backward()
    assert all(p.grad is None for p in loaded[0].parameters())
    assert all(p.grad is not None for p in loaded[2].parameters())


def test_the_saved_dtype_wins_over_the_skeletons(tmp_path: Path, small: nn.Module) -> None:
    save(small.to(torch.float16), tmp_path / "small")
    assert {p.dtype for p in load(tmp_path / "small", mlp().double()).parameters()} == {torch.float16}


class Positions(nn.Module):
    """Adds positions that are computed when it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.register_buffer("positions", torch.arange(40.0).view(5, 8).sin(), persistent=False)
        self.register_buffer("order", torch.arange(5), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.words(tokens) + self.positions[self.order])


def test_buffers_that_are_not_saved_get_the_dtype_they_had(tmp_path: Path) -> None:
    small = rw.compress(Positions(), rw.Budget(removed=0.3)).to(torch.bfloat16)
    save(small, tmp_path / "small")
    loaded = load(tmp_path / "small", Positions())
    assert (loaded.positions.dtype, loaded.order.dtype) == (torch.bfloat16, torch.int64)
    assert_same(loaded, small, tokens())


def test_a_buffer_that_was_float32_beside_half_weights_stays_so(tmp_path: Path) -> None:
    model = Positions().to(torch.bfloat16)
    model.positions = model.positions.float()
    save(model, tmp_path / "model")
    assert load(tmp_path / "model", Positions()).positions.dtype is torch.float32
    assert load(tmp_path / "model", Positions().to(torch.bfloat16)).positions.dtype is torch.float32


def test_weights_in_shared_or_strided_memory_are_saved(tmp_path: Path) -> None:
    model = mlp()
    model[0].weight = nn.Parameter(torch.randn(10, 16).t())
    model[2].weight.data = model[4].weight.data.expand(1, 10, 16)[0].t().mm(model[4].weight.data)
    block = torch.randn(400)
    model[0].bias.data, model[2].bias.data = block[:16], block[8:24]
    save(model, tmp_path / "model")
    assert_same(load(tmp_path / "model", mlp()), model, features())


def test_the_files_are_json_and_safetensors_and_nothing_else(tmp_path: Path, small: nn.Module) -> None:
    save(small, tmp_path / "small")
    assert sorted(os.listdir(tmp_path)) == ["small"]
    assert sorted(os.listdir(tmp_path / "small")) == ["model.safetensors", "rankwise.json"]
    structure = json.loads((tmp_path / "small" / "rankwise.json").read_text())
    assert structure["format"] == "rankwise"
    assert structure["version"] == 2
    assert structure["parameters"] == rw.count(small)
    raw = (tmp_path / "small" / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__")
    assert header.keys() == structure["tensors"].keys()
    assert len(raw) == 8 + length + sum(p.numel() * p.element_size() for p in small.parameters())


def test_a_tied_weight_is_stored_once(tmp_path: Path) -> None:
    model = Spec(back="tied").build()
    save(model, tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert sum(tensor.numel() for tensor in stored.values()) == rw.count(model)
    assert json.loads((tmp_path / "model" / "rankwise.json").read_text())["tied"] == {"head.weight": "front.weight"}


def test_both_files_have_the_rights_of_a_new_file(tmp_path: Path, small: nn.Module) -> None:
    (tmp_path / "new").touch()
    save(small, tmp_path / "small")
    rights = stat.S_IMODE((tmp_path / "new").stat().st_mode)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "small").iterdir()] == [rights, rights]


def test_folders_above_are_made(tmp_path: Path, small: nn.Module) -> None:
    save(small, tmp_path / "runs" / "one" / "small")
    assert_same(load(tmp_path / "runs" / "one" / "small", mlp()), small, features())


def test_overwrite_replaces_a_saved_model(tmp_path: Path, small: nn.Module) -> None:
    save(mlp(), tmp_path / "small")
    save(small, tmp_path / "small", overwrite=True)
    assert os.listdir(tmp_path) == ["small"]
    assert_same(load(tmp_path / "small", mlp()), small, features())


def test_an_existing_folder_is_refused(tmp_path: Path, small: nn.Module) -> None:
    save(small, tmp_path / "small")
    with pytest.raises(
        rw.CheckpointError, match=r"`folder` \(--out\) must be new, but .*small exists. .*overwrite=True"
    ):
        save(mlp(), tmp_path / "small")
    assert_same(load(tmp_path / "small", mlp()), small, features())


def test_overwrite_never_deletes_what_is_not_a_saved_model(tmp_path: Path, small: nn.Module) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(rw.CheckpointError, match="nothing else, but .* also holds thesis.tex"):
        save(small, tmp_path, overwrite=True)
    with pytest.raises(rw.CheckpointError, match="must be a folder, but .*thesis.tex is a file"):
        save(small, tmp_path / "thesis.tex", overwrite=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "experiment.json").write_text("{}")
    with pytest.raises(rw.CheckpointError, match="also holds experiment.json"):
        save(small, tmp_path / "run", overwrite=True)
    with pytest.raises(rw.CheckpointError, match="place that can be written, but is .*Choose another place"):
        save(small, tmp_path / "thesis.tex" / "small")
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_gated_model_is_refused(tmp_path: Path) -> None:
    model = mlp()
    rw.Pruner(model, rw.Budget(removed=0.5), anneal_steps=2)
    with pytest.raises(rw.CheckpointError, match="must be compact, but 0 is gated. Use what `pruner.compact"):
        save(model, tmp_path / "model")
    save(mlp(), tmp_path / "dense")
    with pytest.raises(rw.CheckpointError, match="must be the dense form of the saved model, but 0 is gated"):
        load(tmp_path / "dense", model)


def test_a_tensor_without_plain_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(rw.CheckpointError, match="weight is on the meta device"):
        save(nn.Linear(2, 2, device="meta"), tmp_path / "model")
    sparse = nn.Module()
    sparse.register_buffer("table", torch.eye(2).to_sparse())
    with pytest.raises(rw.CheckpointError, match="table is torch.sparse_coo"):
        save(sparse, tmp_path / "model")
    odd = nn.Module()
    odd.register_buffer("table", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(
        rw.CheckpointError, match="type that safetensors has, but one is torch.complex128 instead. Convert it"
    ):
        save(odd, tmp_path / "model")
    assert not list(tmp_path.iterdir())


def run(tmp_path: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, in `tmp_path`."""
    start = "import os, resource, signal\nfrom torch import nn\nimport rankwise as rw\n"
    start += "from rankwise.deploy import save as s\n"
    done = [sys.executable, "-c", start + textwrap.dedent(code)]
    return subprocess.run(done, cwd=tmp_path, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("bytes_left", [100, 20_000])
def test_a_full_disk_leaves_the_old_folder_and_nothing_else(tmp_path: Path, bytes_left: int) -> None:
    save(mlp(), tmp_path / "small")
    before = {path.name: path.read_bytes() for path in (tmp_path / "small").iterdir()}
    code = f"""
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, ({bytes_left}, {bytes_left}))
        for folder in ("small", "new", "runs/new"):
            try:
                s.save(nn.Linear(200, 200), folder, overwrite=True)
            except rw.CheckpointError as error:
                os.write(1, str(error).encode() + b"\\n")
    """
    result = run(tmp_path, code)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 3
    assert all("File too large" in line and "Nothing was changed; free some space" in line for line in lines)
    assert os.listdir(tmp_path) == ["small"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "small").iterdir()} == before


def test_a_killed_save_leaves_no_half_of_a_model(tmp_path: Path) -> None:
    save(mlp(), tmp_path / "small")
    result = run(
        tmp_path,
        """
        # killed when everything is written, and before it gets its name
        os.rename = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
        s.save(nn.Linear(10, 10), "new")
        """,
    )
    assert result.returncode == -9
    assert not (tmp_path / "new").exists()
    result = run(
        tmp_path,
        """
        s.sync = lambda path: os.kill(os.getpid(), signal.SIGKILL)
        s.save(nn.Linear(10, 10), "small", overwrite=True)
        """,
    )
    assert result.returncode == -9
    load(tmp_path / "small", mlp())


@pytest.mark.parametrize("failing", [1, 2])
def test_a_rename_that_fails_puts_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: nn.Module, failing: int
) -> None:
    save(small, tmp_path / "small")
    rename, calls = os.rename, []

    def fail_once(*names: Any) -> None:
        calls.append(names)
        if len(calls) == failing:
            raise PermissionError(13, "Permission denied")
        rename(*names)

    monkeypatch.setattr("rankwise.deploy.save.exchange", lambda one, other: False)
    monkeypatch.setattr(os, "rename", fail_once)
    with pytest.raises(rw.CheckpointError, match="failed: Permission denied. Nothing was changed"):
        save(mlp(), tmp_path / "small", overwrite=True)
    assert os.listdir(tmp_path) == ["small"]
    assert_same(load(tmp_path / "small", mlp()), small, features())


def test_a_model_that_lost_its_name_to_a_killed_save_gets_it_back(tmp_path: Path, small: nn.Module) -> None:
    save(small, tmp_path / "small")
    code = """
        # where names cannot be exchanged in one step: killed between the two
        s.exchange, rename = (lambda one, other: False), os.rename
        os.rename = lambda *names: (rename(*names), os.kill(os.getpid(), signal.SIGKILL))
        s.save(nn.Linear(10, 10), "small", overwrite=True)
    """
    assert run(tmp_path, code).returncode == -9
    with pytest.raises(rw.CheckpointError, match=r"killed while it took the place of .*\.small\.\w{8}\.old: rename"):
        load(tmp_path / "small", mlp())
    with pytest.raises(rw.CheckpointError, match=r"`folder` \(--out\) must be new, but .*small exists"):
        save(nn.Linear(10, 10), tmp_path / "small")
    assert_same(load(tmp_path / "small", mlp()), small, features())
    assert os.listdir(tmp_path) == ["small"]


def test_what_a_killed_save_left_is_swept_by_the_next_and_what_another_writes_is_not(tmp_path: Path) -> None:
    code = """
        s.sync = lambda path: os.kill(os.getpid(), signal.SIGKILL)
        s.save(nn.Linear(10, 10), "small")
    """
    assert run(tmp_path, code).returncode == -9
    assert len(os.listdir(tmp_path)) == 1
    with s.whole_folder(tmp_path / "small") as being_written:
        assert os.listdir(tmp_path) == [being_written.name]
        save(mlp(), tmp_path / "small")
        assert being_written.is_dir()
    assert os.listdir(tmp_path) == ["small"]


def test_readers_beside_a_writer_never_miss_the_model(tmp_path: Path) -> None:
    folder, code = (
        tmp_path / "small",
        """
        import torch
        for number in range(60):
            model = nn.Linear(10, 10)
            nn.init.constant_(model.weight, number)
            nn.init.constant_(model.bias, number)
            s.save(model, "small", overwrite=True)
    """,
    )
    save(nn.Linear(10, 10), folder)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        writing, read = pool.submit(run, tmp_path, code), []
        while not writing.done():
            read.append(load(folder, nn.Linear(10, 10)))
    assert writing.result().returncode == 0, writing.result().stderr
    assert len(read) > 1
    for model in read[1:]:
        values = torch.cat([model.weight.flatten(), model.bias]).unique()
        assert len(values) == 1 or torch.equal(values, torch.cat([read[0].weight.flatten(), read[0].bias]).unique())


def test_an_interrupted_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: nn.Module) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("safetensors.torch.save_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(small, tmp_path / "small")
    assert not list(tmp_path.iterdir())


def test_every_method_is_saved_and_loaded() -> None:
    """A method of the tests' table without a row here would not be."""
    assert {name.split()[0] for name in METHODS} == {name.split()[0] for name in ROWS}
