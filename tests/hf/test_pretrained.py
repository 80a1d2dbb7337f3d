"""Compact models saved as folders: stock `from_pretrained` loads them, and nobody gets random weights in silence."""

from __future__ import annotations

import copy
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import rankwise as rw
from rankwise.deploy.quantize import bfloat16
from rankwise.hf import save_pretrained
from rankwise.modules import LowRankHead, PivotLinear, SelectedLinear
from tests.hf.hf_families import FAMILIES, GENERATING, QUIET, TIED, WORDS, batch, build, compact, logits, pruned

pytestmark = QUIET


def load(folder: Path, cls: Any) -> hf.PreTrainedModel:
    """Stock loading, in which nothing may be missing, left over or of another shape."""
    model, report = cls.from_pretrained(folder, output_loading_info=True)
    assert {word: keys for word, keys in report.items() if keys} == {}
    return model


def assert_same(model: hf.PreTrainedModel, other: hf.PreTrainedModel, **inputs: Tensor) -> None:
    """Every tensor bit for bit; outputs as close as rounding lets them be, which depends on where tensors lie."""
    state, want = model.state_dict(), other.state_dict()
    assert state.keys() == want.keys()
    assert all(torch.equal(state[name], want[name]) for name in want)
    assert rw.count(model) == rw.count(other)
    torch.testing.assert_close(logits(model, **inputs), logits(other, **inputs), rtol=1e-5, atol=1e-5)


