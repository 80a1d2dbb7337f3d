"""`rankwise plan` says what a pruner would do, and says what is wrong in one line."""

from __future__ import annotations

import importlib
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from torch import nn

import rankwise as rw
from rankwise.cli.app import run
from tests.cli.cli_toys import answer

MODULE = """
import torch
from dataclasses import dataclass
from torch import nn

from neighbour_of_{stem} import WORDS
from rankwise.modules import LowRankLinear

@dataclass
class Settings:
    width: "int" = 16

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        print("a word from the builder")
        width = Settings().width
        self.words = nn.Embedding(WORDS, width)
        self.fc = nn.Linear(width, width)
        self.pair = LowRankLinear(nn.Linear(width, 4, bias=False), nn.Linear(4, width))
        self.conv = nn.Conv1d(3, 3, 3)
        self.head = nn.Linear(width, WORDS)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        return self.head(self.pair(self.fc(self.words(tokens))))

def build():
    return Model()

def broken():
    raise ValueError("no such\\nluck")

def number():
    return 3

five = 5
root = nn.Linear(5, 5)
with torch.device("meta"):
    empty = nn.Linear(5, 5)
"""


@pytest.fixture
def stem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of models in the current folder, under a name that was never imported before."""
    name = f"models_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(MODULE.replace("{stem}", name))
    (tmp_path / f"neighbour_of_{name}.py").write_text("WORDS = 50\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    importlib.invalidate_caches()
    return name


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a wrong argument gets."""
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if line != "a word from the builder"]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize("place", ["{stem}:build", "{stem}.py:build", "{stem}:Model", "./{stem}.py:Model"])
def test_the_plan_is_the_pruners(stem: str, capsys: pytest.CaptureFixture[str], place: str) -> None:
    got = answer(capsys, "plan", place.format(stem=stem))
    model = importlib.import_module(stem).build()
    plan = rw.find_plan(model)
    assert [row["names"] for row in got["matrices"]] == [[use.name for use in site.uses] for site in plan.sites]
    assert [row["parameters"] for row in got["matrices"]] == [site.params for site in plan.sites]
    assert [item["name"] for item in got["left_out"]] == ["conv"]
    assert got["dense"] == rw.count(model)
    assert got["prunable"] + got["fixed"] == got["dense"]
    assert got["budget"] is None
    assert got["exported"] is None


def test_a_model_on_the_meta_device_can_be_planned(stem: str, capsys: pytest.CaptureFixture[str]) -> None:
    got = answer(capsys, "plan", f"{stem}:empty", "--removed", "0.5")
    assert got["dense"] == 30
    assert got["exported"] <= 15


@pytest.mark.parametrize("method", ["fac", "agp", "flop-agp"])
@pytest.mark.parametrize(
    "words, budget",
    [
        (["--removed", "0.5"], rw.Budget(removed=0.5)),
        (["--removed", "0.5", "--of", "prunable"], rw.Budget(removed=0.5, of="prunable")),
        (["--params", "700"], rw.Budget(params=700)),
    ],
)
def test_uniform_ranks_are_those_the_pruner_exports(
    stem: str, capsys: pytest.CaptureFixture[str], method: str, words: list[str], budget: rw.Budget
) -> None:
    got = answer(capsys, "plan", f"{stem}:build", "--method", method, *words)
    settings = {} if method == "fac" else {"anneal_steps": 5}
    pruner = rw.Pruner(importlib.import_module(stem).build(), budget, method, **settings)
    assert {row["names"][0]: row["kept"] for row in got["matrices"]} == pruner.ranks()
    assert got["budget"] == pruner.limit
    assert got["exported"] == pruner.size().exported
    assert got["final"]


@pytest.mark.parametrize("method", ["np-l0", "flop-l0", "svd", "dense"])
def test_every_method_stays_within_the_budget(stem: str, capsys: pytest.CaptureFixture[str], method: str) -> None:
    got = answer(capsys, "plan", f"{stem}:build", "--method", method, "--params", "1300")
    assert got["exported"] == got["fixed"] + sum(row["exported"] for row in got["matrices"])
    assert got["exported"] <= got["budget"] == 1300
    assert all(row["kept"] <= row["components"] for row in got["matrices"])


def test_include_and_exclude_take_names(stem: str, capsys: pytest.CaptureFixture[str]) -> None:
    got = answer(capsys, "plan", f"{stem}:build", "--exclude", "fc", "--exclude", "pair")
    assert [row["names"] for row in got["matrices"]] == [["words", "head"]]
    share = 272 / got["dense"]
    assert {"name": "fc", "parameters": 272, "share": share, "reason": "in `exclude`"} in got["left_out"]
    got = answer(capsys, "plan", f"{stem}:build", "--include", "fc", "--include", "pair")
    assert [row["names"] for row in got["matrices"]] == [["fc"], ["pair"]]


