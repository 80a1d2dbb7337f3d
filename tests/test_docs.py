"""README and docs are true today: names exist, tables come from records, commands parse and the examples run."""

from __future__ import annotations

import ast
import csv
import importlib
import json
import re
import shlex
import shutil
import statistics
import warnings
from dataclasses import dataclass
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
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
"""The language and the text of a block of code."""
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
    record = json.loads((ROOT / "results/arena-smollm2-refined.json").read_text())
    found = {tuple(_one_shot_row(row)) for row in (record["dense"], *record["rows"])}
    shown = [tuple(row[1:]) for row in rows_of(marked("docs/compress.md", "one-shot"))]
    assert len(shown) == len(set(shown)) == 8
    assert set(shown) <= found


def _one_shot_row(row: dict[str, Any]) -> list[str]:
    removed = f"{row['removed']:.0%}" if "removed" in row else ""
    texts = [f"{made[text]:,.1f}" if made else "" for made in (row, row.get("healed")) for text in ("test", "other")]
    return [removed, f"{row['parameters']:,}", *texts]


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


SHORTER = {
    "1_000": "10",
    "The function ": "w1 w2",
    "=300": "=3",
    'device_map="cuda", ': "",
    "150000": "500",
    "--method.anneal_steps 200": "--method.anneal_steps 2",
    "--model.width 256 --model.rank 64": "--model.width 16 --model.rank 5",
    "--both.window 32": "--both.window 8",
    "--removed 0.7,0.8,0.9 --seeds 0,1,2": "--removed 0.7 --seeds 0,1",
    "--seeds 0,1\n": "--seeds 0\n",
    "wiki.txt --window 1024": "text.txt --window 16",
    "steps=300)": "steps=4)",
    "num_windows=256)": "num_windows=8, window=16)",
}
"""What the pages show, and what the tests run in its place to be quick."""
TOO_SLOW = (
    "compile",
    "cuda",
    "openvino",
    "glue",
    "run sentences",
    "run causal",
    "--tasks",
    "wandb",
    "rankwise compare",
    "--launcher",
)
"""Commands with these words are parsed and not run: they need a GPU, a download, a compiler or another package, or
serve until they are stopped."""
ELSEWHERE = ("huggingface.md", "scaling.md")
"""Pages that tests/hf and tests/test_many_gpus.py go through."""
FOLLOWED = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "src").rglob("*.md"))]
    if re.search(r"```python|^rankwise ", page.read_text(), re.MULTILINE) and page.name not in ELSEWHERE
]
"""Pages that are gone through as a reader would."""


class Net(nn.Module):
    """A model of one's own, for pages that speak of one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader has: a text, models of transformers, a file with a model, a finished run."""
    import rankwise.hf
    from rankwise.cli.app import run
    from tests.cli.cli_toys import words
    from tests.hf.hf_families import build
    from tests.hf.test_compress import tokenizer

    folder = tmp_path_factory.mktemp("desk")
    (folder / "text.txt").write_text(" ".join(f"w{i * i % 47}" for i in range(1_500)))
    (folder / "other.txt").write_text(" ".join(f"w{i * i * i % 47}" for i in range(1_500)))
    (folder / "README.md").write_text(" ".join(f"w{i * i % 43}" for i in range(1_500)))
    (folder / "my_models.py").write_text(
        "from torch import nn\n\n\ndef build():\n    return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))\n"
    )
    for name, family in (("my-model", "llama"), ("my-llama", "llama"), ("my-bert", "bert")):
        model = build(family)
        model.save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
        small = rw.compress(model, rw.Budget(removed=0.3))
        rankwise.hf.save_pretrained(small, folder / f"{name}-small", tokenizer=tokenizer())
    assert run(["run", "demo", *words(folder), "--out", str(folder / "runs/demo")]) == 0
    return folder


