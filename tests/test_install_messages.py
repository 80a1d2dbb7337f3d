"""Messages about what is missing are true wherever rankwise is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankwise.errors import EXTRAS, install_extra

ROOT = Path(__file__).parent.parent


def test_a_message_names_all_that_an_extra_installs() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {name: list(packages) for name, packages in EXTRAS.items()} == {
        name: packages for name, packages in extras.items() if name != "dev"
    }


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_message_needs_no_index_that_has_rankwise(extra: str) -> None:
    message = install_extra(extra)
    outside, inside = message.split(" (in a clone: ")
    assert "rankwise" not in outside
    assert inside == f'pip install -e ".[{extra}]" -c constraints.txt).'
    assert all(name in outside for name in EXTRAS[extra])


def test_nothing_is_said_to_come_from_an_index_that_does_not() -> None:
    for path in [*(ROOT / "src").rglob("*.py"), *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        assert "install rankwise" not in (text := path.read_text()), path
        assert 'install "rankwise' not in text, path
        assert "install 'rankwise" not in text, path