def entry(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def rewrite(folder: Path, **changes: Any) -> None:
    """Change the entry of a saved model."""
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"].update(changes)
    (folder / "config.json").write_text(json.dumps(content))


# what comes back is what was saved


FORMS = [
    (family, method)
    for family in ("bert", "gpt2", "llama-tied", "t5")
    for method in ("np-l0", "agp", "fac", "svd pivot")
]


@pytest.mark.parametrize("family, method", [*((family, "flop-l0") for family in FAMILIES), *FORMS])
def test_stock_loading_gives_the_same_model(family: str, method: str, tmp_path: Path) -> None:
    small = compact(family, method)
    small.save_pretrained(tmp_path)
    again = load(tmp_path, type(small))
    assert_same(again, small)
    ours = {LowRankHead, PivotLinear, SelectedLinear}
    assert {type(m) for m in again.modules()} & ours == {type(m) for m in small.modules()} & ours


def test_ranks_stand_in_the_configuration(tmp_path: Path) -> None:
    pruner = pruned("bert", removed=0.5)
    pruner.compact().save_pretrained(tmp_path)
    layers = entry(tmp_path)["layers"]
    for name, rank in pruner.ranks().items():
        rows, columns = next(site.shape for site in pruner.plan.sites if site.name == name)
        if rank * (rows + columns) < rows * columns:
            assert layers.pop(name)["rank"] == rank
    assert layers == {}


def test_a_model_whose_layers_are_stock_needs_nobody(tmp_path: Path) -> None:
    compact("bert", "agp").save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    assert "quantization_config" not in content
    assert "transformers_weights" not in content


@pytest.mark.filterwarnings("ignore:This processor has no instructions")
@pytest.mark.parametrize("make", [build, compact])
def test_a_model_in_bfloat16_layers_is_not_saved(make: Any, tmp_path: Path) -> None:
    small: Any = bfloat16(make("bert"))
    for save in (small.save_pretrained, lambda folder: save_pretrained(small, folder)):
        with pytest.raises(rw.CheckpointError, match="is BFloat16Linear. Save the model that it was made from"):
            save(tmp_path / "small")
    assert not (tmp_path / "small").exists()


def test_the_auto_classes_and_other_tasks_load_it(tmp_path: Path) -> None:
    small = compact("bert-mlm", removed=0.5)
    small.save_pretrained(tmp_path)
    inputs = {name: value for name, value in batch(small).items() if name != "labels"}
    assert_same(load(tmp_path, hf.AutoModelForMaskedLM), small)
    with torch.no_grad():
        want = small.bert(**inputs).last_hidden_state
        for cls in (hf.AutoModel, hf.AutoModelForSequenceClassification):
            model = cls.from_pretrained(tmp_path)
            base = getattr(model, "bert", model)
            torch.testing.assert_close(base(**inputs).last_hidden_state, want, rtol=1e-5, atol=1e-5)
            assert logits(model, **inputs).isfinite().all() if base is not model else True


def test_an_encoder_saved_alone_becomes_a_classifier(tmp_path: Path) -> None:
    small = compact("roberta", removed=0.5)
    inputs = {name: value for name, value in batch(small).items() if name != "labels"}
    small.roberta.save_pretrained(tmp_path)
    model = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    with torch.no_grad():
        want, got = (each.roberta(**inputs).last_hidden_state for each in (small, model))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert {item.name for item in rw.find_plan(model).left_out} >= {"classifier.dense", "classifier.out_proj"}


@pytest.mark.parametrize("family", ["llama-tied", "t5"])
def test_shards_are_put_together(family: str, tmp_path: Path) -> None:
    small = compact(family)
    save_pretrained(small, tmp_path / "small", max_shard_size="5KB")
    assert len(list((tmp_path / "small").glob("model-*.safetensors"))) > 1
    assert {path.suffix for path in (tmp_path / "small").iterdir()} == {".safetensors", ".json", ".md"}
    assert_same(load(tmp_path / "small", type(small)), small)


@pytest.mark.parametrize("family", ["bert-mlm", "gpt2"])
def test_a_layer_of_rank_nothing_is_saved_too(family: str, tmp_path: Path) -> None:
    model = build(family)
    plan = rw.find_plan(model)
    small = rw.compress(model, rw.Budget(params=rw.count(model) - plan.params + 20), embeddings=True).eval()
    assert sum(layer.numel() == 0 for layer in small.parameters()) > 2
    small.save_pretrained(tmp_path)
    assert_same(load(tmp_path, type(small)), small)


def test_the_dtype_asked_for_is_the_dtype_that_comes(tmp_path: Path) -> None:
    small = compact("llama-tied")
    small.save_pretrained(tmp_path)
    half = hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(logits(half).float(), logits(small), rtol=0.1, atol=0.1)


def test_a_loaded_model_is_an_ordinary_one(tmp_path: Path) -> None:
    compact("gpt2").save_pretrained(tmp_path / "one")
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert not hasattr(model, "hf_quantizer")
    assert not model.is_quantized
    assert not hasattr(model.config, "quantization_config")
    assert not hasattr(model.config, "transformers_weights")
    model.save_pretrained(tmp_path / "two")
    assert entry(tmp_path / "two") == entry(tmp_path / "one")
    assert_same(load(tmp_path / "two", type(model)), model)
    rw.Pruner(model, rw.Budget(removed=0.1), "flop-agp", anneal_steps=1)


def test_saving_leaves_the_configuration_to_others_who_share_it(tmp_path: Path) -> None:
    dense = build("bert")
    student, control = (type(dense)(dense.config) for _ in range(2))
    pruner = rw.Pruner(student, rw.Budget(removed=0.4), "fac")
    student.save_pretrained(tmp_path / "gated")
    small: Any = pruner.compact()
    assert not hasattr(small.config, "quantization_config")
    small.save_pretrained(tmp_path / "small")
    assert not hasattr(small.config, "quantization_config")
    control.save_pretrained(tmp_path / "control")
    assert_same(load(tmp_path / "control", type(control)), control)
    assert_same(load(tmp_path / "small", type(small)), small)


def test_a_save_that_fails_leaves_the_configuration_too(tmp_path: Path) -> None:
    small = compact("bert")
    with pytest.raises(TypeError):
        small.save_pretrained(tmp_path, max_shard_size=[])
    assert not hasattr(small.config, "quantization_config")


@pytest.mark.parametrize("family", GENERATING)
def test_generation_with_its_cache_is_that_of_the_model_in_memory(family: str, tmp_path: Path) -> None:
    small = compact(family)
    small.save_pretrained(tmp_path)
    again = load(tmp_path, type(small))
    prompt = batch(small)["input_ids"]
    settings = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    want = small.generate(prompt, **settings, use_cache=False)
    assert want.shape[1] >= 8
    assert len(set(want[:, -8:].flatten().tolist())) > 1
    for model in (small, again):
        assert torch.equal(model.generate(prompt, **settings, use_cache=True), want)


# ties and vocabulary


@pytest.mark.parametrize("family", TIED)
def test_tying_weights_again_changes_nothing(family: str, tmp_path: Path) -> None:
    """Neither on a gated model, nor on a compact one, nor on one that was loaded."""
    pruner = pruned(family, "flop-agp")
    small: Any = pruner.compact()
    small.save_pretrained(tmp_path)
    for model in (pruner.model, small, load(tmp_path, type(small))):
        assert isinstance(model, hf.PreTrainedModel)
        want, size = logits(model), rw.count(model)
        model.tie_weights()
        assert torch.equal(logits(model), want)
        assert rw.count(model) == size


@pytest.mark.parametrize("method", ["flop-l0", "np-l0", "agp", "svd pivot"])
@pytest.mark.parametrize("family", ["bert-mlm", "distilbert", "llama", "qwen2", "t5"])
def test_a_compact_model_takes_another_vocabulary(family: str, method: str, tmp_path: Path) -> None:
    for words in (WORDS + 4, WORDS - 5):
        small = compact(family, method)
        inputs = batch(small)
        inputs["input_ids"] = inputs["input_ids"].clamp(max=min(words, WORDS) - 1)
        del inputs["labels"]
        if family == "t5":
            inputs["decoder_input_ids"] = inputs["input_ids"]
        want = logits(small, **inputs)
        small.resize_token_embeddings(words)
        assert small.config.vocab_size == words
        got = logits(small, **inputs)
        assert family == "distilbert" or got.shape[-1] == words
        kept = min(want.shape[-1], got.shape[-1])
        torch.testing.assert_close(got[..., :kept], want[..., :kept], rtol=1e-5, atol=1e-5)
        for module in small.modules():
            if isinstance(module, nn.Embedding | nn.Linear):
                rows = module.num_embeddings if isinstance(module, nn.Embedding) else module.out_features
                assert rows == module.weight.shape[0]
        assert small.get_input_embeddings().num_embeddings == words
        head = small.get_output_embeddings()
        assert head is None or head.out_features == words
        small.save_pretrained(tmp_path / str(words))
        assert_same(load(tmp_path / str(words), type(small)), small, **inputs)
        # the last word is there
        small.get_input_embeddings()(torch.tensor([words - 1]))
        with pytest.raises(IndexError):
            small.get_input_embeddings()(torch.tensor([words]))


def test_a_vocabulary_is_padded_to_a_multiple() -> None:
    small = compact("qwen2")
    assert small.resize_token_embeddings() is small.get_input_embeddings()
    small.resize_token_embeddings(pad_to_multiple_of=16)
    assert small.config.vocab_size == 64
    assert logits(small).shape[-1] == 64


def test_a_gated_model_refuses_another_vocabulary() -> None:
    model = pruned("gpt2").model
    with pytest.raises(rw.RankwiseError, match="before `rankwise.Pruner`, or on the compact model"):
        model.resize_token_embeddings(60)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_saves_itself_and_not_the_model_it_was_copied_from(copied: Any, tmp_path: Path) -> None:
    small = compact("bert")
    twin = copied(small)
    with torch.no_grad():
        twin.classifier.bias.add_(1)
    twin.save_pretrained(tmp_path)
    assert_same(load(tmp_path, type(twin)), twin)
    assert not torch.equal(logits(twin), logits(small))


# without the package, with `import rankwise` alone, and with `import rankwise.hf`

WITHOUT = """
import sys
PREPARED
import transformers as hf
for name, folder in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        getattr(hf, name).from_pretrained(folder)
        print(name, "loaded")
    except Exception as error:
        print(name, type(error).__name__, str(error).replace("\\n", " "))
"""
WITH = """
import sys
import rankwise.hf
from transformers import AutoModelForSequenceClassification
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1])
import copy
import torch
from safetensors.torch import load_file
data = load_file(sys.argv[2])
with torch.no_grad():
    print(float((copy.deepcopy(model)(data["input_ids"]).logits - data["logits"]).abs().max()))
"""


@pytest.mark.parametrize("prepared", ["sys.modules['rankwise'] = None", "import rankwise"])
def test_importing_rankwise_hf_is_all_that_is_needed_and_its_absence_is_said(prepared: str, tmp_path: Path) -> None:
    small = compact("bert", removed=0.5)
    gated = pruned("gpt2").model
    tokens = batch(small)["input_ids"]
    save_pretrained(small, tmp_path / "small")
    small.save_pretrained(tmp_path / "stock")
    gated.save_pretrained(tmp_path / "gated")
    compact("bert", "agp").save_pretrained(tmp_path / "plain")
    save_file({"input_ids": tokens, "logits": logits(small, input_ids=tokens)}, tmp_path / "data.safetensors")
    cases = {
        "AutoModelForSequenceClassification": "small",
        "BertForSequenceClassification": "stock",
        "AutoModel": "stock",
        "AutoModelForCausalLM": "gated",
        "BertModel": "plain",
    }
    arguments = [word for name, folder in cases.items() for word in (name, str(tmp_path / folder))]
    start = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    without = subprocess.Popen([sys.executable, "-c", WITHOUT.replace("PREPARED", prepared), *arguments], **start)
    with_it = subprocess.Popen(
        [sys.executable, "-c", WITH, str(tmp_path / "small"), str(tmp_path / "data.safetensors")], **start
    )
    said, loaded = without.communicate(), with_it.communicate()
    lines = said[0].splitlines()
    assert len(lines) == 5, said
    for line in lines[:4]:
        assert re.search(r' ValueError .*pip install ".\[hf\]" in a clone .* `import rankwise.hf` before', line), line
    assert lines[4] == "BertModel loaded"
    assert with_it.returncode == 0, loaded
    # in memory of its own, the loaded model gives the very same numbers
    assert float(loaded[0]) == 0.0


UNTOUCHED = """
import sys
methods = lambda: [vars(hf.PreTrainedModel)[name] for name in ("save_pretrained", "resize_token_embeddings")]
import rankwise as rw
finders = list(sys.meta_path)
rw.Pruner, rw.compress, rw.load
assert sys.meta_path == finders and not any(type(finder).__module__.startswith("rankwise") for finder in finders)
import transformers as hf
stock = methods()
assert all(method.__module__.startswith("transformers") for method in stock)
assert "rankwise.hf" not in sys.modules
config = hf.BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
model = rw.compress(hf.BertModel(config), rw.Budget(removed=0.2), embeddings=True, target="cpu")
assert "rankwise.hf" in sys.modules and methods() != stock
model.save_pretrained(sys.argv[1])
assert rw.count(hf.BertModel.from_pretrained(sys.argv[1])) == rw.count(model)
"""


def test_importing_rankwise_patches_nothing_and_compressing_a_model_of_transformers_lets_it_be_saved(
    tmp_path: Path,
) -> None:
    done = subprocess.run([sys.executable, "-c", UNTOUCHED, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# what is refused


def test_a_checkpoint_of_a_gated_model_is_not_loaded(tmp_path: Path) -> None:
    pruned("bert").model.save_pretrained(tmp_path)
    with pytest.raises(rw.CheckpointError, match="this folder holds a gated one.*resume_from_checkpoint"):
        hf.AutoModelForSequenceClassification.from_pretrained(tmp_path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "bert"
    save_pretrained(compact("bert", "fac", 0.5), folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A saved model to be damaged."""
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def refused(folder: Path, match: str, **settings: Any) -> None:
    """Refused with these words, unless a checksum speaks first."""
    with pytest.raises(rw.CheckpointError, match=f"{match}|is damaged: its checksum is .*RANKWISE_VERIFY=0"):
        hf.AutoModelForSequenceClassification.from_pretrained(folder, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANKWISE_VERIFY", "0")
        with pytest.raises(rw.CheckpointError, match=match):
            hf.AutoModelForSequenceClassification.from_pretrained(folder, **settings)


def test_a_folder_of_a_newer_version_is_refused(folder: Path) -> None:
    rewrite(folder, version=3, rankwise="9.9")
    refused(folder, "must be version 2 at most, but is version 3, written by rankwise 9.9. Upgrade rankwise")


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"version": None}, "is damaged: its version is None"),
        ({"layers": 3}, "is damaged: 'int' object"),
        ({"layers": {"x": {"kind": "magic"}}}, "a layer must be one of linear, .*magic"),
        ({"tied": []}, "is damaged: 'list' object"),
    ],
)
def test_a_damaged_entry_is_refused(folder: Path, changes: dict[str, Any], match: str) -> None:
    rewrite(folder, **changes)
    refused(folder, match)


def test_layers_of_another_architecture_are_refused(folder: Path) -> None:
    layers = entry(folder)["layers"]
    name = next(iter(layers))
    rewrite(folder, layers={**layers, "elsewhere": layers[name]})
    refused(folder, "elsewhere was saved as .*, but is not in the skeleton")


def test_a_class_that_has_none_of_the_layers_is_refused(folder: Path) -> None:
    with pytest.raises(rw.CheckpointError, match="must be in RobertaModel, but none.*BertForSequenceClassification"):
        hf.RobertaModel.from_pretrained(folder)


def test_a_head_whose_labels_do_not_match_is_refused(folder: Path) -> None:
    what = r"classifier.weight must be \[3, 16\].*, but was saved as \[2, 16\].*`num_labels`"
    refused(folder, rf"{what}.*or pass ignore_mismatched_sizes=True", num_labels=3)
    refused(folder, what, num_labels=3, ignore_mismatched_sizes=False)


@pytest.mark.parametrize("compact_head", [False, True])
def test_a_head_for_other_labels_is_fresh_where_that_is_asked_for(compact_head: bool, tmp_path: Path) -> None:
    """All else comes as it was saved; as in transformers, sizes may differ by `ignore_mismatched_sizes`."""
    model: Any = build("bert")
    # of rank one, which is all that is kept of it where it is in the plan
    model.classifier.weight.data[1] = -model.classifier.weight.data[0]
    plan = rw.find_plan(model, include=r".*dense|classifier" if compact_head else r".*dense")
    small: Any = rw.compress(model, rw.Budget(removed=0.5, of="prunable"), plan=plan)
    assert isinstance(small.classifier, nn.Sequential) == compact_head
    small.save_pretrained(tmp_path / "two")
    refused(tmp_path / "two", "classifier.* must be .*5.*, but was saved as .*2.*=True for fresh values", num_labels=5)
    other: Any = hf.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "two", num_labels=5, ignore_mismatched_sizes=True
    )
    want, got = small.bert.state_dict(), other.bert.state_dict()
    assert want.keys() == got.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    # as BERT begins: small numbers around nothing, and a bias of nothing
    assert other.classifier.weight.shape == (5, 16)
    assert 0 < other.classifier.weight.abs().max() < 10 * other.config.initializer_range
    assert torch.equal(other.classifier.bias, torch.zeros(5))
    assert "classifier" in {item.name for item in rw.find_plan(other).left_out}
    other.save_pretrained(tmp_path / "five")
    assert_same(load(tmp_path / "five", type(other)), other)


@pytest.mark.parametrize("embeddings", [False, True])
def test_another_vocabulary_is_fresh_and_tied_where_that_is_asked_for(embeddings: bool, tmp_path: Path) -> None:
    model: Any = build("gpt2")
    plan = rw.find_plan(model, include=r".*" if embeddings else r".*\.c_(attn|fc|proj)")
    small: Any = rw.compress(model, rw.Budget(removed=0.2), plan=plan)
    small.save_pretrained(tmp_path)
    other: Any = type(small).from_pretrained(tmp_path, vocab_size=WORDS + 7, ignore_mismatched_sizes=True)
    assert other.lm_head.weight is other.transformer.wte.weight
    assert other.lm_head.weight.shape == (WORDS + 7, 16)
    assert other.lm_head.weight.isfinite().all()
    assert torch.equal(other.transformer.h[0].mlp.c_fc[0].weight, small.transformer.h[0].mlp.c_fc[0].weight)


def test_a_missing_factor_is_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith(".0.weight"))
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    refused(folder, f"The folder must hold {re.escape(name)}, but does not")


def test_a_mask_that_does_not_fit_its_weight_is_refused(tmp_path: Path) -> None:
    compact("bert", "np-l0").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith(".kept"))
    tensors[name] = ~tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    refused(tmp_path, r"must keep \d+ inputs, but keeps \d+")


def test_loading_compresses_nothing(tmp_path: Path) -> None:
    from rankwise.hf.quantizer import RankwiseConfig

    build("bert").save_pretrained(tmp_path)
    refused(tmp_path, "Load it, then use `rankwise.Pruner`", quantization_config=RankwiseConfig(version=1))


# saving with a card


def test_the_card_says_what_was_asked_for_and_what_was_measured(tmp_path: Path) -> None:
    pruner = pruned("bert", removed=0.5)
    small, size = pruner.compact(), pruner.size()
    save_pretrained(
        small,
        tmp_path / "small",
        size=size,
        quality={"accuracy": (0.91, 0.9)},
        speed={"torch, 2 threads, batch 1": (12.0, 7.5)},
        base_model="some/bert",
    )
    card = (tmp_path / "small" / "README.md").read_text()
    for line in (
        "base_model: some/bert",
        f"| dense | {size.dense:,} | 0.00% |",
        f"| requested, at most | {size.budget:,} | {1 - size.budget / size.dense:.2%} |",
        f"| this model | {rw.count(small):,} | {size.removed:.2%} |",
        "| accuracy | 0.91 | 0.9 |",
        "| torch, 2 threads, batch 1 | 12.00 | 7.50 |",
    ):
        assert line in card.splitlines()


def test_the_code_in_the_card_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = (folder / "README.md").read_text()
    assert card.count("Not measured.") == 2
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    assert code is not None
    folder.rename(folder.parent / "bert")
    monkeypatch.chdir(folder.parent)
    names: dict[str, Any] = {}
    exec(code[1], names)
    assert rw.count(names["model"]) == int(re.search(r"with ([\d,]+) parameters", card)[1].replace(",", ""))


def test_the_size_of_a_model_that_keeps_its_shape_is_told_in_nonzeros(tmp_path: Path) -> None:
    pruner = pruned("bert", "agp")
    save_pretrained(pruner.compact(), tmp_path / "small", size=pruner.size())
    card = (tmp_path / "small" / "README.md").read_text()
    assert f"| this model, non-zero | {pruner.size().exported:,} |" in card
    assert f"| this model, zeros included | {pruner.size().dense:,} | 0.00% |" in card


def test_a_tokenizer_goes_along(tmp_path: Path) -> None:
    words = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "[PAD]": 3, "[MASK]": 4, "a": 5}
    tokenizer = hf.BertTokenizer(vocab=words)
    save_pretrained(compact("bert"), tmp_path / "small", tokenizer=tokenizer)
    again = hf.AutoTokenizer.from_pretrained(tmp_path / "small")
    assert again("a")["input_ids"] == tokenizer("a")["input_ids"]


def test_nothing_is_half_written(tmp_path: Path) -> None:
    class Broken:
        def save_pretrained(self, folder: Path) -> None:
            raise OSError("disk full")

    with pytest.raises(rw.CheckpointError, match="must be written whole to .*, but that failed: disk full"):
        save_pretrained(compact("bert"), tmp_path / "deep" / "small", tokenizer=Broken())
    assert list(tmp_path.iterdir()) == []


def test_a_saved_model_is_replaced_only_when_asked(tmp_path: Path) -> None:
    small, other = compact("bert"), compact("bert", removed=0.5)
    save_pretrained(small, tmp_path / "small")
    with pytest.raises(rw.CheckpointError, match="must be new, but .*small exists.*overwrite=True"):
        save_pretrained(other, tmp_path / "small")
    save_pretrained(other, tmp_path / "small", overwrite=True)
    assert_same(load(tmp_path / "small", type(small)), other)
    (tmp_path / "file").write_text("")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    (tmp_path / "small" / "runs").mkdir()
    for name, match in (
        ("file", "is a file"),
        ("mine", "has no config.json of one"),
        ("small", "also holds the folder runs"),
    ):
        with pytest.raises(rw.CheckpointError, match=match):
            save_pretrained(other, tmp_path / name, overwrite=True)


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    pruner = pruned("bert")
    small = pruner.compact(rw.Budget(removed=0.2))
    target = tmp_path / "small"
    with pytest.raises(TypeError, match="must be a model of transformers, but is a Linear.*`rankwise.save`"):
        save_pretrained(nn.Linear(2, 2), target)  # type: ignore[arg-type]
    with pytest.raises(rw.CheckpointError, match="must be compact, but .* is gated"):
        save_pretrained(pruner.model, target)  # type: ignore[arg-type]
    with pytest.raises(rw.RankwiseError, match=f"of {rw.count(small):,} parameters, but describes one of"):
        save_pretrained(small, target, size=pruner.size())
    with pytest.raises(ValueError, match=r"`quality` must give two numbers.*'F1' has \(0.9,\)"):
        save_pretrained(small, target, quality={"F1": (0.9,)})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"`speed` must give two numbers.*'cpu' has \(1.0, nan\)"):
        save_pretrained(small, target, speed={"cpu": (1.0, float("nan"))})
    assert list(tmp_path.iterdir()) == []


def test_an_upload_goes_through_the_same_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads: list[tuple[Any, ...]] = []
    monkeypatch.setattr(hf.PreTrainedModel, "push_to_hub", lambda *args, **kwargs: uploads.append((args[1:], kwargs)))
    small = compact("bert")
    small.save_pretrained(tmp_path / "name", push_to_hub=True, commit_message="m")
    assert uploads == [(("name",), {"commit_message": "m"})]
    assert entry(tmp_path / "name")["quant_method"] == "rankwise"


@pytest.mark.parametrize("layout", ["pair", "pivot"])
def test_layers_that_are_asked_for_their_sizes_tell_them(layout: Any, tmp_path: Path) -> None:
    """Whisper asks its table of positions how many there are."""
    shape = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = hf.WhisperConfig(
        vocab_size=WORDS, d_model=16, encoder_ffn_dim=24, decoder_ffn_dim=24, num_mel_bins=8, max_source_positions=10,
        max_target_positions=10, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, **shape,
    )  # fmt: skip
    model = hf.WhisperForConditionalGeneration(config).eval()
    inputs = {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": batch(model)["input_ids"][:2]}
    small: Any = rw.compress(model, rw.Budget(removed=0.4), embeddings=True, layout=layout)
    assert isinstance(small.model.encoder.embed_positions, nn.Sequential)
    assert logits(small, **inputs).shape == logits(model, **inputs).shape
    small.save_pretrained(tmp_path)
    assert_same(load(tmp_path, type(small)), small, **inputs)


def test_rankwise_load_knows_what_a_model_asks_its_layers(tmp_path: Path) -> None:
    """The package's own way of saving, which needs no transformers but a skeleton."""
    small = compact("t5", "fac", 0.5)
    rw.save(small, tmp_path / "small")
    assert_same(rw.load(tmp_path / "small", build("t5", seed=1)), small)
