"""Exported models: what an engine gives is what the model gives, or nothing is written."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankwise as rw
from rankwise.deploy.export import FORMATS
from rankwise.deploy.export.check import difference, largest_difference
from rankwise.deploy.export.program import exportable, flatten
from rankwise.deploy.inputs import example_inputs
from rankwise.deploy.save import whole_folder
from rankwise.lab.models.adaptive import Clusters
from rankwise.lab.models.sru import SRUConfig, SRULanguageModel
from rankwise.lab.models.transformer_xl import TransformerXL, TransformerXLConfig
from rankwise.modules import LowRankHead, PivotLinear, SelectedLinear, embedding, joined, linear
from tests.deploy.saved_toys import Asks, compact, tokens
from tests.models import Spec, batch

PACKAGES = {"onnx": ["onnx", "onnxscript", "onnxruntime"], "openvino": ["openvino"], "pt2": []}


def engine(format: str) -> Any:
    for package in PACKAGES[format]:
        pytest.importorskip(package)
    return FORMATS[format]


def tied_and_low_rank(layout: Any = "pair") -> nn.Module:
    """A compact model with a tied low-rank head."""
    torch.manual_seed(0)
    dense = Spec(width=8, back="bias-tied", parts=("linear", "nested")).build()
    return rw.compress(dense, rw.Budget(removed=0.4), embeddings=True, layout=layout)


def tied_and_pivot() -> nn.Module:
    """The same in the pivot layout."""
    return tied_and_low_rank("pivot")


def sru() -> SRULanguageModel:
    torch.manual_seed(0)
    return SRULanguageModel(SRUConfig(num_words=20, embedding_width=8, width=12, num_layers=2, rank=4, layer_norm=True))


def adaptive() -> SRULanguageModel:
    torch.manual_seed(0)
    clusters = Clusters(widths=(6, 3), cutoffs=(5,), scale=2.0)
    config = SRUConfig(num_words=20, embedding_width=12, width=12, num_layers=1, clusters=clusters)
    return SRULanguageModel(config)


def transformer_xl() -> TransformerXL:
    torch.manual_seed(0)
    config = TransformerXLConfig(num_words=20, width=8, num_heads=2, head_width=4, inner=12, num_layers=2)
    return TransformerXL(config)


def outputs(model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    """Every tensor that a model gives, in order."""
    with torch.no_grad():
        found = model.eval()(**inputs)
    found = (found,) if isinstance(found, Tensor) else tuple(found.values()) if isinstance(found, dict) else found
    return [tensor for part in found for tensor in ([part] if isinstance(part, Tensor) else part)]


@pytest.mark.parametrize("build", [tied_and_low_rank, tied_and_pivot])
@pytest.mark.parametrize("format", FORMATS)
def test_an_exported_model_gives_the_same_for_other_batches_and_lengths(
    format: str, build: Any, tmp_path: Path
) -> None:
    model = build()
    assert any(isinstance(module, LowRankHead) for module in model.modules())
    assert any(isinstance(module, PivotLinear) for module in model.modules()) == (build is tied_and_pivot)
    made = engine(format).export(model, {"tokens": batch(Spec(), 3, 6)}, tmp_path / "out")
    run = engine(format).load(tmp_path / "out")
    for size, length in ((1, 9), (5, 2)):
        tokens = batch(Spec(), size, length, seed=size)
        (expected,) = outputs(model, {"tokens": tokens})
        torch.testing.assert_close(run(tokens=tokens)["output"], expected, rtol=1e-5, atol=1e-5)
    assert made.difference < 1e-5
    assert made.bytes == sum(f.stat().st_size for f in (tmp_path / "out").iterdir() if f.name != "export.json")
    assert {tuple(case["tokens"]) for case in made.checked} == {(3, 6), (1, 3)}


@pytest.mark.parametrize("format, build", [("onnx", sru), ("openvino", transformer_xl)])
def test_a_state_goes_in_and_comes_out(format: str, build: Any, tmp_path: Path) -> None:
    model = build()
    if isinstance(model, TransformerXL):
        inputs: dict[str, Any] = {"tokens_BT": torch.randint(0, 20, (3, 5)), "memory": tuple(torch.randn(2, 3, 6, 8))}
    else:
        inputs = {"tokens_BT": torch.randint(0, 20, (3, 4)), "state_LBD": torch.randn(2, 3, 12)}
    engine(format).export(model, inputs, tmp_path / "out")
    run = engine(format).load(tmp_path / "out")
    other = {name: v + 1 if name == "tokens_BT" else v for name, v in inputs.items()}
    other["tokens_BT"] %= 20
    found = run(**other)
    names = ["logits", "new_state"] if "state_LBD" in inputs else ["logits", "new_memory_0", "new_memory_1"]
    assert list(found) == names
    for one, expected in zip(found.values(), outputs(model, other), strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("format", FORMATS)
def test_a_size_of_one_is_fixed_and_the_others_are_open(format: str, tmp_path: Path) -> None:
    model = sru()
    made = engine(format).export(model, example_inputs(model, 2, 1), tmp_path / "out")
    assert made.shapes == {"tokens_BT": ["n0", 1], "state_LBD": [2, "n0", 12]}
    run = engine(format).load(tmp_path / "out")
    for size in (1, 3):
        inputs = {"tokens_BT": torch.randint(0, 20, (size, 1)), "state_LBD": torch.randn(2, size, 12)}
        for found, expected in zip(run(**inputs).values(), outputs(model, inputs), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    # every engine has an error of its own
    with pytest.raises(Exception, match=r"."):
        run(tokens_BT=torch.randint(0, 20, (2, 4)), state_LBD=torch.randn(2, 2, 12))


@pytest.mark.parametrize("int8", [False, True], ids=["", "int8"])
def test_a_recurrence_in_onnx_reads_texts_of_any_length(int8: bool, tmp_path: Path) -> None:
    """A loop has one step: the file of a long example is as small as that of a short one."""
    model, onnx = sru(), engine("onnx")
    if not onnx.has_loops():
        pytest.skip("this version of torch writes no loops")
    short, long = (onnx.export(model, example_inputs(model, 2, n), tmp_path / str(n), int8=int8) for n in (3, 40))
    assert long.shapes == {"tokens_BT": ["n0", "n1"], "state_LBD": [2, "n0", 12]}
    assert long.bytes < 1.1 * short.bytes
    inputs = example_inputs(model, 3, 9)
    for found, expected in zip(onnx.load(long.folder)(**inputs).values(), outputs(model, inputs), strict=True):
        assert difference(found, expected) < (0.1 if int8 else 1e-5)


def test_a_batch_that_cannot_be_one_is_compared_with_a_larger_one(tmp_path: Path) -> None:
    model = transformer_xl()
    made = engine("pt2").export(model, example_inputs(model, 2, 4), tmp_path / "out")
    assert made.shapes["tokens_BT"] == ["n0", "n1"]
    for dimension in (0, 1):
        assert len({case["tokens_BT"][dimension] for case in made.checked}) > 1


class InPairs(nn.Module):
    """Adds a text to the next one, so that their number must be even."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1, 2, x.shape[1]).sum(1)


