"""Healing of folders: it brings a model back to its dense one, resumes bit for bit, and refuses in one line."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import rankwise as rw
from rankwise.errors import RankwiseError
from rankwise.lab.experiments import pipeline
from rankwise.lab.experiments.healing import Healed, heal_folder, is_unfinished
from rankwise.lab.experiments.healing.folder import rates_beyond
from rankwise.lab.experiments.healing.pair import MOST_RATES, RATES
from rankwise.lab.tasks.healing import parts_of_batch
from rankwise.lab.training.run import DivergedError
from tests.lab.experiments import experiment_toys
from tests.lab.experiments.experiment_toys import Phases
from tests.lab.experiments.healing_toys import decoder, encoder, make_place, text_file, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:.* of the gates had not decided")
QUICK: dict[str, Any] = {"steps": 10, "batch_size": 4, "window": 12, "device": "cpu"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("models"))


def healed(place: Path, name: str, out: Path, **settings: Any) -> Healed:
    text = [place / "text.txt"]
    return heal_folder(place / f"{name}-small", place / name, text, out, **{**QUICK, **settings})


def windows(place: Path, number: int = 32) -> torch.Tensor:
    """Text of another seed than what is trained on, each window after BOS."""
    text = text_file(place / "other.txt", words=11 * number, seed=1).read_text()
    return F.pad(torch.tensor(tokenizer()(text)["input_ids"]).view(number, 11), (1, 0), value=1)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def difference(place: Path, small: Path) -> float:
    """KL of the dense decoder's answers and those of another folder."""
    with torch.no_grad():
        p, q = (
            torch.log_softmax(hf.AutoModelForCausalLM.from_pretrained(folder)(windows(place)).logits, -1)
            for folder in (place / "decoder", small)
        )
    return float(F.kl_div(q, p, log_target=True, reduction="sum"))


def test_a_healed_decoder_is_nearer_to_the_dense_one_and_of_the_same_form(place: Path, tmp_path: Path) -> None:
    out, said = tmp_path / "healed", list[str]()
    result = healed(place, "decoder", out, steps=60, lr=3e-3, say=said.append)
    assert difference(place, out) < 0.5 * difference(place, place / "decoder-small")
    assert result.dense < result.after < result.before
    before, after = weights(place / "decoder-small"), weights(out)
    assert {name: (x.shape, x.dtype) for name, x in before.items()} == {n: (x.shape, x.dtype) for n, x in after.items()}
    # all of them are trained: factors, norms and the table
    assert all(not torch.equal(before[name], after[name]) for name in before)
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (place / "decoder-small", out))
    layers = [entry["quantization_config"]["layers"] for entry in (old, new)]
    assert layers[0] == layers[1] and old["use_cache"] == new["use_cache"]
    assert rw.count(hf.AutoModelForCausalLM.from_pretrained(out)) == result.parameters
    assert not (tmp_path / "healed.healing").exists()
    assert not said
    card = (out / "README.md").read_text()
    assert result.figures in card and f"{result.tokens:,} tokens in 60 steps at a rate of 0.003" in card


