"""A toy run for the tests of the command line; as a program, the command line with someone impatient in front of it.

python cli_toys.py MOMENTS ARGUMENT ...

runs the same command for every one of the moments (a JSON list), each time with Ctrl-C pressed then, and once more
without; tells the exit codes as JSON. A moment is "read", a phase, or a phase and "report"; "x 2" presses twice.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

LETTERS = "abcdefgh"
SETTINGS = {
    "model.width": "12",
    "model.embedding_width": "8",
    "model.num_layers": "2",
    "model.rank": "4",
    "method.anneal_steps": "3",
    "both.steps": "10",
    "both.warmup_steps": "2",
    "both.batch_size": "4",
    "both.window": "8",
    "both.eval_every": "5",
    "both.log_every": "5",
    "both.checkpoint_every": "4",
    "both.device": "cpu",
}


def words(folder: Path, **changes: str) -> list[str]:
    """Options that make a preset a toy on a text in that folder, whose cache is there too."""
    text = folder / "text.txt"
    if not text.exists():
        draw, letter, letters = random.Random(0), 0, []
        for _ in range(3_000):
            letter = (letter + draw.choice((1, 1, 1, 2, 5))) % len(LETTERS)
            letters.append(LETTERS[letter])
        text.write_text("".join(letters))
    places = {"corpus.name": str(text)}
    changed = {name.replace("__", "."): value for name, value in changes.items()}
    pairs = [word for name, value in (places | SETTINGS | changed).items() for word in (f"--{name}", value)]
    return [*pairs, *cache(folder)]


def cache(folder: Path) -> list[str]:
    """Options that name the cache of `words`; what is saved of a run does not."""
    return ["--corpus.cache", str(folder / "cache")]


def answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    """What a command prints as JSON, and nothing but that."""
    from rankwise.cli.app import run

    capsys.readouterr()
    assert run([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that a mistake gets, and nothing but that."""
    from rankwise.cli.app import run

    capsys.readouterr()
    assert run([*map(str, arguments)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("rankwise: ")
    return line


def results(folder: Path) -> list[dict[str, Any]]:
    """The rows of a record but for what a clock says."""
    return [lasting(row) for row in json.loads((folder / "record.json").read_text())["rows"]]


def lasting(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a row must hold again, whenever it is computed."""
    return {key: row[key] for key in ("name", "method", "parameters", "removed", "valid", "test")}


def python(*arguments: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run Python with this source, and nothing of the tests' own warnings."""
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, **settings)


def run_impatiently(moments: list[str], arguments: list[str]) -> list[int]:
    """The exit codes of a command that Ctrl-C, pressed for real, stops again and again."""
    from rankwise.cli import progress
    from rankwise.cli.app import run

    waiting = list(moments)

    def press(now: str) -> None:
        moment, _, twice = waiting[0].partition(" x ") if waiting else ("", "", "")
        if now == moment:
            waiting.pop(0)
            for _ in range(int(twice or 1)):
                os.kill(os.getpid(), signal.SIGINT)

    class Impatient(progress.Lines):
        title = ""

        def phase(self, title: str) -> None:
            self.title = title
            super().phase(title)
            press(title)

        def read(self, what: str, done: int, total: int | None) -> None:
            press("read")

        def report(self, line: Mapping[str, Any]) -> None:
            super().report(line)
            press(f"{self.title}, report")

    progress.Lines = Impatient  # type: ignore[misc]
    return [run(arguments) for _ in range(len(moments) + 1)]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    codes = run_impatiently(json.loads(sys.argv[1]), sys.argv[2:])
    print(json.dumps(codes), file=sys.stderr)
