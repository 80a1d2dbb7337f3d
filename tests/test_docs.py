"""README and docs are true today: names exist, tables come from records, commands parse and the examples run."""

from __future__ import annotations

import ast
import csv
import importlib
import json
import re
import runpy
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rankwise as rw

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [
    *ROOT.glob("*.md"),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "src").rglob("*.md")),
]
TERMS = re.findall(r"`([\w/]+\.py)::([\w.]+)`", (ROOT / "docs/paper_map.md").read_text())


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    from results_page.records import read_results

    return read_results([ROOT / "results", ROOT / "benchmarks/results.csv"])


def marked(page: str, name: str) -> str:
    """The text between two comments that a page marks by name."""
    found = re.search(rf"<!-- {name} -->\s*(.*?)\s*<!-- /{name} -->", (ROOT / page).read_text(), re.DOTALL)
    assert found is not None, f"{page} must mark {name}"
    return found[1]


def rows_of(table: str) -> list[tuple[str, ...]]:
    """The cells of a table in Markdown, without its head."""
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table.splitlines()][2:]


@pytest.mark.parametrize("path, name", TERMS)
def test_every_term_of_the_paper_has_its_home(path: str, name: str) -> None:
    module = path.removesuffix(".py").replace("/", ".")
    own = module.removeprefix("benchmarks.")
    found = importlib.import_module(own if own != module else f"rankwise.{module}")
    for part in name.split("."):
        found = getattr(found, part)


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120


def test_the_table_of_the_readme_is_what_the_command_prints(results: dict[str, Any]) -> None:
    from results_page.headline import headline

    assert marked("README.md", "headline") == headline(results).markdown()


def test_the_picture_of_the_readme_is_what_the_command_draws(results: dict[str, Any]) -> None:
    from picture import picture

    assert (ROOT / "docs/figures/enwik8-sru.svg").read_text() == picture(results)
    assert "](docs/figures/enwik8-sru.svg)" in README


def test_recipes_are_counted_from_every_run() -> None:
    """Computed here a second time, from the CSV alone."""
    with (ROOT / "results/lagrangian-recipes.csv").open() as file:
        records = [{k: v if k == "recipe" else float(v) for k, v in row.items()} for row in csv.DictReader(file)]
    settings: dict[tuple[object, ...], list[float]] = {}
    for row in records:
        if abs(row["expected"] - row["target"]) <= 0.01:
            key = (row["target"], row["recipe"], row["gate_lr"], row["multiplier_lr"])
            settings.setdefault(key, []).append(row["bits"])
    best: dict[float, float] = {}
    for (target, *_), bits in settings.items():
        best[target] = min(best.get(target, 99.0), statistics.mean(bits))
    text = (ROOT / "docs/results.md").read_text().split("## Does the size hold?")[1]
    shown = rows_of("\n".join(line for line in text.splitlines() if line.startswith("|")))
    assert [row[0] for row in shown] == ["committed", "published"]
    for name, runs, hits, worst_miss, mean, worst in shown:
        mine = [row for row in records if row["recipe"] == name]
        miss = [100 * abs(row["expected"] - row["target"]) for row in mine]
        extra = [row["bits"] - best[row["target"]] for row in mine]
        assert [int(runs), int(hits)] == [len(mine), sum(m <= 1 for m in miss)]
        assert [worst_miss, mean, worst] == [f"{max(miss):.1f}", f"{statistics.mean(extra):.3f}", f"{max(extra):.3f}"]


def test_the_table_of_one_shot_compression_is_the_recorded_one() -> None:
    record = json.loads((ROOT / "results/oneshot-smollm2.json").read_text())
    found = {(f"{row['parameters']:,}", f"{row['perplexity']:,.1f}") for row in record["rows"]}
    shown = [(parameters, perplexity) for _, parameters, perplexity in rows_of(marked("docs/compress.md", "one-shot"))]
    assert len(shown) == len(set(shown)) == 5
    assert set(shown) <= found


def test_the_table_of_speeds_on_a_gpu_is_the_recorded_one(results: dict[str, Any]) -> None:
    from results_page.sections import gpu_timing

    table = gpu_timing(results["benchmarks"])
    names = ("", "", "batch", "kernels: 80% removed", "graph: 80% removed")
    places = [0, 1, 2, *(table.columns.index(name) for name in names[3:])]
    found = {tuple(row[place] for place in places) for row in table.rows}
    shown = rows_of(marked("docs/inference.md", "gpu"))
    assert len(shown) == 8
    assert set(shown) <= found


