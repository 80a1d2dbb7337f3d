"""The callback under the stock Trainer: the same run as a plain loop, and the same run when it is resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import rankwise as rw
from rankwise.hf import PruningCallback
from tests.hf.hf_families import QUIET, WORDS, batch, build, compact, logits

pytestmark = [
    *QUIET,
    # by torch, of the loader that the Trainer makes
    pytest.mark.filterwarnings("ignore:.*pin_memory.* argument is set as true:UserWarning"),
]

STEPS = 6


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random sentences, the same ones in every run."""

    def __init__(self, model: hf.PreTrainedModel, size: int = 64) -> None:
        rows = batch(model, size=size, seed=5)
        self.rows = [{name: value[i] for name, value in rows.items()} for i in range(size)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return self.rows[i]


def gated(family: str = "bert", method: str = "flop-l0", **settings: Any) -> rw.Pruner:
    settings = settings or ({"anneal_steps": 4} if method != "fac" else {})
    return rw.Pruner(build(family), rw.Budget(removed=0.4), method, **settings)


def trainer(pruner: rw.Pruner, folder: Path, **settings: Any) -> hf.Trainer:
    """As a user would make it."""
    model: Any = pruner.model
    arguments = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
    }
    return hf.Trainer(
        model=model,
        args=hf.TrainingArguments(output_dir=str(folder), **{**arguments, **settings}),
        train_dataset=Sentences(model),
        eval_dataset=Sentences(model, size=8),
        callbacks=[PruningCallback(pruner)],
    )


def assert_equal_states(model: nn.Module, other: nn.Module) -> None:
    state, want = model.state_dict(), other.state_dict()
    assert state.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(state[name], value), name


