"""One-shot compression of a pretrained model, from a folder to a folder, by hand and by the command."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn

import rankwise as rw
import rankwise.hf
from rankwise.cli.app import run
from rankwise.core.plan import Plan
from rankwise.deploy.compress import Listener, compress_folder
from rankwise.deploy.compressed import Compressed, RefinedFolder
from rankwise.deploy.documents import SpecialTokens
from rankwise.deploy.inputs import (
    Calibration,
    KeptBack,
    encoder,
    positions_of,
    read_windows,
    special_tokens,
    text_windows,
)
from rankwise.files import sealed, write_json
from rankwise.hf.generated import generated
from rankwise.hf.loading import PretrainedModel, generated_windows
from rankwise.modules import PivotLinear
from rankwise.oneshot import default_plan, sampled_loss
from tests.flips import flipped
from tests.hf.hf_families import ENCODER, build, compact

WORDS = [f"w{i}" for i in range(50)]


def tokenizer() -> hf.PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({"<unk>": 0, **{word: i + 1 for i, word in enumerate(WORDS)}}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def marked_tokenizer() -> hf.PreTrainedTokenizerFast:
    """One that puts [CLS] before a text and [SEP] behind it."""
    made = tokenizer()
    ends = [("[CLS]", 51), ("[SEP]", 52)]
    made.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]"})
    made._tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return made


class Notes(Listener):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of each of three families, one of them without its tokenizer, and texts."""
    folder = tmp_path_factory.mktemp("models")
    for family in ("llama-tied", "roberta-mlm", "bert", "gemma", "bart", "t5"):
        build(family).save_pretrained(folder / family)
        if family != "bert":
            tokenizer().save_pretrained(folder / family)
    torch.manual_seed(0)
    hf.BertModel(hf.BertConfig(**ENCODER)).save_pretrained(folder / "encoder")
    marked_tokenizer().save_pretrained(folder / "encoder")
    (folder / "text.txt").write_text(" ".join(WORDS[i * i % 50] for i in range(2_000)))
    (folder / "short.txt").write_text("w1 w2 w3")
    (folder / "empty.txt").write_text("")
    (folder / "foreign.txt").write_text("жук лиса " * 200)
    (folder / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "w1"}]}\n' * 50)
    return folder


def compress_pretrained(name: str, budget: rw.Budget, out: Path, **settings: Any) -> Compressed:
    return compress_folder(PretrainedModel(name), budget, out, **settings)


def compressed(place: Path, out: Path, **more: Any) -> hf.PreTrainedModel:
    calibration = Calibration(file=place / "text.txt", num_windows=8, window=12, loss_window=6)
    size = compress_pretrained(
        *(str(place / "llama-tied"), rw.Budget(removed=0.3), out),
        **{"calibration": calibration, "ranks": "global", "refine": 0, **more},
    )
    model = hf.AutoModelForCausalLM.from_pretrained(out)
    assert rw.count(model) == size.exported <= size.budget == size.dense - -(-3 * size.dense // 10)
    return model


@pytest.mark.parametrize("layout", [None, "pair", "pivot"])
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


def test_python_and_the_folder_have_the_same_defaults(place: Path, tmp_path: Path) -> None:
    small = compressed(place, tmp_path / "small")
    source = PretrainedModel(str(place / "llama-tied"))
    model = source.load()
    data = source.read(Calibration(file=place / "text.txt", num_windows=8, window=12, loss_window=6))(model)
    same = rw.compress(model, rw.Budget(removed=0.3), data.batches, loss_batches=data.loss_batches)
    state, want = small.state_dict(), same.state_dict()
    assert state.keys() == want.keys()
    assert all(torch.equal(state[name], want[name]) for name in want)


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


# layers of random weights may be worth nothing
@pytest.mark.filterwarnings("ignore:These layers are left as they are")
@pytest.mark.parametrize("family", ["gemma", "bart"])
@pytest.mark.parametrize("layout", ["pair", "pivot"])
def test_a_scaled_table_of_words_is_compressed_if_it_is_wanted(
    place: Path, tmp_path: Path, family: str, layout: Any
) -> None:
    calibration = Calibration(file=place / "text.txt", num_windows=4, window=12, loss_window=6)
    given: dict[str, Any] = {
        "calibration": calibration,
        "layout": layout,
    }
    size = compress_pretrained(
        str(place / family), rw.Budget(removed=0.7), tmp_path / "small", embeddings=True, refine=0, **given
    )
    kind = hf.AutoModelForCausalLM if family == "gemma" else hf.AutoModelForSeq2SeqLM
    model, dense = (kind.from_pretrained(each).eval() for each in (tmp_path / "small", place / family))
    assert rw.count(model) == size.exported <= size.budget
    table, before = model.get_input_embeddings(), dense.get_input_embeddings()
    assert isinstance(table, nn.Sequential)
    # the table is scaled as before: by the root of the width
    words = torch.arange(9)
    rows = table[0].weight[:9] @ table[1].weight.t()
    torch.testing.assert_close(table(words), 4.0 * rows)
    torch.testing.assert_close(before(words), 4.0 * before.weight[:9])
    assert 0 < (table(words) - before(words)).norm() < before(words).norm()


@pytest.mark.filterwarnings("ignore:These layers are left as they are")
def test_an_encoder_decoder_is_measured_by_what_the_dense_one_says(place: Path, tmp_path: Path) -> None:
    calibration = Calibration(file=place / "text.txt", num_windows=4, window=12, loss_window=6)
    size = compress_pretrained(
        str(place / "t5"), rw.Budget(removed=0.2), tmp_path / "small", calibration=calibration, embeddings=True
    )
    model = hf.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "small")
    assert rw.count(model) == size.exported <= size.budget
    assert size.quality is not None and "likeliest words" in size.quality.measure
    assert min(size.quality.dense, size.quality.small) >= 1


