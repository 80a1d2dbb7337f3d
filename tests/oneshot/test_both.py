"""Neurons and ranks in one budget: exact, by shares that are given or found, and loaded like any other folder."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import rankwise as rw
from rankwise.cli.app import run
from rankwise.modules import LowRankLinear, PivotLinear
from rankwise.oneshot import RANKS, Refinement
from rankwise.oneshot.both import KEPT_BACK, SHARES, NeuronsThenRanks, divergence
from tests.hf.test_widths import build, tokens
from tests.oneshot.test_blockwise import Kept

# models this small lose layers as a whole
pytestmark = pytest.mark.filterwarnings("ignore:These layers are left as they are")
BATCHES = [{"input_ids": tokens(seed)} for seed in range(5)]
BOTH: Any = "width+svd"


def limit_of(model: torch.nn.Module, removed: float) -> int:
    return int((1 - removed) * rw.count(model))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_a_share_is_the_two_methods_one_after_the_other(family: str, share: float) -> None:
    model: Any = build(family)
    dense, limit = rw.count(model), limit_of(model, 0.4)
    before = copy.deepcopy(model.state_dict())
    found: Any = rw.compress(model, rw.Budget(params=limit), BATCHES, method=BOTH, width_share=share)
    want: Any = model
    if share:
        middle = dense - round(share * (dense - limit))
        want = rw.compress(want, rw.Budget(params=middle), BATCHES, method="width")
        widths = [(m.config.intermediate_size, m.config.num_key_value_heads) for m in (want, model)]
        assert widths[0] < widths[1]
    if rw.count(want) > limit:
        want = rw.compress(want, rw.Budget(params=limit), BATCHES)
    torch.testing.assert_close(found.state_dict(), want.state_dict(), rtol=0, atol=0)
    assert found.config.intermediate_size == want.config.intermediate_size
    assert rw.count(found) <= limit
    has_low_rank = any(isinstance(module, LowRankLinear) for module in found.modules())
    assert has_low_rank == (share < 1)
    # the smallest component that is left costs the two sides of the smallest matrix
    assert share == 1 or limit - rw.count(found) < 2 * model.config.hidden_size
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_the_share_that_is_found_is_the_best_of_those_tried() -> None:
    model = build()
    budget = rw.Budget(params=limit_of(model, 0.4))
    used, kept_back = BATCHES[:-1], BATCHES[-1:]
    assert len(BATCHES) // KEPT_BACK == 0
    errors = {
        share: divergence(model, rw.compress(model, budget, used, method=BOTH, width_share=share), kept_back)
        for share in SHARES
    }
    assert len(set(errors.values())) == len(SHARES)
    best = min(errors, key=lambda share: errors[share])
    found = rw.compress(model, budget, BATCHES, method=BOTH)
    want = rw.compress(model, budget, BATCHES, method=BOTH, width_share=best)
    torch.testing.assert_close(found.state_dict(), want.state_dict(), rtol=0, atol=0)


def test_what_decides_between_shares_is_in_no_batch_of_the_loss() -> None:
    """Of the windows kept back, the beginnings are no loss batches either, however many are in one."""
    model, limit = build(), limit_of(build(), 0.4)
    # two for each batch of calibration; those of the last one are shorter
    halves = [{"input_ids": tokens(seed)[:, :4]} for seed in range(8)] + [{"input_ids": tokens(4)[:, :3]}] * 2
    lengths: set[int] = set()

    def loss(output: Any) -> torch.Tensor:
        lengths.add(output.logits.shape[1])
        found: torch.Tensor = output.logits.square().mean()
        return found

    plan = rw.find_plan(model)
    shared = {"loss": loss, "progress": None}
    low_rank = {"budget": rw.Budget(params=limit)}
    NeuronsThenRanks(rw.compress, plan, limit, shared, low_rank).best_share(model, BATCHES, halves)
    assert lengths == {4}


def test_a_share_that_no_width_reaches_is_passed_by() -> None:
    """One key-value head and few neurons stay in any case, but ranks may go to zero."""
    model = build()
    budget = rw.Budget(params=limit_of(model, 0.8))
    with pytest.raises(rw.BudgetError, match="must be at least"):
        rw.compress(model, budget, BATCHES, method="width")
    small = rw.compress(model, budget, BATCHES, method=BOTH, embeddings=True)
    assert rw.count(small) <= limit_of(model, 0.8)


def test_divergence_is_zero_for_the_same_and_kullback_leibler_for_others() -> None:
    model, other = build().eval(), build().eval()
    assert divergence(model, other, BATCHES) == 0
    with torch.no_grad():
        other.lm_head.weight.mul_(0.5)
        logits = [each(**BATCHES[0]).logits.double() for each in (model, other)]
    p, q = (each.softmax(-1) for each in logits)
    want = float((p * (p / q).log()).sum(-1).mean())
    assert divergence(model, other, BATCHES[:1]) == pytest.approx(want, rel=1e-4)
    base = divergence(model.model, build().model, BATCHES)
    assert base == 0


def test_the_model_itself_is_changed_where_that_is_asked_for() -> None:
    model = build()
    limit = limit_of(model, 0.3)
    assert rw.compress(model, rw.Budget(params=limit), BATCHES, method=BOTH, in_place=True) is model
    assert rw.count(model) <= limit


def test_blocks_that_were_refined_before_are_taken_as_they_are() -> None:
    model, kept, trained = build(), Kept(stops_after=len(BATCHES)), []
    settings: dict[str, Any] = {"method": BOTH, "width_share": 0.5, "refinement": Refinement(steps=2), "refined": kept}
    settings["progress"] = lambda what, done, total: trained.append(done) if what == "refining" else None
    want = rw.compress(model, rw.Budget(removed=0.3), BATCHES, **settings)
    assert list(kept.states) == list(range(len(model.model.layers)))
    trained.clear()
    found = rw.compress(model, rw.Budget(removed=0.3), BATCHES, **settings)
    assert not trained
    torch.testing.assert_close(found.state_dict(), want.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("method", ["svd", BOTH])
def test_pivots_that_half_precision_would_hurt_become_pairs(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    saved = {"dtype": torch.bfloat16, "megabytes": 2 * limit_of(model, 0.3) / 10**6}
    settings: dict[str, Any] = {"method": method, "layout": "pivot", "width_share": 0.5 if method == BOTH else None}
    # nothing is good enough
    monkeypatch.setattr("rankwise.core.matrices.ROUNDING", 0.0)
    small = rw.compress(model, rw.Budget(**saved), BATCHES, **settings)
    assert any(isinstance(module, LowRankLinear) for module in small.modules())
    assert not any(isinstance(module, PivotLinear) for module in small.modules())
    assert sum(tensor.nbytes for tensor in small.state_dict().values()) <= saved["megabytes"] * 10**6


def test_layers_outside_of_the_plan_stay_as_they_are() -> None:
    model: Any = build()
    plan = rw.find_plan(model, include=["gate_proj", "up_proj", "down_proj"])
    small: Any = rw.compress(model, rw.Budget(removed=0.2), BATCHES, method=BOTH, width_share=0.5, plan=plan)
    assert small.config.num_key_value_heads == model.config.num_key_value_heads
    assert small.config.intermediate_size < model.config.intermediate_size
    q = small.model.layers[0].self_attn.q_proj
    assert torch.equal(q.weight, model.model.layers[0].self_attn.q_proj.weight)


def test_the_command_writes_a_folder_that_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build("qwen3").save_pretrained(tmp_path / "dense")
    words = ["compress", str(tmp_path / "dense"), "--removed", "0.3", "--method", BOTH, "--width-share", "0.5"]
    assert run([*words, "--device", "cpu", "--json", "--out", str(tmp_path / "small")]) == 0
    made = json.loads(capsys.readouterr().out)
    small: Any = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert rw.count(small) == made["exported"] <= made["budget"]
    widths = [small.config.intermediate_size, small.config.num_key_value_heads]
    assert widths != [24, 2]
    assert any(isinstance(module, LowRankLinear) for module in small.modules())
    generated = small.generate(tokens(), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert generated.shape[1] == tokens().shape[1] + 4


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_blended_widths_lie_between_the_two(family: str) -> None:
    model, widths = build(family), {}
    for ranks in RANKS:
        found: Any = rw.compress(model, rw.Budget(removed=0.3), BATCHES, method="width", ranks=ranks)
        assert rw.count(found) <= limit_of(model, 0.3)
        widths[ranks] = found.config.intermediate_size, found.config.num_key_value_heads
    for one, other, between in zip(widths["global"], widths["even"], widths["blend"], strict=True):
        assert min(one, other) <= between <= max(one, other)


@pytest.mark.parametrize("method", ["width", BOTH])
def test_the_command_takes_any_ranks_with_any_method(
    tmp_path: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    build("qwen3").save_pretrained(tmp_path / "dense")
    words = ["compress", str(tmp_path / "dense"), "--removed", "0.2", "--method", method, "--ranks", "blend", "--json"]
    more = ["--width-share", "0.5"] if method == BOTH else []
    assert run([*words, *more, "--calibration", "none", "--device", "cpu", "--out", str(tmp_path / "small")]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == "blend"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no batch": ({"calibration": None}, "but `calibration` has 0. Pass at least two batches, or `width_share`"),
    "one batch": ({"calibration": BATCHES[:1]}, "but `calibration` has 1"),
    "a share above one": ({"width_share": 1.5}, r"in \[0, 1\], but is 1.5 instead"),
    "a share of nothing": ({"method": "svd", "width_share": 0.5}, 'goes with method="width\\+svd"'),
    "steps for width": ({"method": "width", "refinement": Refinement(steps=2)}, r"so are `refinement` \(--refine\)"),
    "an anchor for width": ({"method": "width", "anchor": True}, "settings of low rank, and so are .* `anchor`"),
    "steps without data": (
        {"width_share": 0.5, "calibration": None, "refinement": Refinement(steps=2)},
        "`refinement` must go with `calibration`, but there is none",
    ),
    "a latency": ({"budget": rw.Budget(latency_ms=5.0)}, "must be a size for width"),
    "a method in a list": ({"method": ["svd"]}, r"one of .*, but is \['svd'\] instead"),
    "an unknown method": ({"method": "svd+width"}, 'one of "svd", "width", "width\\+svd", but is \'svd\\+width\''),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused_and_changes_nothing(case: str) -> None:
    changes, message = WRONG[case]
    model = build()
    before = copy.deepcopy(model.state_dict())
    settings = {"budget": rw.Budget(removed=0.3), "calibration": BATCHES, "method": BOTH, "in_place": True, **changes}
    with pytest.raises(rw.RankwiseError, match=message):
        rw.compress(model, **settings)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_blocks_that_are_to_be_refined_are_looked_for_before_neurons_go() -> None:
    model = build(num_hidden_layers=1, layer_types=None)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(rw.RankwiseError, match="blocks"):
        rw.compress(
            model, rw.Budget(removed=0.3), BATCHES, method=BOTH, width_share=0.5, refinement=Refinement(steps=2),
            in_place=True,
        )  # fmt: skip
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_model_without_one_width_is_refused_at_once() -> None:
    sizes = {"vocab_size": 9, "max_position_embeddings": 8, "hidden_size": 16, "intermediate_size": 64}
    bert = hf.BertModel(hf.BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(rw.PlanError, match="Every layer must have one block of gate_proj"):
        rw.compress(bert, rw.Budget(removed=0.1), BATCHES, method=BOTH)
