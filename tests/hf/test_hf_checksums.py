"""A folder of transformers with a compact model comes back bit for bit, or not at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import rankwise as rw
from rankwise.hf import save_pretrained
from rankwise.lab.experiments.saved_models import open_folder
from tests.flips import flipped
from tests.hf.hf_families import QUIET, build, compact, pruned

pytestmark = QUIET
FLIPS = 40
CONFIG = "config.json"


def same(model: nn.Module, other: nn.Module) -> bool:
    state, want = model.state_dict(), other.state_dict()
    return state.keys() == want.keys() and all(torch.equal(state[name], want[name]) for name in want)


def load(folder: Path, **settings: Any) -> hf.PreTrainedModel:
    return hf.AutoModelForSequenceClassification.from_pretrained(folder, **settings)


def rewrite(folder: Path, entry: dict[str, Any]) -> None:
    content = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**content, "quantization_config": entry}))


def entry_in(folder: Path) -> Any:
    return json.loads((folder / CONFIG).read_text())["quantization_config"]


def tiny() -> hf.PreTrainedModel:
    sizes = {"vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = hf.BertConfig(**sizes, intermediate_size=4, max_position_embeddings=4)
    return rw.compress(hf.BertForSequenceClassification(config), rw.Budget(removed=0.5, of="prunable"), embeddings=True)


@pytest.fixture(scope="module")
def model() -> hf.PreTrainedModel:
    return compact("bert", "fac", 0.5)


@pytest.fixture(scope="module")
def saved(model: hf.PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "bert"
    save_pretrained(model, folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A saved model to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "bert"))


@pytest.fixture
def shards(model: hf.PreTrainedModel, tmp_path: Path) -> list[Path]:
    """Those of a saved model."""
    model.save_pretrained(tmp_path / "shards", max_shard_size=4_000)
    found = sorted((tmp_path / "shards").glob("*.safetensors"))
    assert len(found) > 2
    return found


# bits


@pytest.mark.parametrize("name", [CONFIG, "model.safetensors"])
def test_a_flipped_bit_is_refused_or_changes_nothing(name: str, tmp_path: Path) -> None:
    model = tiny()
    model.save_pretrained(tmp_path)
    path = tmp_path / name
    content = path.read_bytes()
    start, end = 0, len(content)
    if name == CONFIG:
        # the rest of the configuration is everyone's to edit
        start = content.index(b'"quantization_config"')
        end = content.index(b'"transformers_weights"')
    loaded = 0
    for bit in range(8 * start, 8 * end, 8 * (end - start) // FLIPS | 1):
        with flipped(path, bit):
            try:
                found = load(tmp_path)
            except rw.CheckpointError:
                continue
            except (OSError, ValueError):
                # JSON that is none, or whose entry is not ours any more, is refused by transformers
                assert name == CONFIG
                continue
            loaded += 1
            assert same(found, model)
    assert loaded == 0 or name == CONFIG
    assert same(load(tmp_path), model)


def test_a_weight_that_changed_is_refused_with_its_file_unless_it_is_asked_for(
    folder: Path, model: hf.PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "model.safetensors"
    with flipped(path, 8 * path.stat().st_size - 2):
        for opened in (load, open_folder):
            with pytest.raises(rw.CheckpointError, match=r"bert/model.safetensors .* its checksum is .*VERIFY=0"):
                opened(folder)
        monkeypatch.setenv("RANKWISE_VERIFY", "0")
        assert not same(load(folder), model)
    assert same(load(folder), model)


# the entry in `config.json`


@pytest.mark.parametrize("key", ["layers", "tied", "files", "checksum", "rankwise", "version"])
def test_a_deleted_entry_is_refused(key: str, folder: Path) -> None:
    entry = entry_in(folder)
    del entry[key]
    rewrite(folder, entry)
    with pytest.raises(rw.CheckpointError, match=r"`quantization_config` in config.json .*damaged.* Save the model"):
        load(folder)


def test_a_deleted_layer_is_refused_with_and_without_checksums(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to be a fresh one, of random weights."""
    entry = entry_in(folder)
    layers = entry["layers"]
    for name in layers:
        fewer = {**entry, "layers": {key: layer for key, layer in layers.items() if key != name}}
        rewrite(folder, fewer)
        with pytest.raises(rw.CheckpointError, match=r"`quantization_config` in config.json .*its checksum is"):
            load(folder)
        with monkeypatch.context() as patch:
            patch.setenv("RANKWISE_VERIFY", "0")
            with pytest.raises(rw.CheckpointError, match=rf"config.json must list {name}, .*Save the model again"):
                load(folder)


