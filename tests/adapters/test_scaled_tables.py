"""Tables of words that scale the rows they look up: planned, gated, compressed and saved as any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rankwise as rw
from rankwise.adapters.plans import find_plan
from rankwise.core.calibrate import output_fisher
from rankwise.modules import scale_of
from tests.adapters.plan_toys import names, reasons

BUDGET = rw.Budget(removed=0.4)

WORDS, WIDTH, SCALE = 30, 12, 3.5


class ByNumber(nn.Embedding):
    """As BART's."""

    def __init__(self, scale: float = SCALE) -> None:
        super().__init__(WORDS, WIDTH, padding_idx=WORDS - 1)
        self.scale = scale

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) * self.scale


class ByBuffer(nn.Embedding):
    """As Gemma's, which rounds its scale to the dtype of the weight."""

    scale: Tensor

    def __init__(self, scale: float = SCALE) -> None:
        super().__init__(WORDS, WIDTH)
        self.register_buffer("scale", torch.tensor(scale), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scale.to(self.weight.dtype)


class Words(nn.Module):
    """A table, a layer, and a head, tied to the table or not; `outside` is a scale that the model applies itself."""

    def __init__(self, table: nn.Embedding, *, tied: bool, outside: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.body = table, nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.outside = outside
        nn.init.normal_(table.weight)
        if tied:
            self.head.weight = table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.table(tokens) * self.outside
        y: Tensor = self.head(h + torch.tanh(self.body(h)))
        return y


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(0, WORDS, (4, 9), generator=torch.Generator().manual_seed(seed))


def cross_entropy(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), logits.detach().flatten(0, 1).argmax(1), reduction="sum")


scaled = pytest.mark.parametrize("make", [ByNumber, ByBuffer])


@pytest.mark.filterwarnings("ignore:These layers are left as they are")
@scaled
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", ["pair", "pivot"])
def test_a_scaled_table_is_compressed_as_if_the_model_scaled_its_rows(make: Any, tied: bool, layout: Any) -> None:
    model = Words(make(), tied=tied)
    alike = Words(nn.Embedding(WORDS, WIDTH, model.table.padding_idx), tied=tied, outside=SCALE)
    alike.load_state_dict(model.state_dict())
    assert "table" in names(find_plan(model))
    small, other = (
        rw.compress(
            each, rw.Budget(removed=0.4), [tokens(), tokens(1)], loss=cross_entropy, embeddings=True, layout=layout
        )
        for each in (model, alike)
    )
    assert isinstance(small.table, nn.Sequential)
    assert rw.count(small) == rw.count(other)
    torch.testing.assert_close(small(tokens(2)), other(tokens(2)), rtol=1e-4, atol=1e-4)


@scaled
@pytest.mark.parametrize("tied", [False, True])
def test_a_gated_table_scales_and_so_does_what_it_becomes(make: Any, tied: bool) -> None:
    model = Words(make(), tied=tied)
    want = model(tokens())
    pruner = rw.Pruner(model, rw.Budget(removed=0.3), "svd", init="svd")
    model.train()
    torch.testing.assert_close(model(tokens()), want, rtol=1e-4, atol=1e-4)
    small = pruner.compact()
    assert rw.count(small) == pruner.size().exported
    torch.testing.assert_close(small(tokens()), model.eval()(tokens()), rtol=1e-4, atol=1e-4)


@scaled
def test_a_saved_one_loads_into_a_fresh_model_and_is_compressed_again(make: Any, tmp_path: Path) -> None:
    small = rw.compress(Words(make(), tied=True), rw.Budget(removed=0.3), embeddings=True)
    rw.save(small, tmp_path / "small")
    loaded = rw.load(tmp_path / "small", Words(make(), tied=True))
    assert torch.equal(loaded(tokens()), small(tokens()))
    again = rw.compress(loaded, rw.Budget(params=rw.count(loaded)), embeddings=True)
    torch.testing.assert_close(again(tokens()), small(tokens()))


@scaled
def test_words_weigh_what_an_error_of_their_unscaled_rows_costs(make: Any) -> None:
    model = Words(make(), tied=False)
    alike = Words(nn.Embedding(WORDS, WIDTH), tied=False, outside=SCALE)
    alike.load_state_dict(model.state_dict())
    found, want = (output_fisher(each, find_plan(each), [tokens()], cross_entropy) for each in (model, alike))
    for name in ("rows_O", "inputs_II"):
        torch.testing.assert_close(getattr(found["table"], name), getattr(want["table"], name))


class Positions(nn.Embedding):
    """As BART's positions, which begin at two."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids.clamp(max=2) + 2)


class InOrder(nn.Embedding):
    """As Whisper's: the rows of places, whatever the words."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.weight[: input_ids.shape[1]].expand(len(input_ids), -1, -1)


class Normed(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return F.normalize(super().forward(input), dim=-1)


class Dropped(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return F.dropout(super().forward(input), 0.5, self.training)


class Mixing(nn.Embedding):
    """As Ovis2's: words by number, or by chances of all."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if input.dtype == torch.long else input @ self.weight[: input.shape[-1]]


class Silent(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 0


class Wide(ByNumber):
    """Holds a scale for every column, which a factor of lower rank has not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("columns", torch.ones(WIDTH))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", [Positions, InOrder, Normed, Dropped, Mixing, Silent, Wide])
def test_a_table_that_does_anything_else_is_left_out(kind: type[nn.Embedding], device: str) -> None:
    with torch.device(device):
        table = kind() if kind is Wide else kind(WORDS, WIDTH)  # type: ignore[call-arg]
    model = nn.ModuleDict({"table": table, "plain": nn.Linear(4, 4)})
    state = torch.get_rng_state()
    plan = find_plan(model)
    assert names(plan) == {"plain"}
    assert kind.__name__ in reasons(plan)["table"]
    # nothing is drawn from the generator of the user
    assert torch.equal(torch.get_rng_state(), state)


def test_the_scale_is_measured() -> None:
    assert scale_of(nn.Embedding(3, 2)) == 1.0
    for make in (ByNumber, ByBuffer):
        for scale in (-0.03, 1.0, 25.25):
            assert scale_of(make(scale)) == pytest.approx(scale)
    assert scale_of(Normed(3, 2)) is None


@scaled
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_without_weights_has_the_same_plan(make: Any, tied: bool) -> None:
    with torch.device("meta"):
        empty = Words(make(), tied=tied)
    assert find_plan(empty) == find_plan(Words(make(), tied=tied))