@pytest.mark.parametrize("num_texts, said", [(2, 2), (4, "n0")])
def test_a_size_is_called_open_only_if_another_was_compared(num_texts: int, said: Any, tmp_path: Path) -> None:
    made = engine("pt2").export(InPairs(), {"x": torch.randn(num_texts, 6)}, tmp_path / "out")
    assert made.shapes["x"][0] == said
    assert len({case["x"][0] for case in made.checked}) == (1 if said == 2 else 2)
    assert len({case["x"][1] for case in made.checked}) > 1


class Stateful(nn.Module):
    """Its arguments have names that begin with the name of a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor], state_mask: Tensor | float = 1.0, state_2: Tensor | float = 0.0
    ) -> Tensor:
        return self.layer(x) * state_mask + state[0] - 2 * state[1] + 3 * state_2


@pytest.mark.parametrize("format", FORMATS)
def test_an_input_named_like_a_part_of_a_tuple_is_an_input(format: str, tmp_path: Path) -> None:
    def inputs(size: int) -> dict[str, Any]:
        x, first, second, mask, third = torch.randn(5, size, 8)
        return {"x": x, "state": (first, second), "state_mask": mask, "state_2": third}

    model = Stateful()
    made = engine(format).export(model, inputs(3), tmp_path / "out")
    assert list(made.shapes) == ["x", "state_0", "state_1", "state_mask", "state_2"]
    given = inputs(5)
    (expected,) = outputs(model, given)
    torch.testing.assert_close(engine(format).load(tmp_path / "out")(**given)["output"], expected)


def test_two_inputs_or_outputs_of_one_flat_name_are_refused(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"state": (x, x), "state_1": x}

    x = torch.randn(3, 8)
    with pytest.raises(rw.CheckpointError, match="Inputs must differ in their flat names, but two are called state_0"):
        engine("pt2").export(Stateful(), {"x": x, "state": (x, x), "state_0": x}, tmp_path / "out")
    with pytest.raises(rw.CheckpointError, match="Outputs must differ in their flat names, but two are called state_1"):
        engine("pt2").export(Twice(), {"x": x}, tmp_path / "out")
    assert not list(tmp_path.iterdir())


class CausalAttention(nn.Module):
    """Two layers of attention to what came before, padding left out, by a mask of one kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layers = kind, nn.ModuleList(nn.Linear(8, 24) for _ in range(2))

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() & real[:, None, None]
        mask = seen if self.kind == "bool" else torch.zeros_like(seen, dtype=x.dtype).masked_fill(~seen, -torch.inf)
        for layer in self.layers:
            q, k, v = layer(x)[:, None].chunk(3, -1)
            x = x + nn.functional.scaled_dot_product_attention(q, k, v, mask)[:, 0]
        return x


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("format", FORMATS)
def test_what_sees_nothing_is_zero_in_every_engine(format: str, kind: str, tmp_path: Path) -> None:
    """OpenVINO gives NaN there, ONNX Runtime the mean of what is masked."""
    torch.manual_seed(0)
    model = CausalAttention(kind)
    engine(format).export(model, {"x": torch.randn(2, 6, 8), "real": torch.ones(2, 6).bool()}, tmp_path / "out")
    real = torch.ones(3, 5, dtype=torch.bool)
    real[0, :2], real[1, 3:], real[2] = False, False, False
    inputs = {"x": torch.randn(3, 5, 8), "real": real}
    (expected,) = outputs(model, inputs)
    assert expected.isfinite().all()
    found = engine(format).load(tmp_path / "out")(**inputs)["output"]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def rank_zero() -> nn.Module:
    table = nn.Sequential(
        embedding(nn.Parameter(torch.empty(20, 0)), None), linear(nn.Parameter(torch.empty(6, 0)), None)
    )
    pair = nn.Sequential(
        linear(nn.Parameter(torch.empty(0, 6)), None),
        linear(nn.Parameter(torch.empty(7, 0)), nn.Parameter(torch.randn(7))),
    )
    kept = torch.zeros(7, dtype=torch.bool)
    none = SelectedLinear(nn.Parameter(torch.empty(6, 0)), kept, nn.Parameter(torch.randn(6)))
    return nn.Sequential(table, pair, none, LowRankHead(table[0], table[1], nn.Parameter(torch.randn(20))))


