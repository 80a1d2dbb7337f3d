"""README and docs are true today: names exist, figures come from records, and the example runs."""

from __future__ import annotations

import csv
import importlib
import json
import re
import runpy
import shlex
import statistics
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import rankwise as rw

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def section(name: str) -> list[list[str]]:
    """The cells of a table that the README marks by name."""
    text = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", README, re.DOTALL)
    assert text is not None
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text[1].splitlines()]
    return rows[2:]


@pytest.mark.parametrize(
    "path, name", re.findall(r"`([\w/]+\.py)::([\w.]+)`", (ROOT / "docs/paper_map.md").read_text())
)
def test_every_term_of_the_paper_has_its_home(path: str, name: str) -> None:
    module = path.removesuffix(".py").replace("/", ".")
    own = module.removeprefix("benchmarks.")
    found = importlib.import_module(own if own != module else f"rankwise.{module}")
    for part in name.split("."):
        found = getattr(found, part)


def test_the_table_of_methods_is_the_recorded_one() -> None:
    record = json.loads((ROOT / "results/methods-enwik8-transformer.json").read_text())
    rows = {row["name"]: row for row in record["rows"]}
    for name, params, bits in section("methods"):
        row = rows["control" if name.startswith("dense control") else name]
        assert (params, bits) == (f"{row['params']:,}", f"{row['bits']:.3f}")


def test_the_table_of_recipes_is_the_recorded_one() -> None:
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
    for name, runs, hits, worst_miss, mean, worst in section("recipes"):
        mine = [row for row in records if row["recipe"] == name.split(" ")[0]]
        miss = [100 * abs(row["expected"] - row["target"]) for row in mine]
        extra = [row["bits"] - best[row["target"]] for row in mine]
        assert [int(runs), int(hits)] == [len(mine), sum(m <= 1 for m in miss)]
        assert [worst_miss, mean, worst] == [f"{max(miss):.1f}", f"{statistics.mean(extra):.3f}", f"{max(extra):.3f}"]


def test_the_ten_minute_table_is_the_recorded_one() -> None:
    record = json.loads((ROOT / "results/enwik8-sru-10min.json").read_text())
    rows = {row["name"]: row for row in record["rows"]}
    for name, params, removed, bits in section("ten minutes"):
        row = rows[name]
        assert params == f"{row['parameters']:,}"
        assert removed == f"{row['removed_of_prunable']:.1%}"
        assert bits == f"{row['test']['bits_per_character']:.3f}"


@pytest.mark.parametrize(
    "name, record, base, rows",
    [
        ("enwik8", "enwik8-sru", "enwik8-sru", 16),
        ("transformer-xl", "enwik8-transformer-xl", "enwik8-transformer-xl", 3),
        ("words", "words", "enwik8-words", 3),
    ],
)
def test_the_tables_of_enwik8_are_the_recorded_ones(name: str, record: str, base: str, rows: int) -> None:
    from results_page import paper
    from results_page.comparison import comparison

    own, plain = (json.loads((ROOT / f"results/table-{stem}.json").read_text()) for stem in (record, "np-l0"))
    printed, measure, other = {
        "enwik8": (paper.ENWIK8_SRU, "bits_per_character", (plain, "enwik8-sru-plain-1536")),
        "transformer-xl": (paper.ENWIK8_TRANSFORMER_XL, "bits_per_character", (None, "")),
        "words": (paper.WIKITEXT_103, "perplexity", (None, "")),
    }[name]
    table = comparison(printed, (own, base), other, measure)
    found = {
        (row, removed, theirs, parameters, test, lost)
        for row, removed, _, _, theirs, parameters, _, test, lost in table.rows
    }
    shown = {tuple(row) for row in section(name)}
    assert len(shown) == rows
    assert shown <= found


def test_what_np_l0_loses_is_recorded() -> None:
    from results_page.records import cells

    record = json.loads((ROOT / "results/table-np-l0.json").read_text())
    (control,) = cells(record, "enwik8-sru-plain-1536", "dense")
    (large,) = cells(record, "enwik8-sru-plain-2048", "dense")
    lost = [
        f"{100 * (cell.lost('bits_per_character') or 0):.1f}%"
        for name in ("np-l0-80", "np-l0-90")
        for cell in cells(record, "enwik8-sru-plain-2048", name)
    ]
    small, big = (f"{cell.row['test']['bits_per_character']:.4f}" for cell in (control, large))
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"({small}) it is counted; of one of 65M (control {big}) it loses {' and '.join(lost)}." in text


def test_what_is_kept_of_frequent_and_rare_words_is_recorded() -> None:
    from results_page.sections import clusters

    record = json.loads((ROOT / "results/table-words.json").read_text())
    frequent, rare, rarest, _ = (re.findall(r"\d+%", row[-1])[0] for row in clusters(record, "enwik8-words").rows)
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"keeps {frequent} of what it spent on frequent words, {rare} and {rarest} of" in text


@pytest.mark.parametrize("name, words", [("enwik8-sru", "SRU with 80% removed"), ("enwik8-transformer-xl", "longer")])
def test_speeds_on_a_gpu_are_the_recorded_ones(name: str, words: str) -> None:
    record = json.loads((ROOT / f"results/table-{name}.json").read_text())
    (row,) = (row for run in record["runs"] for row in run["rows"] if row["name"] == "flop-l0-80")
    text = (ROOT / "docs/inference.md").read_text()
    assert re.search(rf"{words}[^(]*\({row['speedup']:.2f}x", text)


