"""Timing many models: every case once, against the right counterpart, and plain words where nothing was gained."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peer import released_sru
from torch import Tensor, nn

import rankwise as rw
from rankwise.deploy.bench import ENGINES, BenchConfig, Engine, bench, engine, remarks, summary
from rankwise.deploy.quantize import can_multiply_bfloat16
from rankwise.lab.models.sru import SRUConfig, SRULanguageModel
from rankwise.lab.models.transformer_xl import TransformerXL, TransformerXLConfig

pytestmark = pytest.mark.filterwarnings("ignore:This processor has no instructions for int8")


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(7, width)
        self.layer = nn.Linear(width, 7)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        y: Tensor = self.layer(self.words(tokens_BT))
        return y


def tokens(batch: int, length: int) -> Tensor:
    return torch.zeros(batch, length, dtype=torch.long)


def test_every_case_has_a_row_of_every_model() -> None:
    config = BenchConfig(length=3, batches=(1, 2), threads=(1,), repeats=2)
    before, told = torch.get_num_threads(), []
    rows = bench({"dense": Model(9), "compact": Model(2)}, config, tokens, tell=told.append)
    assert torch.get_num_threads() == before
    assert told == ["torch, batch 1 x 3, 1 thread", "torch, batch 2 x 3, 1 thread"]
    precisions = ["float32", "int8", *(["bfloat16"] if can_multiply_bfloat16() else [])]
    names = [(name, precision) for precision in precisions for name in ("dense", "compact")]
    assert [(row["model"], row["precision"]) for row in rows] == 2 * names
    assert [row["batch"] for row in rows] == [1] * len(names) + [2] * len(names)
    assert rows[0]["parameters"] == rw.count(Model(9))
    for case in (rows[: len(names)], rows[len(names) :]):
        assert case[0]["speed"] == 1
        for row in case:
            ratio = case[0]["milliseconds"]["median"] / row["milliseconds"]["median"]
            assert row["speed"] == pytest.approx(ratio)


def row(model: str, spent: tuple[float, float, float], **changes: Any) -> dict[str, Any]:
    p20, median, p80 = spent
    case = {"engine": "torch", "batch": 1, "length": 8, "device": "cpu", "threads": 1, "parameters": 100}
    milliseconds = {"median": median, "p20": p20, "p80": p80, "repeats": 5}
    return {"model": model, "precision": "float32", **case, "milliseconds": milliseconds, **changes}


def test_what_is_not_faster_is_said() -> None:
    dense, slow = row("dense", (9, 10, 11)), (9.5, 12, 13)
    assert remarks([dense, row("compact", (1, 2, 3), parameters=20)]) == []
    (line,) = remarks([dense, row("agp", slow)])
    assert line == (
        "agp in float32 is slower than dense of the same precision (0.83x; torch, batch 1 x 8, 1 thread): "
        "12.00 against 10.00 ms (its matrices are no smaller)."
    )
    (line,) = remarks([dense, row("compact", (8, 9.5, 12), parameters=20)])
    assert "is not clearly faster than dense" in line
    assert "repeat it on a quiet machine" in line
    (line,) = remarks([row("dense", (0.9, 1, 1.1)), row("compact", (1, 1, 1), parameters=20)])
    assert "is NOT faster than dense in float32" in line
    assert line.endswith("(calls as short as this are mostly overhead).")


def test_int8_must_be_faster_than_the_same_model_in_float32() -> None:
    compact = {"parameters": 20}
    rows = [row("dense", (9, 10, 11)), row("compact", (2, 2, 2), **compact)]
    (line,) = remarks([*rows, row("compact", (4, 4, 4), precision="int8", **compact)])
    assert line.startswith("compact in int8 is NOT faster than compact in float32")
    fast = [row("dense", (3, 3, 3), precision="int8"), row("compact", (1, 1, 1), precision="int8", **compact)]
    assert remarks([*rows, *fast]) == []


@given(
    times=st.lists(st.floats(0.1, 50), min_size=6, max_size=6),
    device=st.sampled_from(["cpu", "cuda"]),
)
def test_nothing_is_slower_than_dense_of_its_precision_without_a_line(times: list[float], device: str) -> None:
    """By more than 3%, whatever else is faster than it."""
    precisions = ["float32", "int8", "bfloat16"]
    rows = [
        row(name, (time, time, time), precision=precision, device=device, parameters=size)
        for (precision, (name, size)), time in zip(
            product(precisions, (("dense", 100), ("compact", 20))), times, strict=True
        )
    ]
    said = [line for line in remarks(rows) if "slower than dense of the same precision" in line]
    expected = [
        f"compact in {precision} is slower"
        for precision, dense, compact in zip(precisions, times[::2], times[1::2], strict=True)
        if compact > 1.03 * dense
    ]
    assert [line.partition(" than")[0] for line in said] == expected
    # in one sentence, too
    (slower,) = [text for text in summary(rows).split(". ") if "Slower" in text] or [""]
    assert all(f"{line.removesuffix(' is slower')} than dense in" in slower for line in expected)
    assert slower.count("(1 of 1 cases") == len(expected)


def test_on_a_gpu_bfloat16_is_judged_against_the_dense_model_in_bfloat16() -> None:
    gpu: dict[str, Any] = {"device": "cuda"}
    half, compact = {"precision": "bfloat16", **gpu}, {"parameters": 20, **gpu}
    rows = [row("dense", (9, 10, 11), **gpu), row("compact", (4, 5, 6), **compact)]
    assert remarks([*rows, row("dense", (2, 2, 2), **half), row("compact", (1, 1, 1), **{**compact, **half})]) == []
    (line,) = remarks([*rows, row("dense", (2, 2, 2), **half), row("compact", (3, 3, 3), **{**compact, **half})])
    assert line.startswith(
        "compact in bfloat16 is slower than dense of the same precision (0.67x; torch, batch 1 x 8, cuda)"
    )


def test_cases_are_judged_by_themselves() -> None:
    rows = [row("dense", (9, 10, 11)), row("compact", (4, 5, 6), parameters=20)]
    more = [row("dense", (1, 1, 1), batch=2), row("compact", (4, 5, 6), parameters=20, batch=2)]
    (line,) = remarks([*rows, *more])
    assert "batch 2 x 8" in line


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"length": 0}, "`length` must be at least 1, but is 0 instead."),
        ({"batches": (1, 0)}, "`batch` must be at least 1, but is 0 instead."),
        ({"threads": (0,)}, "`threads` must be at least 1, but is 0 instead."),
        ({"threads": ("some",)}, "`threads` must be numbers or \"all\", but one is 'some' instead."),
        ({"repeats": 1}, "`repeats` must be at least 2, but is 1 instead."),
        (
            {"engines": ("compil",)},
            "must be one of torch, compile, .*, but is 'compil' instead. Did you mean 'compile'?",
        ),
        (
            {"engines": ("graph",)},
            "An engine must be one of torch, compile, .* for 'cpu', but is 'graph' instead.",
        ),
        ({"device": "gpu"}, '`device` must be "cpu" or "cuda", but is \'gpu\' instead.'),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(rw.RankwiseError, match=message.replace("?", r"\?")):
        BenchConfig(**{"length": 4, **changes})


def test_all_threads_are_counted_once() -> None:
    cores = BenchConfig(length=1, threads=("all",)).counts
    assert BenchConfig(length=1, threads=(*cores, "all", *cores)).counts == cores


def test_an_engine_that_lacks_something_says_what(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = Engine(("cpu",), lambda: "it needs nothing you have.", lambda model, inputs: lambda: None)
    monkeypatch.setitem(ENGINES, "lacking", lacking)
    with pytest.raises(rw.RankwiseError, match="The engine 'lacking' cannot run here: it needs nothing you have."):
        engine("lacking")


def test_torch_runs_the_model_without_gradients() -> None:
    model = Model(3)
    got = engine("torch").prepare(model, (tokens(2, 4),))()
    assert isinstance(got, Tensor)
    assert not got.requires_grad
    torch.testing.assert_close(got, model(tokens(2, 4)).detach())


def test_the_released_code_must_be_there_and_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    # as if the package were not installed
    monkeypatch.setitem(__import__("sys").modules, "sru", None)
    model = SRULanguageModel(SRUConfig(num_words=5, embedding_width=4, width=6, num_layers=1))
    with pytest.raises(rw.RankwiseError, match="The released code is the package `sru`, but importing it failed"):
        released_sru(model)
    other = TransformerXL(TransformerXLConfig(num_words=5, width=4, num_heads=1, head_width=2, inner=3, num_layers=1))
    with pytest.raises(rw.RankwiseError, match="SRU models with a plain embedding only, but this is a TransformerXL"):
        released_sru(other)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(rw.RankwiseError, match='must be "cpu" where torch finds no GPU, but is "cuda" instead'):
        BenchConfig(length=4, device="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_models_are_timed_in_both_precisions_and_left_where_they_are() -> None:
    models = {"dense": Model(9), "compact": Model(2)}
    config = BenchConfig(length=3, batches=(2,), engines=("torch", "graph"), repeats=2, device="cuda")
    rows = bench(models, config, tokens)
    names = [(name, precision) for precision in ("float32", "bfloat16") for name in models]
    assert [(row["engine"], row["model"], row["precision"]) for row in rows] == [
        (engine, *name) for engine in config.engines for name in names
    ]
    assert {parameter.device.type for model in models.values() for parameter in model.parameters()} == {"cpu"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("kind", ["sru", "transformer-xl"])
def test_a_graph_finds_what_the_model_finds(kind: str) -> None:
    torch.manual_seed(0)
    model = (
        SRULanguageModel(SRUConfig(num_words=7, embedding_width=8, width=16, num_layers=2, rank=4))
        if kind == "sru"
        else TransformerXL(
            TransformerXLConfig(num_words=7, width=16, num_heads=2, head_width=8, inner=32, num_layers=2)
        )
    )
    model, batch = model.cuda().eval(), torch.randint(0, 7, (2, 6), device="cuda")
    run = engine("graph", "cuda").prepare(model, (batch,))
    with torch.inference_mode():
        expected = model(batch)[0]
    for _ in range(2):
        found = run()
        torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-5)  # type: ignore[index]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_model_that_asks_the_host_is_no_graph() -> None:
    class Asking(Model):
        def forward(self, tokens_BT: Tensor) -> Tensor:
            return super().forward(tokens_BT) * float(tokens_BT.sum())

    with pytest.raises(rw.RankwiseError, match="but Asking does not"):
        engine("graph", "cuda").prepare(Asking(3).cuda().eval(), (tokens(1, 2).cuda(),))