def test_plain_lines_name_everything(stem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", f"{stem}:build", "--removed", "0.5"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    row = next(line for line in lines if line.startswith("words = head"))
    assert row.split()[3:] == ["50", "x", "16", "embedding", "=", "linear", "800", "5/16", "330"]
    assert "uniform ranks; training or SVD will share them out differently" in lines
    totals = [line.split()[0] for line in lines if line.endswith("%")]
    assert totals == ["dense", "prunable", "fixed", "budget", "exported"]
    assert any(line.startswith("conv") and "it is a convolution of a longer kernel" in line for line in lines)
    assert captured.err == "a word from the builder\n"
    assert all(ord(letter) < 128 for letter in captured.out)


def test_a_model_that_is_itself_a_layer_has_a_name(stem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", f"{stem}:root", "--removed", "0.5", "--method", "agp"]) == 0
    out = capsys.readouterr().out
    assert "(model)" in out
    assert "uniform weights; agp exports these; matrices keep their shape" in out


def test_nothing_is_trained_changed_or_factorized(
    stem: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.linalg.eigh", None)
    monkeypatch.setattr("torch.linalg.svd", None)
    root = importlib.import_module(stem).root
    before = root.weight.clone()
    answer(capsys, "plan", f"{stem}:root", "--removed", "0.5")
    assert type(root) is nn.Linear
    assert (root.weight == before).all()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--method", "flip-l0"], "`method` must be one of .* 'flip-l0' instead. Did you mean 'flop-l0'?"),
        (["--removed", "0.5", "--params", "3"], "A plan takes one budget at most, but got --removed and --params."),
        (["--params", "3"], "The budget must be at least 112 parameters"),
        # of 1,296 parameters; words and head are tied, and counted once
        (["--params", "3"], "Left out of the plan: conv 30 (2.3%), biases, norms and the like 82 (6.3%)."),
        (["--removed", "0.9", "--exclude", "words"], "plan: head 850 (65.6%), conv 30 (2.3%), biases, norms"),
        (["--megabytes", "0.0001"], "The smallest size is megabytes=0.000448"),
        (["--removed", "80"], "`removed` must be a fraction in (0, 1), but is 80.0 instead. Did you mean removed=0.8?"),
        (["--of", "prunable"], "`--of prunable` must go with `--removed`"),
        (["--of", "half", "--removed", "0.5"], "`--of` must be one of model, prunable, but is 'half' instead."),
        (["--params", "many"], "`--params` must be a whole number, but is 'many' instead."),
        (["--include", "nothing"], "`include` must name layers of the model, but 'nothing' matches none."),
        (["--exclude", "fc", "--exclude", "haed"], "but 'haed' matches none. Did you mean 'head'?"),
        (["--frob"], "There is no option `--frob` here."),
        (["--exlude", "fc"], "There is no option `--exlude` here. Did you mean '--exclude'?"),
        (["--removed"], "`--removed` needs a value."),
        (["fc"], "takes no further argument, but got 'fc'."),
    ],
)
def test_a_wrong_option_gets_one_line(
    stem: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    line = refusal(capsys, "plan", f"{stem}:build", *arguments)
    start, _, end = message.partition(" .* ")
    assert start in line
    assert end in line


@pytest.mark.parametrize(
    "place, message",
    [
        ("{stem}:biuld", "but {stem} has no 'biuld'. Did you mean 'build'?"),
        ("{stem}:broken", "{stem}:broken must make a model without arguments, but raises ValueError: no such luck."),
        ("{stem}:number", "{stem}:number must give a torch.nn.Module, but gives 3 instead."),
        ("{stem}:five", "{stem}:five must be a model or make one, but is 5 instead."),
        ("nowhere.py:build", "MODEL must name a file that exists, but there is no nowhere.py."),
        (
            "nowhere.at.all:build",
            "must import without error, but raises ModuleNotFoundError: No module named 'nowhere'",
        ),
        ("{stem}", "MODEL must be `package.module:builder` or `path/to/file.py:builder`, but is '{stem}' instead."),
    ],
)
def test_a_wrong_model_gets_one_line(stem: str, capsys: pytest.CaptureFixture[str], place: str, message: str) -> None:
    assert message.format(stem=stem) in refusal(capsys, "plan", place.format(stem=stem))


def test_a_file_that_fails_or_exits_gets_one_line(
    tmp_path: Path, stem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for text, message in (("1 / 0", "ZeroDivisionError: division by zero"), ("raise SystemExit(1)", "SystemExit: 1")):
        (tmp_path / f"failing_{stem}.py").write_text(text)
        assert message in refusal(capsys, "plan", f"failing_{stem}.py:build")


def test_python_m_rankwise_is_the_command_line(stem: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rankwise", "plan", f"{stem}:build", "--params", "3"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert "The budget must be at least 112 parameters" in done.stderr


def test_a_time_becomes_a_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "fast.py"
    file.write_text(
        "from rankwise.lab.models.sru import SRUConfig, SRULanguageModel\n"
        "def build():\n"
        "    return SRULanguageModel(SRUConfig(num_words=20, embedding_width=64, width=64, num_layers=1))\n"
    )
    assert run(["plan", f"{file}:build", "--latency-ms", "1e9"]) == 2
    assert "`latency_ms` must be below what the dense model takes" in capsys.readouterr().err
    assert run(["plan", f"{file}:build", "--latency-ms", "1e-9"]) == 2
    assert "`latency_ms` must be at least" in capsys.readouterr().err
    assert run(["plan", f"{file}:build", "--latency-ms", "5", "--removed", "0.5"]) == 2
    assert "one budget at most, but got --removed and --latency-ms" in capsys.readouterr().err
