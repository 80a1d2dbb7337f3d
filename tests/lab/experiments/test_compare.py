"""Two models side by side: their answers are those of the models alone, and their losses those of a forward pass."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from rankwise.errors import CheckpointError, RankwiseError
from rankwise.hf import save_pretrained
from rankwise.lab.experiments import pipeline
from rankwise.lab.experiments.compare import Answering, Comparison, RunModel, find_pair, open_answering
from rankwise.lab.experiments.sample import sample
from tests.hf.hf_families import DECODER, WORDS, build, causal, compact
from tests.lab.experiments.experiment_toys import toy

PROMPT = "a b c d"
SETTINGS: dict[str, Any] = {"length": 12, "temperature": 0.0, "seed": 0}
PAIRS = ["sru", "words", "transformer-xl", "llama", "gpt2"]
BYTES = 256


def byte_tokenizer() -> Any:
    """Each byte is a token, so that a character may be several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return hf.PreTrainedTokenizerFast(tokenizer_object=made)


def word_tokenizer() -> Any:
    """A word for every number of a model."""
    known = ["<unk>", "<s>", *"abcdefgh", *(f"w{i}" for i in range(WORDS - 10))]
    words = {word: i for i, word in enumerate(known)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of our models, and decoders of transformers, dense and compressed."""
    folder = tmp_path_factory.mktemp("compare")
    with warnings.catch_warnings():
        # so few steps decide nothing
        warnings.simplefilter("ignore")
        for kind in ("sru", "words", "transformer-xl"):
            (texts := folder / f"texts-{kind}").mkdir()
            pipeline.run(toy(texts, kind, compare=("dense",) if kind == "sru" else ()), folder / kind)
    for kind in ("llama", "gpt2"):
        build(kind).save_pretrained(folder / f"{kind}-dense")
        save_pretrained(compact(kind), folder / f"{kind}-small")
        for role in ("dense", "small"):
            word_tokenizer().save_pretrained(folder / f"{kind}-{role}")
    settings = {**DECODER, "vocab_size": BYTES, "bos_token_id": None, "max_position_embeddings": 64}
    torch.manual_seed(0)
    causal(hf.LlamaConfig(**settings)).save_pretrained(folder / "bytes")
    byte_tokenizer().save_pretrained(folder / "bytes")
    build("t5").save_pretrained(folder / "t5")
    build("bert-mlm").save_pretrained(folder / "encoder")
    build("llama").save_pretrained(folder / "bare")
    return folder


def pair(place: Path, kind: str) -> Comparison:
    run = place / kind
    dense, small = find_pair(run) if run.is_dir() else (place / f"{kind}-dense", place / f"{kind}-small")
    return Comparison(open_answering(str(dense), "dense"), open_answering(str(small), "small"))


def ended(comparison: Comparison, prompt: str = PROMPT, **changes: Any) -> tuple[list[Any], list[Any]]:
    """What is found of the prompt, and the answers."""
    events = list(comparison.answers(prompt, **{**SETTINGS, **changes}))
    found = [[event for event in events if event["kind"] == kind] for kind in ("prompt", "answer")]
    assert [[event["model"] for event in some] for some in found] == [[0, 1], [0, 1]]
    for place in (0, 1):
        pieces = [event["text"] for event in events if event["kind"] == "text" and event["model"] == place]
        assert "".join(pieces) == found[1][place]["text"]
    return found[0], found[1]


def logits(model: Answering, numbers: list[int]) -> Tensor:
    """Those of a plain call."""
    tokens_BT = torch.tensor([numbers])
    with torch.inference_mode():
        out: Any = model.model(tokens_BT, None) if isinstance(model, RunModel) else (model.model(tokens_BT).logits,)
    found: Tensor = out[0][0]
    return found


def plain_losses(model: Answering, numbers: list[int]) -> list[float]:
    """The loss of all tokens but the first."""
    losses: list[float] = F.cross_entropy(
        logits(model, numbers)[:-1], torch.tensor(numbers[1:]), reduction="none"
    ).tolist()
    return losses


def tokens_of(model: Answering, text: str) -> list[int]:
    return [*model.before, *model.encode(text)]


@pytest.mark.parametrize("kind", PAIRS)
def test_losses_are_those_of_a_forward_pass(place: Path, kind: str) -> None:
    both = pair(place, kind)
    prompts, answers = ended(both, temperature=1.0)
    assert both.unit == "nats per token"
    for i, model in enumerate(both.models):
        numbers = tokens_of(model, PROMPT)
        losses = plain_losses(model, numbers)
        found = [piece["loss"] for piece in prompts[i]["pieces"]]
        assert (found[0] is None) == (not model.before)
        assert [loss for loss in found if loss is not None] == pytest.approx(losses, rel=1e-4, abs=1e-5)
        assert prompts[i]["mean"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
        # the answer of the other one
        whole = [*numbers, *model.encode(answers[1 - i]["text"])]
        expected = plain_losses(model, whole)[len(numbers) - 1 :]
        assert [piece["loss"] for piece in answers[1 - i]["pieces"]] == pytest.approx(expected, rel=1e-3, abs=1e-4)
        assert "".join(piece["text"] for piece in answers[i]["pieces"]) == answers[i]["text"]


@pytest.mark.parametrize("kind", PAIRS)
def test_greedy_answers_are_those_of_generate_and_of_sample(place: Path, kind: str) -> None:
    both = pair(place, kind)
    for model, answer in zip(both.models, ended(both)[1], strict=True):
        numbers = tokens_of(model, PROMPT)
        if isinstance(model, RunModel):
            drawn = list(sample(model.model, model.vocabulary, PROMPT, **SETTINGS))
        else:
            network: Any = model.model
            drawn = network.generate(
                torch.tensor([numbers]), attention_mask=torch.ones(1, len(numbers)), do_sample=False, max_new_tokens=12
            )[0, len(numbers) :].tolist()
        assert answer["tokens"] == 12
        assert answer["text"] == "".join(model.spell(numbers, drawn))


def test_a_seed_gives_the_same_answers_again_and_another_seed_others(place: Path) -> None:
    both = pair(place, "sru")
    texts = [[answer["text"] for answer in ended(both, temperature=1.0, seed=seed)[1]] for seed in (1, 1, 2)]
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[2][0] and texts[0][1] != texts[2][1]


def test_an_answer_ends_where_the_model_ends_it(place: Path) -> None:
    both = pair(place, "llama")
    model = both.models[0]
    whole = model.encode(ended(both)[1][0]["text"])
    model.ends = frozenset([whole[3]])
    answer = ended(both)[1][0]
    assert model.encode(answer["text"]) == whole[: whole.index(whole[3])]
    model.ends = frozenset([whole[0]])
    answer = ended(both)[1][0]
    assert (answer["text"], answer["tokens"], answer["speed"], answer["pieces"]) == ("", 0, None, ())


def test_models_of_different_vocabularies_are_compared_per_byte(place: Path) -> None:
    dense, small = open_answering(str(place / "sru"), "dense"), open_answering(str(place / "bytes"), "small")
    both = Comparison(dense, small)
    assert both.unit == "bits per byte"
    prompts, answers = ended(both)
    # a character is a byte here, so both means are over the same number
    nats = plain_losses(small, small.encode(PROMPT))
    assert prompts[1]["mean"] == pytest.approx(sum(nats) / len(nats) / math.log(2), rel=1e-4)
    text = answers[0]["text"]
    nats = plain_losses(small, small.encode(PROMPT + text))[-len(text) :]
    assert [piece["loss"] for piece in answers[0]["pieces"]] == pytest.approx(
        [loss / math.log(2) for loss in nats], rel=1e-3
    )
    assert "".join(piece["text"] for piece in answers[0]["pieces"]) == text
    # bytes at random are no letters of the run
    assert "dense cannot read this answer: The text must be written in the 9 characters" in answers[1]["note"]
    assert [(piece["text"], piece["loss"]) for piece in answers[1]["pieces"]] == [(answers[1]["text"], None)]


def test_an_answer_that_the_other_vocabulary_does_not_spell_is_shown_as_it_is(place: Path) -> None:
    both = Comparison(open_answering(str(place / "sru"), "dense"), open_answering(str(place / "llama-small"), "small"))
    answer = ended(both, "a b")[1][0]
    shown = "".join(piece["text"] for piece in answer["pieces"])
    assert shown.endswith(answer["text"])
    assert (answer["mean"] is None) == (answer["note"] is not None)


@pytest.fixture(scope="module")
def by_bytes(place: Path) -> Answering:
    return open_answering(str(place / "bytes"), "bytes")


@given(seen=st.text(max_size=12), text=st.text(min_size=1, max_size=12))
def test_pieces_spell_the_text_and_hold_all_tokens(by_bytes: Answering, seen: str, text: str) -> None:
    given, numbers = by_bytes.encode(seen), by_bytes.encode(text)
    found = by_bytes.score([*given, *numbers], len(given), per_byte=False)
    assert "".join(piece.text for piece in found.pieces) == text
    assert sum(piece.tokens for piece in found.pieces) == len(numbers)
    losses = by_bytes.losses([*given, *numbers], len(given))
    if given:
        assert found.mean == pytest.approx(sum(loss or 0 for loss in losses) / len(losses))


def test_a_run_gives_its_control_or_else_its_base(place: Path) -> None:
    run = place / "sru"
    assert find_pair(run) == (run / "dense", run / "flop-l0")
    assert find_pair(run / "flop-l0") == (run / "dense", run / "flop-l0")
    assert find_pair(place / "words") == (place / "words/base", place / "words/flop-l0")
    same = open_answering(str(run / "flop-l0" / "model"), "model")
    other = open_answering(str(run), "run")
    assert same.about() == {**other.about(), "name": "model"}


@pytest.mark.parametrize(
    "name, words",
    [
        ("nowhere", "nowhere"),
        ("t5", "t5 holds an encoder-decoder"),
        ("encoder", "must have a language-model head .* BertForMaskedLM"),
        ("bare", "`rankwise compare` needs the model's tokenizer, but .*bare"),
        ("texts-sru", "must be a folder of a run or of transformers, but .*texts-sru is neither"),
    ],
)
def test_what_cannot_answer_is_refused(place: Path, name: str, words: str) -> None:
    with pytest.raises(RankwiseError, match=words):
        open_answering(str(place / name), "model")


def test_one_model_is_no_pair(place: Path) -> None:
    with pytest.raises(CheckpointError, match="needs two models, .*llama-small is one model"):
        find_pair(place / "llama-small")
    with pytest.raises(CheckpointError, match="nowhere is neither"):
        find_pair(place / "nowhere")


@pytest.mark.parametrize(
    "prompt, changes, words",
    [
        ("", {}, "`prompt` must hold at least one token"),
        ("a Z", {}, "dense: The text must be written in the 9 characters of the corpus, but has 'Z'"),
        ("a", {"length": 0}, "`length` must be at least 1, but is 0"),
        ("a", {"temperature": -1.0}, "`temperature` must be at least 0 and finite, but is -1.0"),
        ("a", {"temperature": math.nan}, "`temperature` must be at least 0 and finite, but is nan"),
        ("a", {"seed": 2**63}, "`seed` must be a whole number of 64 bits, but is 9223372036854775808"),
    ],
)
def test_a_wrong_question_is_refused_before_anything_is_answered(
    place: Path, prompt: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(RankwiseError, match=words):
        pair(place, "sru").answers(prompt, **{**SETTINGS, **changes})


def test_more_than_a_model_reads_is_refused(place: Path) -> None:
    with pytest.raises(RankwiseError, match="at most 20 tokens, which is all that dense reads, but have 5 and 16"):
        pair(place, "llama").answers(PROMPT, **{**SETTINGS, "length": 16})


def test_losses_that_are_not_finite_are_refused(place: Path) -> None:
    both = pair(place, "llama")
    torch.nn.init.constant_(next(both.models[1].model.parameters()), math.nan)
    with pytest.raises(RankwiseError, match="Losses must be finite, but small in torch.float32 gives nan"):
        list(both.answers(PROMPT, **SETTINGS))