def test_the_page_of_results_is_what_the_command_prints(results: dict[str, Any]) -> None:
    from results_page.figures import figures_of
    from results_page.page import page

    assert (ROOT / "docs/results.md").read_text() == page(results) + "\n", "print it again by the command at its top"
    for figure in figures_of(results):
        assert (ROOT / f"docs/figures/{figure.name}.svg").read_text() == figure.svg
    assert "no table here" not in page(results)


def test_the_tables_on_scaling_follow_from_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    scaling = importlib.import_module("scaling")
    for name, make in scaling.TABLES.items():
        assert marked("docs/scaling.md", name) == scaling.markdown(make()), name
    assert marked("docs/scaling.md", "utilization") == f"{scaling.utilization():.1%}"
    # LLaMA 7B, which also has norms
    model = scaling.Decoder()
    assert model.dense + 2 * model.head == 6_738_415_616 - (2 * model.layers + 1) * model.width


def test_the_example_in_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code is not None
    monkeypatch.chdir(tmp_path)

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    batches = [(torch.randn(8, 16), torch.randn(8, 16)) for _ in range(12)]
    names = {"torch": torch, "model": build(), "build": build, "batches": batches, "criterion": nn.MSELoss()}
    exec(code[1].replace("1_000", "10"), names)
    small = names["small"]
    assert isinstance(small, nn.Module)
    assert rw.count(small) <= 0.2 * rw.count(build())


def test_the_loop_that_heals_a_model_runs() -> None:
    from tests.lab.experiments.healing_toys import decoder

    *_, code = re.findall(r"```python\n(.*?)```", (ROOT / "docs/heal.md").read_text(), re.DOTALL)
    torch.manual_seed(0)
    dense: Any = decoder()
    small = rw.compress(dense, rw.Budget(removed=0.4))
    batches = [{"input_ids": torch.randint(16, (4, 12))} for _ in range(12)]

    def difference() -> float:
        with torch.no_grad():
            p, q = (torch.log_softmax(model(**batches[0]).logits, -1) for model in (dense, small))
        return float(nn.functional.kl_div(q, p, log_target=True, reduction="sum"))

    before = difference()
    exec(code, {"torch": torch, "dense": dense, "small": small, "batches": batches})
    assert difference() < before


@pytest.mark.filterwarnings("ignore:.* of the gates had not decided")
def test_the_small_transformer_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["small_transformer.py", "--quick"])
    runpy.run_path(str(ROOT / "examples/small_transformer.py"), run_name="__main__")
    assert "largest difference of logits 0.0e+00" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```python" in page.read_text()], ids=lambda page: str(page.relative_to(ROOT))
)
def test_what_the_examples_import_exists(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                exec(ast.unparse(node), {})


COMMANDS = [
    (str(page.relative_to(ROOT)), re.split(r"\s{2,}#", line)[0].strip())
    for page in PAGES
    for block in re.findall(r"```\n(.*?)```", page.read_text(), re.DOTALL)
    for line in block.splitlines()
    if line.startswith("rankwise ")
]


@pytest.mark.parametrize("page, command", COMMANDS)
def test_commands_in_the_docs_are_understood(page: str, command: str, tmp_path: Path) -> None:
    """Each is parsed to its last setting; what the commands do is tested with the command line."""
    from rankwise.cli import app
    from rankwise.cli.command import parse
    from rankwise.cli.settings import configured
    from rankwise.lab.experiments.presets import preset

    _, name, *words = shlex.split(command)
    options = parse(app.COMMANDS[name], words)
    experiment = app.COMMANDS[name].experiment
    if experiment is not None:
        in_a_run = name in ("prune", "evaluate")
        configured(preset("demo") if in_a_run else experiment(options), options)


@pytest.mark.parametrize("page", sorted({page for page, _ in COMMANDS}))
def test_the_commands_of_a_page_can_be_run_one_after_another(page: str) -> None:
    """Another run in the same folder would be refused."""
    from rankwise.cli import app
    from rankwise.cli.command import parse
    from rankwise.cli.runs import folder_of
    from rankwise.cli.settings import configured

    folders: dict[Path, str] = {}
    for _, command in (pair for pair in COMMANDS if pair[0] == page):
        _, name, *words = shlex.split(command)
        experiment = app.COMMANDS[name].experiment
        if name not in ("run", "train", "sweep") or experiment is None:
            continue
        options = parse(app.COMMANDS[name], words)
        folder = folder_of(name, options, configured(experiment(options), options))
        assert folders.setdefault(folder, command) == command, folder


def test_the_docs_hold_commands_and_terms() -> None:
    """An empty list would let the tests above pass without a word."""
    assert len(COMMANDS) > 10
    assert len(TERMS) > 20