def test_what_is_left_out_is_said_and_what_the_layers_lose_instead(place: Path, tmp_path: Path) -> None:
    notes = Notes()
    size = compress_pretrained(
        *(str(place / "gemma"), rw.Budget(removed=0.1), tmp_path / "small"), embeddings=False, listener=notes
    )
    model = hf.AutoModelForCausalLM.from_pretrained(place / "gemma")
    words = model.get_input_embeddings().weight.numel()
    lost = (size.dense - size.budget) / default_plan(model, embeddings=False).params
    assert notes.said == [
        f"Left out: model.embed_tokens ({words:,} parameters, {words / size.dense:.1%} of the model): "
        "an embedding, which embeddings=True (--embeddings yes) compresses.",
        f"So the layers that are compressed lose {lost:.1%} of their parameters.",
    ]
    notes = Notes()
    compress_pretrained(str(place / "gemma"), rw.Budget(removed=0.1), tmp_path / "all", listener=notes)
    assert notes.said == []


def test_texts_begin_as_a_model_expects(place: Path) -> None:
    decoder, bidirectional = (hf.AutoConfig.from_pretrained(place / name) for name in ("llama-tied", "encoder"))
    plain, marked = tokenizer(), marked_tokenizer()
    # BOS is the configuration's where the tokenizer has none, and the tokenizer's where it has one
    assert special_tokens(plain, decoder) == SpecialTokens((decoder.bos_token_id,))
    plain.add_special_tokens({"bos_token": "w7"})
    assert special_tokens(plain, decoder) == SpecialTokens((8,))
    # what a tokenizer adds itself is not added twice; a text of a decoder goes on
    assert special_tokens(marked, decoder) == SpecialTokens((51,))
    assert special_tokens(marked, bidirectional) == SpecialTokens((51,), (52,))
    assert special_tokens(tokenizer(), bidirectional) == SpecialTokens()
    decoder.bos_token_id = None
    assert special_tokens(tokenizer(), decoder) == SpecialTokens()


def test_the_pooler_of_an_encoder_is_left_alone(place: Path, tmp_path: Path) -> None:
    """The loss of its hidden states does not depend on it: it went to rank 0, and all sentences were pooled to one."""
    calibration = Calibration(file=place / "text.txt", num_windows=8, window=12, loss_window=8)
    with pytest.warns(UserWarning, match=r"left as they are, and others lose more.*: pooler\.dense\."):
        size = compress_pretrained(
            str(place / "encoder"), rw.Budget(removed=0.2), tmp_path / "small", calibration=calibration
        )
    small, dense = (hf.BertModel.from_pretrained(each).eval() for each in (tmp_path / "small", place / "encoder"))
    assert rw.count(small) == size.exported <= size.budget
    assert torch.equal(small.pooler.dense.weight, dense.pooler.dense.weight)
    pooled = small(torch.tensor([[51, 3, 9, 52], [51, 17, 30, 52]])).pooler_output
    assert (pooled[0] - pooled[1]).abs().max() > 1e-4
    assert size.quality is not None and size.quality.dense == 0 < size.quality.small < 1


MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    {"idx": 3, "name": "3", "path": "../outside", "type": "sentence_transformers.models.Dense"},
]


def test_files_of_sentence_transformers_travel_but_no_code(place: Path, tmp_path: Path) -> None:
    source = tmp_path / "sentences"
    shutil.copytree(place / "encoder", source)
    inside = {
        "modules.json": json.dumps(MODULES),
        "sentence_bert_config.json": '{"max_seq_length": 12}',
        "config_sentence_transformers.json": "{}",
        "1_Pooling/config.json": '{"word_embedding_dimension": 16}',
    }
    others = ["1_Pooling/pytorch_model.bin", "1_Pooling/code.py", "code.py", "3_Unnamed/config.json"]
    for name in [*inside, *others]:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(inside.get(name, "{}"))
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "config.json").write_text("{}")
    notes, out = Notes(), tmp_path / "small"
    # a second time over the first
    for overwrite in (False, True):
        compress_pretrained(str(source), rw.Budget(removed=0.2), out, overwrite=overwrite, listener=notes)
    assert {name: (out / name).read_text() for name in inside} == inside
    assert not any((out / name).exists() for name in others)
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == [".eval_results", "1_Pooling"]
    assert notes.said[-1].endswith("files are: 1_Pooling/code.py, 1_Pooling/pytorch_model.bin.")
    (out / "mine").mkdir()
    with pytest.raises(rw.CheckpointError, match="also holds the folder mine"):
        compress_pretrained(str(source), rw.Budget(removed=0.2), out, overwrite=True)