def test_speeds_by_cuda_graph_are_the_recorded_ones() -> None:
    with (ROOT / "benchmarks/results.csv").open() as file:
        rows = {row["case"]: float(row["value"]) for row in csv.DictReader(file) if row["benchmark"] == "gpu inference"}
    speeds = {
        (model, precision, batch): f"{rows[f'{model} {precision}, batch {batch}, graph: speed of 80% / dense']:.2f}x"
        for model in ("sru", "txl")
        for precision in ("float32", "bfloat16")
        for batch in (1, 128)
    }
    text = " ".join((ROOT / "docs/inference.md").read_text().split())
    for model, name in (("sru", "SRU"), ("txl", "Transformer-XL")):
        single, half = (
            f"{speeds[model, precision, 1]} and {speeds[model, precision, 128]} in {precision}"
            for precision in ("float32", "bfloat16")
        )
        assert f"{name} {single}, {half}" in text


@pytest.mark.filterwarnings("ignore:.* of the gates had not decided")
def test_the_table_of_speeds_is_the_recorded_one() -> None:
    with (ROOT / "benchmarks/results.csv").open() as file:
        # the last run of a case counts
        rows = {(row["benchmark"], row["case"]): row for row in csv.DictReader(file)}
    for benchmark, case, median in section("speed"):
        row = rows[benchmark, case]
        value = float(row["value"])
        assert median == (f"{value / 1e6:.2f}M" if row["unit"] == "characters/s" else f"{value:.2f}x")


def test_the_table_of_fine_tuning_is_the_recorded_one() -> None:
    from results_page.sections import fine_tuning

    record = json.loads((ROOT / "results/glue-mpnet.json").read_text())
    found = {row[1:] for row in fine_tuning(record).rows}
    shown = [tuple(figures) for _, *figures in section("fine-tuning")]
    assert len(shown) == 4
    assert set(shown) <= found
    first = [
        [row["score"] for row in record["rows"] if (row["row"], row["seed"]) == (name, 0)]
        for name in ("control", "ours-35", "ours-60", "paper-35", "fac-35")
    ]
    control, some, most, learned, even = (f"{statistics.mean(scores):.2f}" for scores in first)
    assert f"are {control}, {some} and {most}." in README
    assert f"learned ranks {learned}, even ones (fac) {even}" in README


def test_the_one_shot_table_is_the_recorded_one() -> None:
    record = json.loads((ROOT / "results/oneshot-smollm2.json").read_text())
    found = {(f"{row['parameters']:,}", f"{row['perplexity']:,.1f}") for row in record["rows"]}
    shown = [(parameters, perplexity) for _, parameters, perplexity in section("one-shot")]
    assert len(shown) == len(set(shown)) == 4
    assert set(shown) <= found


def test_the_page_of_results_is_what_the_command_prints() -> None:
    from results_page.figures import figures_of
    from results_page.page import page
    from results_page.records import read_results

    found = read_results([ROOT / "results", ROOT / "benchmarks/results.csv"])
    assert (ROOT / "docs/results.md").read_text() == page(found) + "\n", "print it again by the command at its top"
    for figure in figures_of(found):
        assert (ROOT / f"docs/figures/{figure.name}.svg").read_text() == figure.svg
    assert "no table here" not in page(found)


def test_the_tables_on_scaling_follow_from_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    scaling = importlib.import_module("scaling")
    text = (ROOT / "docs/scaling.md").read_text()
    for name, make in scaling.TABLES.items():
        assert f"<!-- {name} -->\n{scaling.markdown(make())}\n<!-- /{name} -->" in text, name
    assert f"{scaling.utilization():.1%} of the card's peak" in text
    # of LLaMA 7B, which has norms beside
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


@pytest.mark.filterwarnings("ignore:.* of the gates had not decided")
def test_the_small_transformer_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["small_transformer.py", "--quick"])
    runpy.run_path(str(ROOT / "examples/small_transformer.py"), run_name="__main__")
    assert "largest difference of logits 0.0e+00" in capsys.readouterr().out


def test_links_in_the_docs_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


COMMANDS = [
    (page.name, re.split(r"\s{2,}#", line)[0].strip())
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for block in re.findall(r"```\n(.*?)```", page.read_text(), re.DOTALL)
    for line in block.splitlines()
    if line.startswith("rankwise ")
]


@pytest.mark.parametrize("page, command", COMMANDS)
def test_commands_in_the_docs_are_understood(page: str, command: str, tmp_path: Path) -> None:
    """Each is parsed to its last setting; what the commands do is tested with the command line."""
    from rankwise.cli import app
    from rankwise.cli.command import configured, parse
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
    from rankwise.cli.command import configured, parse
    from rankwise.cli.runs import folder_of

    folders: dict[Path, str] = {}
    for _, command in (pair for pair in COMMANDS if pair[0] == page):
        _, name, *words = shlex.split(command)
        experiment = app.COMMANDS[name].experiment
        if name not in ("run", "train", "sweep") or experiment is None:
            continue
        options = parse(app.COMMANDS[name], words)
        folder = folder_of(name, options, configured(experiment(options), options))
        assert folders.setdefault(folder, command) == command, folder


def test_the_docs_hold_commands() -> None:
    assert len(COMMANDS) > 10
