"""One-shot compression of a pretrained model, from a folder to a folder, by hand and by the command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from hf_families import build, compact
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

import rankwise as rw
from rankwise.cli.app import run
from rankwise.core.plan import Plan
from rankwise.deploy.compress import plan_of, sampled_loss
from rankwise.deploy.inputs import positions_of
from rankwise.deploy.windows import Calibration, text_windows
from rankwise.hf.compress import compress_pretrained, numbering
from rankwise.modules import PivotLinear

WORDS = [f"w{i}" for i in range(50)]


def tokenizer() -> hf.PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({"<unk>": 0, **{word: i + 1 for i, word in enumerate(WORDS)}}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of each of three families, one of them without its tokenizer, and texts."""
    folder = tmp_path_factory.mktemp("models")
    for family in ("llama-tied", "roberta-mlm", "bert"):
        build(family).save_pretrained(folder / family)
        if family != "bert":
            tokenizer().save_pretrained(folder / family)
    (folder / "text.txt").write_text(" ".join(WORDS[i * i % 50] for i in range(2_000)))
    (folder / "short.txt").write_text("w1 w2 w3")
    return folder


def compressed(place: Path, out: Path, **more: Any) -> hf.PreTrainedModel:
    calibration = Calibration(file=place / "text.txt", num_windows=8, window=12, loss_window=6)
    size = compress_pretrained(
        str(place / "llama-tied"), rw.Budget(removed=0.3), out, **{"calibration": calibration, **more}
    )
    model = hf.AutoModelForCausalLM.from_pretrained(out)
    assert rw.count(model) == size.exported <= size.budget == size.dense - -(-3 * size.dense // 10)
    return model


@pytest.mark.parametrize("layout", ["pair", "pivot"])
@pytest.mark.parametrize("embeddings", [False, True])
def test_a_folder_becomes_a_smaller_one_that_stock_loading_takes(
    place: Path, tmp_path: Path, layout: Any, embeddings: bool
) -> None:
    model = compressed(place, tmp_path / "small", layout=layout, embeddings=embeddings)
    found = any(isinstance(module, PivotLinear) for module in model.modules())
    assert found == (layout == "pivot")
    assert isinstance(model.get_input_embeddings(), torch.nn.Embedding) or embeddings
    assert model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3, pad_token_id=0).shape == (1, 6)
    assert hf.AutoTokenizer.from_pretrained(tmp_path / "small")("w1 w2")["input_ids"] == [2, 3]
    assert "30.0" in (tmp_path / "small" / "README.md").read_text()


def test_what_was_compressed_is_compressed_again(place: Path, tmp_path: Path) -> None:
    first = compressed(place, tmp_path / "small")
    calibration = Calibration(file=place / "text.txt", num_windows=4, window=12, loss_window=6)
    size = compress_pretrained(
        str(tmp_path / "small"), rw.Budget(removed=0.1), tmp_path / "smaller", calibration=calibration
    )
    assert size.dense == rw.count(first)
    assert rw.count(hf.AutoModelForCausalLM.from_pretrained(tmp_path / "smaller")) == size.exported


def test_a_classifier_needs_no_calibration(place: Path, tmp_path: Path) -> None:
    size = compress_pretrained(str(place / "bert"), rw.Budget(removed=0.2), tmp_path / "small", embeddings=True)
    model = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "small")
    assert rw.count(model) == size.exported