def test_windows_lie_at_equal_distances_in_the_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(" ".join(WORDS[i // 100] for i in range(5_000)))
    windows = text_windows(encoder(tokenizer()), Calibration(file=tmp_path / "text.txt", num_windows=5, window=20))
    assert len(windows) == 5
    assert all(len(window) == 20 for window in windows)
    # words stand in order: a fifth of them lies between one window and the next
    assert [int(window[5]) // 10 for window in windows] == [0, 1, 2, 3, 4]


def test_several_texts_give_equally_many_windows_for_both_uses(tmp_path: Path) -> None:
    for name, word in (("a.txt", "w1"), ("b.txt", "w2"), ("c.txt", "w3")):
        (tmp_path / name).write_text(" ".join([word] * 2_000))
    files = [tmp_path / name for name in ("a.txt", "b.txt", "c.txt")]
    calibration = Calibration(file=files[0], also=tuple(files[1:]), num_windows=12, window=10)
    windows = read_windows(encoder(tokenizer()), calibration)
    for part, number in ((windows.used, 4), (windows.kept_back, 1)):
        assert sorted(int(window[3]) for window in part) == sorted([2, 3, 4] * number)
    assert windows.notes == []


def test_a_decoder_generates_its_own_calibration_text(place: Path, tmp_path: Path) -> None:
    """Words are as likely as the model finds them: its loss on them is the entropy of its answers."""
    model = hf.AutoModelForCausalLM.from_pretrained(place / "llama-tied").eval()
    calibration = Calibration(file=None, num_windows=64, window=12)
    state = torch.get_rng_state()
    windows = generated_windows(model, calibration, SpecialTokens((1,)))
    assert torch.equal(torch.get_rng_state(), state)
    assert (len(windows.used), len(windows.kept_back)) == (64, 16)
    text = torch.stack(windows.used)
    assert text.shape == (64, 12) and bool((text[:, 0] == 1).all())
    with torch.no_grad():
        logs = model(text[:, :-1]).logits.log_softmax(-1)
    entropy = -(logs.exp() * logs).sum(-1).mean()
    assert -logs.gather(-1, text[:, 1:, None]).mean() == pytest.approx(entropy.item(), rel=0.05)
    # a model that expects nothing before a text, and one that reads less than a window
    plain = generated_windows(model, Calibration(file=None, num_windows=3, window=99), SpecialTokens())
    assert plain.used[0].shape == (model.config.max_position_embeddings,)
    words = ["compress", str(place / "llama-tied"), "--removed", "0.3", "--windows", "4", "--refine", "2"]
    assert run([*words, "--out", str(tmp_path / "small")]) == 0


def test_text_is_generated_whatever_settings_a_folder_has_for_answers(place: Path) -> None:
    """As likely as the model finds it, and not as it would be for a user."""
    model = hf.AutoModelForCausalLM.from_pretrained(place / "llama-tied").eval()
    calibration, found = Calibration(file=None, num_windows=3, window=8), []
    settings = {"repetition_penalty": 9.0, "no_repeat_ngram_size": 1, "min_p": 0.5, "num_beams": 2, "max_length": 3}
    for given in ({}, settings):
        model.generation_config.update(**given)
        found.append(torch.stack(generated_windows(model, calibration, SpecialTokens((1,))).used))
    assert torch.equal(*found)
    assert model.generation_config.repetition_penalty == 9.0


def test_text_is_generated_by_any_seed_and_without_an_end_that_is_a_word(place: Path) -> None:
    model: Any = PretrainedModel(str(place / "llama-tied")).load()
    assert torch.equal(
        generated(model, 2, 6, SpecialTokens(), seed=3), generated(model, 2, 6, SpecialTokens(), seed=3 + 2**63)
    )
    words = model.config.vocab_size
    for end in (None, 0, words, -1):
        model.config.eos_token_id = end
        windows = generated(model, 2, 6, SpecialTokens())
        assert windows.shape == (2, 6) and int(windows.max()) < words


def test_text_is_generated_by_a_model_with_several_ends_of_a_text(place: Path) -> None:
    model = hf.AutoModelForCausalLM.from_pretrained(place / "llama-tied").eval()
    calibration, found = Calibration(file=None, num_windows=3, window=8), []
    for ends in (3, [3, 5]):
        model.config.eos_token_id = ends
        found.append(torch.stack(generated_windows(model, calibration, SpecialTokens()).used))
    assert torch.equal(*found)


def test_the_models_are_compared_on_texts_of_other_kinds_too(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They change nothing, and each has the figures that it would have if it were kept back."""
    (tmp_path / "other.txt").write_text(" ".join(WORDS[i * i * i % 50] for i in range(2_000)))
    words = ["compress", str(place / "llama-tied"), "--removed", "0.3", "--window", "12", "--windows", "8"]
    words += ["--calibration", str(place / "text.txt"), "--refine", "0", "--device", "cpu", "--json", "--out"]
    assert run([*words, str(tmp_path / "a")]) == 0
    plain = json.loads(capsys.readouterr().out)["quality"]
    assert run([*words, str(tmp_path / "b"), "--measure", str(tmp_path / "other.txt")]) == 0
    found = json.loads(capsys.readouterr().out)["quality"]
    assert plain["elsewhere"] == {}
    assert {**found, "elsewhere": {}} == plain
    one, two = (hf.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in "ab")
    assert all(torch.equal(tensor, two.state_dict()[name]) for name, tensor in one.state_dict().items())
    asked = Calibration(file=tmp_path / "other.txt", num_windows=2, window=12)
    kept = [{"input_ids": torch.stack(text_windows(encoder(tokenizer()), asked, special=SpecialTokens((1,))))}]
    dense = hf.AutoModelForCausalLM.from_pretrained(place / "llama-tied")
    by_hand = KeptBack(dense, kept, is_decoder=True).quality(one)
    assert found["elsewhere"] == {str(tmp_path / "other.txt"): pytest.approx([by_hand.dense, by_hand.small])}


def test_who_waits_for_generated_text_sees_how_far_it_is(place: Path, tmp_path: Path) -> None:
    class Told(Listener):
        def __init__(self) -> None:
            self.told: list[tuple[int, int]] = []

        def progress(self, what: str, done: int, total: int) -> None:
            if what == "generating":
                self.told.append((done, total))

    given: dict[str, Any] = {"refine": 0, "device": "cpu", "listener": (listener := Told())}
    # and 16 more that are kept back
    given["calibration"] = Calibration(file=None, num_windows=150, window=3)
    compress_pretrained(str(place / "llama-tied"), rw.Budget(removed=0.2), tmp_path / "small", **given)
    assert listener.told == [(0, 166), (64, 166), (128, 166), (166, 166)]


def test_a_text_is_mixed_with_the_models_own(place: Path, tmp_path: Path) -> None:
    """Half of the windows are of each, and what is kept back of either is measured."""
    calibration = Calibration(file=place / "text.txt", num_windows=8, window=12, generated=True)
    model = hf.AutoModelForCausalLM.from_pretrained(place / "llama-tied")
    data = PretrainedModel(str(place / "llama-tied")).read(calibration)(model)
    used = torch.cat([batch["input_ids"] for batch in data.batches])
    alone = PretrainedModel(str(place / "llama-tied")).read(replace(calibration, num_windows=4, generated=False))(model)
    text = torch.cat([batch["input_ids"] for batch in alone.batches])
    assert used.shape == (8, 12)
    assert [bool((text == window).all(1).any()) for window in used] == [True, False] * 4
    assert data.texts == ["", "text of its own"]
    out = tmp_path / "small"
    made = compress_pretrained(
        str(place / "llama-tied"), rw.Budget(removed=0.3), out, calibration=calibration, refine=0
    )
    assert made.quality is not None and list(made.quality.elsewhere) == ["text of its own"]


def test_who_has_given_no_text_is_told_what_was_read(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, line in (
        ("llama-tied", "has generated its own: 4 windows of 12 tokens"),
        ("roberta-mlm", "generates none"),
    ):
        words = ["compress", str(place / name), "--removed", "0.2", "--windows", "4", "--window", "12", "--refine", "0"]
        assert run([*words, "--out", str(tmp_path / name)]) == 0
        assert line in " ".join(capsys.readouterr().err.split())


def test_work_that_was_stopped_while_blocks_were_refined_goes_on(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with the same weights, trains only what was not, and leaves nothing behind."""
    calibration = Calibration(file=place / "text.txt", num_windows=8, window=12)
    given: dict[str, Any] = {"calibration": calibration, "ranks": "global", "refine": 3, "device": "cpu"}
    source = str(place / "llama-tied")
    compress_pretrained(source, rw.Budget(removed=0.3), tmp_path / "whole", **given)
    trained = []

    class Stops(Notes):
        def progress(self, what: str, done: int, total: int) -> None:
            if what == "refining":
                trained.append(done)
                if len(trained) == 5:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress_pretrained(source, rw.Budget(removed=0.3), tmp_path / "small", **given, listener=Stops())
    assert [path.name for path in sorted(tmp_path.iterdir())] == [".small.refining", "whole"]
    compress_pretrained(source, rw.Budget(removed=0.3), tmp_path / "small", **given, listener=Stops())
    assert trained == [1, 2, 3, 4, 5, 4, 5, 6]
    one, two = (hf.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("whole", "small"))
    assert all(torch.equal(tensor, two.state_dict()[name]) for name, tensor in one.state_dict().items())
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["small", "whole"]


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_a_flipped_bit_in_a_refined_block_makes_it_be_trained_again(suffix: str, tmp_path: Path) -> None:
    blocks = RefinedFolder(tmp_path / "small", {"model": "toy"})
    for number in range(2):
        blocks.save(number, {"weight": torch.full((2, 2), float(number))})
    path = next(blocks.place.glob(f"*1{suffix}"))
    content = path.read_bytes()
    for position in range(0, 8 * len(content), 7):
        if not content[position // 8 : position // 8 + 1].isspace():
            with flipped(path, position):
                assert blocks.load(1) is None
    for number in range(2):
        found = blocks.load(number)
        assert found is not None and torch.equal(found["weight"], torch.full((2, 2), float(number)))
    assert RefinedFolder(tmp_path / "small", {"model": "other"}).load(1) is None


def test_blocks_that_were_refined_with_other_settings_are_not_taken(place: Path, tmp_path: Path) -> None:
    calibration = Calibration(file=place / "text.txt", num_windows=8, window=12)
    given: dict[str, Any] = {"calibration": calibration, "ranks": "global", "device": "cpu"}
    kept = tmp_path / ".small.refining"
    kept.mkdir()
    block = kept / "block-0000.safetensors"
    save_file({"weight": torch.ones(2)}, block)
    write_json(block.with_suffix(".json"), sealed({"removed": "0.4"}, [block]))
    made = compress_pretrained(
        *(str(place / "llama-tied"), rw.Budget(removed=0.3), tmp_path / "small"), refine=2, **given
    )
    assert made.exported <= made.budget and not kept.exists()


def test_settings_of_generate_that_cannot_be_saved_are_refused_before_the_work(place: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(place / "llama-tied", tmp_path / "odd"))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "do_sample": False}))
    with pytest.raises(rw.CheckpointError, match="generation_config.json must be .*`temperature`.* or remove it.$"):
        PretrainedModel(str(folder)).load()
    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(rw.CheckpointError, match="generation_config.json must be"):
        rankwise.hf.save_pretrained(model, tmp_path / "saved")
    model.generation_config.do_sample = True
    rankwise.hf.save_pretrained(model, tmp_path / "saved")


def test_the_command_compresses_and_heals(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compress", str(place / "llama-tied"), "--removed", "0.3", "--window", "12", "--windows", "8"]
    words += ["--refine", "0", "--device", "cpu", "--out", str(tmp_path / "small"), "--json", "--heal"]
    assert run([*words, "4", "--calibration", "none"]) == 2
    assert "`--heal` needs a text, but there is none" in capsys.readouterr().err
    texts = {"small": [], "mixed": ["generated", place / "text.txt"], "given": [place / "text.txt"]}
    for name, given in texts.items():
        words[words.index("--out") + 1] = str(tmp_path / name)
        assert run([*words, "4", *(str(word) for text in given for word in ("--calibration", text))]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["healed"]["parameters"] == found["exported"]
        assert rw.count(hf.AutoModelForCausalLM.from_pretrained(tmp_path / name)) == found["exported"]
        card = (tmp_path / name / "README.md").read_text()
        assert ("windows of the dense model's own" in card) == (name != "given")
        assert ("on text.txt" in card) == (name != "small")


def test_what_cannot_be_healed_is_refused_before_it_is_compressed(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out, model = tmp_path / "short.txt", tmp_path / "small", str(place / "llama-tied")
    text.write_text("w1 w2 " * 12)
    words = ["compress", model, "--removed", "0.3", "--window", "6", "--refine", "0", "--device", "cpu", "--heal"]

    def refused(*more: object) -> str:
        assert run([*words, *map(str, more)]) == 2
        assert not out.exists()
        shown = capsys.readouterr().err
        assert "Compressing" not in shown and "Generating" not in shown
        return shown

    given = ("--calibration", text, "--out", out)
    line = refused(4, *given)
    assert "`text` must hold at least 2 windows of 20 tokens, one of them to hold out, but" in line
    assert line == refused(4, *given, "--calibration", "generated")
    # it is what healing says
    assert run(["compress", model, "--removed", "0.3", "--calibration", "none", "--out", str(tmp_path / "made")]) == 0
    capsys.readouterr()
    heal = ["heal", str(tmp_path / "made"), "--teacher", model, "--text", str(text), "--device", "cpu", "--out"]
    assert run([*heal, str(tmp_path / "healed")]) == 2
    assert line.splitlines()[-1] == capsys.readouterr().err.splitlines()[-1]
    assert "`--heal` must be 0 or at least 2 steps, but is 1" in refused(1, "--out", out)
    # what compression refuses is said in its own words
    assert "`calibration` must be a text, but" in refused(4, "--calibration", tmp_path / "none.txt", "--out", out)
    (tmp_path / "small.healing").mkdir()
    (tmp_path / "small.healing/mine.txt").write_text("mine")
    assert "small.healing must be where a healing keeps its state, but holds" in refused(4, "--out", out)


def test_tables_of_words_are_left_out_unless_they_are_wanted(place: Path) -> None:
    model = hf.AutoModelForCausalLM.from_pretrained(place / "llama-tied")

    def names(plan: Plan) -> set[str]:
        return {use.name for site in plan.sites for use in site.uses}

    some, all_of_them = (default_plan(model, embeddings=wanted) for wanted in (False, True))
    assert names(all_of_them) - names(some) == {"model.embed_tokens", "lm_head"}
    assert not any("q_proj" in name for name in names(default_plan(model, exclude=["q_proj"])))


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
    quality = size["quality"]
    assert quality["measure"] == "perplexity" and quality["windows"] == 1
    assert min(quality["dense"], quality["small"]) > 1
    assert list(size["speed"]) == ["12", "1"]
    assert all(time > 0 for times in size["speed"].values() for time in times)
    assert size["device"] == "cpu" or torch.cuda.is_available()


def test_the_last_line_has_size_quality_and_speed(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--removed", "0.3", "--calibration", str(place / "text.txt"), "--window", "12", "--device", "cpu"]
    out = str(tmp_path / "small")
    assert run(["compress", str(place / "llama-tied"), *words, "--dtype", "bfloat16", "--out", out]) == 0
    said = capsys.readouterr()
    number = r"[\d.e+]+"
    assert re.search(
        rf"{re.escape(out)} has [\d,]+ of [\d,]+ parameters, 30\.\d+% removed \(at most [\d,]+ were asked for\); "
        rf"perplexity {number} dense, {number} small on 16 windows kept back; "
        rf"12 tokens {number} ms dense, {number} ms small; 1 token {number} ms dense, {number} ms small on cpu\. "
        rf"Next: rankwise heal {re.escape(out)} --teacher {re.escape(str(place / 'llama-tied'))} --text .* --out ",
        " ".join(said.out.split()),
    )
    assert "Compressing layer by layer" in said.err
    assert hf.AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16


SLOWER = "The small model is slower than dense of the same precision "


@pytest.mark.parametrize(
    "later, wanted",
    [
        (8.0, [SLOWER + "(0.50x; 1 token on cpu): 8.00 against 4.00 ms."]),
        # nothing of more than 3% goes unsaid, though it may be the machine
        (
            4.2,
            [
                SLOWER
                + "(0.95x; 1 token on cpu): 4.20 against 4.00 ms (or the machine was busy: the two did not take turns)."
            ],
        ),
        (4.1, []),
    ],
)
def test_a_model_that_became_slower_gets_a_line(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, later: float,
    wanted: list[str],
) -> None:  # fmt: skip
    times = iter([{64: 5.0, 1: 4.0}, {64: 3.0, 1: later}] * 2)
    monkeypatch.setattr("rankwise.deploy.compress.milliseconds", lambda model, length: next(times))
    # no memory for both
    monkeypatch.setattr("rankwise.deploy.compressed.free_memory", lambda device: 0)
    words = ["compress", str(place / "llama-tied"), "--removed", "0.3", "--calibration", "none", "--device", "cpu"]
    assert run([*words, "--out", str(tmp_path / "small")]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert [line in said for line in wanted] == [True] * len(wanted)
    assert ("slower than dense" in said) == bool(wanted)
    assert run([*words, "--out", str(tmp_path / "again"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["remarks"] == wanted


def test_both_models_are_timed_in_turns_where_there_is_memory_for_both(place: Path, tmp_path: Path) -> None:
    source = PretrainedModel(str(place / "llama-tied"))
    made = compress_folder(source, rw.Budget(removed=0.3), tmp_path / "small", device="cpu")
    assert made.in_turns
    slower = dataclasses.replace(made, speed={1: (4.0, 4.2)})
    assert "did not take turns" not in slower.remarks()[0]
    assert "did not take turns" in dataclasses.replace(slower, in_turns=False).remarks()[0]


@pytest.mark.parametrize(
    "words, message",
    [
        (["llama-tied", "--out", "OUT"], "takes one budget, but got none. Example: --removed 0.3."),
        (["llama-tied", "--removed", "0.3", "--params", "9", "--out", "OUT"], "got --removed and --params"),
        (["llama-tied", "--removed", "0.99", "--out", "OUT"], "Remove at most 0."),
        (["llama-tied", "--latency-ms", "1e6", "--out", "OUT"], "must be below what the dense model takes"),
        (["llama-tied", "--latency-ms", "1", "--params", "9", "--out", "OUT"], "got --params and --latency-ms"),
        (
            ["llama-tied", "--removed", "0.3", "--calibration", "short.txt", "--out", "OUT"],
            "must hold at least one window of 20 tokens, but .*short.txt has 3. Give a longer text",
        ),
        (
            ["llama-tied", "--removed", "0.3", "--calibration", "empty.txt", "--out", "OUT"],
            "must hold at least one window of 20 tokens, but .*empty.txt has 0. Give a longer text",
        ),
        (
            ["llama-tied", "--removed", "0.3", "--calibration", "foreign.txt", "--window", "12", "--out", "OUT"],
            "must know the characters of `calibration`, but .*% of the tokens of foreign.txt are <unk>",
        ),
        (
            ["llama-tied", "--removed", "0.3", "--calibration", "chat.jsonl", "--window", "12", "--out", "OUT"],
            "chat.jsonl holds conversations .* need a tokenizer with a chat template, but this model has none",
        ),
        (
            ["roberta-mlm", "--removed", "0.3", "--calibration", "generated", "--out", "OUT"],
            "`--calibration generated` needs a decoder of transformers with its tokenizer, but roberta-mlm is none",
        ),
        (
            ["llama-tied", "--removed", "0.3", "--calibration", "none", "--measure", "text.txt", "--out", "OUT"],
            "`--measure` goes with a calibration, but there is none",
        ),
        (
            ["llama-tied", "--removed", "0.3", "--window", "12", "--measure", "short.txt", "--out", "OUT"],
            "`measure` must hold at least one window of 12 tokens, but .*short.txt has 3",
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
        (
            ["llama-tied", "--removed", "0.3", "--device", "abacus", "--out", "OUT"],
            "`device` must be one that torch has here, such as .*, but is 'abacus' instead.",
        ),
        (["llama-tied", "--removed", "0.3", "--dtype", "int8", "--out", "OUT"], "--dtype"),
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


@pytest.mark.parametrize("refine, message", [(-1, "`steps` must be a whole number"), (3, "needs a calibration, but")])
def test_steps_that_cannot_be_taken_are_refused_before_the_model_is_loaded(
    tmp_path: Path, refine: int, message: str
) -> None:
    with pytest.raises(rw.RankwiseError, match=message):
        compress_folder(PretrainedModel("unread"), rw.Budget(removed=0.3), tmp_path / "small", refine=refine)


def test_a_compact_model_reads_as_much_as_the_dense_one() -> None:
    dense = build("mpnet")
    small = compact("mpnet")
    assert type(small.mpnet.embeddings.position_embeddings) is not nn.Embedding
    most = positions_of(small)
    assert most is not None and most == positions_of(dense) == dense.config.max_position_embeddings - 2
    small(torch.full((1, most), 5))
    with pytest.raises(IndexError):
        small(torch.full((1, most + 1), 5))


def test_the_command_leaves_out_neurons_and_heads(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder is a smaller Llama with the model's tokenizer, and says so; what does not fit is refused."""
    words = ["compress", str(place / "llama-tied"), "--method", "width", "--out", str(tmp_path / "small")]
    text = ["--calibration", str(place / "text.txt"), "--windows", "8", "--window", "12"]
    assert run([*words, "--removed", "0.3", *text, "--json"]) == 0
    size = json.loads(capsys.readouterr().out)
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert rw.count(model) == size["exported"] <= size["budget"]
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert config["intermediate_size"] < ENCODER["intermediate_size"] and "quantization_config" not in config
    assert "import rankwise" not in (tmp_path / "small" / "README.md").read_text()
    assert hf.AutoTokenizer.from_pretrained(tmp_path / "small")("w1 w2")["input_ids"] == [2, 3]
    for wrong, message in {
        "--removed 0.9": "key-value heads of every layer",
        "--removed 0.2 --layout pivot": "`layout` and `embeddings` are settings of low rank",
        "--latency-ms 5": "must be a size for width",
    }.items():
        assert run([*words[:-1], str(tmp_path / "other"), *wrong.split()]) == 2
        assert message in capsys.readouterr().err
    assert run(["compress", str(place / "bert"), *words[2:-1], str(tmp_path / "other"), "--removed", "0.1"]) == 2
    assert "BertForSequenceClassification has 0 for 2 layers" in capsys.readouterr().err


def test_windows_are_by_default_no_longer_than_what_the_model_reads(tmp_path: Path) -> None:
    hf.LlamaForCausalLM(
        hf.LlamaConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=len(WORDS),
            max_position_embeddings=24,
        )
    ).save_pretrained(tmp_path)  # fmt: skip
    source = PretrainedModel(str(tmp_path))
    assert (source.window(256), source.window(8)) == (24, 8)
    assert PretrainedModel(str(tmp_path / "missing")).window(256) == 256
