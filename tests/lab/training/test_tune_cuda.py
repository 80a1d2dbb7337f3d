"""Fine-tuning on a GPU, where steps are recorded as graphs; skipped where there is none."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankwise.lab.training.tune import TuningConfig, tune

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
CONFIG = TuningConfig(epochs=4, batch_size=16, lr=1e-2, clip=0.5)


class Lines:
    """Texts of two lengths, and a last batch that is not full."""

    def __init__(self, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(100, 8, 12, generator=generator).to(device)
        self.y = self.x.sum(-1)

    def __len__(self) -> int:
        return len(self.x)

    def batches(self, batch_size: int, seed: int) -> Iterator[dict[str, Tensor]]:
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        for i, index in enumerate(order.split(batch_size)):
            chosen, length = index.to(self.x.device), 8 if i % 2 else 4
            yield {"x": self.x[chosen, :length], "y": self.y[chosen, :length]}


class Loss:
    """Counts how often the host asks for it."""

    def __init__(self, *, waits: bool = False) -> None:
        self.asked, self.waits = 0, waits

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        self.asked += 1
        value = (model(batch["x"]).squeeze(-1) - batch["y"]).square().mean()
        if self.waits:
            assert value.item() >= 0
        return value


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 1))


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().cpu().flatten() for p in module.parameters()])


def test_graphs_train_the_weights_that_a_cpu_trains() -> None:
    start, loss = model(), Loss()
    lines: list[Mapping[str, Any]] = []
    here, there = copy.deepcopy(start), copy.deepcopy(start).cuda()
    tune(here, Lines("cpu"), CONFIG, Loss(), precision="no", log=None)
    tune(there, Lines("cuda"), CONFIG, loss, precision="no", log=lines.append)
    torch.testing.assert_close(weights(there), weights(here), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(weights(there), weights(start), atol=1e-2)
    # once, and once to record it: two lengths and one batch of another size
    assert loss.asked == 2 * 3
    assert all(torch.isfinite(torch.tensor(line["loss"])) for line in lines)


def test_dropout_draws_anew_in_every_step_of_a_graph() -> None:
    seen: list[Tensor] = []

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.mask = nn.Parameter(torch.ones(1000)), nn.Buffer(torch.zeros(1000))

        def forward(self, x: Tensor) -> Tensor:
            kept = nn.functional.dropout(self.weight, 0.5)
            self.mask.copy_(kept.detach())
            return (x * kept.mean()).sum(-1, keepdim=True)

    dropped = Dropped().cuda()
    tune(dropped, Lines("cuda"), CONFIG, Loss(), after_step=lambda: seen.append((dropped.mask != 0).cpu()))
    pairs = pairwise(seen)
    assert all(300 < int((a != b).sum()) < 700 for a, b in pairs)


def test_a_model_that_waits_for_the_gpu_is_trained_without_a_graph() -> None:
    trained, loss = model().cuda(), Loss(waits=True)
    with pytest.warns(UserWarning, match="without a CUDA graph"):
        tune(trained, Lines("cuda"), CONFIG, loss, precision="no")
    expected = model().cuda()
    tune(expected, Lines("cuda"), CONFIG, Loss(), precision="no")
    torch.testing.assert_close(weights(trained), weights(expected), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_an_encoder_and_its_teacher_are_trained_by_graphs(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    from rankwise.distill import Distillation, distillation_loss

    sizes = {"hidden_size": 16, "dim": 16, "intermediate_size": 32, "hidden_dim": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "n_heads": 2, "n_layers": 2, "vocab_size": 50, "pad_token_id": 1}
    config = transformers.AutoConfig.for_model(family, **sizes, **heads)
    torch.manual_seed(0)
    student = transformers.AutoModelForSequenceClassification.from_config(config).cuda()
    loss = distillation_loss(copy.deepcopy(student), Distillation())
    taken: list[int] = []

    class Texts(Lines):
        def batches(self, batch_size: int, seed: int) -> Iterator[dict[str, Tensor]]:
            for batch in super().batches(batch_size, seed):
                mask = (batch["y"] > -3).long()
                ids = mask * batch["x"][..., 0].abs().mul(10).long().clamp(max=47) + 2
                yield {"input_ids": ids, "attention_mask": mask, "labels": mask[:, 0]}

    def counted(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        taken.append(1)
        return loss(model, batch)

    tune(student, Texts("cuda"), CONFIG, counted)
    assert len(taken) == 2 * 3
    assert torch.isfinite(weights(student)).all()