@pytest.mark.parametrize("key", ["layers", "tied"])
def test_an_entry_that_lacks_a_part_is_refused_without_checksums_too(
    key: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKWISE_VERIFY", "0")
    entry = entry_in(folder)
    del entry[key]
    rewrite(folder, entry)
    with pytest.raises(rw.CheckpointError, match=f"is damaged: it has no `{key}`"):
        load(folder)


def test_a_head_that_is_not_listed_is_refused_without_checksums_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKWISE_VERIFY", "0")
    compact("gpt2", "fac", 0.5).save_pretrained(tmp_path)
    entry = entry_in(tmp_path)
    assert entry["layers"].pop("lm_head")["embedding"] == "transformer.wte.0"
    rewrite(tmp_path, entry)
    with pytest.raises(rw.CheckpointError, match=r"config.json must list lm_head, which is saved in parts"):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_folder_without_the_entry_is_refused(folder: Path) -> None:
    content = json.loads((folder / CONFIG).read_text())
    del content["quantization_config"]
    (folder / CONFIG).write_text(json.dumps(content))
    with pytest.raises((OSError, ValueError), match="its layers are those of the package rankwise"):
        load(folder)


# what people do with folders


def test_the_rest_of_the_configuration_may_be_edited(folder: Path, model: hf.PreTrainedModel) -> None:
    content = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**content, "use_cache": False, "note": "mine"}, indent=8))
    assert same(load(folder), model)
    config = hf.AutoConfig.from_pretrained(folder)
    config.hidden_dropout_prob = 0.3
    config.save_pretrained(folder)
    loaded = load(folder)
    assert same(loaded, model)
    assert loaded.config.hidden_dropout_prob == 0.3


def test_a_model_that_was_trained_on_is_saved_over_itself(folder: Path) -> None:
    model = load(folder)
    with torch.no_grad():
        model.classifier.bias.add_(1)
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    assert same(load(folder), model)
    copied = Path(shutil.copytree(folder, folder.with_name("elsewhere")))
    assert same(load(copied), model)


def test_variants_stand_beside_each_other(folder: Path, model: hf.PreTrainedModel) -> None:
    other = load(folder)
    with torch.no_grad():
        other.classifier.bias.add_(1)
    other.save_pretrained(folder, variant="tuned")
    assert same(load(folder), model)
    assert same(load(folder, variant="tuned"), other)


# shards


def test_shards_load_and_are_checked_each(shards: list[Path], model: hf.PreTrainedModel) -> None:
    assert same(load(shards[0].parent), model)
    for path in shards:
        with (
            flipped(path, 8 * path.stat().st_size - 2),
            pytest.raises(rw.CheckpointError, match=f"{path.name} must be .* its checksum is"),
        ):
            load(path.parent)


def test_a_missing_shard_is_noticed(shards: list[Path]) -> None:
    shards[1].unlink()
    with pytest.raises(OSError, match=shards[1].name):
        load(shards[1].parent)


def test_exchanged_shards_are_noticed(shards: list[Path]) -> None:
    first, second = shards[0].read_bytes(), shards[1].read_bytes()
    shards[0].write_bytes(second)
    shards[1].write_bytes(first)
    with pytest.raises(rw.CheckpointError, match=rf"{shards[0].name} must be .* its checksum is"):
        load(shards[0].parent)


def test_a_shard_that_the_index_does_not_name_is_noticed(shards: list[Path]) -> None:
    path = shards[0].parent / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    gone = shards[-1].name
    index["weight_map"] = {name: shard for name, shard in index["weight_map"].items() if shard != gone}
    path.write_text(json.dumps(index))
    with pytest.raises(rw.CheckpointError, match=f"{gone} .*the index of the shards does not name it"):
        load(path.parent)


def test_a_file_left_by_an_earlier_save_is_not_taken_for_the_model(folder: Path, tmp_path: Path) -> None:
    """transformers prefers a single file to shards, also where the shards are newer."""
    other = load(folder)
    with torch.no_grad():
        other.classifier.bias.add_(1)
    other.save_pretrained(folder, max_shard_size=4_000)
    with pytest.raises(rw.CheckpointError, match=r"model.safetensors .*was not written with the others"):
        load(folder)
    (folder / "model.safetensors").unlink()
    assert same(load(folder), other)
    other.save_pretrained(folder)
    assert same(load(folder), other)


# what is not finite


def test_a_parameter_that_is_not_finite_is_refused_by_its_name(tmp_path: Path) -> None:
    model: Any = compact("bert", "fac", 0.5)
    model.classifier.bias.data[0] = float("nan")
    for save in (model.save_pretrained, lambda folder, **more: save_pretrained(model, folder, **more)):
        with pytest.raises(rw.CheckpointError, match=r"1 of the 2 numbers of classifier.bias are NaN.*check_finite"):
            save(tmp_path / "model")
        assert list(tmp_path.iterdir()) == []
    state = {name: tensor.nan_to_num() for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path / "given", state_dict=state)
    save_pretrained(model, tmp_path / "model", check_finite=False)
    assert load(tmp_path / "model").classifier.bias.isnan().tolist() == [True, False]


def test_masks_of_infinities_dense_and_gated_models_are_left_alone(tmp_path: Path) -> None:
    model: Any = compact("bert", "fac", 0.5)
    model.register_buffer("mask", torch.full((2, 2), float("-inf")))
    model.save_pretrained(tmp_path / "masked")
    dense: Any = build("bert")
    gated: Any = pruned("bert").model
    for name, kept in (("dense", dense), ("gated", gated)):
        kept.classifier.bias.data[0] = float("nan")
        kept.save_pretrained(tmp_path / name)
        assert (tmp_path / name / "model.safetensors").is_file()
