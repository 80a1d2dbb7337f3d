"""`rankwise compress` on folders of runs and of `rankwise.save`; tests/hf has those of transformers."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch
from torch import Tensor, nn

import rankwise as rw
import rankwise.deploy.save as saving
from rankwise.cli import progress
from rankwise.cli.app import run
from rankwise.lab.data.corpus import open_corpus
from rankwise.lab.data.windows import Evaluation
from rankwise.lab.models.transformer_xl import TransformerXL, TransformerXLConfig
from rankwise.lab.report.found import read
from rankwise.lab.tasks.language import LanguageModel, evaluate
from rankwise.modules import PivotLinear
from tests.cli.cli_toys import LETTERS, cache, refusal


def compressed(capsys: pytest.CaptureFixture[str], folder: Path, out: Path, *words: object) -> nn.Module:
    """What a command wrote, which is of the size that it says."""
    capsys.readouterr()
    assert run(["compress", str(folder), "--out", str(out), "--json", *map(str, words)]) == 0
    size = json.loads(capsys.readouterr().out)
    model = rw.load(out).eval()
    assert rw.count(model) == size["exported"] <= size["budget"]
    return model


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(tokens)[0]
    return found


# layers of models that were hardly trained may be worth nothing
nothing_learned = pytest.mark.filterwarnings("ignore:These layers are left as they are")


@nothing_learned
@pytest.mark.parametrize("arm", ["dense", "flop-l0"])
def test_the_model_of_a_run_is_compressed_by_its_own_vocabulary(
    finished: Path, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arm: str
) -> None:
    words = ["--removed", 0.2, "--calibration", place / "text.txt", "--windows", 8, "--window", 40]
    before = rw.load(finished / arm / "model")
    whole = compressed(capsys, finished / arm, tmp_path / "of-run", *words)
    assert rw.count(whole) <= 0.8 * rw.count(before)
    # the model's own folder lies in that of the run
    inner = compressed(capsys, finished / arm / "model", tmp_path / "of-model", *words)
    plain = compressed(capsys, finished / arm / "model", tmp_path / "plain", "--removed", 0.2)
    tokens = torch.arange(40)[None] % len(LETTERS)
    assert torch.equal(logits(whole, tokens), logits(inner, tokens))
    assert not torch.equal(logits(whole, tokens), logits(plain, tokens))


@pytest.mark.parametrize("embeddings", [False, True])
def test_a_saved_model_is_compressed_again_and_again_as_by_python(
    embeddings: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command and `rankwise.compress` have the same defaults."""
    torch.manual_seed(0)
    config = TransformerXLConfig(num_words=20, width=8, num_heads=2, head_width=4, inner=12, num_layers=2)
    rw.save(TransformerXL(config), tmp_path / "dense")
    words = ["--removed", 0.2, *(["--embeddings", "yes"] if embeddings else [])]
    first = compressed(capsys, tmp_path / "dense", tmp_path / "first", *words)
    second = compressed(capsys, tmp_path / "first", tmp_path / "second", *words)
    tokens = torch.arange(9)[None]
    for before, after in (("dense", first), ("first", second)):
        settings: Any = {"embeddings": True} if embeddings else {}
        expected = rw.compress(rw.load(tmp_path / before), rw.Budget(removed=0.2), **settings)
        torch.testing.assert_close(logits(after, tokens), logits(expected, tokens))


@pytest.mark.parametrize(
    "words, pivots, multiple", [("", False, 1), ("--layout pivot", True, 1), ("--target size", True, 1),
                                ("--target cuda", False, 8), ("--target size --layout pair", False, 1)]
)  # fmt: skip
def test_a_model_is_made_of_pairs_unless_the_smallest_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, pivots: bool, multiple: int
) -> None:
    torch.manual_seed(0)
    config = TransformerXLConfig(num_words=20, width=64, num_heads=2, head_width=32, inner=96, num_layers=2)
    rw.save(TransformerXL(config), tmp_path / "dense")
    small = compressed(capsys, tmp_path / "dense", tmp_path / "small", "--removed", 0.4, *words.split())
    assert any(isinstance(module, PivotLinear) for module in small.modules()) == pivots
    seconds = [module[1] for module in small.modules() if isinstance(module, nn.Sequential) and len(module) == 2]
    ranks = [second.in_features for second in seconds if isinstance(second, nn.Linear | PivotLinear)]
    assert ranks and all(rank % multiple == 0 for rank in ranks)


