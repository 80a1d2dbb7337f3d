"""`rankwise evaluate` of models of transformers: perplexity by a stated convention, and tasks of lm-eval."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

import rankwise as rw
from rankwise.cli.app import run
from rankwise.hf import save_pretrained
from rankwise.hf.evaluation import Tasks, TextWindows
from tests.hf.hf_families import ENCODER, build, compact

WORDS = [f"w{i}" for i in range(48)]
TEXT = "  ".join(WORDS[i * i % 48] + ("é" if i % 7 == 0 else "") for i in range(400)) + " \n"
"""Two spaces between words, some of which are unknown and have two bytes for a letter."""
QUESTIONS = [
    {"question": " ".join(WORDS[i : i + 3]), "choices": WORDS[i + 3 : i + 6], "answer": i % 3} for i in range(20)
]
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def tokenizer(bos: bool) -> Any:
    words = {"<unk>": 0, "<s>": 1, **{word: i + 2 for i, word in enumerate(WORDS)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    more = {"bos_token": "<s>"} if bos else {}
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", **more)


def without_bos() -> hf.PreTrainedModel:
    model = build("llama")
    model.config.bos_token_id = None
    model.generation_config.bos_token_id = None
    return model


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of models with and without a token that begins a text, one of them compressed; texts and tasks."""
    folder = tmp_path_factory.mktemp("evaluation")
    made = {"dense": build("llama"), "small": compact("llama"), "no-bos": without_bos(), "t5": build("t5")}
    for name, model in made.items():
        model.save_pretrained(folder / name) if name != "small" else save_pretrained(model, folder / name)
        tokenizer(name != "no-bos").save_pretrained(folder / name)
    for name, kind in (("mlm", "bert-mlm"), ("bare", "llama")):
        build(kind).save_pretrained(folder / name)
    torch.manual_seed(0)
    hf.BertModel(hf.BertConfig(**ENCODER)).save_pretrained(folder / "encoder")
    (folder / "empty").mkdir()
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    (folder / "short.txt").write_text("w1 w2 w3")
    (folder / "latin.txt").write_bytes(b"w1 \xe9")
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    (folder / "tasks").mkdir()
    for name, file in (("toy_choice", "questions.jsonl"), ("toy_lost", "nowhere.jsonl")):
        (folder / "tasks" / f"{name}.yaml").write_text(TASK.format(name=name, file=folder / file))
    (folder / "tasks" / "group.yaml").write_text("group: toy_group\ntask:\n  - toy_choice\n")
    return folder


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing is read from, or left in, the user's cache of datasets; the hub is out of reach."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert run(["evaluate", *map(str, words), "--device", "cpu", "--json"]) == 0
    told = capsys.readouterr()
    # no bars, and no advice on how to call lm-eval
    assert re.fullmatch(r"Loading .*\n", told.err)
    return json.loads(told.out)


def by_hand(model: Any, bos: bool, window: int) -> tuple[float, float, int, int]:
    """Perplexity, bits per byte, tokens and bytes, one token at a time."""
    pieces = [(match.start(), match[0]) for match in re.finditer(r"\S+", TEXT)]
    numbers = [WORDS.index(piece) + 2 if piece in WORDS else 0 for _, piece in pieces]
    step = window - bos
    nats, tokens, num_bytes = 0.0, 0, 0
    for first in range(0, len(numbers) - step + 1, step):
        ids = [1] * bos + numbers[first : first + step]
        with torch.no_grad():
            chances = model.double()(torch.tensor([ids])).logits[0].softmax(-1)
        for place in range(1, window):
            nats -= math.log(chances[place - 1, ids[place]].item())
            tokens += 1
            at = first + place - bos
            end = pieces[at + 1][0] if at + 1 < len(pieces) else len(TEXT)
            num_bytes += len(TEXT[pieces[at][0] : end].encode())
    return math.exp(nats / tokens), nats / math.log(2) / num_bytes, tokens, num_bytes


