"""The documentation site is made of the repository's own pages, and a broken link or an unexplained name fails it."""

from __future__ import annotations

import importlib.util
import logging
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import rankwise
from rankwise.cli.app import COMMANDS
from rankwise.cli.settings import settings
from rankwise.lab.experiments.presets import preset

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("assemble", ROOT / "docs/assemble.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(site: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "docs"
    site.assemble(folder)
    return folder


def test_every_page_of_the_repository_is_on_the_site(site: ModuleType, pages: Path) -> None:
    sources = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.md")]
    places = [site.place_of(path.relative_to(ROOT).as_posix()) for path in sources]
    assert len(places) == len(set(places))
    assert [place for place in places if not (pages / place).is_file() or place.startswith(site.COPIES)] == []


def test_links_lead_from_page_to_page(pages: Path) -> None:
    for page in pages.rglob("*.md"):
        for target in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", page.read_text()):
            assert (page.parent / target).is_file(), f"{page.relative_to(pages)}: {target}"


def test_a_link_is_rewritten_to_where_its_target_is(site: ModuleType) -> None:
    text = "[a](../src/rankwise/core/README.md#size) [b](compress.md) [c](../results) ![d](figures/life.svg)"
    assert site.relinked(text, "docs/tutorial.md") == (
        "[a](code/core.md#size) [b](compress.md) c ![d](figures/life.svg)"
    )
    assert site.relinked("[a](docs/log/README.md)", "README.md") == "[a](log/README.md)"
    assert site.relinked("[a](../../../docs/tutorial.md)", "src/rankwise/core/README.md") == "[a](../tutorial.md)"
    # so that the build sees it
    assert site.relinked("[a](gone.md)", "docs/tutorial.md") == "[a](gone.md)"


def test_the_command_reference_is_what_the_parser_knows(pages: Path) -> None:
    text = (pages / "reference/commands.md").read_text()
    parts = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert list(parts) == list(COMMANDS)
    for command in COMMANDS.values():
        assert all(f"| `{argument.label}` |" in parts[command.name] for argument in command.arguments)
    listed = (pages / "reference/settings.md").read_text()
    assert all(f"| `{name}` |" in listed for name in settings(preset("demo")))


def test_a_public_name_must_be_shown_and_explained(site: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/reference/api.md").read_text()
    assert site.undocumented(page) == []
    assert site.undocumented(page.replace("::: rankwise.count\n", "")) == [
        "reference/api.md must show `rankwise.count`, but does not"
    ]
    monkeypatch.setattr(rankwise.Pruner.step, "__doc__", None)
    assert site.undocumented(page) == ["`rankwise.Pruner.step` must have a docstring, but has none"]


def built(pages: Path, folder: Path) -> list[str]:
    """The warnings of a strict build of these pages."""
    pytest.importorskip("mkdocstrings")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    from mkdocs.exceptions import Abort

    found: list[str] = []

    class Note(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler, logger = Note(logging.WARNING), logging.getLogger("mkdocs")
    logger.addHandler(handler)
    settings: dict[str, Any] = {"docs_dir": str(pages), "site_dir": str(folder)}
    try:
        build(load_config(str(ROOT / "mkdocs.yml"), **settings))
    except Abort as error:
        found.append(str(error))
    finally:
        logger.removeHandler(handler)
    return found


@pytest.mark.filterwarnings("ignore")
def test_the_site_builds_strictly_and_a_broken_link_fails(
    pages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    assert built(pages, tmp_path / "good") == []
    page = (tmp_path / "good/reference/api.html").read_text()
    assert 'id="rankwise.Pruner.compact"' in page
    # the site fetches nothing from elsewhere
    home = (tmp_path / "good/index.html").read_text()
    assert not re.findall(r"<(?:script|link|img)[^>]*https?://", home)
    tutorial = pages / "tutorial.md"
    before = tutorial.read_text()
    tutorial.write_text(f"{before}\n[gone](gone.md) [nowhere](compress.md#nowhere)\n")
    found = built(pages, tmp_path / "bad")
    tutorial.write_text(before)
    assert any("'gone.md'" in line for line in found)
    assert any("#nowhere" in line for line in found)
    assert "Aborted with 2 warnings" in found[-1]