def test_the_figures_are_perplexities_of_text_that_was_not_trained_on(place: Path, tmp_path: Path) -> None:
    valid = text_file(tmp_path / "valid.txt", words=400, seed=2)
    result = healed(place, "decoder", tmp_path / "healed", valid=[valid], lr=1e-3)
    numbers = torch.tensor(tokenizer()(valid.read_text())["input_ids"])
    # a window begins with BOS
    rows = torch.cat(
        [torch.ones(32, 1, dtype=torch.long), numbers[: 36 * 11].view(36, 11)[[i * 36 // 32 for i in range(32)]]], 1
    )
    for folder, figure in (("decoder", result.dense), ("decoder-small", result.before), ("", result.after)):
        model = hf.AutoModelForCausalLM.from_pretrained(place / folder if folder else tmp_path / "healed")
        with torch.no_grad():
            loss = F.cross_entropy(model(rows).logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
        assert figure == pytest.approx(float(loss.exp()), rel=1e-4)


@pytest.mark.parametrize("name", ["encoder", "masked"])
def test_an_encoder_is_healed_too(place: Path, tmp_path: Path, name: str) -> None:
    result = healed(place, name, tmp_path / "healed", steps=40, lr=3e-3)
    assert result.after < 0.9 * result.before
    assert result.measure == ("relative error of the outputs" if name == "encoder" else result.measure)
    before, after = weights(place / f"{name}-small"), weights(tmp_path / "healed")
    # the pooler, and the head of words, learn as well
    assert all(not torch.equal(before[key], after[key]) for key in before if "token_type" not in key)


def test_the_rate_is_the_one_that_does_best_on_text_held_out(place: Path, tmp_path: Path) -> None:
    result = healed(place, "decoder", tmp_path / "chosen", rates=(1e-6, 3e-3), steps=20)
    assert result.lr == 3e-3
    assert list(result.rates) == ["1e-06", "0.003"]
    assert (result.rates["0.003"] or 0) < (result.rates["1e-06"] or 0)
    fixed = healed(place, "decoder", tmp_path / "given", lr=3e-3, steps=20)
    assert not fixed.rates
    # trials leave no trace in what is trained then
    pairs = zip(weights(tmp_path / "chosen").values(), weights(tmp_path / "given").values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_rates_are_tried_until_the_best_is_between_two_others(place: Path, tmp_path: Path) -> None:
    result = healed(place, "decoder", tmp_path / "chosen", steps=20)
    tried = sorted(float(name) for name in result.rates)
    assert tried[0] < result.lr < tried[-1] or len(tried) == MOST_RATES
    assert set(RATES) <= set(tried)


@given(st.integers(-12, 0), st.integers(1, 5), st.data())
def test_the_next_rate_is_beyond_the_best_and_only_where_none_was_tried(
    lowest: int, number: int, data: st.DataObject
) -> None:
    series = [float(f"{10 ** (power / 2):.0e}") for power in range(lowest, lowest + number)]
    losses = data.draw(st.permutations([None if i % 4 == 3 else float(i) for i in range(number)]))
    found = rates_beyond({f"{rate:g}": loss for rate, loss in zip(series, losses, strict=True)})
    # the lowest loss is always 0
    best = losses.index(0.0)
    if 0 < best < number - 1:
        assert not found
    else:
        (rate,) = found
        power = lowest + number if best == number - 1 else lowest - 1
        assert rate == float(f"{10 ** (power / 2):.0e}")
        assert rate not in series


def test_where_all_rates_diverged_a_lower_one_is_next() -> None:
    assert rates_beyond({"0.0003": None, "0.001": None}) == [1e-4]
    assert rates_beyond({"0.0003": None, "0.001": None, "0.0001": None}) == [3e-5]


def test_a_rate_that_diverges_is_not_chosen(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rankwise.lab.experiments.healing import folder

    stock = folder.fit

    def fit(model: Any, task: Any, config: Any, *args: Any, **more: Any) -> Any:
        if config.lr > 1:
            raise DivergedError("The loss must stay finite")
        return stock(model, task, config, *args, **more)

    monkeypatch.setattr(folder, "fit", fit)
    result = healed(place, "decoder", tmp_path / "healed", rates=(1e9, 1e-3))
    assert (result.lr, result.rates["1e+09"]) == (1e-3, None)
    with pytest.raises(RankwiseError, match=r"keep the loss finite, but none of 1e\+09 does. Give a lower one: --lr"):
        healed(place, "decoder", tmp_path / "again", rates=(1e9,))


def test_a_gpu_that_is_too_small_is_told_what_to_do(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rankwise.lab.experiments.healing import folder

    def full(*args: Any, **more: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with monkeypatch.context() as patch:
        patch.setattr(folder, "fit", full)
        with pytest.raises(RankwiseError, match=r"in 1 parts: CUDA .*--accumulate 2") as refused:
            healed(place, "decoder", tmp_path / "healed", lr=1e-3)
    assert "\n" not in str(refused.value)
    # nothing was learned yet, so other settings are not refused
    healed(place, "decoder", tmp_path / "healed", lr=1e-3, accumulate=2)


STOPS = [
    ("measuring the dense model and the compressed one", None),
    ("trying a rate of 0.001", 1),
    ("trying a rate of 0.003", None),
    ("healing at a rate of 0.003", 3),
    ("healing at a rate of 0.003", 7),
]


def test_a_healing_that_is_stopped_anywhere_ends_with_the_same_weights(place: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rates": (1e-3, 3e-3), "steps": 20}
    whole = healed(place, "decoder", tmp_path / "whole", **settings)
    for title, step in STOPS:
        with pytest.raises(KeyboardInterrupt):
            healed(place, "decoder", tmp_path / "stopped", **settings, watcher=Phases(title, step))
    rest = healed(place, "decoder", tmp_path / "stopped", **settings, watcher=(watcher := Phases()))
    # only what was not done yet
    assert 0 < watcher.steps < 20
    assert "trying a rate of 0.001" not in watcher.titles
    pairs = zip(weights(tmp_path / "whole").values(), weights(tmp_path / "stopped").values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert (rest.figures, rest.rates, rest.tokens) == (whole.figures, whole.rates, whole.tokens)


def test_a_stopped_healing_goes_on_only_with_what_it_began_with(place: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        healed(place, "decoder", tmp_path / "healed", lr=1e-3, watcher=Phases("healing at a rate of 0.001", 3))
    with pytest.raises(rw.CheckpointError, match="`steps` was 10 and is now 11. Restore it, .* Or remove"):
        healed(place, "decoder", tmp_path / "healed", lr=1e-3, steps=11)
    text = text_file(tmp_path / "text.txt", seed=5)
    with pytest.raises(
        rw.CheckpointError, match="that of another text. Give it again, or remove .*healing to begin afresh"
    ):
        heal_folder(place / "decoder-small", place / "decoder", [text], tmp_path / "healed", **QUICK, lr=1e-3)


def test_in_place_of_the_compressed_folder(place: Path, tmp_path: Path) -> None:
    """As after `rankwise compress`: a stop loses neither the compressed model nor what was learned."""
    folder = tmp_path / "small"
    shutil.copytree(place / "decoder-small", folder)
    before = weights(folder)
    more: dict[str, Any] = {"lr": 3e-3, "overwrite": True, **QUICK}
    with pytest.raises(KeyboardInterrupt):
        heal_folder(
            folder,
            place / "decoder",
            [place / "text.txt"],
            folder,
            **more,
            watcher=Phases("healing at a rate of 0.003", 5),
        )
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(folder).items())
    assert is_unfinished(folder) and not is_unfinished(tmp_path / "apart")
    heal_folder(folder, place / "decoder", [place / "text.txt"], folder, **more)
    healed(place, "decoder", tmp_path / "apart", lr=3e-3)
    pairs = zip(weights(folder).values(), weights(tmp_path / "apart").values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    # healed twice, the card tells both
    heal_folder(folder, place / "decoder", [place / "text.txt"], folder, **{**more, "lr": 1e-3})
    assert len(re.findall("Distilled from", (folder / "README.md").read_text())) == 2


def stop_after_save(patch: pytest.MonkeyPatch) -> None:
    """Stops a healing when the folder of its state is to be removed."""
    stock = os.replace

    def replace(source: Any, target: Any) -> None:
        if str(source).endswith(".healing"):
            raise KeyboardInterrupt
        stock(source, target)

    patch.setattr(os, "replace", replace)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_healing_that_was_stopped_once_its_model_was_saved_is_finished(
    place: Path, tmp_path: Path, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(place / "decoder-small", tmp_path / "small"))
    out, said, watcher = folder if in_place else tmp_path / "healed", list[str](), Phases()

    def heal(**more: Any) -> Healed:
        given = (folder, place / "decoder", [place / "text.txt"], out)
        return heal_folder(*given, **{**QUICK, "rates": (1e-3, 3e-3), "overwrite": in_place, **more})

    with monkeypatch.context() as patch:
        stop_after_save(patch)
        with pytest.raises(KeyboardInterrupt):
            heal()
    found, state = weights(out), tmp_path / f"{out.name}.healing"
    with pytest.raises(rw.CheckpointError, match="`steps` was 10 and is now 11"):
        heal(steps=11)
    # of a removal that was stopped
    (tmp_path / f".{state.name}.done/left").mkdir(parents=True)
    assert is_unfinished(out) and state.exists()
    result = heal(watcher=watcher, say=said.append)
    assert said == [f"The healing of {out} was finished before; what was left of it is removed."]
    assert watcher.steps == 0 and all(torch.equal(tensor, found[name]) for name, tensor in weights(out).items())
    whole = healed(place, "decoder", tmp_path / "whole", rates=(1e-3, 3e-3))
    assert (result.figures, result.rates, result.tokens) == (whole.figures, whole.rates, whole.tokens)
    assert result.figures in (out / "README.md").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"small", out.name, "whole"}


def test_another_model_is_not_taken_for_one_that_was_saved(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(place / "decoder-small", tmp_path / "small"))

    def heal() -> Healed:
        given: dict[str, Any] = {**QUICK, "lr": 3e-3, "overwrite": True}
        return heal_folder(folder, place / "decoder", [place / "text.txt"], folder, **given)

    with monkeypatch.context() as patch:
        stop_after_save(patch)
        with pytest.raises(KeyboardInterrupt):
            heal()
    file = folder / "model.safetensors"
    save_file({name: 1.01 * tensor for name, tensor in weights(folder).items()}, file, {"format": "pt"})
    with pytest.raises(RankwiseError, match="that of another model. Give it again, or remove"):
        heal()
    assert not is_unfinished(folder)
    # as before the model was saved: what was learned is not lost
    shutil.rmtree(folder)
    shutil.copytree(place / "decoder-small", folder)
    heal()
    healed(place, "decoder", tmp_path / "whole", lr=3e-3)
    assert all(torch.equal(tensor, weights(folder)[name]) for name, tensor in weights(tmp_path / "whole").items())


def test_what_was_gained_is_kept_as_json_also_where_a_model_was_lost() -> None:
    given: dict[str, Any] = {"folder": "a", "measure": "perplexity", "held_out": "text", "rates": {"0.001": None}}
    given |= {"parameters": 5, "steps": 2, "tokens": 3, "seconds": 0.1, "lr": 1e-3, "next_command": "rankwise bench a"}
    result = Healed(**given, dense=1 / 3, before=math.inf, after=0.1)
    assert Healed.from_json(json.loads(json.dumps(result.to_json(), allow_nan=False))) == result


@pytest.mark.parametrize("texts", [0, 1])
def test_the_dense_model_writes_what_it_is_healed_with(place: Path, tmp_path: Path, texts: int) -> None:
    given, more = [place / "text.txt"][:texts], {**QUICK, "steps": 40, "lr": 3e-3, "generated": True}

    def heal(name: str, watcher: Phases | None = None) -> Healed:
        return heal_folder(place / "decoder-small", place / "decoder", given, tmp_path / name, **more, watcher=watcher)

    result = heal("healed")
    assert result.after < 0.9 * result.before
    # where it was stopped and goes on, nothing is generated again
    written = set()
    for step in (5, 20):
        with pytest.raises(KeyboardInterrupt):
            heal("stopped", Phases("healing at a rate of 0.003", step))
        (kept,) = (tmp_path / "stopped.healing").glob("generated-*")
        written.add(kept.stat().st_mtime_ns)
    assert len(written) == 1
    heal("stopped")
    pairs = zip(weights(tmp_path / "healed").values(), weights(tmp_path / "stopped").values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_who_waits_for_generated_text_sees_how_far_it_is(place: Path, tmp_path: Path) -> None:
    class Counts(Phases):
        def __init__(self) -> None:
            super().__init__("measuring the dense model and the compressed one")
            self.counted: list[tuple[str, int, int]] = []

        def count(self, done: int, total: int) -> None:
            self.counted.append((self.titles[-1], done, total))

    more: dict[str, Any] = {**QUICK, "lr": 3e-3, "generated": True}
    for known in (False, True):
        with pytest.raises(KeyboardInterrupt):
            heal_folder(
                place / "decoder-small", place / "decoder", [], tmp_path / "out", **more, watcher=(watcher := Counts())
            )
        # what was generated before is read
        assert watcher.counted == ([] if known else [("generating text", 0, 64), ("generating text", 64, 64)])


def test_text_of_another_model_or_a_damaged_one_is_not_taken(place: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    other = decoder()
    other.save_pretrained(tmp_path / "other")
    tokenizer().save_pretrained(tmp_path / "other")
    more: dict[str, Any] = {**QUICK, "lr": 3e-3, "generated": True}

    def heal(teacher: Path, out: Path, **given: Any) -> Healed:
        return heal_folder(place / "decoder-small", teacher, [], out, **more, **given)

    want, stops = heal(place / "decoder", tmp_path / "want"), "measuring the dense model and the compressed one"
    with pytest.raises(KeyboardInterrupt):
        heal(tmp_path / "other", tmp_path / "found", watcher=Phases(stops, None))
    with pytest.raises(KeyboardInterrupt):
        heal(place / "decoder", tmp_path / "found", watcher=Phases(stops, None))
    kept = list((tmp_path / "found.healing").glob("generated-*"))
    assert len(kept) == 2
    for file, content in zip(kept, (b"", b"\xff" * 100), strict=True):
        file.write_bytes(content)
    found = heal(place / "decoder", tmp_path / "found")
    assert found.figures == want.figures
    pairs = zip(weights(tmp_path / "want").values(), weights(tmp_path / "found").values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_what_was_written_once_and_is_read_often_is_told(place: Path, tmp_path: Path) -> None:
    said: list[str] = []
    text = text_file(tmp_path / "short.txt", words=300)
    more: dict[str, Any] = {**QUICK, "lr": 1e-3, "steps": 100, "generated": True, "say": said.append}
    heal_folder(place / "decoder-small", place / "decoder", [], tmp_path / "alone", **more)
    (line,) = said
    windows, times = map(
        int, re.findall(r"has written (\d+) windows to train on, so each is read (\d+) times", line)[0]
    )
    assert windows < 64 and abs(windows * times - 400) <= windows / 2
    # beside a short text there are no more of them than it has windows
    said.clear()
    heal_folder(place / "decoder-small", place / "decoder", [text], tmp_path / "beside", **more)
    of_text, own = said
    (tokens,) = re.findall(r"short.txt, (?:\d+) windows of the dense model's own has (\d+) tokens to train on", of_text)
    (windows,) = re.findall(r"has written (\d+) windows to train on", own)
    assert 2 * int(windows) <= int(tokens) / 12 <= 2 * int(windows) + 1
    with pytest.raises(RankwiseError, match="`generated` must be True or False, but is 'no' instead"):
        heal_folder(place / "decoder-small", place / "decoder", [], tmp_path / "no", **{**more, "generated": "no"})


def test_text_too_short_for_a_share_goes_without(place: Path, tmp_path: Path) -> None:
    few = [text_file(tmp_path / f"{name}.txt", words=words) for name, words in (("a", 11), ("b", 22))]
    for name, more in (("few", {}), ("steps", {"steps": 2, "batch_size": 1})):
        given = {**QUICK, "lr": 1e-3, "generated": True, **more}
        result = heal_folder(place / "decoder-small", place / "decoder", few, tmp_path / name, **given)
        assert result.tokens > 0


@pytest.mark.parametrize("whose", ["decoder-small", "decoder"])
def test_a_healing_goes_on_with_the_weights_that_it_began_with_alone(place: Path, tmp_path: Path, whose: str) -> None:
    for name in ("decoder-small", "decoder"):
        shutil.copytree(place / name, tmp_path / name)

    def heal(**more: Any) -> Healed:
        given = (tmp_path / "decoder-small", tmp_path / "decoder", [place / "text.txt"], tmp_path / "out")
        return heal_folder(*given, **QUICK, lr=3e-3, **more)

    with pytest.raises(KeyboardInterrupt):
        heal(watcher=Phases("healing at a rate of 0.003", 5))
    file = tmp_path / whose / "model.safetensors"
    before = file.read_bytes()
    save_file({name: 1.01 * tensor for name, tensor in weights(file.parent).items()}, file, {"format": "pt"})
    with pytest.raises(RankwiseError, match="that of another (model|teacher). Give it again, or remove"):
        heal()
    file.write_bytes(before)
    assert heal().after > 0


def test_a_dense_model_that_is_far_worse_than_the_compressed_one_is_doubted(place: Path, tmp_path: Path) -> None:
    doubt = "Is it the one that this was made from?"
    Path(shutil.copytree(place / "decoder", tmp_path / "other"))
    changed = {name: 3 * torch.randn_like(tensor) for name, tensor in weights(tmp_path / "other").items()}
    save_file(changed, tmp_path / "other/model.safetensors", {"format": "pt"})
    for teacher, doubted in ((tmp_path / "other", True), (place / "decoder", False)):
        said: list[str] = []
        given: dict[str, Any] = {**QUICK, "lr": 1e-4, "steps": 4, "say": said.append, "overwrite": True}
        done = heal_folder(place / "decoder-small", teacher, [place / "text.txt"], tmp_path / "out", **given)
        assert (done.dense > 1.5 * done.before) == doubted
        assert any(doubt in line for line in said) == doubted


def test_a_healing_goes_on_where_other_milliseconds_were_measured(place: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(place / "decoder-small", tmp_path / "small"))

    def heal(**more: Any) -> Healed:
        given = (folder, place / "decoder", [place / "text.txt"], tmp_path / "out")
        return heal_folder(*given, **QUICK, lr=3e-3, **more)

    (folder / "compression.json").write_text('{"speed": 1}')
    with pytest.raises(KeyboardInterrupt):
        heal(watcher=Phases("healing at a rate of 0.003", 5))
    (folder / "compression.json").write_text('{"speed": 2}')
    done = heal()
    kept = json.loads((tmp_path / "out/compression.json").read_text())
    assert kept == {"speed": 2, "healed": {"measure": "perplexity", "dense": done.dense, "small": done.after}}


def test_a_rate_that_fails_may_be_replaced(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rankwise.lab.experiments.healing import folder

    stock = folder.fit

    def fit(model: Any, task: Any, config: Any, *args: Any, **more: Any) -> Any:
        outcome = stock(model, task, config, *args, **more)
        if config.lr > 1e-4:
            raise DivergedError("The loss must stay finite")
        return outcome

    monkeypatch.setattr(folder, "fit", fit)
    for lr in (None, 1e-3):
        with pytest.raises((RankwiseError, DivergedError)):
            healed(place, "decoder", tmp_path / "out", lr=lr, rates=(1e-3,))
    assert healed(place, "decoder", tmp_path / "out", lr=1e-5, rates=(1e-3,)).lr == 1e-5


def test_files_of_others_are_not_taken_for_a_state(place: Path, tmp_path: Path) -> None:
    (tmp_path / "out.healing").mkdir()
    (tmp_path / "out.healing/mine.txt").write_text("mine")
    with pytest.raises(RankwiseError, match="out.healing must be where a healing keeps its state, but holds other"):
        healed(place, "decoder", tmp_path / "out", lr=1e-3)
    assert (tmp_path / "out.healing/mine.txt").read_text() == "mine"


def test_a_refused_healing_leaves_nothing(place: Path, tmp_path: Path) -> None:
    texts = [tmp_path / "none.txt"]
    with pytest.raises(RankwiseError, match="`text` must be a text"):
        heal_folder(place / "decoder-small", place / "decoder", texts, tmp_path / "a/b/out", **QUICK)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("settings", [{"accumulate": 2}, {"checkpointing": True}])
def test_less_memory_gives_the_same_model(place: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    healed(place, "decoder", tmp_path / "plain", lr=1e-3, accumulate=1)
    healed(place, "decoder", tmp_path / "spared", lr=1e-3, **{"accumulate": 1, **settings})
    pairs = zip(weights(tmp_path / "plain").values(), weights(tmp_path / "spared").values(), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_the_precision_of_the_folder_stays(place: Path, tmp_path: Path) -> None:
    model = hf.AutoModelForCausalLM.from_pretrained(place / "decoder-small", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    tokenizer().save_pretrained(tmp_path / "half")
    result = heal_folder(
        tmp_path / "half", place / "decoder", [place / "text.txt"], tmp_path / "healed", **QUICK, lr=3e-3
    )
    assert {tensor.dtype for tensor in weights(tmp_path / "healed").values()} == {torch.bfloat16}
    # steps in bfloat16 would be lost: the sum of many is not
    assert result.after < result.before


def test_what_makes_a_model_worse_is_not_written(place: Path, tmp_path: Path) -> None:
    """The dense model itself has nothing to learn, and loses by steps that are too large."""
    said: list[str] = []
    shutil.copytree(place / "decoder", tmp_path / "copy")
    text, more = place / "text.txt", {**QUICK, "lr": 0.5, "say": said.append}
    result = heal_folder(tmp_path / "copy", place / "decoder", text, tmp_path / "healed", **more)
    assert result.after == result.before == result.dense
    assert "Training made it no better on text that is held out" in said[-1]
    pairs = zip(weights(place / "decoder").values(), weights(tmp_path / "healed").values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_model_that_was_not_compressed_is_healed_with_a_word(place: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)
    other = decoder()
    other.save_pretrained(tmp_path / "fresh")
    said: list[str] = []
    text = [place / "text.txt"]
    # it has no tokenizer of its own, so the teacher's is taken
    result = heal_folder(
        tmp_path / "fresh", place / "decoder", text, tmp_path / "out", **QUICK, lr=1e-3, say=said.append
    )
    assert "every layer as its class builds it: it was not compressed, or by width" in said[0]
    assert result.after < result.before
    assert hf.AutoTokenizer.from_pretrained(tmp_path / "out")("w1 w2")["input_ids"] == tokenizer()("w1 w2")["input_ids"]


def test_a_short_text_is_read_again_with_a_word(place: Path, tmp_path: Path) -> None:
    said: list[str] = []
    text = text_file(tmp_path / "short.txt", words=60)
    more = {**QUICK, "lr": 1e-3, "say": said.append}
    result = heal_folder(place / "decoder-small", place / "decoder", [text], tmp_path / "out", **more)
    assert result.tokens == 10 * 4 * 12
    assert "short.txt has 48 tokens to train on, so each is read 10 times: more text would heal better" in said[0]


def bad(place: Path, folder: Path) -> dict[str, tuple[dict[str, Any], str]]:
    """What is wrong, and what is said of it."""
    small, dense = place / "decoder-small", place / "decoder"
    wide = folder / "wide"
    decoder(vocab_size=30).save_pretrained(wide)
    decoder().save_pretrained(folder / "renamed")
    tokenizer(shift=3).save_pretrained(folder / "renamed")
    shutil.copytree(dense, folder / "quantized")
    config = json.loads((folder / "quantized/config.json").read_text())
    entry = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "quantized/config.json").write_text(json.dumps({**config, "quantization_config": entry}))
    encoder(num_hidden_layers=1).save_pretrained(folder / "shallow")
    (folder / "empty.txt").write_text("")
    (folder / "tiny.txt").write_text("w1 w2 w3")
    (folder / "window.txt").write_text("w1 " * 12)
    (folder / "latin.txt").write_bytes(b"w1 w2 caf\xe9 " * 100)
    text_file(folder / "foreign.txt", first="ж")
    shutil.copytree(small, folder / "taken")
    return {
        "no text": ({"texts": []}, "`texts` must name at least one text, but is empty. Example: --text book.txt"),
        "empty": ({"texts": [folder / "empty.txt"]}, "`text` must be a text, but .*empty.txt is empty"),
        "tiny": ({"texts": [folder / "tiny.txt"]}, "must hold at least one window of 12 tokens, but .*tiny.txt has 3"),
        "one": ({"texts": [folder / "window.txt"]}, "at least 2 windows of 12 tokens, one of them to hold out, but"),
        "missing": ({"texts": [folder / "none.txt"]}, "must be a text, but .*none.txt is not: No such file"),
        "folder": ({"texts": [folder]}, "`text` must be a text, but .* is a folder"),
        "latin": ({"texts": [folder / "latin.txt"]}, "must be UTF-8, but .*latin.txt has the byte 0xe9"),
        "foreign": ({"texts": [folder / "foreign.txt"]}, "must know the characters of `text`, but 9.% of the to"),
        "words": ({"teacher": wide}, "as many words as .*decoder-small, 16, but .*wide has 30. Give the dense model"),
        "tokens": ({"teacher": folder / "renamed"}, "must read the same tokens, but the tokenizer of .*renamed"),
        "kind": ({"teacher": place / "encoder"}, "of the kind of .*, LlamaForCausalLM, but .*encoder is BertModel"),
        "head": (
            {"folder": place / "encoder-small", "teacher": place / "masked"}, "BertModel, but .*masked is BertForMasked"
        ),
        "depth": (
            {"folder": place / "encoder-small", "teacher": folder / "shallow"}, "as many layers as .*, 2, but .* has 1"
        ),
        "same": ({"teacher": small}, "`teacher` must be another model than FOLDER, but both are"),
        "quantized": ({"teacher": folder / "quantized"}, "weights unrounded, but .* is quantized by 'bitsandbytes'"),
        "quantized student": ({"folder": folder / "quantized"}, "FOLDER must hold its weights unrounded"),
        "nowhere": ({"teacher": folder / "nowhere"}, "`teacher` must be a folder that exists, or a name on the hub"),
        "no model": ({"folder": folder}, "FOLDER must be a folder or name that transformers can load"),
        "encoders write nothing": (
            {"folder": place / "encoder-small", "teacher": place / "encoder", "generated": True},
            "Text is generated by decoders, but .*encoder is none. Name a text instead",
        ),
        "window": ({"window": 41}, "`window` must be at most 40 tokens, which is all the model reads, but is 41"),
        "accumulate": ({"accumulate": 3}, "`accumulate` must divide the 4 windows of a batch, but is 3"),
        "steps": ({"steps": 1}, "`steps` must be a whole number of at least 2, but is 1"),
        "lr": ({"lr": -1.0}, "`lr` must be positive and finite, but is -1.0"),
        "rates": ({"rates": ()}, r"`rates` must be positive and finite, but are \[\]"),
        "out": ({"out": folder / "taken"}, r"`folder` \(--out\) must be new, but .*taken exists"),
    }  # fmt: skip


def test_what_is_wrong_is_said_in_one_line_before_anything_slow(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rankwise.lab.experiments.healing import pretrained

    def slow(name: str) -> Any:
        raise AssertionError(f"weights of {name} were loaded")

    monkeypatch.setattr(pretrained, "open_model", slow)
    for changes, message in bad(place, tmp_path).values():
        given = {"folder": place / "decoder-small", "teacher": place / "decoder", "texts": [place / "text.txt"],
                 "out": tmp_path / "out", **QUICK, **changes}  # fmt: skip
        with pytest.raises(RankwiseError, match=message) as refused:
            heal_folder(**given)
        assert "\n" not in str(refused.value)
        assert not (tmp_path / "out").exists() and not (tmp_path / "out.healing").exists()


@pytest.mark.parametrize("words, window, parts", [(50_000, 512, 8), (50_000, 32, 1), (262_144, 512, 16), (2, 256, 2)])
def test_parts_of_a_batch_bound_what_is_in_memory(words: int, window: int, parts: int) -> None:
    assert parts_of_batch(16, window, words, on_gpu=False) == parts
    at_once = 16 // parts * window * words
    assert at_once <= 2**26 or parts == 16
    assert parts_of_batch(16, window, words, on_gpu=True) <= parts


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of rankwise's own architecture, with a compressed model and its dense control."""
    folder = tmp_path_factory.mktemp("run")
    pipeline.run(experiment_toys.toy(folder, compare=("dense",)), folder / "run")
    return folder


def test_the_model_of_a_run_is_healed_with_its_own_vocabulary(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rankwise.cli.app import run as command

    text, settings = run / "letters.txt", {"steps": 20, "batch_size": 4, "lr": 3e-3, "device": "cpu"}
    student, teacher = run / "run/flop-l0", run / "run/dense"
    whole = heal_folder(student, teacher, [text], tmp_path / "whole", **settings)
    assert whole.measure == "bits per character"
    assert whole.after < whole.before
    with pytest.raises(KeyboardInterrupt):
        heal_folder(
            student, teacher, [text], tmp_path / "stopped", **settings, watcher=Phases("healing at a rate of 0.003", 11)
        )
    heal_folder(student, teacher, [text], tmp_path / "stopped", **settings)
    assert (tmp_path / "whole/model.safetensors").read_bytes() == (tmp_path / "stopped/model.safetensors").read_bytes()
    assert rw.count(rw.load(tmp_path / "whole")) == rw.count(rw.load(student / "model")) == whole.parameters
    with monkeypatch.context() as patch:
        stop_after_save(patch)
        with pytest.raises(KeyboardInterrupt):
            heal_folder(student, teacher, [text], tmp_path / "saved", **settings)
    assert heal_folder(student, teacher, [text], tmp_path / "saved", **settings).figures == whole.figures
    assert not (tmp_path / "saved.healing").exists()
    assert command(["sample", str(tmp_path / "whole"), "--length", "5"]) == 0


def test_bad_input_for_a_model_of_a_run(run: Path, place: Path, tmp_path: Path) -> None:
    student, teacher, text = run / "run/flop-l0", run / "run/dense", [run / "letters.txt"]
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "tiny.txt").write_text("a b c")
    (tmp_path / "foreign.txt").write_text("a b ж")
    cases: list[tuple[Any, Any, Any, str]] = [
        (
            student,
            place / "decoder",
            text,
            "must be a model of rankwise's own architectures, as .* is, but .* of transf",
        ),
        (student, teacher, [tmp_path / "empty.txt"], "`text` must be a text, but .*empty.txt is empty"),
        (student, teacher, [tmp_path / "tiny.txt"], "at least 4 x 8 tokens to train on, but .*tiny.txt has 3"),
        (
            student,
            teacher,
            [tmp_path / "foreign.txt"],
            "must be written in the 9 characters of the corpus, but has 'ж'",
        ),
    ]
    with pytest.raises(RankwiseError, match="Text is generated by decoders of transformers, but .* Name a text instea"):
        heal_folder(student, teacher, [], tmp_path / "out", batch_size=4, device="cpu", generated=True)
    for folder, other, texts, message in cases:
        with pytest.raises(RankwiseError, match=message) as refused:
            heal_folder(folder, other, texts, tmp_path / "out", batch_size=4, device="cpu")
        assert "\n" not in str(refused.value)