def names_for(page: Path) -> dict[str, Any]:
    """What the snippets of a page take for granted."""
    from tests.hf.hf_families import batch, build
    from tests.hf.test_compress import tokenizer

    torch.manual_seed(0)
    batches = [(torch.randn(8, 16), torch.randn(8, 16)) for _ in range(12)]
    names: dict[str, Any] = {
        "torch": torch,
        "model": Net(),
        "build": Net,
        "batches": batches,
        "criterion": nn.MSELoss(),
    }
    if page.name == "compress.md":
        model = build("llama")
        names |= {"model": model, "tokenizer": tokenizer(), "batches": [batch(model, seed=i) for i in range(4)]}
    if page.name == "heal.md":
        dense = build("llama")
        small = rw.compress(dense, rw.Budget(removed=0.4))
        names |= {"dense": dense, "small": small, "batches": [batch(dense, seed=i) for i in range(4)]}
    if page.name == "export.md":
        bert = build("bert").eval()
        inputs = batch(bert)
        names |= {"model": bert, "tokens": inputs["input_ids"], "mask": inputs["attention_mask"]}
    if page.name == "inference.md":
        names |= {"prompt": torch.ones(1, 4, dtype=torch.long), "next_token": torch.ones(1, 1, dtype=torch.long)}
    if page.parent.name == "methods":
        names |= vars(importlib.import_module("rankwise.methods.paper")) | {"dataclass": dataclass}
    return names


def toy_words(name: str, words: list[str], folder: Path) -> list[str]:
    """A command of a page with settings that make it a toy; those of the page come last, and win."""
    from tests.cli import cli_toys

    if name in ("run", "train", "sweep") and "--config" not in words and "--dry-run" not in words:
        place = 1 if words and not words[0].startswith("-") else 0
        return [*words[:place], *cli_toys.words(folder), *words[place:]]
    if name == "prune" or (name == "evaluate" and not {"--text", "--tasks"} & set(words)):
        return [*words, *cli_toys.cache(folder)]
    if name == "compress":
        return [*words, "--windows", "8", "--window", "16"]
    if name == "heal":
        return [*words, "--steps", "4", "--window", "16", "--batch-size", "2"]
    if name == "bench":
        return [*words, "--repeats", "2", "--length", "5"]
    return [*words, "--length", "5"] if name == "export" else words


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
@pytest.mark.filterwarnings("ignore:gates cannot decide")
@pytest.mark.filterwarnings("ignore:pruning has only")
@pytest.mark.filterwarnings("ignore:These layers are left as they are")
@pytest.mark.parametrize("page", FOLLOWED, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_can_be_followed_to_its_end(
    page: Path, desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its snippets and commands, in order, at toy size."""
    from rankwise.cli.app import run

    folder = tmp_path / "desk"
    shutil.copytree(desk, folder, ignore=shutil.ignore_patterns("demo") if page.name == "tutorial.md" else None)
    monkeypatch.chdir(folder)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    for made in re.findall(r"--out (\S+)", page.read_text()):
        # what the page itself makes is not there before
        shutil.rmtree(folder / made, ignore_errors=True)
    names = names_for(page)
    for language, text in FENCE.findall(page.read_text()):
        for shown, quick in SHORTER.items():
            text = text.replace(shown, quick)
        if language == "toml":
            Path("run.toml").write_text(text)
            assert run(["run", "--config", "run.toml", "--dry-run"]) == 0
        # whether a time can be met is for the machine to say; tests/test_latency.py has a clock of its own
        if language == "python" and "meet_latency(" not in text:
            exec(text, names)
        for line in re.sub(r"\\\n\s*", "", text).splitlines():
            command = re.split(r"\s{2,}#", line)[0]
            if command.startswith("rankwise ") and not any(word in command for word in TOO_SLOW):
                _, name, *words = shlex.split(command)
                code = run([name, *toy_words(name, words, folder)])
                assert code == 0, f"{command}: {capsys.readouterr().err.splitlines()[-1]}"


def test_the_example_in_the_readme_meets_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code is not None
    monkeypatch.chdir(tmp_path)
    names = names_for(ROOT / "README.md")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(code[1].replace("1_000", "10"), names)
    assert rw.count(names["small"]) <= 0.2 * rw.count(Net())


def test_the_diagrams_are_what_the_command_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    for name, draw in importlib.import_module("diagrams").DIAGRAMS.items():
        assert (ROOT / f"docs/figures/{name}.svg").read_text() == draw(), name


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
    for language, block in FENCE.findall(page.read_text())
    for line in block.splitlines()
    if not language and line.startswith("rankwise ")
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
        in_a_run = name in ("prune", "evaluate") or getattr(options, "config", None) is not None
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
        if options.dry_run or options.config is not None:
            continue
        folder = folder_of(name, options, configured(experiment(options), options))
        assert folders.setdefault(folder, command) == command, folder


def test_the_docs_hold_commands_and_terms() -> None:
    """An empty list would let the tests above pass without a word."""
    assert len(COMMANDS) > 10
    assert len(TERMS) > 20