@pytest.mark.parametrize("name, bos", [("dense", True), ("small", True), ("no-bos", False)])
@pytest.mark.parametrize("window, batch", [(20, 1), (7, 3), (2, 5)])
def test_perplexity_is_that_of_the_stated_convention(
    place: Path, capsys: pytest.CaptureFixture[str], name: str, bos: bool, window: int, batch: int
) -> None:
    words = ("--text", place / "text.txt", "--window", window, "--batch-size", batch)
    found = answer(capsys, place / name, *words)
    model = hf.AutoModelForCausalLM.from_pretrained(place / name)
    perplexity, bits, tokens, num_bytes = by_hand(model, bos, window)
    text = found["text"]
    assert text["perplexity"] == pytest.approx(perplexity, rel=1e-5)
    assert text["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    assert (text["tokens"], text["bytes"], text["window"]) == (tokens, num_bytes, window)
    assert text["begins_with"] == ("<s>" if bos else None)
    assert ("begins with <s>, which is not predicted" in text["convention"]) == bos
    assert found["parameters"] == rw.count(model)


@given(window=st.integers(2, 20), limit=st.integers(1, 500))
@settings(max_examples=30, deadline=None)
def test_every_byte_before_the_rest_is_counted_once_where_bos_begins_a_window(
    place: Path, window: int, limit: int
) -> None:
    """Then every token of the text is predicted, so other windows measure the same bytes."""
    config = hf.AutoConfig.from_pretrained(place / "dense")
    found = TextWindows(place / "text.txt", tokenizer(True), config, window, limit)
    number = min(400 // (window - 1), limit)
    pieces = [match.start() for match in re.finditer(r"\S+", TEXT)] + [len(TEXT)]
    assert len(found.tokens) == number
    assert found.num_bytes == len(TEXT[: pieces[number * (window - 1)]].encode())


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary(place: Path) -> None:
    model: Any = build("llama")
    torch.nn.init.zeros_(model.lm_head.weight)
    windows = TextWindows(place / "text.txt", tokenizer(True), model.config, 10)
    found = windows.measure(model)
    assert found.perplexity == pytest.approx(model.config.vocab_size, rel=1e-5)
    bits = found.tokens * math.log2(model.config.vocab_size)
    assert found.bits_per_byte == pytest.approx(bits / windows.num_bytes, rel=1e-5)


def test_the_default_window_is_what_the_model_reads_and_its_dtype_is_chosen(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(capsys, place / "dense", "--text", place / "text.txt", "--limit", "3", "--dtype", "bfloat16")
    assert (found["text"]["window"], found["text"]["windows"], found["dtype"]) == (20, 3, "bfloat16")


def test_logits_that_are_not_finite_are_said(place: Path) -> None:
    model: Any = build("llama")
    torch.nn.init.constant_(model.lm_head.weight, float("nan"))
    windows = TextWindows(place / "text.txt", tokenizer(True), model.config, 10)
    with pytest.raises(rw.RankwiseError, match="its loss is nan from window 1 of 44 on, in torch.float32"):
        windows.measure(model)


def accuracy(model: Any, number: int) -> float:
    """The share of questions whose answer has the likeliest words, by hand."""
    right = 0
    for row in QUESTIONS[:number]:
        asked = [WORDS.index(word) + 2 for word in row["question"].split()]  # type: ignore[attr-defined]
        # an encoder-decoder begins its answer with a token of its own
        begun = {"decoder_input_ids": torch.tensor([[0]])} if model.config.is_encoder_decoder else {}
        with torch.no_grad():
            chances = model(torch.tensor([asked]), **begun).logits[0, -1].log_softmax(-1)
        likeliest = max(range(3), key=lambda i, row=row: chances[WORDS.index(row["choices"][i]) + 2])  # type: ignore[misc]
        right += likeliest == row["answer"]
    return right / number


@pytest.mark.parametrize("name, limit", [("dense", None), ("small", None), ("small", 7), ("t5", None)])
def test_tasks_are_measured_by_lm_eval_on_a_cpu(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, limit: int | None
) -> None:
    words = ["--tasks", "toy_choice", "--include", place / "tasks", "--batch-size", "4", "--out", tmp_path / "a.json"]
    words += [] if limit is None else ["--limit", limit]
    found = answer(capsys, place / name, *words)
    kind = hf.T5ForConditionalGeneration if name == "t5" else hf.AutoModelForCausalLM
    model = kind.from_pretrained(place / name)
    tasks = found["tasks"]
    assert tasks["results"]["toy_choice"]["acc,none"] == pytest.approx(accuracy(model, limit or 20))
    assert tasks["n-samples"]["toy_choice"] == {"original": 20, "effective": limit or 20}
    assert tasks["limit"] == limit
    assert json.loads((tmp_path / "a.json").read_text()) == found


def test_documents_are_scored_and_not_their_json(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": TEXT}) + "\n", encoding="utf-8")
    plain, documents = (
        answer(capsys, place / "dense", "--text", file, "--window", "9", "--limit", "1")["text"]
        for file in (place / "text.txt", tmp_path / "a.jsonl")
    )
    assert documents["perplexity"] == pytest.approx(plain["perplexity"])
    assert documents["bits_per_byte"] is None
    # two short documents: each begins as the model expects it, and no window fits
    (tmp_path / "a.jsonl").write_text('{"text": "w1"}\n{"text": "w2"}\n')
    assert run(["evaluate", str(place / "dense"), "--text", str(tmp_path / "a.jsonl"), "--window", "9"]) == 2
    assert "a.jsonl has none" in capsys.readouterr().err


def test_a_text_and_tasks_go_together_and_are_shown(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--text", place / "text.txt", "--tasks", "toy_choice", "--include", place / "tasks", "--limit", "5"]
    assert run(["evaluate", *map(str, [place / "small", *words])]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "perplexity" in told and "bits per byte" in told
    assert re.search(r"toy_choice acc \d\.\d{4} \d\.\d{4} 5 ", told)
    assert "windows of 20 tokens that do not overlap" in told
    assert "At most 5 questions of a task: no final figures." in told


@pytest.mark.parametrize(
    "words, message",
    [
        (["dense"], "needs --tasks NAMES or --text FILE, but got neither for dense"),
        (["dense", "--text", "short.txt", "--window", "9"], "of 9 tokens, but short.txt has 4. Give a longer"),
        (["dense", "--text", "text.txt", "--window", "21"], "at most 20 tokens, which is all .* reads, but is 21"),
        (["dense", "--text", "text.txt", "--window", "1"], "`window` must be at least 2, so that .* but is 1."),
        (["dense", "--text", "text.txt", "--window", "0"], "`--window` must be a whole number of at least 1, but is 0"),
        (["dense", "--text", "text.txt", "--batch-size", "-1"], "`--batch-size` must be .* but is -1"),
        (["dense", "--text", "none.txt"], "none.txt is not: No such file"),
        (["dense", "--text", "latin.txt"], "must be UTF-8, but latin.txt has the byte 0xe9 at position 3"),
        (["dense", "--window", "9", "--tasks", "a"], "`--window` must go with `--text`, but stands alone"),
        (["dense", "--text", "text.txt", "--include", "tasks"], "`--include` must go with `--tasks`"),
        (["dense", "--text", "text.txt", "--split", "test"], "`--split` is for the data of a run, but dense is none"),
        (["dense", "--text", "text.txt", "--corpus.name", "x"], "There is no option `--corpus.name` here"),
        (["dense", "--text", "text.txt", "--device", "abacus"], "`device` must be one that torch has here"),
        (["dense", "--text", "text.txt", "--out", "short.txt"], "`--out` must be a new file, but short.txt exists"),
        (["dense", "--text", "text.txt", "--out", "no/a.json"], "in a folder that exists, but there is no no"),
        (["encoder", "--text", "text.txt"], "must have a language-model head .* but 'encoder' is a BertModel"),
        (["mlm", "--tasks", "toy_choice"], "must have a language-model head .* but 'mlm' is a BertForMaskedLM"),
        (["t5", "--text", "text.txt"], "needs a model that reads one text, but 't5' is an encoder-decoder"),
        (["bare", "--text", "text.txt"], "`rankwise evaluate` needs the model's tokenizer, but 'bare' has none"),
        (["empty", "--text", "text.txt"], "need a model of transformers, but empty holds no config.json"),
        (["./nowhere", "--text", "text.txt"], "MODEL must be a folder that exists, .* there is no './nowhere'"),
        (["text.txt", "--text", "text.txt"], "MODEL must be a folder, .* but text.txt is a file"),
        (["dense", "--tasks", "toy_choice", "--include", "nowhere"], "there is no folder nowhere"),
        (["dense", "--tasks", "toy_lost", "--include", "tasks"], "The task 'toy_lost' must load .* FileNotFoundError"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_before_the_weights_are_read(
    place: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr("rankwise.hf.loading.load_model", lambda name: pytest.fail("the weights were read"))
    assert run(["evaluate", *words]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert re.search(message, told.err)


def test_an_unknown_task_gets_the_nearest_names(place: Path) -> None:
    with pytest.raises(rw.DataError, match="there is no 'toy_choise'. Did you mean 'toy_choice'") as raised:
        Tasks(["toy_choise", "hellaswag"], place / "tasks")
    assert "hellaswag" not in str(raised.value)


def test_a_group_is_measured_by_its_tasks(place: Path) -> None:
    model: Any = build("llama")
    found = Tasks(["toy_group"], place / "tasks").measure(model, tokenizer(True), batch_size=20)
    assert found["results"]["toy_choice"]["acc,none"] == pytest.approx(accuracy(model, 20))


def test_what_to_install_is_said(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankwise.hf.evaluation.find_spec", lambda name: None)
    assert run(["evaluate", str(place / "dense"), "--tasks", "hellaswag"]) == 2
    assert re.search('needs lm-eval, which is not installed. .* pip install "lm_eval>=', capsys.readouterr().err)


def test_help_needs_no_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["evaluate", str(place / "dense"), "--help"]) == 0
    assert "--tasks NAMES" in capsys.readouterr().out