def all_pivots() -> nn.Module:
    """A pivot layer without inputs, and one whose outputs are its inputs in another order."""

    def pivots(rank: int, outputs: int) -> PivotLinear:
        coefficients = nn.Parameter(torch.randn(outputs - rank, rank))
        return PivotLinear(coefficients, torch.randperm(outputs).int(), nn.Parameter(torch.randn(outputs)))

    none = joined(linear(nn.Parameter(torch.empty(0, 6)), None), pivots(0, 7))
    every = joined(linear(nn.Parameter(torch.randn(5, 7)), None), pivots(5, 5))
    return nn.Sequential(nn.Embedding(20, 6), none, every)


def selected() -> nn.Module:
    kept = torch.tensor([True, False, True, True])
    return nn.Sequential(nn.Embedding(20, 4), SelectedLinear(nn.Parameter(torch.randn(5, 3)), kept))


def asks() -> nn.Module:
    return compact(Asks, tokens(), "np-l0")


@pytest.mark.parametrize(
    "build", [rank_zero, all_pivots, selected, asks, sru, adaptive, transformer_xl, tied_and_low_rank, tied_and_pivot]
)
def test_the_form_for_engines_is_the_same_function_and_leaves_the_model_alone(build: Any) -> None:
    model = build().eval()
    kinds = [type(module) for module in model.modules()]
    made = exportable(model)
    assert [type(module) for module in model.modules()] == kinds
    assert not any(isinstance(module, SelectedLinear | PivotLinear) for module in made.modules())
    tokens = torch.randint(0, 11, (3, 4))
    with torch.no_grad():
        pairs = zip(flat(made(tokens)), flat(model(tokens)), strict=True)
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def flat(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [tensor for part in value for tensor in flat(part)]


@pytest.mark.parametrize("build", [rank_zero, all_pivots])
def test_a_rank_of_zero_can_be_exported(build: Any, tmp_path: Path) -> None:
    """OpenVINO gives wrong numbers for tables without columns."""
    model = build()
    made = engine("openvino").export(model, {"input": torch.randint(0, 20, (3, 4))}, tmp_path / "out")
    assert made.difference < 1e-5


@pytest.mark.parametrize("format", ["onnx", "openvino"])
def test_eight_bits_are_smaller_and_close(format: str, tmp_path: Path) -> None:
    if format == "openvino":
        pytest.importorskip("nncf")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 300), nn.Tanh(), nn.Linear(300, 200))
    inputs = {"input": torch.randn(8, 256)}
    whole = engine(format).export(model, inputs, tmp_path / "whole")
    small = engine(format).export(model, inputs, tmp_path / "small", int8=True)
    assert small.bytes < 0.4 * whole.bytes
    assert whole.difference < 1e-5 < small.difference < 0.1


