"""A `config.json` from a stranger: what it asks for is bounded by its weights, and a change of it is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import rankwise as rw
import rankwise.hf
from rankwise.cli.app import run
from rankwise.deploy.inputs import model_class
from rankwise.files import LARGEST_JSON
from rankwise.hf.bounds import WHOLE
from rankwise.hf.loading import PretrainedModel, empty_model, load_config, load_model
from rankwise.lab.tasks import pretrained


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model, and a compact one."""
    folder = tmp_path_factory.mktemp("folders")
    config = hf.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=32,
    )  # fmt: skip
    model = hf.BertForSequenceClassification(config).eval()
    model.save_pretrained(folder / "dense")
    rw.compress(model, rw.Budget(removed=0.2), embeddings=True).save_pretrained(folder / "small")
    return folder


@pytest.fixture(params=["dense", "small"])
def folder(folders: Path, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders / request.param, tmp_path / request.param))


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if key != WHOLE}))


@pytest.mark.parametrize("name", ["num_hidden_layers", "vocab_size", "max_position_embeddings", "type_vocab_size"])
@pytest.mark.parametrize("size", [10**9, 2**62])
def test_a_larger_model_than_was_saved_is_refused(name: str, size: int, folder: Path) -> None:
    edit(folder, **{name: size})
    with pytest.raises(rw.CheckpointError) as refused:
        load_model(str(folder))
    assert "\n" not in str(refused.value)
    if folder.name == "small":
        with pytest.raises(rw.CheckpointError):
            hf.BertForSequenceClassification.from_pretrained(folder)


def test_a_few_more_layers_than_were_saved_stop_the_building(folder: Path) -> None:
    edit(folder, num_hidden_layers=9_999)
    with pytest.raises(
        rw.CheckpointError, match="it describes a model of more than 1,000 tensors, which are not there"
    ):
        empty_model(str(folder))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "read",
    [load_model, empty_model, load_config, pretrained.load_config, hf.BertForSequenceClassification.from_pretrained],
)
def test_a_longer_configuration_than_any_is_refused_before_transformers_reads_it(
    read: Any, name: str, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be read whole: 64 GiB of a file without content took all memory of a machine."""
    folder = Path(shutil.copytree(folders / "small", tmp_path / "small"))
    with (folder / name).open("a") as file:
        file.write(" " * (LARGEST_JSON + 1))
    read_by = []
    monkeypatch.setattr(hf.PreTrainedConfig, "_dict_from_json_file", lambda *args: read_by.append(args))
    with pytest.raises(rw.CheckpointError, match=f"{name} must have at most 16,777,216 bytes, but has 16,7"):
        read(str(folder))
    assert not PretrainedModel(str(folder)).generates
    assert not read_by


def test_a_long_vocabulary_is_none_too_long(folder: Path) -> None:
    (folder / "vocab.json").write_text(json.dumps({"a": 0}) + " " * LARGEST_JSON)
    load_model(str(folder))


@pytest.mark.parametrize("dtype", ["int8", "bool"])
def test_a_type_that_no_weights_have_is_refused(dtype: str, folder: Path) -> None:
    edit(folder, dtype=dtype)
    for read in (empty_model, load_model):
        with pytest.raises(rw.CheckpointError):
            read(str(folder))


@pytest.mark.parametrize(
    "named",
    [["pipeline"], ["PreTrainedModel"], ["AutoModel"], ["LlamaForCausalLM"], ["torch"], "pipeline", 5, [["a"]], []],
)
def test_what_is_no_model_of_the_configuration_is_not_its_class(named: Any, folders: Path) -> None:
    config = hf.BertConfig()
    config.architectures = named
    assert model_class(config) is None
    config.architectures = ["BertModel"]
    assert model_class(config) is hf.BertModel


@pytest.mark.parametrize("command", ["export {} --to pt2 --out out", "compress {} --removed 0.1 --out out", "plan {}"])
@pytest.mark.parametrize("named", [["pipeline"], 5])
def test_commands_say_so_in_one_line(
    command: str, named: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    edit(folder, architectures=named)
    code = run(command.format(folder).split())
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("rankwise: ")]
    assert code in (0, 2)
    assert sum("warning" not in line for line in errors) == (code == 2)


def test_a_changed_configuration_is_told_and_an_edited_one_is_not_once_it_says_so(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr("rankwise.hf.bounds.logger.warning", told.append)
    folder = Path(shutil.copytree(folders / "small", tmp_path / "small"))
    model = hf.BertForSequenceClassification.from_pretrained(folder)
    assert told == []
    assert not hasattr(model.config, WHOLE)
    path = folder / "config.json"
    text = path.read_text()
    path.write_text(text.replace('"hidden_act": "gelu"', '"hidden_act": "relu"'))
    hf.AutoModelForSequenceClassification.from_pretrained(folder)
    assert ["config.json is not as it was saved" in line for line in told] == [True]
    # a bit in the name of the checksum
    path.write_text(text.replace(WHOLE, "rankwise_checksu-"))
    hf.AutoModelForSequenceClassification.from_pretrained(folder)
    assert len(told) == 2
    path.write_text(text)
    edit(folder)
    hf.BertForSequenceClassification.from_pretrained(folder)
    assert len(told) == 2
    model.save_pretrained(folder)
    again = hf.BertForSequenceClassification.from_pretrained(folder)
    assert len(told) == 2
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])


def test_errors_of_transformers_are_one_of_ours(folders: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders / "small", tmp_path / "small"))
    edit(folder, hidden_act={"a": 1})
    with pytest.raises(rw.CheckpointError, match="transformers cannot load it: .* Save it again."):
        hf.BertForSequenceClassification.from_pretrained(folder)