def test_the_trainer_does_what_a_plain_loop_does(tmp_path: Path) -> None:
    """One step of the gates after each step of the optimizer. LLaMA has no dropout, so that both see the same."""
    under = gated("llama")
    trainer(under, tmp_path, lr_scheduler_type="constant", train_sampling_strategy="sequential").train()

    plain = gated("llama")
    model: Any = plain.model
    decayed = {name for name, p in model.named_parameters() if p.dim() > 1}
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in model.named_parameters() if n in decayed], "weight_decay": 0.1},
            {"params": [p for n, p in model.named_parameters() if n not in decayed], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )
    rows = Sentences(model).rows
    model.train()
    for step in range(STEPS):
        chunk = rows[4 * step : 4 * step + 4]
        model(**{name: torch.stack([row[name] for row in chunk]) for name in chunk[0]}).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        plain.step()
        optimizer.zero_grad()
    assert plain.steps == under.steps == STEPS
    # which the callback does by itself
    plain.drop_closed(optimizer)
    for name, value in under.model.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "family, method", [("bert", "flop-l0"), ("gpt2", "flop-l0"), ("t5", "flop-agp"), ("mixtral", "flop-l0")]
)
def test_a_resumed_run_ends_with_the_same_weights(
    family: str, method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bit for bit: gates, multipliers, moments and step are in the Trainer's own checkpoint."""
    whole = gated(family, method)
    trainer(whole, tmp_path / "whole", save_strategy="steps", save_steps=3).train()
    resumed = gated(family, method)
    again = trainer(resumed, tmp_path / "resumed")
    hf.logging.enable_propagation()
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    hf.logging.disable_propagation()
    assert "missing keys" not in caplog.text
    assert "unexpected keys" not in caplog.text
    assert resumed.steps == STEPS
    assert_equal_states(resumed.model, whole.model)
    assert_equal_states(resumed.compact(), whole.compact())


def test_after_a_run_in_mixed_precision_the_compact_model_computes_as_it_is_saved(tmp_path: Path) -> None:
    pruner = gated("llama")
    for _ in range(2):
        trainer(pruner, tmp_path, bf16=True).train()
    small = pruner.compact().eval()
    small.save_pretrained(tmp_path / "small")
    loaded = hf.LlamaForCausalLM.from_pretrained(tmp_path / "small").eval()
    inputs = batch(small)
    assert torch.equal(logits(small, **inputs), logits(loaded, **inputs))


def test_accumulated_gradients_make_one_step(tmp_path: Path) -> None:
    one, many = gated("llama"), gated("llama")
    common = {"train_sampling_strategy": "sequential", "max_steps": 2}
    for pruner, size, parts in ((one, 8, 1), (many, 2, 4)):
        settings = {"per_device_train_batch_size": size, "gradient_accumulation_steps": parts}
        trainer(pruner, tmp_path, **settings, **common).train()
    assert one.steps == many.steps == 2
    for a, b in zip(one.controller.gates, many.controller.gates, strict=True):
        torch.testing.assert_close(a.alpha, b.alpha, rtol=1e-3, atol=1e-3)


class Scaler:
    """What accelerate hangs on its optimizer in fp16: a scale that its own step changes."""

    def __init__(self) -> None:
        self.scale = 1024.0

    def get_scale(self) -> float:
        return self.scale


def test_the_scale_of_the_gradients_is_that_before_the_optimizers_step() -> None:
    def alphas(scale: float) -> list[Tensor]:
        pruner = gated()
        model: Any = pruner.model
        model.train()
        torch.manual_seed(0)
        (model(**batch(model)).loss * scale).backward()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if scale != 1.0:
            optimizer.scaler = Scaler()
        callback, nothing = PruningCallback(pruner), (None, None, None)
        callback.on_pre_optimizer_step(*nothing, optimizer=optimizer)  # type: ignore[arg-type]
        if scale != 1.0:
            optimizer.scaler.scale = 2048.0
        callback.on_optimizer_step(*nothing, optimizer=optimizer)  # type: ignore[arg-type]
        return [gate.alpha.clone() for gate in pruner.controller.gates]

    for a, b in zip(alphas(1024.0), alphas(1.0), strict=True):
        torch.testing.assert_close(a, b)


def test_sizes_are_logged_beside_the_loss(tmp_path: Path) -> None:
    pruner = gated()
    run = trainer(pruner, tmp_path)
    run.train()
    logs = [entry for entry in run.state.log_history if "loss" in entry]
    assert len(logs) == STEPS
    dense = pruner.account.dense
    assert all(entry["budget"] == pruner.limit for entry in logs)
    targets = [entry["target_size"] for entry in logs]
    assert targets == sorted(targets, reverse=True)
    assert pruner.limit < targets[0] < dense
    assert targets[-1] == pruner.limit
    assert logs[-1]["expected_size"] == round(pruner.controller.expected_size())


def test_the_best_checkpoint_is_one_of_the_final_size(tmp_path: Path) -> None:
    """A larger model is better: the first evaluation would win."""
    pruner = gated(anneal_steps=3)
    run = trainer(
        pruner,
        tmp_path,
        learning_rate=0.0,
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="larger",
        greater_is_better=True,
    )

    def larger(*args: Any, **kwargs: Any) -> dict[str, float]:
        return {"eval_larger": float(-pruner.steps)}

    run.evaluate = larger  # type: ignore[method-assign]
    run.train()
    assert run.state.best_metric == -3
    assert run.state.best_model_checkpoint is not None
    assert run.state.best_model_checkpoint.endswith("checkpoint-3")
    assert pruner.steps == 3


def test_a_checkpoint_says_that_it_is_gated(tmp_path: Path) -> None:
    pruner = gated("gpt2")
    run = trainer(pruner, tmp_path, save_strategy="steps", save_steps=STEPS)
    run.train()
    run.save_model(str(tmp_path / "final"))
    for folder in (tmp_path / f"checkpoint-{STEPS}", tmp_path / "final"):
        content = json.loads((folder / "config.json").read_text())
        assert content["quantization_config"]["gated"] is True
        with pytest.raises(rw.CheckpointError, match="holds a gated one"):
            hf.AutoModelForCausalLM.from_pretrained(folder)


def test_a_compact_model_is_healed_and_loaded_again(tmp_path: Path) -> None:
    """A short training of the compact model, from memory and from disk; its checkpoints are compact models."""
    compact("qwen2", "fac").save_pretrained(tmp_path / "small")
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    before = logits(model)
    arguments = hf.TrainingArguments(
        output_dir=str(tmp_path / "heal"), max_steps=2, save_steps=2, report_to="none", disable_tqdm=True, use_cpu=True
    )
    hf.Trainer(model=model, args=arguments, train_dataset=Sentences(model)).train()
    assert not torch.equal(logits(model), before)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "heal" / "checkpoint-2")
    assert rw.count(again) == rw.count(model)
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-5, atol=1e-5)
    assert again.config.vocab_size == WORDS


# what is refused


def test_another_model_than_the_pruners_is_refused(tmp_path: Path) -> None:
    pruner = gated()
    run = trainer(gated(), tmp_path)
    run.add_callback(PruningCallback(pruner))
    with pytest.raises(rw.RankwiseError, match="must train the pruner's model, but got another one"):
        run.train()
    assert pruner.steps == 0


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"n_gpu": 2}, "must drive one GPU, but this one drives 2"),
        ({"deepspeed": "x.json"}, "but DeepSpeed is set"),
    ],
)
def test_ways_to_train_that_would_lose_gradients_are_refused(changes: dict[str, Any], match: str) -> None:
    from types import SimpleNamespace

    pruner = gated()
    arguments: Any = SimpleNamespace(**{"n_gpu": 1, "deepspeed": None, "fsdp": None, **changes})
    with pytest.raises(rw.RankwiseError, match=match):
        PruningCallback(pruner).on_train_begin(arguments, hf.TrainerState(), hf.TrainerControl(), model=pruner.model)


def test_the_callback_wants_a_pruner() -> None:
    with pytest.raises(TypeError, match="must be a rankwise.Pruner, but is a Linear"):
        PruningCallback(nn.Linear(2, 2))  # type: ignore[arg-type]
