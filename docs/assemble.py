"""Assemble the pages of the documentation site: python docs/assemble.py FOLDER

`make docs` does this, and builds the site from FOLDER. The generator sees Markdown alone, so another can replace it.

- docs/ is copied; README.md becomes the home page, and the notes beside the code become pages. Links are rewritten to
  lead from page to page; other files that a page links to are copied.
- The command reference is made from the parser, and the reference of settings from the presets.
- It fails where a public name is not on the page of the Python interface, or has no docstring.
"""

from __future__ import annotations

import importlib
import inspect
import posixpath
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = "src/rankwise"
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "code/contributing.md",
    "CHANGELOG.md": "code/changelog.md",
    f"{SOURCE}/lab/GUIDE.md": "code/lab-guide.md",
    f"{SOURCE}/lab/kernels/sru/README.md": "code/sru.md",
    f"{SOURCE}/lab/kernels/relative_attention/README.md": "code/relative_attention.md",
    **{f"{SOURCE}/{name}/README.md": f"code/{name}.md" for name in ("core", "methods", "deploy", "hf", "serve", "lab")},
}
"""Pages that stand elsewhere in the repository, and their places on the site."""
COPIES = "files"
"""The folder of the site with the other files that pages link to."""
API = "reference/api.md"
PRESETS = {
    "demo": "A language model of ours: `demo`, and the presets of the paper",
    "glue-minilm": "An encoder on GLUE: `glue-minilm`, `glue-mpnet`, `glue-roberta`",
    "sentences": "An encoder on your own sentences: `sentences`",
    "causal": "A decoder on your own text: `causal`",
}
LINK = re.compile(r"\[([^\]]*)\]\((?!https?://|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
"""Text, target and anchor of a link inside the repository."""


def assemble(folder: Path) -> None:
    """Write all pages of the site into a folder, in place of what is there."""
    problems = undocumented((ROOT / "docs" / API).read_text())
    if problems:
        raise SystemExit("\n".join(problems))
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    pages = {f"docs/{path.relative_to(folder).as_posix()}": path.read_text() for path in folder.rglob("*.md")}
    pages |= {source: (ROOT / source).read_text() for source in OUTSIDE}
    for source, text in pages.items():
        write(folder / place_of(source), relinked(text, source))
        for path in copied(text, source):
            write(folder / place_of(path), (ROOT / path).read_text())
    write(folder / "reference/commands.md", commands_page())
    write(folder / "reference/settings.md", settings_page())


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def place_of(source: str) -> str:
    """Where a file of the repository stands on the site."""
    if source in OUTSIDE:
        return OUTSIDE[source]
    return source.removeprefix("docs/") if source.startswith("docs/") else f"{COPIES}/{source}"


def relinked(text: str, source: str) -> str:
    """A page with links that lead from its place on the site to those of what it links to."""

    def rewrite(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[2]))
        if (ROOT / target).is_dir():
            # a folder has no page: its name remains
            return link[1]
        place = posixpath.relpath(place_of(target), posixpath.dirname(place_of(source)) or ".")
        return f"[{link[1]}]({place}{link[3] or ''})" if (ROOT / target).is_file() else link[0]

    return LINK.sub(rewrite, text)


def copied(text: str, source: str) -> Iterator[str]:
    """The files outside docs/, and not pages themselves, that a page links to."""
    for link in LINK.finditer(text):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[2]))
        if not target.startswith("docs/") and target not in OUTSIDE and (ROOT / target).is_file():
            yield target


def undocumented(page: str) -> list[str]:
    """What is wrong with the Python interface: names that are not on the page, or that have no docstring."""
    import rankwise

    shown = re.findall(r"^::: ([\w.]+)", page, re.MULTILINE)
    names = {f"rankwise.{name}" for name in dir(rankwise) if not name.startswith("_")} - {"rankwise.VERSION"}
    problems = [f"{API} must show `{name}`, but does not" for name in sorted(names - set(shown))]
    for name in shown:
        home, _, last = name.rpartition(".")
        value = getattr(importlib.import_module(home), last)
        for path, thing in {name: value, **members(name, value)}.items():
            if not inspect.getdoc(thing):
                problems.append(f"`{path}` must have a docstring, but has none")
    return problems


def members(name: str, value: Any) -> dict[str, Any]:
    """The public methods and properties of a class."""
    found = vars(value).items() if inspect.isclass(value) else ()
    kinds = (property, classmethod, staticmethod)
    return {
        f"{name}.{key}": getattr(value, key) if isinstance(thing, classmethod | staticmethod) else thing
        for key, thing in found
        if not key.startswith("_") and (inspect.isfunction(thing) or isinstance(thing, kinds))
    }


def commands_page() -> str:
    """Every command as the parser knows it."""
    from rankwise.cli.app import COMMANDS

    listed = [f"| [{each.name}](#{each.name}) | {each.about} |" for each in COMMANDS.values()]
    parts = ["# Commands", "Made from the parser; `rankwise COMMAND --help` prints the same.", table("command", listed)]
    for command in COMMANDS.values():
        paragraphs = command.details.split("\n\n")
        lines = [line for text in paragraphs for line in joined(text)]
        examples = [line.removeprefix("example: ") for line in lines if line.startswith("example: ")]
        prose = [" ".join(text.split()) for text in paragraphs if not text.startswith("example: ")]
        rows = [f"| `{cell(argument.label)}` | {cell(argument.help)} |" for argument in command.arguments]
        if command.experiment is not None:
            rows.append("| `--SETTING VALUE` | Any of the [settings](settings.md). |")
        parts += [f"## {command.name}", command.about, *prose, "```\n" + "\n".join(examples) + "\n```"]
        parts.append(table("argument", rows))
    return "\n\n".join(parts) + "\n"


def table(head: str, rows: list[str]) -> str:
    """A table whose rows are written already; its last column has no name."""
    columns = [*head.split(", "), ""]
    return "\n".join([f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *rows])


def joined(text: str) -> list[str]:
    """Lines, those that end in a backslash together with the next."""
    return re.sub(r"\\\n\s*", "", text).split("\n")


def settings_page() -> str:
    """The settings of each kind of experiment, with the values of a preset."""
    from rankwise.cli.settings import as_text, settings
    from rankwise.lab.experiments.presets import preset

    parts = [
        "# Settings of a run",
        "`rankwise run PRESET --SETTING VALUE` changes a setting, and a file that `--config` names may hold them. "
        "`--both.NAME` sets `--base.NAME` and `--training.NAME`; `--method NAME` chooses how a model is pruned. "
        "`rankwise run PRESET --help` lists the settings of any preset with its values.",
    ]
    for name, title in PRESETS.items():
        found = settings(preset(name)).values()
        rows = [f"| `{each.name}` | {value(as_text(each.value))} | {cell(each.about)} |" for each in found]
        parts += [f"## {title}", f"Values are those of `{name}`.", table("setting, value", rows)]
    return "\n\n".join(parts) + "\n"


def cell(text: str) -> str:
    return text.replace("|", r"\|")


def value(text: str) -> str:
    return "" if text in ('""', "...") else f"`{cell(text)}`"


if __name__ == "__main__":
    assemble(Path(sys.argv[1]))
