"""The loss of a plain output layer, and products filled up to 16 bytes, against plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rankwise.kernels import linear
from rankwise.lab.kernels import loss
from rankwise.lab.models.sru import SRUConfig, SRULanguageModel
from rankwise.lab.tasks.language import LanguageModel
from tests.lab.kernels.triton_cases import (
    BF16,
    DEVICE,
    GPU,
    assert_same,
    by_interpreter,
    kernels,
    outputs_and_gradients,
    poison,  # noqa: F401
    run_by_interpreter,
    some,
)

pytestmark = pytest.mark.usefixtures("poison")
IGNORED = -100


@by_interpreter
def test_the_kernels_by_the_interpreter() -> None:
    run_by_interpreter(__file__)


def losses_and_gradients(run: object, h: Tensor, layer: nn.Linear, targets: Tensor) -> dict[str, Tensor]:
    tensors = [h, *layer.parameters()]
    return outputs_and_gradients(lambda *_: run(h, layer, targets, IGNORED), tensors)  # type: ignore[operator]


@kernels
@pytest.mark.parametrize("turned", [False, True], ids=["", "time first"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(
    "batch, steps, width, words", [(1, 1, 1, 1), (3, 7, 5, 13), (40, 52, 8, 205), (2, 3, 16, 1024)]
)
def test_loss_and_gradients_are_those_of_cross_entropy(
    batch: int, steps: int, width: int, words: int, bias: bool, turned: bool
) -> None:
    layer = nn.Linear(width, words, bias=bias, device=DEVICE)
    h = some(batch, steps, width) if not turned else some(steps, batch, width)
    targets = torch.randint(words, (batch, steps), device=DEVICE)
    if batch > 1:
        targets[torch.rand(batch, steps, device=DEVICE) < 0.3] = IGNORED
        targets[0, 0] = 0

    def view(h: Tensor) -> Tensor:
        return h.transpose(0, 1) if turned else h

    got = losses_and_gradients(lambda h, *rest: loss.output_loss(view(h), *rest), h, layer, targets)
    want = losses_and_gradients(lambda h, *rest: loss.reference(view(h), *rest), h, layer, targets)
    if words > 1:
        assert_same(got, want, 1e-5)


@kernels
def test_without_any_target_the_loss_is_undefined_as_that_of_torch() -> None:
    layer, targets = nn.Linear(3, 4, device=DEVICE), torch.full((2, 5), IGNORED, device=DEVICE)
    assert loss.output_loss(some(2, 5, 3), layer, targets, IGNORED).isnan()


@kernels
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("inputs, outputs", [(5, 13), (8, 16), (205, 9), (16, 205)])
def test_a_product_that_is_filled_up_is_that_of_torch(inputs: int, outputs: int, bias: bool) -> None:
    tensors = [some(3, 4, inputs), some(outputs, inputs), some(outputs) if bias else None]
    got = outputs_and_gradients(lambda *given: linear._Linear.apply(*given, torch.float32), tensors)
    assert_same(got, outputs_and_gradients(nn.functional.linear, tensors), 1e-5)


@pytest.mark.skipif(not GPU, reason="half precision of a GPU")
def test_in_half_precision_a_language_model_has_the_loss_and_gradients_of_float32() -> None:
    config = SRUConfig(num_words=205, embedding_width=29, width=64, num_layers=3, rank=16, dropout=0.0, layer_norm=True)
    language = LanguageModel(SRULanguageModel(config).to(DEVICE))
    tokens, targets = torch.randint(205, (2, 4, 30), device=DEVICE)
    targets[0, :5] = IGNORED
    found = []
    for enabled in (True, False):
        with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
            mean, _ = language(tokens, targets)
        language.zero_grad()
        mean.backward()
        found.append({"loss": mean} | {name: p.grad.clone() for name, p in language.named_parameters()})
    assert_same(found[0], found[1], 5 * BF16)