def test_windows_lie_at_equal_distances_in_the_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(" ".join(WORDS[i // 100] for i in range(5_000)))
    windows = text_windows(numbering(tokenizer()), Calibration(file=tmp_path / "text.txt", num_windows=5, window=20))
    assert len(windows) == 5
    assert all(len(window) == 20 for window in windows)
    # words stand in order: a fifth of them lies between one window and the next
    assert [int(window[5]) // 10 for window in windows] == [0, 1, 2, 3, 4]


def test_tables_of_words_are_left_out_unless_they_are_wanted(place: Path) -> None:
    model = hf.AutoModelForCausalLM.from_pretrained(place / "llama-tied")

    def names(plan: Plan) -> set[str]:
        return {use.name for site in plan.sites for use in site.uses}

    some, all_of_them = (plan_of(model, embeddings=wanted, exclude=()) for wanted in (False, True))
    assert names(all_of_them) - names(some) == {"model.embed_tokens", "lm_head"}
    assert not any("q_proj" in name for name in names(plan_of(model, embeddings=False, exclude=["q_proj"])))


def test_the_loss_of_sampled_answers_has_the_fisher_information_as_second_moment() -> None:
    """The oracle: for logits, diag(p) - p p^T; its diagonal is p (1 - p)."""
    logits = torch.randn(1, 4).expand(60_000, 4).contiguous().requires_grad_()
    output = hf.modeling_outputs.CausalLMOutput(logits=logits)
    (grad,) = torch.autograd.grad(sampled_loss()(output), logits)
    chances = logits[0].detach().softmax(-1)
    torch.testing.assert_close(grad.square().mean(0), chances * (1 - chances), rtol=0.05, atol=0.002)


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that a refused command says; nothing was written."""
    assert run(["compress", *map(str, arguments)]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    return line


def test_the_command_compresses(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--removed", "0.3", "--calibration", str(place / "text.txt"), "--windows", "4", "--window", "12"]
    assert run(["compress", str(place / "llama-tied"), *words, "--out", str(tmp_path / "small"), "--json"]) == 0
    size = json.loads(capsys.readouterr().out)
    assert rw.count(hf.AutoModelForCausalLM.from_pretrained(tmp_path / "small")) == size["exported"]


@pytest.mark.parametrize(
    "words, message",
    [
        (["llama-tied", "--out", "OUT"], "takes one budget, but got none. Example: --removed 0.3."),
        (["llama-tied", "--removed", "0.3", "--params", "9", "--out", "OUT"], "got --removed and --params"),
        (["llama-tied", "--removed", "0.99", "--out", "OUT"], "Remove at most 0."),
        (
            ["llama-tied", "--removed", "0.3", "--calibration", "short.txt", "--out", "OUT"],
            "must hold at least one window of 256 tokens, but .*short.txt has 3. Give a longer text",
        ),
        (
            ["llama-tied", "--removed", "0.3", "--calibration", "none.txt", "--out", "OUT"],
            "none.txt is not: No such file",
        ),
        (
            ["llama-tied", "--removed", "0.3", "--calibration", "llama-tied/model.safetensors", "--out", "OUT"],
            "must be UTF-8, but llama-tied/model.safetensors has the byte 0x",
        ),
        (["bert", "--removed", "0.3", "--calibration", "text.txt", "--out", "OUT"], "needs the model's tokenizer, but"),
        (
            ["llama-tied", "--removed", "0.3", "--calibration", "text.txt", "--window", "30", "--out", "OUT"],
            "A window must be at most 20 tokens, which is all the model reads, but is 30",
        ),
        (
            ["roberta-mlm", "--removed", "0.3", "--calibration", "text.txt", "--window", "20", "--out", "OUT"],
            "A window must be at most 18 tokens, which is all the model reads, but is 20",
        ),
        (["nowhere", "--removed", "0.3", "--out", "OUT"], "MODEL must be a folder or name .* 'nowhere' is not|nowhere"),
        (["llama-tied", "--removed", "0.3", "--out", "text.txt"], "must be a folder, but .*text.txt is a file"),
        (
            ["llama-tied", "--removed", "0.3", "--exclude", "q_prod", "--out", "OUT"],
            "`exclude` must name layers of the model, but 'q_prod' matches none",
        ),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    place: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    before = sorted(path.name for path in place.iterdir())
    assert re.search(message, said(capsys, *words))
    assert sorted(path.name for path in place.iterdir()) == before


def test_a_compact_model_reads_as_much_as_the_dense_one() -> None:
    dense = build("mpnet")
    small = compact("mpnet")
    assert type(small.mpnet.embeddings.position_embeddings) is not nn.Embedding
    most = positions_of(small)
    assert most is not None and most == positions_of(dense) == dense.config.max_position_embeddings - 2
    small(torch.full((1, most), 5))
    with pytest.raises(IndexError):
        small(torch.full((1, most + 1), 5))