@nothing_learned
def test_what_is_made_of_a_run_says_what_it_lost_and_writes_text(
    finished: Path, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "small"
    words = ["--removed", 0.1, "--calibration", place / "text.txt", "--windows", 8, "--window", 40]
    for source in (finished, finished / "flop-l0" / "model"):
        # one that was made before is replaced whole
        model = compressed(capsys, source, out, *words, "--overwrite")
        assert run(["evaluate", str(out), *cache(place), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["parameters"] == rw.count(model)
        text = Evaluation(open_corpus(next((place / "cache").glob("corpora/text-*"))).valid, unroll=8)
        assert found["loss"] == pytest.approx(evaluate(LanguageModel(model), text, "character").loss, rel=1e-6)
        assert run(["sample", str(out), "--prompt", "abc", "--length", "9"]) == 0
        assert re.fullmatch(f"abc[{LETTERS}]{{9}}\n", capsys.readouterr().out)
    assert run(["compress", str(finished), "--removed", "0.1", "--out", str(out)]) == 2
    assert "exists. Choose another name, or pass overwrite=True (--overwrite)." in capsys.readouterr().err
    # and so does what is made of that
    compressed(capsys, out, tmp_path / "smaller", *words)
    assert run(["sample", str(tmp_path / "smaller"), "--prompt", "abc"]) == 0


@nothing_learned
def test_a_healing_that_was_stopped_goes_on_only_for_the_model_that_it_began_with(
    finished: Path, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["compress", str(finished / "dense"), "--calibration", str(place / "text.txt"), "--windows", "8"]
    words += ["--window", "16", "--device", "cpu", "--refine", "0", "--heal", "6", "--out", str(tmp_path / "small")]

    class Impatient(progress.Lines):
        stop = ""

        def phase(self, title: str) -> None:
            if title.startswith(self.stop):
                raise KeyboardInterrupt

    # before the text was read, before anything was learned, and after
    for moment in ("reading the text", "trying", "healing at"):
        with monkeypatch.context() as patch:
            patch.setattr(progress, "Lines", Impatient)
            patch.setattr(Impatient, "stop", moment)
            assert run([*words, "--removed", "0.2"]) == 130
        capsys.readouterr()
        assert run([*words, "--removed", "0.5", "--overwrite"]) == 2
        assert "small.healing `removed` was 0.2 and is now 0.5" in capsys.readouterr().err
    # another model that was compressed there since is not healed in its place
    with monkeypatch.context() as patch:
        patch.setattr(progress, "Lines", Impatient)
        patch.setattr(Impatient, "stop", "reading the text")
        assert run([*words, "--removed", "0.2", "--out", str(tmp_path / "other")]) == 130
    assert (
        run([*words[: words.index("--heal")], "--removed", "0.5", "--out", str(tmp_path / "other"), "--overwrite"]) == 0
    )
    assert run([*words, "--removed", "0.2", "--out", str(tmp_path / "other")]) == 2
    assert "must be new" in capsys.readouterr().err
    assert run([*words, "--removed", "0.2"]) == 0
    assert rw.count(rw.load(tmp_path / "small")) <= 0.8 * rw.count(rw.load(finished / "dense" / "model"))


def healed_words(finished: Path, place: Path) -> list[str]:
    """A command that compresses and heals; the name of what it makes is missing."""
    words = ["compress", str(finished / "dense"), "--calibration", str(place / "text.txt"), "--windows", "8"]
    return [*words, "--window", "16", "--device", "cpu", "--refine", "0", "--heal", "6", "--removed", "0.2", "--out"]


@nothing_learned
def test_a_stop_between_compression_and_healing_or_after_both_loses_neither(
    finished: Path, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = healed_words(finished, place)
    began: list[progress.Lines] = []

    class Impatient(progress.Lines):
        """Stops the command when the second of its parts begins to show something."""

        def __init__(self, stream: TextIO) -> None:
            super().__init__(stream)
            began.append(self)
            if len(began) == 2:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(progress, "Lines", Impatient)
        assert run([*words, str(tmp_path / "small")]) == 130
    made = (tmp_path / "small/model.safetensors").read_bytes()
    capsys.readouterr()
    # no other model takes its place unnoticed
    assert run([*words, str(tmp_path / "small"), "--removed", "0.5"]) == 2
    assert "must be new" in capsys.readouterr().err
    assert (tmp_path / "small/model.safetensors").read_bytes() == made
    assert run([*words, str(tmp_path / "small")]) == 0
    said, shown = capsys.readouterr()
    assert "healing at" in shown and "Compressing layer by layer" not in shown
    # what was made before the stop is said too
    assert "parameters, 2" in said and " ms dense, " in said and " before, " in said
    assert run([*words, str(tmp_path / "whole")]) == 0
    found, whole = (tmp_path / name / "model.safetensors" for name in ("small", "whole"))
    assert found.read_bytes() == whole.read_bytes() != made
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small", "whole"]
    # a report shows what the healed model loses
    report = read([tmp_path / "small"])
    record = json.loads((tmp_path / "small/compression.json").read_text())
    row = report.runs[0].record["rows"][1]
    assert not report.problems and row["name"] == "svd, healed"
    assert row["test"] == {record["healed"]["measure"]: record["healed"]["small"]}
    # nor does a stop at the very end, when the state of healing is removed
    stock = os.replace

    def replace(source: Any, target: Any) -> None:
        if str(source).endswith(".healing"):
            raise KeyboardInterrupt
        stock(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        assert run([*words, str(tmp_path / "small"), "--overwrite"]) == 130
    capsys.readouterr()
    assert run([*words, str(tmp_path / "small"), "--overwrite"]) == 0
    shown = capsys.readouterr().err
    assert "was finished before" in shown and "Compressing layer by layer" not in shown
    assert found.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small", "whole"]
    # and now there is a model that is complete
    assert run([*words, str(tmp_path / "small")]) == 2
    assert "must be new" in capsys.readouterr().err


@nothing_learned
def test_a_stop_at_the_moment_at_which_the_compressed_model_appears_loses_nothing(
    finished: Path, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = healed_words(finished, place)
    stock = saving._put

    def put(source: Path, target: Path) -> None:
        stock(source, target)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(saving, "_put", put)
        assert run([*words, str(tmp_path / "small")]) == 130
    capsys.readouterr()
    # a command that only compresses is another one
    assert run([*words[: words.index("--heal")], *words[-3:], str(tmp_path / "small")]) == 2
    assert "must be new" in capsys.readouterr().err
    assert run([*words, str(tmp_path / "small")]) == 0
    assert "Compressing layer by layer" not in capsys.readouterr().err
    # and once it is healed it is not healed again
    assert run([*words, str(tmp_path / "small")]) == 2
    assert "must be new" in capsys.readouterr().err


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved model whose architecture is ours, one whose is not, and texts."""
    config = TransformerXLConfig(num_words=8, width=8, num_heads=2, head_width=4, inner=12, num_layers=1)
    rw.save(TransformerXL(config), tmp_path / "saved")
    rw.save(nn.Sequential(nn.Linear(8, 8)), tmp_path / "own")
    (tmp_path / "text.txt").write_text(LETTERS * 100)
    (tmp_path / "greek.txt").write_text("αβγ" * 100)
    (tmp_path / "short.txt").write_text(LETTERS)
    (tmp_path / "latin.txt").write_bytes((LETTERS * 100).encode() + b"\xe9" + (LETTERS * 100).encode())
    (tmp_path / "damaged").mkdir()
    for name in ("rankwise.json", "model.safetensors"):
        (tmp_path / "damaged" / name).write_text("{")
    return tmp_path


@pytest.mark.parametrize(
    "words, message",
    [
        ("saved --removed 0.2 --calibration text.txt", "the folder holds none. Give the folder of the run"),
        ("RUN --removed 0.2 --calibration greek.txt --window 9", "in the 8 bytes of the corpus|in the 8 characters"),
        ("RUN --removed 0.2 --calibration short.txt", "at least one window of 256 tokens, but short.txt has 8"),
        ("RUN --removed 0.2 --calibration none.txt", "none.txt is not: No such file"),
        ("RUN --removed 0.2 --calibration latin.txt", "must be UTF-8, but latin.txt has the byte 0xe9 at position 800"),
        (
            "RUN --removed 0.2 --calibration short.txt --window 4 --windows 1 --heal 6",
            "`text` must hold at least 16 x 8 tokens to train on, but short.txt has",
        ),
        ("RUN --removed 0.2 --calibration text.txt --heal 1", "`--heal` must be 0 or at least 2 steps, but is 1"),
        ("RUN --removed 0.2 --calibration text.txt --heal -3", "`--heal` must be 0 or at least 2 steps, but is -3"),
        ("RUN --removed 0.2 --calibration text.txt --calibration none", "`--calibration none` must stand alone"),
        ("RUN --removed 0.2 --calibration text.txt --windows 0", r"\(--windows\) must be a whole number of at least 1"),
        ("RUN --removed 0.2 --exclude nothing", "'nothing' matches none"),
        ("RUN --removed 0.999", "Remove at most 0."),
        ("own --removed 0.2", "A model of your own needs its `skeleton`"),
        ("damaged --removed 0.2", "is damaged"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    finished: Path,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    message: str,
) -> None:
    monkeypatch.chdir(folder)
    before = sorted(path.name for path in folder.iterdir())
    line = refusal(capsys, "compress", *words.replace("RUN", str(finished)).split(), "--out", "out")
    assert re.search(message, line)
    assert sorted(path.name for path in folder.iterdir()) == before