@pytest.mark.parametrize("rank", [None, 16])
def test_a_head_that_is_tied_is_multiplied_in_eight_bits(rank: int | None, tmp_path: Path) -> None:
    """So are all products of the model: none is left in float."""
    torch.manual_seed(0)
    table: nn.Module = nn.Embedding(3_000, 64)
    head: nn.Module = nn.Linear(64, 3_000, bias=False)
    if rank is None:
        head.weight = table.weight
    else:
        words, projection = nn.Embedding(3_000, rank), nn.Linear(rank, 64, bias=False)
        table, head = joined(words, projection), LowRankHead(words, projection)
    model, inputs = nn.Sequential(table, nn.Tanh(), head), {"input": torch.randint(0, 3_000, (3, 4))}
    made = engine("onnx").export(model, inputs, tmp_path / "out", int8=True)
    products = [node.op_type for node in pytest.importorskip("onnx").load(made.folder / "model.onnx").graph.node]
    assert "MatMul" not in products
    assert products.count("MatMulInteger") == (1 if rank is None else 3)


def test_eight_bits_of_a_model_that_needs_two_files_leave_none_in_float(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankwise.deploy.export.LARGE", 0)
    inputs = {"input": torch.randn(8, 256)}
    sizes = {}
    for int8 in (False, True):
        made = engine("onnx").export(nn.Linear(256, 2_000), inputs, tmp_path / str(int8), int8=int8)
        assert {path.name for path in made.folder.iterdir()} == {"model.onnx", "model.onnx.data", "export.json"}
        sizes[int8] = made.bytes
    assert sizes[True] < 0.3 * sizes[False]


class Pooled(nn.Module):
    """Words and positions, and two outputs: of every token, and of the first one."""

    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(30, 16), nn.Embedding(12, 16)
        self.layer, self.pooler = nn.Linear(16, 24), nn.Linear(24, 16)
        self.register_buffer("places", torch.arange(12)[None])

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.words(tokens) + self.positions(self.places[:, : tokens.shape[1]])
        states = torch.tanh(self.layer(x))
        return {"states": states, "pooled": self.pooler(states[:, 0])}


@pytest.mark.parametrize("layout", ["pair", "pivot"])
@pytest.mark.parametrize("format", ["onnx", "openvino"])
def test_eight_bits_of_either_layout_keep_every_output(format: str, layout: Any, tmp_path: Path) -> None:
    """OpenVINO may know an output that is put in order by the names of several operations."""
    if format == "openvino":
        pytest.importorskip("nncf")
    torch.manual_seed(0)
    model = rw.compress(Pooled().eval(), rw.Budget(removed=0.4), layout=layout)
    assert any(isinstance(module, PivotLinear) for module in model.modules()) == (layout == "pivot")
    inputs = {"tokens": torch.randint(0, 30, (3, 6))}
    made = engine(format).export(model, inputs, tmp_path / "out", int8=True)
    assert list(engine(format).load(tmp_path / "out")(**inputs)) == made.outputs == ["states", "pooled"]


def test_a_key_error_is_no_full_disk(tmp_path: Path) -> None:
    """What goes wrong while a folder is filled says for itself what it is, and leaves nothing behind."""
    with pytest.raises(KeyError, match="pooler_output"), whole_folder(tmp_path / "out"):
        raise KeyError("pooler_output")
    outputs = {"logits": torch.ones(1), "state": torch.ones(1)}
    with pytest.raises(rw.CheckpointError, match=r"must give logits, state, but in onnx it lacks state\."):
        largest_difference(lambda **inputs: {"logits": torch.ones(1)}, [{}], [outputs], "onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "found, expected, value",
    [
        ([1.0, -2.0], [1.0, -4.0], 0.5),
        ([0.0], [0.0], 0.0),
        ([float("nan")], [1.0], float("inf")),
        ([1.0, 1.0], [1.0], float("inf")),
    ],
)
def test_the_difference_is_relative_to_the_largest_number(
    found: list[float], expected: list[float], value: float
) -> None:
    assert difference(torch.tensor(found), torch.tensor(expected)) == value


def test_what_differs_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(rw.CheckpointError, match=r"must give the outputs of the model within -1, but they differ by"):
        engine("pt2").export(
            tied_and_low_rank(), {"tokens": batch(Spec(), 3, 6)}, tmp_path / "new" / "out", tolerance=-1
        )
    assert not list(tmp_path.iterdir())


REFUSED: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "half": (lambda: tied_and_low_rank().half(), None, rw.CheckpointError, "must be float32 on the CPU, but .*float16"),
    "no model": (lambda: 3, None, TypeError, "`model` must be a torch.nn.Module, but is a int"),
    "a tuple": (tied_and_low_rank, (1,), TypeError, "must be a dictionary of inputs by name, but is tuple"),
    "a number": (tied_and_low_rank, {"tokens": 3}, TypeError, "must hold tensors, .* but 'tokens' is int"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_and_nothing_written(case: str, tmp_path: Path) -> None:
    build, inputs, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        engine("pt2").export(build(), inputs or {"tokens": batch(Spec())}, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_gated_model_is_refused(tmp_path: Path) -> None:
    model = Spec().build()
    rw.Pruner(model, rw.Budget(removed=0.3), anneal_steps=1)
    with pytest.raises(rw.CheckpointError, match="must be compact, but front is gated"):
        engine("pt2").export(model, {"tokens": batch(Spec())}, tmp_path / "out")


def test_code_that_depends_on_data_is_refused_in_one_line(tmp_path: Path) -> None:
    class Deciding(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if x.sum() > 0 else x

    with pytest.raises(rw.CheckpointError, match="must be one that `torch.export` can capture") as caught:
        engine("pt2").export(Deciding(), {"x": torch.ones(3, 2)}, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(rw.CheckpointError, match="must be new, but .* exists"):
        engine("pt2").export(tied_and_low_rank(), {"tokens": batch(Spec(), 3, 6)}, tmp_path)
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("format", FORMATS)
def test_a_folder_of_something_else_is_not_loaded(format: str, tmp_path: Path) -> None:
    with pytest.raises(rw.CheckpointError, match=f"A model exported to {format} must hold model"):
        engine(format).load(tmp_path)


@pytest.mark.parametrize("format", ["onnx", "openvino"])
def test_a_missing_package_is_named(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, format, None)
    with pytest.raises(rw.CheckpointError, match=rf"needs the package {format}, .* pip install onnx .*\[export\]"):
        FORMATS[format].export(tied_and_low_rank(), {"tokens": batch(Spec())}, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_flat_names_are_those_of_the_arguments() -> None:
    a, b, c = torch.zeros(1), torch.ones(1), torch.ones(2)
    assert flatten({"x": a, "memory": (b, c)}) == {"x": a, "memory_0": b, "memory_1": c}


@pytest.mark.parametrize("build", [sru, transformer_xl])
def test_made_up_inputs_fit_our_models(build: Any) -> None:
    model = build()
    inputs = example_inputs(model, 2, 3)
    assert outputs(model, inputs)[0].shape == (2, 3, 20)
    with pytest.raises(ValueError, match="`batch` must be a whole number of at least 1, but is 0"):
        example_inputs(model, 0, 3)


def test_a_full_disk_is_one_error_and_no_end_of_the_process(tmp_path: Path) -> None:
    code = """
        import os, resource, signal, torch
        import rankwise as rw
        from rankwise.deploy.export import pt2
        model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.ReLU())
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        for size in (1_000, 3_000, 42_000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            try:
                pt2.export(model, {"input": torch.randn(2, 100)}, "out")
            except rw.CheckpointError as error:
                print(error, flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert [line.count("failed: File too large. Nothing was changed") for line in result.stdout.splitlines()] == [1] * 3
    assert os.listdir(tmp_path) == []
