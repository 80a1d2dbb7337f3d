"""Tables on a terminal: however narrow it is, no figure and no name is cut."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rankwise.cli import tables
from rankwise.cli.app import COMMANDS, run
from rankwise.cli.command import parse
from rankwise.cli.tables import LEAST
from rankwise.lab.experiments.presets import PRESETS
from rankwise.lab.report import table
from tests.cli.cli_toys import cache, words

WIDTHS = [20, 40, 72, 80, 100, 140]


def record(num_seeds: int) -> dict[str, object]:
    """That of a run or a sweep, with names and figures that differ in their last characters."""

    def row(name: str, value: float) -> dict[str, object]:
        quality = {"bits_per_character": value}
        timing = {"median": 10 * value, "p20": value, "p80": value}
        sizes = {"parameters": round(1e6 * value), "removed": 0.8, "nonzeros": False, "speedup": value}
        return {"name": name, "method": name, "valid": quality, "test": quality, "milliseconds": timing, **sizes}

    names = ("dense", "flop-l0-80-published", "flop-l0-80-distilled")
    return {
        "runs": [
            {"rows": [row(name, 1.2345 + seed / 7 + place / 1000) for place, name in enumerate(names)]}
            for seed in range(num_seeds)
        ]
    }


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """The lines of a table on a terminal of some width, as the eye sees them."""

    def show(width: int, header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
        tables.print_table(header, rows, words=("",))
        return re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out).splitlines()

    return show


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("num_seeds", [1, 3])
def test_every_cell_is_whole(num_seeds: int, width: int, shown: Callable[..., list[str]]) -> None:
    found = table(record(num_seeds))
    lines = shown(width, found.columns, found.rows)
    for row in found.rows:
        assert all(any(cell in line for line in lines) for cell in row[1:])
    words = " ".join(lines).split()
    assert all(word in words for name in found.columns for word in name.split())
    widest = max(len(cell) for row in (*found.rows, words) for cell in row[1:])
    assert max(map(len, lines)) <= max(width, LEAST + 2 + widest)


def test_a_run_fits_a_terminal_of_80_columns(shown: Callable[..., list[str]]) -> None:
    found = table(record(1))
    lines = shown(80, found.columns, [("flop-l0", *row[1:]) for row in found.rows])
    assert max(map(len, lines)) <= 80
    assert any(set(line) == {"─"} for line in lines)
    # a row is a line
    assert sum(line.startswith("flop-l0") for line in lines) == len(found.rows)


def drawn(header: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[str], width: int) -> list[list[str]]:
    """The lines of each of the tables that a wide one is cut into."""
    console = Console(width=width)
    found = []
    for part in tables.tables(header, rows, words, width):
        with console.capture() as captured:
            console.print(part, crop=False)
        found.append(captured.get().splitlines())
    return found


NAMES = st.lists(st.sampled_from(["layer", "10", "attention", "q_proj", "x"]), min_size=1, max_size=6).map(".".join)
PROSE = st.lists(st.sampled_from(["it", "is", "0.5", "empty", "a.b", "left-out", "1,000"]), max_size=8).map(" ".join)
FIGURES = st.sampled_from(["", "1.00x", "1,234,567", "1.2345 ± 0.0006", "+9.8%"])


@given(
    header=st.lists(st.sampled_from(["bits per character", "speed", "ms", "of dense"]), min_size=1, max_size=8),
    data=st.data(),
    width=st.integers(40, 120),
)
def test_a_table_keeps_its_width_and_all_its_content(header: list[str], data: st.DataObject, width: int) -> None:
    number = data.draw(st.integers(1, 4))
    names, reasons = (data.draw(st.lists(kind, min_size=number, max_size=number)) for kind in (NAMES, PROSE))
    figures = [[data.draw(FIGURES) for _ in header] for _ in range(number)]
    rows = [[name, *cells, why] for name, cells, why in zip(names, figures, reasons, strict=True)]
    found = drawn(["name", *header, "why"], rows, ("name", "why"), width)
    lines = [line for lines in found for line in lines]
    assert max(map(len, lines)) <= width
    assert all(any(cell in line for line in lines) for cells in figures for cell in cells)
    letters = Counter("".join(lines).replace(" ", ""))
    # the first column stands in every table
    repeated = "".join(["name", *names]) * len(found) + "".join([*header, "why", *("".join(row[1:]) for row in rows)])
    assert letters == Counter(repeated.replace(" ", ""))


def test_decimals_and_ranges_are_never_broken() -> None:
    rows = [["model.layers.0-29.self_attn", "0.5 is 1,000 times 0.0005"]]
    (lines,) = drawn(["name", "why"], rows, ("name", "why"), 28)
    words = " ".join(lines).split()
    assert {"0.5", "1,000", "0.0005"} <= set(words)
    assert any("0-29" in word for word in words)


def fits(lines: Sequence[str]) -> bool:
    assert lines
    assert not [line for line in lines if "…" in line]
    return max(map(len, lines)) <= 80


def run_at_80(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    monkeypatch.setenv("COLUMNS", "80")
    capsys.readouterr()
    assert run(arguments) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_every_help_fits_80_columns(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = run_at_80(monkeypatch, capsys, *filter(None, [name]), "--help")
    assert max(map(len, lines)) <= 80
    if name in ("run", "train", "sweep"):
        settings = run_at_80(monkeypatch, capsys, name, "demo", "--help")
        assert max(map(len, settings)) <= 80
        assert len(settings) > len(lines)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_help_is_made_of_sentences(name: str) -> None:
    command = COMMANDS[name]
    paragraphs = [text for text in command.details.split("\n\n") if not text.startswith("example:")]
    for text in (command.about, *paragraphs, *(argument.help for argument in command.arguments)):
        assert text.endswith("."), text


def test_an_example_of_a_help_is_one_command_when_copied(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in COMMANDS.values():
        text = "\n".join(run_at_80(monkeypatch, capsys, command.name, "--help"))
        examples = re.findall(r"^example: (rankwise .*)$", command.details, re.MULTILINE)
        assert examples
        for example in examples:
            assert shlex.split(example) in [
                shlex.split(found.replace("\\\n", ""))
                for found in re.findall(r"^example: ((?:.*\\\n)*.*)$", text, re.MULTILINE)
            ]


def test_every_table_fits_80_columns(
    finished: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").symlink_to(finished)
    show = partial(run_at_80, monkeypatch, capsys)
    rows = json.loads((finished / "record.json").read_text())["rows"]
    for lines in (show("run", "demo", *words(place), "--out", "run"), show("report", "run")):
        assert fits(lines)
        # a sentence may follow
        shown = lines[: [*lines, ""].index("")]
        for row in rows:
            (line,) = (line for line in shown if line.split()[:1] == [row["name"]])
            assert f"{row['parameters']:,} {row['removed']:.1%} " in " ".join(line.split())
            assert [f"{row[split]['bits_per_character']:.4f}" for split in ("valid", "test")] == line.split()[4:6]
    grid = ("--methods", "fac", "--removed", "0.5", "--seeds", "0,1")
    assert fits(show("sweep", "demo", *words(place), *grid, "--out", "sweep"))
    record = json.loads((tmp_path / "sweep" / "record.json").read_text())
    lines = show("report", "sweep")
    assert fits(lines)
    assert all(any(cell in line for line in lines) for row in table(record).rows for cell in row)
    assert fits(show("train", "demo", *words(place), "--out", "mine"))
    assert fits(show("prune", "mine", "--budget.removed", "0.6", "--out", "mine-60", *cache(place)))
    assert fits(show("evaluate", "run", "--split", "test", *cache(place)))
    shutil.copytree(finished, tmp_path / "copy")
    assert fits(show("bench", "copy", "--repeats", "2", "--length", "8", "--batch", "1", "--threads", "1"))
    assert fits(show("presets", "glue"))
    assert fits(show("plan", "run"))
    assert fits(show("plan", "run", "--removed", "0.3"))
    assert fits(show("export", "run", "--to", "pt2", "--length", "4", "--out", "exported"))
    assert fits(show("run", "demo", "--dry-run"))
    assert fits(show("sweep", "glue-minilm", "--dry-run", "--removed", "0.35,0.6"))
    assert fits(show("prune", "mine", "--dry-run", "--budget.removed", "0.6"))


ENDINGS = {
    "run": ["run", "demo", "--out", "new", "--compare", ""],
    "train": ["train", "demo", "--out", "new"],
    "prune": ["prune", "copy", "--budget.removed", "0.6", "--out", "new"],
    "sweep": ["sweep", "demo", "--methods", "fac", "--removed", "0.5", "--out", "new"],
    "bench": ["bench", "copy", "--repeats", "2", "--length", "8", "--batch", "1", "--threads", "1"],
    "export": ["export", "copy", "--to", "pt2", "--length", "4", "--out", "new"],
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_command_ends_in_a_sentence_and_the_next_command_which_works(
    name: str,
    finished: Path,
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished, "copy")
    options = words(place) if name in ("run", "train", "sweep") else cache(place) if name == "prune" else []
    lines = run_at_80(monkeypatch, capsys, *ENDINGS[name], *options)
    sentence, following = " ".join(lines[lines.index("") :]).rsplit(" Next: ", 1)
    assert sentence.endswith(".")
    assert re.search(r"\d", sentence)
    assert lines[-1].endswith(following)
    program, command, *words_of_it = shlex.split(following)
    assert program == "rankwise"
    if command == "bench" or following.endswith("onnx"):
        # these take long, and have tests of their own
        parse(COMMANDS[command], words_of_it)
    else:
        settings = ["--length", "5"] if command == "sample" else cache(place) if command == "prune" else []
        assert run([command, *words_of_it, *settings]) == 0


def test_nothing_is_coloured_in_a_pipe(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    for arguments in (["report", str(finished)], ["presets", "demo"], ["plan", str(finished)], ["run", "--dry-run"]):
        assert "\x1b" not in "\n".join(run_at_80(monkeypatch, capsys, *arguments))


def test_the_longest_preset_is_listed_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    longest = max(PRESETS, key=len)
    lines = run_at_80(monkeypatch, capsys, "presets", longest[:-8])
    assert fits(lines)
    for entry in json.loads("\n".join(run_at_80(monkeypatch, capsys, "presets", longest[:-8], "--json"))):
        (line,) = (line for line in lines if line.split()[:1] == [entry["name"]])
        assert line.split()[-2:] == [f"{entry['steps']:,}", "steps"]


def test_every_preset_is_a_row_of_two_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = run_at_80(monkeypatch, capsys, "presets")
    assert fits(lines)
    for name, preset in PRESETS.items():
        (line,) = (line for line in lines if line.split()[:1] == [name])
        if preset.table:
            assert re.fullmatch(r"\S+ +[\d.]+M to [\d.]+M, [\d,]+ steps", line)
    titles = [line.partition(" table")[0] for line in lines if " table, " in line]
    # as published, and short
    assert Counter(titles) == {preset.table: 2 for preset in PRESETS.values() if preset.table}
